// Which token a row of logits gives: the likeliest, or the winner of a race with noise that is a function of (seed,
// position, token id). The exact noise is that of services.engine.sampling; here it is right to about 1e-8, which
// decides nearly every race. Who must be exact is told where it does not.
#pragma once

#include <cmath>
#include <limits>

#include "vector.h"

namespace tandem {

// SplitMix64 (Steele, Lea, Flood 2014).
constexpr uint64_t INCREMENT = 0x9E3779B97F4A7C15;

inline uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

inline uint64_t noise_key(uint64_t seed, int64_t position) {
  return mix(mix(seed + INCREMENT) + (uint64_t)position * INCREMENT);
}

template <typename To, typename From>
inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// A whole number from 0 to below 2^52, without a conversion that only some processors have for vectors.
inline double as_double(uint64_t value) { return bits_of<double>(value | 0x4330000000000000) - 4503599627370496.0; }

// The natural logarithm of a positive normal number, to about 1e-11 of its value.
inline double logarithm(double x) {
  const uint64_t root_half = 0x3FE6A09E667F3BCD, bias = 1024;
  const uint64_t bits = bits_of<uint64_t>(x);
  const uint64_t exponent = (bits - root_half + (bias << 52)) >> 52;  // of the power of two nearest to x, and the bias
  const double m = bits_of<double>(bits - ((exponent - bias) << 52));
  const double s = (m - 1.0) / (m + 1.0), q = s * s;
  double sum = 1.0 / 13.0;
  sum = sum * q + 1.0 / 11.0;
  sum = sum * q + 1.0 / 9.0;
  sum = sum * q + 1.0 / 7.0;
  sum = sum * q + 1.0 / 5.0;
  sum = sum * q + 1.0 / 3.0;
  sum = sum * q + 1.0;
  return (as_double(exponent) - (double)bias) * 0.69314718055994530942 + 2.0 * s * sum;
}

// Standard Gumbel noise of a token, of the race with this key.
inline double gumbel(uint64_t key, int64_t token) {
  const uint64_t bits = mix(key + (uint64_t)token * INCREMENT) >> 12;
  const double uniform = (as_double(bits) + 0.5) * 0x1p-52;
  return -logarithm(-logarithm(uniform));
}

// How a row's token is chosen: the likeliest where the temperature is 0.
struct Draw {
  uint64_t seed;
  int64_t position;
  double temperature, min_p, top_p;
  int64_t top_k;  // 0: all

  bool is_cut() const { return top_k > 0 || top_p < 1.0; }
};

struct Choice {
  int64_t token;
  bool is_certain;  // no other token comes as close as the noise may be wrong
};

constexpr double INFINITE = std::numeric_limits<double>::infinity();
// More than twice what the noise may be wrong by, and of the value, whose rounding hides what the noise decides.
inline double doubt(double value) { return 1e-7 + 1e-15 * std::fabs(value); }


template <typename T>
inline T highest_of(const T* values, int64_t size) {
  constexpr int LANES = 64 / sizeof(T);
  T lanes[LANES];
  for (T& lane : lanes) lane = -std::numeric_limits<T>::infinity();
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES)
    for (int lane = 0; lane < LANES; ++lane)
      lanes[lane] = values[i + lane] > lanes[lane] ? values[i + lane] : lanes[lane];
  for (; i < size; ++i) lanes[0] = values[i] > lanes[0] ? values[i] : lanes[0];
  T highest = lanes[0];
  for (T lane : lanes) highest = lane > highest ? lane : highest;
  return highest;
}

// Whether the highest logit is a finite number. Minus infinity only rules its token out: models mask padding so.
inline bool can_choose(const float* values, int64_t size) {
  uint32_t is_broken = 0, is_finite = 0;
  for (int64_t i = 0; i < size; ++i) {
    is_broken |= !(values[i] < std::numeric_limits<float>::infinity());  // NaN is not less than anything
    is_finite |= values[i] > -std::numeric_limits<float>::infinity();
  }
  return !is_broken && is_finite;
}

// The lowest of the tokens with the highest logit.
inline int64_t likeliest(const float* logits, int64_t size) {
  const float highest = highest_of(logits, size);
  for (int64_t i = 0; i < size; ++i)
    if (logits[i] == highest) return i;
  return 0;
}

// Draws among all tokens; top_k and top_p are not looked at. `values` is room for as many numbers as logits.
inline Choice race(const float* logits, int64_t size, const Draw& draw, double* values) {
  const uint64_t key = noise_key(draw.seed, draw.position);
  const double margin = draw.min_p > 0 ? std::log(draw.min_p) : -INFINITE;
  const double least = (double)highest_of(logits, size) / draw.temperature + margin;
  for (int64_t i = 0; i < size; ++i) values[i] = gumbel(key, i);
  for (int64_t i = 0; i < size; ++i) {
    const double score = (double)logits[i] / draw.temperature;
    values[i] += score < least ? -INFINITE : score;
  }
  const double best = highest_of(values, size), least_of_doubt = best - doubt(best);
  Choice choice{0, true};
  int64_t num = 0;
  for (int64_t i = 0; i < size; ++i)
    if (values[i] >= least_of_doubt) {
      if (num++ == 0) choice.token = i;
    }
  choice.is_certain = num == 1;
  return choice;
}

}  // namespace tandem
