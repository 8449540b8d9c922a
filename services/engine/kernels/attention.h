// Causal attention over the paged pool, in place.
//
// Keys are visited in blocks at fixed positions of the sequence, and every score, weight and sum is the same chain of
// operations for every tile, so that a row's arithmetic depends on its own position only: not on the page size, the
// rows that share its tile, the chunk or the batch. A key that a row does not see weighs exactly zero.
//
// Legend: H KV heads, D head_dim.
#pragma once

#include <cmath>

#include "attention_amx.h"
#include "attention_float.h"
#include "parallel.h"
#include "pool.h"
#include "vector.h"

namespace tandem {

constexpr int64_t TILE_ROWS = 48;  // query rows (tokens times heads of a group) that share the keys they load

// The running softmax of the rows of one tile. There is room for `stride` rows, whole vectors; those beyond the last
// row have its position.
struct Tile {
  Memory q, staging;
  Memory scores;                   // as Steps say; weights after the softmax
  Memory sums;                     // [stride][width], weighted values
  Memory top, weight_sum, factor;  // [stride]: what weights are relative to, in powers of two, and what its rise means
  std::vector<int32_t> position;   // [stride]

  static int64_t rows(const Heads& heads) {
    return round_up(std::max(TILE_ROWS, heads.num_heads / heads.num_kv_heads));
  }
  static int64_t width(const Heads& heads) { return (heads.head_dim + 31) / 32 * 32; }
  static int64_t round_up(int64_t rows) { return (rows + 15) / 16 * 16; }

  explicit Tile(const Heads& heads)
      : q(width(heads) * rows(heads)), staging(BLOCK_KEYS * width(heads)), scores(BLOCK_KEYS * rows(heads)),
        sums(width(heads) * rows(heads)), top(rows(heads)), weight_sum(rows(heads)), factor(rows(heads)),
        position((size_t)rows(heads)) {}
};

// Hides from W rows the keys after their positions.
inline void hide_later_keys(float* scores, int64_t stride, int64_t from, int count, const int32_t* positions) {
  VI position;
  std::memcpy(&position, positions, sizeof position);
  for (int j = 0; j < count; ++j) {
    const VI key = VI{} + (int32_t)(from + j);
    store(scores + j * stride, key <= position ? load(scores + j * stride) : all(-INFINITY));
  }
}

// What weights are relative to rises only where they would become larger than 2^SLACK: a little above 1 they are as
// exact, and the sums need not be multiplied each time (as in FlashAttention-4).
constexpr float SLACK = 8.0f;

inline V raise(V reference, V greatest) { return greatest > reference + all(SLACK) ? greatest : reference; }

// Sums of weights are taken by the keys' numbers modulo SUMS first, then by halving.
constexpr int SUMS = 16;

// Turns the scores of W rows, [count][stride], into weights under the rows' new reference. Returns whether it rose.
inline bool weigh(float* scores, int64_t stride, int count, float scale, float* top, float* weight_sum, float* factor) {
  V greatest = load(scores), others[3] = {greatest, greatest, greatest};
  int j = 1;
  for (; j + 4 <= count; j += 4) {
    greatest = max(greatest, load(scores + j * stride));
#pragma GCC unroll 3
    for (int i = 0; i < 3; ++i) others[i] = max(others[i], load(scores + (j + 1 + i) * stride));
  }
  for (; j < count; ++j) greatest = max(greatest, load(scores + j * stride));
  greatest = max(max(greatest, others[0]), max(others[1], others[2]));
  const V old = load(top), risen = raise(old, greatest * all(scale));
  V sums[SUMS] = {};
  const auto weigh_one = [&](int j, V& sum) {
    const V weight = exp2(fma(load(scores + j * stride), all(scale), -risen));
    store(scores + j * stride, weight);
    sum = sum + weight;
  };
  j = 0;
  for (; j + SUMS <= count; j += SUMS)
#pragma GCC unroll 16
    for (int i = 0; i < SUMS; ++i) weigh_one(j + i, sums[i]);
  for (; j < count; ++j) weigh_one(j, sums[j % SUMS]);
  for (int half = SUMS / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) sums[i] = sums[i] + sums[i + half];
  const V change = exp2(old - risen);
  store(top, risen);
  store(factor, change);
  store(weight_sum, fma(load(weight_sum), change, sums[0]));
  return any(change != all(1.0f));
}

// The same for one row of few: scores [BLOCK_KEYS], of which `count` are there and `visible` are seen.
inline bool weigh_row(float* scores, int count, int visible, float scale, float* top, float* weight_sum,
                      float* factor) {
  for (int j = visible; j < (count + SUMS - 1) / SUMS * SUMS; ++j) scores[j] = -INFINITY;
  V greatest = load(scores);
  for (int j = W; j < count; j += W) greatest = max(greatest, load(scores + j));
  const V old = all(*top), risen = raise(old, all(max_lanes(greatest)) * all(scale));
  V sums[SUMS / W] = {};
  for (int j = 0; j < count; j += W) {
    const V weight = exp2(fma(load(scores + j), all(scale), -risen));
    store(scores + j, weight);
    sums[j / W % (SUMS / W)] = sums[j / W % (SUMS / W)] + weight;
  }
  for (int half = SUMS / W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) sums[i] = sums[i] + sums[i + half];
  const V change = exp2(old - risen);
  *top = risen[0];
  *factor = change[0];
  *weight_sum = fma(all(*weight_sum), change, all(sum_lanes(sums[0])))[0];
  return *factor != 1.0f;
}

inline void scale_row(float* row, int64_t width, float factor) {
  if (factor == 1.0f) return;
  for (int64_t d = 0; d < width; d += W) store(row + d, load(row + d) * all(factor));
}

// Turns the scores of a tile into weights. `first_position` is that of its first row. Returns whether a reference rose.
inline bool weigh_tile(Tile& tile, int64_t rows, int64_t first_position, int64_t from, int count, float scale) {
  const int64_t stride = Tile::round_up(rows);
  float *scores = tile.scores.floats(), *top = tile.top.floats(), *weight_sum = tile.weight_sum.floats();
  float* factor = tile.factor.floats();
  bool has_risen = false;
  if (rows <= MAX_FEW_ROWS) {
    for (int64_t r = 0; r < rows; ++r) {
      const int visible = (int)std::clamp<int64_t>(tile.position[r] + 1 - from, 0, count);
      has_risen |= weigh_row(scores + r * BLOCK_KEYS, count, visible, scale, top + r, weight_sum + r, factor + r);
    }
  } else {
    for (int64_t r = 0; r < stride; r += W) {
      if (from + count > first_position + 1) hide_later_keys(scores + r, stride, from, count, &tile.position[r]);
      has_risen |= weigh(scores + r, stride, count, scale, top + r, weight_sum + r, factor + r);
    }
  }
  return has_risen;
}

// What a thread takes: one KV head's rows for the query tokens [first, last) of the step, which see the keys up to
// `end` of their sequence.
struct Piece {
  int64_t sequence, kv_head, first, last, end;
};

// The pieces of a step in the order in which they are taken. A sequence's last tile, the longest, goes first.
class Pieces {
 public:
  Pieces(const Batch& batch, const Heads& heads)
      : batch_(batch), kv_heads_(heads.num_kv_heads),
        tile_tokens_(std::max<int64_t>(1, TILE_ROWS * heads.num_kv_heads / heads.num_heads)) {}

  // Finds a piece by its number, which is at least that of the call before. False: there are not so many.
  bool find(int64_t number, Piece& piece) {
    for (; sequence_ < batch_.num_sequences; ++sequence_) {
      const int64_t begin = batch_.query_start[sequence_], end = batch_.query_start[sequence_ + 1];
      const int64_t tiles = (end - begin + tile_tokens_ - 1) / tile_tokens_, place = number - before_;
      if (place < tiles * kv_heads_) {
        const int64_t first = begin + (tiles - 1 - place / kv_heads_) * tile_tokens_;
        const int64_t last = std::min(first + tile_tokens_, end);
        piece = {sequence_, place % kv_heads_, first, last, batch_.context_lens[sequence_] - (end - last)};
        return true;
      }
      before_ += tiles * kv_heads_;
    }
    return false;
  }

 private:
  const Batch& batch_;
  int64_t kv_heads_, tile_tokens_, sequence_ = 0, before_ = 0;
};

// Rows of q and out are `q_stride` and `out_stride` elements apart per token. `find_after(block)` gives the first keys
// of the piece that this thread will probably take next, or leaves the block alone.
template <typename Products, typename E, typename FindAfter>
void attend_piece(Products& products, const Batch& batch, const Heads& heads, int64_t layer, const Piece& piece,
                  const E* q, int64_t q_stride, E* out, int64_t out_stride, Tile& tile, const FindAfter& find_after) {
  const HeadCache<E> cache(batch, heads, layer, piece.sequence, piece.kv_head, piece.end);
  const int64_t num_tokens = piece.last - piece.first, first_position = piece.end - num_tokens;
  const int64_t group = heads.num_heads / heads.num_kv_heads, rows = num_tokens * group;
  const int64_t head_dim = heads.head_dim, width = Products::width(head_dim), stride = Tile::round_up(rows);
  const float scale = heads.scale * 1.44269504088896341f;  // weights are powers of two
  const auto column = [&](int64_t r) { return (piece.kv_head * group + r % group) * head_dim; };
  std::vector<const E*> q_rows((size_t)rows);
  for (int64_t r = 0; r < rows; ++r) q_rows[r] = q + (piece.first + r / group) * q_stride + column(r);
  products.prepare(rows);
  Products::load_queries(q_rows.data(), rows, head_dim, stride, tile.q);
  for (int64_t r = 0; r < stride; ++r) tile.position[r] = (int32_t)(first_position + std::min(r, rows - 1) / group);
  float* sums = tile.sums.floats();
  std::fill_n(sums, stride * width, 0.0f);
  std::fill_n(tile.weight_sum.floats(), stride, 0.0f);
  std::fill_n(tile.top.floats(), stride, -INFINITY);

  KeyBlock<E> blocks[2];
  cache.locate(0, blocks[0]);
  for (int64_t from = 0, now = 0; from < piece.end; from += BLOCK_KEYS, now = 1 - now) {
    KeyBlock<E>&block = blocks[now], &ahead = blocks[1 - now];
    if (from + BLOCK_KEYS < piece.end) {
      cache.locate(from + BLOCK_KEYS, ahead);
    } else {
      ahead = block;
      if constexpr (Products::ASKS_BEYOND_PIECE)
        find_after(ahead);
      else
        ahead.count = 0;
    }
    Products::score(tile.q, rows, stride, head_dim, block, ahead, tile.staging, tile.scores.floats());
    if (weigh_tile(tile, rows, first_position, from, block.count, scale) && from > 0)
      for (int64_t r = 0; r < rows; ++r) scale_row(sums + r * width, width, tile.factor.floats()[r]);
    Products::add(tile.scores.floats(), rows, stride, head_dim, block, ahead, tile.staging, sums);
  }
  for (int64_t r = 0; r < rows; ++r)
    Products::store_row(sums + r * width, tile.weight_sum.floats()[r], head_dim,
                        out + (piece.first + r / group) * out_stride + column(r));
}

// Every piece of the step; threads take the next one from `next`, which is zero at the start. Ends without a barrier.
template <typename Products, typename E>
void attend_with(const Batch& batch, const Heads& heads, int64_t layer, const E* q, int64_t q_stride, E* out,
                 int64_t out_stride, std::atomic<int64_t>& next, Tile& tile) {
  Products products;
  Pieces pieces(batch, heads);
  const auto find_after = [&](KeyBlock<E>& block) {
    Pieces later = pieces;
    Piece piece;
    if (later.find(next.load(std::memory_order_relaxed), piece))
      HeadCache<E>(batch, heads, layer, piece.sequence, piece.kv_head, piece.end).locate(0, block);
  };
  for (Piece piece; pieces.find(next.fetch_add(1), piece);)
    attend_piece(products, batch, heads, layer, piece, q, q_stride, out, out_stride, tile, find_after);
}

template <typename E>
void attend(const Batch& batch, const Heads& heads, int64_t layer, const E* q, int64_t q_stride, E* out,
            int64_t out_stride, std::atomic<int64_t>& next, Tile& tile) {
#if defined(TANDEM_AMX)
  if constexpr (sizeof(E) == 2)
    if (has_amx()) return attend_with<AmxProducts>(batch, heads, layer, q, q_stride, out, out_stride, next, tile);
#endif
  attend_with<FloatProducts<E>>(batch, heads, layer, q, q_stride, out, out_stride, next, tile);
}

}  // namespace tandem
