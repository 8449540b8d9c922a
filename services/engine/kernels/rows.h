// What happens to one token's row between the matrices: norms, rotary positions, the activation.
#pragma once

#include <cmath>

#include "vector.h"

namespace tandem {

template <typename E>
inline float sum_of_squares(const E* x, int64_t size) {
  V sums = {};
  for (int64_t i = 0; i < size; i += W) {
    const V v = load_first(x + i, size - i);
    sums = fma(v, v, sums);
  }
  return sum_lanes(sums);
}

// out = x / rms(x) * weight, rounded to E before the weight as `transformers` does; out may be x.
template <typename E>
inline void rms_norm(const E* x, const E* weight, int64_t size, float eps, E* out) {
  const V factor = all(1.0f / std::sqrt(sum_of_squares(x, size) / (float)size + eps));
  for (int64_t i = 0; i < size; i += W) {
    const V scaled = rounded<E>(load_first(x + i, size - i) * factor);
    store_first(out + i, scaled * load_first(weight + i, size - i), size - i);
  }
}

template <typename E>
inline void add_in_place(E* x, const E* delta, int64_t size) {
  for (int64_t i = 0; i < size; i += W)
    store_first(x + i, load_first(x + i, size - i) + load_first(delta + i, size - i), size - i);
}

template <typename E>
inline void widen(const E* x, int64_t size, float* out) {
  for (int64_t i = 0; i < size; i += W) store_first(out + i, load_first(x + i, size - i), size - i);
}

// Rotates a head by the angles whose cosines and sines are `angles` [2][head_dim / 2]; out may be x.
template <typename E>
inline void rotate(const E* x, const float* angles, int64_t head_dim, E* out) {
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; i += W) {
    const int64_t count = half - i;
    const V low = load_first(x + i, count), high = load_first(x + half + i, count);
    const V cosines = load_first(angles + i, count), sines = load_first(angles + half + i, count);
    store_first(out + i, low * cosines - high * sines, count);
    store_first(out + half + i, high * cosines + low * sines, count);
  }
}

// silu(gate) * up, silu rounded to E as `transformers` does.
template <typename E>
inline V gated(V gate, V up, const E*) {
  return rounded<E>(gate / (all(1.0f) + exp(-gate))) * up;
}

// out = silu(gate) * up for gate_up = [gate, up].
template <typename E>
inline void silu_multiply(const E* gate_up, int64_t size, E* out) {
  for (int64_t i = 0; i < size; i += W) {
    const int64_t count = size - i;
    store_first(out + i, gated(load_first(gate_up + i, count), load_first(gate_up + size + i, count), out), count);
  }
}

}  // namespace tandem
