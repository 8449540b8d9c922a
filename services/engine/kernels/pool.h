// Where the keys and values of a sequence lie.
//
// Legend: N pages, H KV heads, L layers, S slots of a page, D head_dim; the pool is [N, H, L, 2, S, D].
#pragma once

#include <algorithm>
#include <cstdint>

#include "vector.h"

namespace tandem {

// Attention visits keys in blocks at fixed positions of the sequence.
constexpr int BLOCK_KEYS = 64;

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
inline int64_t page_offset(const Batch& batch, const Heads& heads, int64_t page, int64_t head, int64_t layer,
                           int part) {
  const int64_t slots = batch.page_size * heads.head_dim;
  return (((page * heads.num_kv_heads + head) * heads.num_layers + layer) * 2 + part) * slots;
}

// Ask for the cache line that begins at element d of a row. Others do nothing, so that each vector of a row may ask.
template <typename E>
[[gnu::always_inline]] inline void ask_for_line(const E* row, int64_t d) {
  if (d % (64 / (int64_t)sizeof(E)) == 0) __builtin_prefetch(row + d);
}

// The first keys and values of a block: as many as the rows of a tile may see.
template <typename E>
struct KeyBlock {
  const E* keys[BLOCK_KEYS];  // beyond the last one: the first one again
  const E* values[BLOCK_KEYS];
  int64_t from = 0, page_size = 1;
  int count = 0;

  // Whether the rows [k, k + num) are one piece, which may go on beyond the block's last one.
  bool is_one_piece(int64_t k, int64_t num) const { return (from + k) % page_size + num <= page_size; }

  // Ask for rows while another block is worked on, a few at a time: a core has only so many loads under way, and those
  // that are asked for beyond them are dropped or keep the work at hand waiting.
  // Always inline: GCC leaves out calls of functions that do nothing else.
  [[gnu::always_inline]] inline void ask_for_keys(int64_t from, int64_t num, int64_t head_dim) const {
    ask_for(keys, from, num, head_dim);
  }
  [[gnu::always_inline]] inline void ask_for_values(int64_t from, int64_t num, int64_t head_dim) const {
    ask_for(values, from, num, head_dim);
  }

 private:
  [[gnu::always_inline]] inline void ask_for(const E* const* rows, int64_t from, int64_t num, int64_t head_dim) const {
    for (int64_t j = from; j < std::min<int64_t>(from + num, count); ++j)
      for (int64_t d = 0; d < head_dim; d += W) ask_for_line(rows[j], d);
  }
};

// The scores of a block lie with the rows beside each other, [key][stride], or for few rows with the keys beside each
// other, [row][BLOCK_KEYS]: then vectors would have few lanes in use.
struct Steps {
  int64_t row, key;
};

constexpr int64_t MAX_FEW_ROWS = 4;

inline Steps steps_of(int64_t num_rows, int64_t stride) {
  return num_rows <= MAX_FEW_ROWS ? Steps{BLOCK_KEYS, 1} : Steps{1, stride};
}

// One head's cache of a sequence in a layer, up to the position `end`.
template <typename E>
struct HeadCache {
  const Batch& batch;
  const Heads& heads;
  const int32_t* pages;
  int64_t layer, kv_head, end;

  HeadCache(const Batch& batch, const Heads& heads, int64_t layer, int64_t sequence, int64_t kv_head, int64_t end)
      : batch(batch), heads(heads), pages(batch.page_tables + sequence * batch.max_pages), layer(layer),
        kv_head(kv_head), end(end) {}

  // There is a key at `from`.
  void locate(int64_t from, KeyBlock<E>& block) const {
    block.from = from;
    block.page_size = batch.page_size;
    block.count = (int)std::min<int64_t>(end - from, BLOCK_KEYS);
    for_each_row(from, block.count, [&](int64_t j, const E* key, const E* value) {
      block.keys[j] = key;
      block.values[j] = value;
    });
    std::fill(block.keys + block.count, block.keys + BLOCK_KEYS, block.keys[0]);
    std::fill(block.values + block.count, block.values + BLOCK_KEYS, block.values[0]);
  }

 private:
  const E* row_at(int64_t position) const {
    const int64_t page = pages[position / batch.page_size], slot = position % batch.page_size;
    return (const E*)batch.pool + page_offset(batch, heads, page, kv_head, layer, 0) + slot * heads.head_dim;
  }

  template <typename Use>
  void for_each_row(int64_t from, int64_t count, const Use& use) const {
    const int64_t to_values = batch.page_size * heads.head_dim;
    for (int64_t j = 0; j < count;) {
      const int64_t slot = (from + j) % batch.page_size, run = std::min(count - j, batch.page_size - slot);
      const E* key = row_at(from + j);
      for (const int64_t end = j + run; j < end; ++j, key += heads.head_dim) use(j, key, key + to_values);
    }
  }
};

}  // namespace tandem
