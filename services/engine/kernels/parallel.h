// One team of threads for a whole step: every operation is called by all threads of the team and takes its share.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace tandem {

struct Team {
  int rank, size;
};

struct Range {
  int64_t begin, end;
};

inline Range share(int64_t count, Team team) {
  return {count * team.rank / team.size, count * (team.rank + 1) / team.size};
}

// The same in whole units, but for the last one.
inline Range share_units(int64_t count, int64_t unit, Team team) {
  const Range units = share((count + unit - 1) / unit, team);
  return {std::min(units.begin * unit, count), std::min(units.end * unit, count)};
}

// What is to be taken next of each thread's part of an operation, for a team of any size.
using Next = std::atomic<int64_t>*;

// Calls body(part, item) for items of each part, this thread's own part first: cores are not equally fast, and whoever
// is ready helps the others. `next` is 0 for each part before.
template <typename Items, typename Body>
inline void take_items(Next next, Team team, const Items& items_of, const Body& body) {
  for (int turn = 0; turn < team.size; ++turn) {
    const Team part{(team.rank + turn) % team.size, team.size};
    const int64_t items = items_of(part);
    for (int64_t item; (item = next[part.rank].fetch_add(1, std::memory_order_relaxed)) < items;) body(part, item);
  }
}

inline void barrier() {
#if defined(_OPENMP)
#pragma omp barrier
#endif
}

// Calls body(Team) on `num_threads` threads.
template <typename Body>
inline void run_team(int num_threads, const Body& body) {
#if defined(_OPENMP)
  if (num_threads > 1) {
#pragma omp parallel num_threads(num_threads)
    body(Team{omp_get_thread_num(), omp_get_num_threads()});
    return;
  }
#endif
  body(Team{0, 1});
}

}  // namespace tandem
