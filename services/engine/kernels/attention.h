// Causal attention over the paged pool, in place.
//
// Keys are visited in blocks of BLOCK_KEYS at fixed positions of the sequence, so that a row's arithmetic depends on its
// own position only: not on the page size, the rows that share its tile, the chunk or the batch.
//
// Legend: N pages, H KV heads, L layers, S slots of a page, D head_dim; the pool is [N, H, L, 2, S, D].
#pragma once

#include <cmath>
#include <vector>

#include "parallel.h"
#include "vector.h"

namespace tandem {

constexpr int BLOCK_KEYS = 32;
constexpr int64_t TILE_ROWS = 32;  // query rows (tokens times heads of a group) that share the keys they load

// What a step says about the pool and the sequences in it.
struct Batch {
  const int32_t* query_start;   // [num_sequences + 1]
  const int32_t* context_lens;  // [num_sequences]
  const int32_t* page_tables;   // [num_sequences][max_pages]
  int64_t num_sequences, max_pages;
  void* pool;
  int64_t num_pages, page_size;
};

struct Heads {
  int64_t num_heads, num_kv_heads, head_dim, num_layers;
  float scale;
};

// The start of one page's keys (part 0) or values (part 1) for a head of a layer, in elements.
inline int64_t page_offset(const Batch& batch, const Heads& heads, int64_t page, int64_t head, int64_t layer, int part) {
  const int64_t slots = batch.page_size * heads.head_dim;
  return (((page * heads.num_kv_heads + head) * heads.num_layers + layer) * 2 + part) * slots;
}

// a's lanes folded once into half the lanes of the result and b's into the other half. After log2(W) folds of W vectors,
// lane j holds the sum of all lanes of vector j. The patterns are those that machines have single instructions for.
template <int FOLD>
inline V fold(V a, V b) {
  VI low, high;
  for (int i = 0; i < W; ++i) {
    const int quad = i / 4 * 4, within = i % 4, block = i / 4, half = W / 8;
    if (FOLD == 0) {
      low[i] = quad + within / 2 + within % 2 * W;
      high[i] = low[i] + 2;
    } else if (FOLD == 1) {
      low[i] = quad + within % 2 + within / 2 * W;
      high[i] = low[i] + 2;
    } else {
      low[i] = (block < half ? 8 * block : 8 * (block - half) + W) + within;
      high[i] = low[i] + 4;
    }
  }
  return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
}

template <int FOLD = 0>
inline V reduce_lanes(V* sums) {
  if constexpr ((1 << FOLD) == W) {
    return sums[0];
  } else {
    for (int i = 0; i < W >> (FOLD + 1); ++i) sums[i] = fold<FOLD>(sums[2 * i], sums[2 * i + 1]);
    return reduce_lanes<FOLD + 1>(sums);
  }
}

// The running softmax of the rows of one tile; rows are padded with zeros to whole vectors.
struct Tile {
  int64_t width;          // head_dim rounded up to whole vectors
  std::vector<float> q;   // [rows][width], scaled
  std::vector<float> sum; // [rows][width], weighted values
  std::vector<float> top; // [rows], the greatest score so far
  std::vector<float> weight_sum;  // [rows][W]
  std::vector<float> staged;      // [2][BLOCK_KEYS][width]: keys and values that need converting or padding

  explicit Tile(const Heads& heads) : width((heads.head_dim + W - 1) / W * W) {
    const int64_t rows = std::max(TILE_ROWS, heads.num_heads / heads.num_kv_heads);
    q.resize((size_t)(rows * width));
    sum.resize((size_t)(rows * width));
    top.resize((size_t)rows);
    weight_sum.resize((size_t)(rows * W));
    staged.resize((size_t)(2 * BLOCK_KEYS * width));
  }
};

// A block's keys and values as rows of `width` floats.
struct KeyBlock {
  const float* keys[BLOCK_KEYS];
  const float* values[BLOCK_KEYS];
};

inline void point_or_stage(const float* row, int64_t head_dim, int64_t width, float* staging, const float** out) {
  if (head_dim == width) {
    *out = row;
    return;
  }
  std::memcpy(staging, row, (size_t)head_dim * sizeof(float));
  *out = staging;
}

inline void point_or_stage(const bf16* row, int64_t head_dim, int64_t, float* staging, const float** out) {
  for (int64_t d = 0; d < head_dim; d += W) store(staging + d, load_first(row + d, head_dim - d));
  *out = staging;
}

// Scores of one row against `count` keys (at least one); the rest of the block gets minus infinity.
inline void score_block(const float* q, const KeyBlock& block, int count, int64_t width, float* scores) {
  for (int group = 0; group < BLOCK_KEYS; group += W) {
    V sums[W] = {};
    if (group < count) {
      const float* keys[W];
      for (int j = 0; j < W; ++j) keys[j] = block.keys[std::min(group + j, count - 1)];
      for (int64_t d = 0; d < width; d += W) {
        const V value = load(q + d);
#pragma GCC unroll 16
        for (int j = 0; j < W; ++j) sums[j] = fma(value, load(keys[j] + d), sums[j]);
      }
    }
    store(scores + group, reduce_lanes(sums));
  }
  for (int j = count; j < BLOCK_KEYS; ++j) scores[j] = -INFINITY;
}

// Turns scores into weights under the row's new maximum; what was summed before is scaled down to it.
inline void weigh_block(float* scores, int count, int64_t width, float* top, float* weight_sum, float* sum) {
  V greatest = load(scores);
  for (int group = W; group < BLOCK_KEYS; group += W) greatest = max(greatest, load(scores + group));
  const float block_top = max_lanes(greatest);
  if (!(block_top <= *top)) {
    if (*top != -INFINITY) {
      const V factor = exp(all(*top - block_top));
      store(weight_sum, load(weight_sum) * factor);
      for (int64_t d = 0; d < width; d += W) store(sum + d, load(sum + d) * factor);
    }
    *top = block_top;
  }
  for (int group = 0; group < BLOCK_KEYS; group += W) store(scores + group, exp(load(scores + group) - all(*top)));
  for (int j = count; j < BLOCK_KEYS; ++j) scores[j] = 0.0f;
  V total = load(weight_sum);
  for (int group = 0; group < BLOCK_KEYS; group += W) total = total + load(scores + group);
  store(weight_sum, total);
}

// sum += weights * values for VECTORS vectors of the row, from `d` on. Keys alternate between CHAINS sums, because one
// chain of additions per vector would wait for itself.
template <int VECTORS, int CHAINS>
inline void add_values(const float* weights, const KeyBlock& block, int count, int64_t d, float* sum) {
  V parts[CHAINS][VECTORS] = {};
  for (int i = 0; i < VECTORS; ++i) parts[0][i] = load(sum + d + i * W);
  int j = 0;
  for (; j + CHAINS <= count; j += CHAINS)
#pragma GCC unroll 4
    for (int chain = 0; chain < CHAINS; ++chain) {
      const V weight = all(weights[j + chain]);
      const float* value = block.values[j + chain] + d;
#pragma GCC unroll 8
      for (int i = 0; i < VECTORS; ++i) parts[chain][i] = fma(weight, load(value + i * W), parts[chain][i]);
    }
  for (; j < count; ++j)
    for (int i = 0; i < VECTORS; ++i)
      parts[j % CHAINS][i] = fma(all(weights[j]), load(block.values[j] + d + i * W), parts[j % CHAINS][i]);
  for (int i = 0; i < VECTORS; ++i) {
    V total = parts[0][i];
    for (int chain = 1; chain < CHAINS; ++chain) total = total + parts[chain][i];
    store(sum + d + i * W, total);
  }
}

inline void add_block(const float* weights, const KeyBlock& block, int count, int64_t width, float* sum) {
  int64_t d = 0;
  for (; d + 8 * W <= width; d += 8 * W) add_values<8, 2>(weights, block, count, d, sum);
  for (; d + 4 * W <= width; d += 4 * W) add_values<4, 2>(weights, block, count, d, sum);
  for (; d < width; d += W) add_values<1, 4>(weights, block, count, d, sum);
}

// Asks for one row of keys or values before its turn: pages lie apart, which the hardware does not foresee.
template <typename E>
inline void prefetch_row(const E* row, int64_t head_dim) {
  constexpr int64_t LINE = 64 / sizeof(E);
  for (int64_t d = 0; d < head_dim; d += LINE) __builtin_prefetch(row + d);
}

// One KV head's rows for the query tokens [first, end) of a sequence. q rows are `q_stride` elements apart per token.
template <typename E>
void attend_tile(const Batch& batch, const Heads& heads, int64_t layer, int64_t sequence, int64_t kv_head,
                 int64_t first, int64_t end, const E* q, int64_t q_stride, E* out, int64_t out_stride, Tile& tile) {
  const int64_t group = heads.num_heads / heads.num_kv_heads, rows = (end - first) * group;
  const int64_t head_dim = heads.head_dim, width = tile.width;
  const int64_t query_end = batch.query_start[sequence + 1];
  const int64_t first_position = batch.context_lens[sequence] - (query_end - first);
  for (int64_t r = 0; r < rows; ++r) {
    const E* row = q + (first + r / group) * q_stride + (kv_head * group + r % group) * head_dim;
    for (int64_t d = 0; d < head_dim; d += W)
      store(&tile.q[r * width + d], load_first(row + d, head_dim - d) * heads.scale);
  }
  std::fill_n(tile.sum.begin(), rows * width, 0.0f);
  std::fill_n(tile.weight_sum.begin(), rows * W, 0.0f);
  std::fill_n(tile.top.begin(), rows, -INFINITY);

  const int32_t* pages = batch.page_tables + sequence * batch.max_pages;
  const E* pool = (const E*)batch.pool;
  const int64_t to_values = batch.page_size * head_dim;
  const int64_t last_position = first_position + (end - first) - 1;
  for (int64_t from = 0; from <= last_position; from += BLOCK_KEYS) {
    KeyBlock block;
    const int loaded = (int)std::min<int64_t>(BLOCK_KEYS, last_position + 1 - from);
    int64_t page = from / batch.page_size, slot = from % batch.page_size;
    int64_t next_page = (from + BLOCK_KEYS) / batch.page_size, next_slot = (from + BLOCK_KEYS) % batch.page_size;
    for (int j = 0; j < loaded; ++j) {
      if (from + BLOCK_KEYS + j <= last_position) {
        const E* next = pool + page_offset(batch, heads, pages[next_page], kv_head, layer, 0) + next_slot * head_dim;
        prefetch_row(next, head_dim);
        prefetch_row(next + to_values, head_dim);
        if (++next_slot == batch.page_size) next_slot = 0, ++next_page;
      }
      const E* keys = pool + page_offset(batch, heads, pages[page], kv_head, layer, 0) + slot * head_dim;
      point_or_stage(keys, head_dim, width, &tile.staged[j * width], &block.keys[j]);
      point_or_stage(keys + to_values, head_dim, width, &tile.staged[(BLOCK_KEYS + j) * width], &block.values[j]);
      if (++slot == batch.page_size) slot = 0, ++page;
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t visible = first_position + r / group + 1 - from;
      if (visible <= 0) continue;
      const int count = (int)std::min<int64_t>(loaded, visible);
      alignas(64) float scores[BLOCK_KEYS];
      float* sum = &tile.sum[r * width];
      score_block(&tile.q[r * width], block, count, width, scores);
      weigh_block(scores, count, width, &tile.top[r], &tile.weight_sum[r * W], sum);
      add_block(scores, block, count, width, sum);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    E* row = out + (first + r / group) * out_stride + (kv_head * group + r % group) * head_dim;
    const V total = all(sum_lanes(load(&tile.weight_sum[r * W])));
    for (int64_t d = 0; d < head_dim; d += W) store_first(row + d, load(&tile.sum[r * width + d]) / total, head_dim - d);
  }
}

// Every (sequence, tile, KV head) of the step is one piece of work; threads take the next one from `next`, which is
// zero at the start. Ends without a barrier.
template <typename E>
void attend(const Batch& batch, const Heads& heads, int64_t layer, const E* q, int64_t q_stride, E* out,
            int64_t out_stride, std::atomic<int64_t>& next, Tile& tile) {
  const int64_t group = heads.num_heads / heads.num_kv_heads;
  const int64_t tile_tokens = std::max<int64_t>(1, TILE_ROWS / group);
  int64_t seen = 0, taken = next.fetch_add(1);
  for (int64_t sequence = 0; sequence < batch.num_sequences; ++sequence) {
    const int64_t begin = batch.query_start[sequence], end = batch.query_start[sequence + 1];
    const int64_t tiles = (end - begin + tile_tokens - 1) / tile_tokens;
    for (; taken < seen + tiles * heads.num_kv_heads; taken = next.fetch_add(1)) {
      const int64_t first = begin + (taken - seen) / heads.num_kv_heads * tile_tokens;
      attend_tile(batch, heads, layer, sequence, (taken - seen) % heads.num_kv_heads, first,
                  std::min(first + tile_tokens, end), q, q_stride, out, out_stride, tile);
    }
    seen += tiles * heads.num_kv_heads;
  }
}

}  // namespace tandem
