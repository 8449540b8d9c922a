// The two products of attention by AMX tiles, for bfloat16: scores = keys * q^T, then sums += weights * values, with
// weights rounded to bfloat16 (as in FlashAttention, arXiv:2205.14135).
//
// Keys are read where they lie. Matrix tiles want their right-hand sides in pairs of what is summed over: queries are
// turned so once for all keys, values once per block. Pairs of values come out of the unpack instructions with their
// columns in another order, and stay so until a row is stored.
#pragma once

#include "amx.h"
#include "pool.h"

#if defined(TANDEM_AMX)

namespace tandem {

struct AmxProducts {
  static int64_t width(int64_t head_dim) { return (head_dim + TILE_K - 1) / TILE_K * TILE_K; }

  // q [width / 2][stride] of pairs from rows of head_dim elements; padding is zero.
  static void load_queries(const bf16* const* rows, int64_t num_rows, int64_t head_dim, int64_t stride, Memory& q) {
    for (int64_t first = 0; first < stride; first += TILE)
      for (int64_t d = 0; d < width(head_dim); d += TILE_K) {
        V turned[TILE];
        for (int64_t j = 0; j < TILE; ++j)
          turned[j] = first + j < num_rows ? (V)load_pairs(rows[first + j] + d, head_dim - d) : V{};
        transpose(turned);
        for (int64_t i = 0; i < TILE; ++i) store(q.floats() + (d / 2 + i) * stride + first, turned[i]);
      }
  }

  // What lies beyond the block's count is anything.
  static void score(const Memory& q, int64_t num_rows, int64_t stride, const HeadCache<bf16>& cache, int64_t from,
                    const KeyBlock<bf16>& block, Memory& staging, float* out) {
    alignas(64) float turned[BLOCK_KEYS * TILE];
    float* scores = num_rows <= MAX_FEW_ROWS ? turned : out;
    const int64_t head_dim = cache.heads.head_dim, page_size = cache.batch.page_size;
    for (int64_t k = 0; k < block.count; k += TILE) {
      // Rows of a prompt come back to the same keys soon, and find them in the cache.
      if (num_rows <= MAX_FEW_ROWS) cache.prefetch(from + BLOCK_KEYS + k, TILE);
      const bf16* keys = block.keys[k];
      int64_t key_stride = head_dim;
      const bool is_one_piece = (from + k) % page_size + TILE <= page_size;
      if (!is_one_piece || head_dim % TILE_K) {
        key_stride = width(head_dim);
        keys = stage_rows(block.keys + k, std::min<int64_t>(TILE, block.count - k), head_dim, (bf16*)staging.floats());
      }
      for (int64_t r = 0; r < stride;) {
        const auto score = stride - r >= 3 * TILE ? score_tiles<3> : score_tiles<1>;
        r += score(q.floats() + r, stride, keys, key_stride, head_dim, scores + k * stride + r);
      }
    }
    if (num_rows > MAX_FEW_ROWS) return;
    const VI lanes = {0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240};
    for (int64_t r = 0; r < num_rows; ++r)
      for (int64_t k = 0; k < block.count; k += TILE) {
        const float* column = scores + k * TILE + r;
        store(out + r * BLOCK_KEYS + k, (V)_mm512_mask_i32gather_ps(__m512{}, 0xffff, (__m512i)lanes, column, 4));
      }
  }

  // Adds to sums [rows][width], whose columns are in the order of the unpacked values.
  static void add(const float* weights, int64_t num_rows, int64_t stride, const HeadCache<bf16>& cache,
                  const KeyBlock<bf16>& block, Memory& staging, float* sums) {
    const int64_t head_dim = cache.heads.head_dim, columns = width(head_dim);
    const int64_t key_tiles = (block.count + TILE_K - 1) / TILE_K;
    float* values = staging.floats();  // [BLOCK_KEYS / 2][columns] of pairs
    for (int64_t j = 0; j < key_tiles * TILE_K; j += 2)
      pair_values(j < block.count ? block.values[j] : nullptr, j + 1 < block.count ? block.values[j + 1] : nullptr,
                  head_dim, values + j / 2 * columns);
    alignas(64) float packed[BLOCK_KEYS / TILE_K][TILE][TILE];  // a row's weights in pairs
    for (int64_t r = 0; r < stride; r += TILE) {
      for (int64_t t = 0; t < key_tiles; ++t)
        if (num_rows > MAX_FEW_ROWS)
          pack_weights(weights + r, stride, t * TILE_K, block.count, packed[t]);
        else
          pack_few_rows(weights, num_rows, t * TILE_K, block.count, packed[t]);
      for (int64_t d = 0; d < columns;) {
        const auto add = columns - d >= 4 * TILE ? add_tiles<4> : add_tiles<2>;
        d += add(packed, key_tiles, values + d, columns, sums + r * columns + d);
      }
    }
  }

  static void store_row(const float* sums, float weight_sum, int64_t head_dim, bf16* out) {
    const VI low_half = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
    const VI high_half = low_half + 8;
    const V share = all(1.0f / weight_sum);
    for (int64_t d = 0; d < head_dim; d += TILE_K) {
      const V even = load(sums + d) * share, odd = load(sums + d + TILE) * share;
      store_first(out + d, __builtin_shuffle(even, odd, low_half), head_dim - d);
      const int64_t left = head_dim - d - TILE;
      if (left > 0) store_first(out + d + TILE, __builtin_shuffle(even, odd, high_half), left);
    }
  }

 private:
  static __m512i load_pairs(const bf16* row, int64_t count) {
    const __mmask32 mask = count >= TILE_K ? ~(__mmask32)0 : ((__mmask32)1 << count) - 1;
    return _mm512_maskz_loadu_epi16(mask, row);
  }

  static const bf16* stage_rows(const bf16* const* rows, int64_t count, int64_t head_dim, bf16* out) {
    const int64_t columns = width(head_dim);
    for (int64_t j = 0; j < TILE; ++j)
      for (int64_t d = 0; d < columns; d += TILE_K)
        _mm512_storeu_si512(out + j * columns + d,
                            j < count ? load_pairs(rows[j] + d, head_dim - d) : _mm512_setzero_si512());
    return out;
  }

  // Tiles 0 to COLUMNS - 1 are sums, 4 keys, 5 queries.
  template <int COLUMNS>
  static int64_t score_tiles(const float* q, int64_t stride, const bf16* keys, int64_t key_stride, int64_t head_dim,
                             float* scores) {
    tiles_read_memory();
    _tile_zero(0);
    if constexpr (COLUMNS > 1) {
      _tile_zero(1);
      _tile_zero(2);
    }
    for (int64_t d = 0; d < head_dim; d += TILE_K, q += TILE * stride) {
      _tile_loadd(4, keys + d, key_stride * 2);
      _tile_loadd(5, q, stride * 4);
      _tile_dpbf16ps(0, 4, 5);
      if constexpr (COLUMNS > 1) {
        _tile_loadd(6, q + TILE, stride * 4);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, q + 2 * TILE, stride * 4);
        _tile_dpbf16ps(2, 4, 7);
      }
    }
    _tile_stored(0, scores, stride * 4);
    if constexpr (COLUMNS > 1) {
      _tile_stored(1, scores + TILE, stride * 4);
      _tile_stored(2, scores + 2 * TILE, stride * 4);
    }
    return COLUMNS * TILE;
  }

  static void pair_values(const bf16* even, const bf16* odd, int64_t head_dim, float* out) {
    for (int64_t d = 0; d < width(head_dim); d += TILE_K) {
      const __m512i a = even ? load_pairs(even + d, head_dim - d) : _mm512_setzero_si512();
      const __m512i b = odd ? load_pairs(odd + d, head_dim - d) : _mm512_setzero_si512();
      _mm512_storeu_si512(out + d, _mm512_unpacklo_epi16(a, b));
      _mm512_storeu_si512(out + d + TILE, _mm512_unpackhi_epi16(a, b));
    }
  }

  // weights [key][stride] of 16 rows as packed [row][pair of keys], halves rounded up; keys from `count` on weigh
  // nothing.
  static void pack_weights(const float* weights, int64_t stride, int64_t first_key, int64_t count,
                           float (*packed)[TILE]) {
    const auto pair = [](V even, V odd) {
      return (V)((((VU)even + 0x8000u) >> 16) | (((VU)odd + 0x8000u) & 0xffff0000u));
    };
    const float* key = weights + first_key * stride;
    V turned[TILE];
    if (first_key + TILE_K <= count) {
#pragma GCC unroll 16
      for (int64_t i = 0; i < TILE; ++i) turned[i] = pair(load(key + 2 * i * stride), load(key + (2 * i + 1) * stride));
    } else {
      const auto weight = [&](int64_t i) { return first_key + i < count ? load(key + i * stride) : V{}; };
      for (int64_t i = 0; i < TILE; ++i) turned[i] = pair(weight(2 * i), weight(2 * i + 1));
    }
    transpose(turned);
    for (int64_t i = 0; i < TILE; ++i) store(packed[i], turned[i]);
  }

  // The same of weights [row][BLOCK_KEYS].
  static void pack_few_rows(const float* weights, int64_t num_rows, int64_t first_key, int64_t count,
                            float (*packed)[TILE]) {
    for (int64_t i = 0; i < TILE; ++i) store(packed[i], V{});
    for (int64_t r = 0; r < num_rows; ++r)
      for (int64_t key = first_key; key < std::min(first_key + TILE_K, count); ++key) {
        uint32_t bits;
        std::memcpy(&bits, weights + r * BLOCK_KEYS + key, sizeof bits);
        const uint16_t half = (uint16_t)((bits + 0x8000u) >> 16);
        std::memcpy((char*)packed[r] + (key - first_key) * 2, &half, sizeof half);
      }
  }

  // Tiles 0 to COLUMNS - 1 are sums, 4 weights, 5 and 6 values.
  template <int COLUMNS>
  static int64_t add_tiles(const float (*packed)[TILE][TILE], int64_t key_tiles, const float* values, int64_t columns,
                        float* sums) {
    tiles_read_memory();
    _tile_loadd(0, sums, columns * 4);
    _tile_loadd(1, sums + TILE, columns * 4);
    if constexpr (COLUMNS > 2) {
      _tile_loadd(2, sums + 2 * TILE, columns * 4);
      _tile_loadd(3, sums + 3 * TILE, columns * 4);
    }
    for (int64_t t = 0; t < key_tiles; ++t, values += TILE * columns) {
      _tile_loadd(4, packed[t], TILE * 4);
      _tile_loadd(5, values, columns * 4);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, values + TILE, columns * 4);
      _tile_dpbf16ps(1, 4, 6);
      if constexpr (COLUMNS > 2) {
        _tile_loadd(5, values + 2 * TILE, columns * 4);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, values + 3 * TILE, columns * 4);
        _tile_dpbf16ps(3, 4, 6);
      }
    }
    _tile_stored(0, sums, columns * 4);
    _tile_stored(1, sums + TILE, columns * 4);
    if constexpr (COLUMNS > 2) {
      _tile_stored(2, sums + 2 * TILE, columns * 4);
      _tile_stored(3, sums + 3 * TILE, columns * 4);
    }
    return COLUMNS * TILE;
  }
};

}  // namespace tandem

#endif
