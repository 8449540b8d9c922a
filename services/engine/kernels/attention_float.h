// The two products of attention in float32, for a block of keys and the rows of a tile: scores = keys * q^T, then
// sums += scores^T * values. bfloat16 keys and values are widened first.
//
// Each score is one chain over d, each sum one chain over the keys, both ascending, whichever function below made them.
//
// With few rows the work waits for memory, so the block `ahead` is asked for between the operations, line by line. With
// many it waits for the multiplications, and whether all of the asking is done matters little.
#pragma once

#include "pool.h"
#include "vector.h"

namespace tandem {

// scores[k][row] for KEYS keys and VECS vectors of rows: lanes are rows. q is [head_dim][stride], scores [..][stride].
template <int KEYS, int VECS>
inline void score_keys(const float* q, int64_t stride, const float* const* keys, int64_t head_dim, float* scores) {
  V sums[KEYS][VECS] = {};
  for (int64_t d = 0; d < head_dim; ++d, q += stride) {
    V queries[VECS];
    for (int v = 0; v < VECS; ++v) queries[v] = load(q + v * W);
#pragma GCC unroll 8
    for (int k = 0; k < KEYS; ++k) {
      const V key = all(keys[k][d]);
#pragma GCC unroll 3
      for (int v = 0; v < VECS; ++v) sums[k][v] = fma(key, queries[v], sums[k][v]);
    }
  }
  for (int k = 0; k < KEYS; ++k)
    for (int v = 0; v < VECS; ++v) store(scores + k * stride + v * W, sums[k][v]);
}

template <int VECS>
inline void score_vectors(const float* q, int64_t stride, const float* const* keys, int count, int64_t head_dim,
                          float* scores) {
  constexpr int KEYS = W == 8 ? 4 : 8;
  int k = 0;
  for (; k + KEYS <= count; k += KEYS) score_keys<KEYS, VECS>(q, stride, keys + k, head_dim, scores + k * stride);
  for (; k < count; ++k) score_keys<1, VECS>(q, stride, keys + k, head_dim, scores + k * stride);
}

// The same for ROWS rows and at most W keys, as scores[row][k] with rows of BLOCK_KEYS: lanes are keys. Rows of keys
// are `width` long, whole vectors. W rows are asked for.
template <int ROWS, typename E>
inline void score_few_rows(const float* q, int64_t stride, const float* const* keys, int count, int64_t width,
                           const E* const* ahead, float* scores) {
  const float* rows[W];
  for (int j = 0; j < W; ++j) rows[j] = keys[std::min(j, count - 1)];
  V sums[ROWS] = {};
  for (int64_t d = 0; d < width; d += W) {
    V columns[W];
    load_columns(rows, d, columns);
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) {
      ask_for_line(ahead[i], d);
      for (int r = 0; r < ROWS; ++r) sums[r] = fma(all(q[(d + i) * stride + r]), columns[i], sums[r]);
    }
  }
  for (int r = 0; r < ROWS; ++r) store(scores + r * BLOCK_KEYS, sums[r]);
}

// sums[row][d..] += weights * values for ROWS rows and VECS vectors. If ASKS, `count` rows are asked for.
template <int ROWS, int VECS, bool ASKS, typename E>
inline void add_rows(const float* weights, Steps steps, const float* const* values, int count, int64_t d,
                     const E* const* ahead, float* sums, int64_t width) {
  V parts[ROWS][VECS];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECS; ++v) parts[r][v] = load(sums + r * width + v * W);
  for (int j = 0; j < count; ++j, weights += steps.key) {
    V value[VECS];
    for (int v = 0; v < VECS; ++v) {
      if constexpr (ASKS) ask_for_line(ahead[j], d + v * W);
      value[v] = load(values[j] + d + v * W);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const V weight = all(weights[r * steps.row]);
#pragma GCC unroll 4
      for (int v = 0; v < VECS; ++v) parts[r][v] = fma(weight, value[v], parts[r][v]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECS; ++v) store(sums + r * width + v * W, parts[r][v]);
}

template <int VECS, typename E>
inline void add_vectors(const float* weights, Steps steps, int64_t rows, const float* const* values, int count,
                        int64_t d, const E* const* ahead, float* sums, int64_t width) {
  constexpr int ROWS = W == 8 ? 5 : 6;
  const auto add = [&](auto asks, auto does_not_ask, int64_t r) {
    const auto add_some = r == 0 ? asks : does_not_ask;
    add_some(weights + r * steps.row, steps, values, count, d, ahead, sums + r * width, width);
  };
  int64_t r = 0;
  for (; r + ROWS <= rows; r += ROWS) add(add_rows<ROWS, VECS, true, E>, add_rows<ROWS, VECS, false, E>, r);
  for (; r + 2 <= rows; r += 2) add(add_rows<2, VECS, true, E>, add_rows<2, VECS, false, E>, r);
  if (r < rows) add(add_rows<1, VECS, true, E>, add_rows<1, VECS, false, E>, r);
}

// What a tile asks of its products; the other one is AmxProducts. `ahead` is the block after the one at hand.
template <typename E>
struct FloatProducts {
  static constexpr bool ASKS_BEYOND_PIECE = true;

  void prepare(int64_t) {}

  static int64_t width(int64_t head_dim) { return (head_dim + W - 1) / W * W; }

  // q [width][stride] from rows of head_dim elements; padding is zero.
  static void load_queries(const E* const* rows, int64_t num_rows, int64_t head_dim, int64_t stride, Memory& q) {
    const int64_t width = FloatProducts::width(head_dim);
    for (int64_t first = 0; first < stride; first += W)
      for (int64_t d = 0; d < width; d += W) {
        V turned[W];
        for (int j = 0; j < W; ++j)
          turned[j] = first + j < num_rows ? load_first(rows[first + j] + d, head_dim - d) : V{};
        transpose(turned);
        for (int i = 0; i < W; ++i) store(q.floats() + (d + i) * stride + first, turned[i]);
      }
  }

  // Not inlined: in one function with the loop around them, GCC keeps the sums of both in memory.
  [[gnu::noinline]] static void score(const Memory& q, int64_t num_rows, int64_t stride, int64_t head_dim,
                                      const KeyBlock<E>& block, const KeyBlock<E>& ahead, Memory& staging,
                                      float* scores) {
    const int64_t width = FloatProducts::width(head_dim);
    const float* keys[BLOCK_KEYS];
    point_or_stage(block.keys, block.count, head_dim, width, staging.floats(), keys);
    const float* queries = q.floats();
    if (num_rows <= MAX_FEW_ROWS) {
      constexpr decltype(&score_few_rows<1, E>) FOR[] = {score_few_rows<1, E>, score_few_rows<2, E>,
                                                         score_few_rows<3, E>, score_few_rows<4, E>};
      for (int k = 0; k < block.count; k += W)
        FOR[num_rows - 1](queries, stride, keys + k, block.count - k, width, ahead.keys + k, scores + k);
      return;
    }
    ahead.ask_for_keys(0, BLOCK_KEYS, head_dim);
    int64_t r = 0;
    for (; r + 3 * W <= stride; r += 3 * W)
      score_vectors<3>(queries + r, stride, keys, block.count, head_dim, scores + r);
    for (; r < stride; r += W) score_vectors<1>(queries + r, stride, keys, block.count, head_dim, scores + r);
  }

  [[gnu::noinline]] static void add(const float* weights, int64_t num_rows, int64_t stride, int64_t head_dim,
                                    const KeyBlock<E>& block, const KeyBlock<E>& ahead, Memory& staging,
                                    float* sums) {
    const int64_t width = FloatProducts::width(head_dim);
    const Steps steps = steps_of(num_rows, stride);
    const float* values[BLOCK_KEYS];
    point_or_stage(block.values, block.count, head_dim, width, staging.floats(), values);
    constexpr int VECS = W == 8 ? 2 : 4;
    int64_t d = 0;
    for (; d + VECS * W <= width; d += VECS * W)
      add_vectors<VECS>(weights, steps, num_rows, values, block.count, d, ahead.values, sums + d, width);
    for (; d < width; d += W)
      add_vectors<1>(weights, steps, num_rows, values, block.count, d, ahead.values, sums + d, width);
  }

  static void store_row(const float* sums, float weight_sum, int64_t head_dim, E* out) {
    const V share = all(1.0f / weight_sum);
    for (int64_t d = 0; d < head_dim; d += W) store_first(out + d, load(sums + d) * share, head_dim - d);
  }

 private:
  // Rows as `width` floats: where they lie, or widened and padded with zeros.
  static void point_or_stage(const E* const* rows, int count, int64_t head_dim, int64_t width, float* staging,
                             const float** out) {
    if constexpr (sizeof(E) == sizeof(float))
      if (head_dim == width) {
        std::copy(rows, rows + count, out);
        return;
      }
    for (int j = 0; j < count; ++j, staging += width) {
      for (int64_t d = 0; d < head_dim; d += W) store(staging + d, load_first(rows[j] + d, head_dim - d));
      out[j] = staging;
    }
  }
};

}  // namespace tandem
