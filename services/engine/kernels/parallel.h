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
