// What a draft model guesses: token after token of each sequence of a step, as far as they are worth it.
#pragma once

#include <numeric>

#include "choose.h"
#include "parallel.h"

namespace tandem {

constexpr int64_t LEVELS = 8;      // of how likely a guess is by the draft
constexpr int64_t CANDIDATES = 32;  // of a draw with top-k or top-p: so few that it costs little

// How far to guess for one sequence: while one more is likely enough to be right.
struct Limit {
  int64_t most;
  float chances[LEVELS];  // how likely a guess of this level is right, if those before it are
  float next;             // and one that has not been made
  float least;            // how likely the next one must be reached for
};

// Moves a step of one token of each sequence on. What is pointed to are the step's own arrays.
struct Guesses {
  const Draw* draws;    // [num_sequences]; the position is that of the first guess
  const Limit* limits;  // [num_sequences]
  int64_t *token_ids, *positions, *slot_mapping;
  int32_t* context_lens;
  int64_t most;          // rounds; no limit has more
  int64_t* chosen;       // [num_sequences][most]
  float* probabilities;  // [num_sequences][most]
  int64_t* num_chosen;   // [num_sequences]
};

// Draws among the likeliest tokens only, as if there were no others.
inline int64_t race_of_few(const float* logits, int64_t size, const Draw& draw, std::vector<int64_t>& ids) {
  ids.resize((size_t)size);
  std::iota(ids.begin(), ids.end(), 0);
  const auto end = ids.begin() + std::min(CANDIDATES, size);
  std::partial_sort(ids.begin(), end, ids.end(), [=](int64_t a, int64_t b) { return logits[a] > logits[b]; });
  const int64_t num = end - ids.begin();
  double weights[CANDIDATES], total = 0.0;
  for (int64_t i = 0; i < num; ++i) {
    weights[i] = std::exp((double)(logits[ids[(size_t)i]] - logits[ids[0]]) / draw.temperature);
    total += weights[i];
  }
  const uint64_t key = noise_key(draw.seed, draw.position);
  double before = 0.0, best = -INFINITE;
  int64_t winner = ids[0];
  for (int64_t i = 0; i < num; ++i) {
    const bool is_kept = before < draw.top_p * total && weights[i] >= draw.min_p && (draw.top_k == 0 || i < draw.top_k);
    if (!is_kept) break;
    before += weights[i];
    const double value = std::log(weights[i]) + gumbel(key, ids[(size_t)i]);
    if (value > best) {
      best = value;
      winner = ids[(size_t)i];
    }
  }
  return winner;
}

// How likely a token is by softmax at a temperature.
inline float probability_of(const float* logits, int64_t size, int64_t token, float temperature) {
  const float highest = highest_of(logits, size), scale = 1.0f / temperature;
  V sums = {};
  int64_t i = 0;
  for (; i + W <= size; i += W) sums = sums + exp((load(logits + i) - all(highest)) * all(scale));
  float sum = sum_lanes(sums);
  for (; i < size; ++i) sum += std::exp((logits[i] - highest) * scale);
  return std::min(1.0f, std::exp((logits[token] - highest) * scale) / sum);
}

// Chooses behind each sequence that is still guessed for, and moves it on. Returns how many are guessed for after that.
class Guesser {
 public:
  Guesser(const Guesses& guesses, int64_t num_sequences, int64_t vocab_size)
      : guesses_(guesses), size_(vocab_size), reached_((size_t)num_sequences, 1.0f), values_((size_t)vocab_size) {
    std::fill_n(guesses.num_chosen, num_sequences, 0);
  }

  // Of a sequence whose last token has these logits: whether it is guessed for again.
  bool take(int64_t b, const float* logits) {
    const Limit& limit = guesses_.limits[b];
    int64_t& num = guesses_.num_chosen[b];
    Draw draw = guesses_.draws[b];
    draw.position += num;
    const bool is_valid = can_choose(logits, size_);  // of a draft that gives NaN, nothing is likely
    const int64_t token = is_valid ? choose(logits, draw) : 0;
    const float temperature = draw.temperature > 0 ? (float)draw.temperature : 1.0f;
    const float probability = is_valid ? probability_of(logits, size_, token, temperature) : 0.0f;
    guesses_.chosen[b * guesses_.most + num] = token;
    guesses_.probabilities[b * guesses_.most + num] = probability;
    ++num;
    float& reached = reached_[(size_t)b];
    reached *= limit.chances[std::min(LEVELS - 1, (int64_t)(probability * LEVELS))];
    return num < limit.most && reached * limit.next > limit.least;
  }

 private:
  int64_t choose(const float* logits, const Draw& draw) {
    if (!(draw.temperature > 0)) return likeliest(logits, size_);
    if (draw.is_cut()) return race_of_few(logits, size_, draw, ids_);
    return race(logits, size_, draw, values_.data()).token;
  }

  const Guesses& guesses_;
  int64_t size_;
  std::vector<float> reached_;
  std::vector<double> values_;
  std::vector<int64_t> ids_;
};

}  // namespace tandem
