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

class AmxProducts {
 public:
  static constexpr bool ASKS_BEYOND_PIECE = false;  // measured: it takes longer

  AmxProducts() = default;
  AmxProducts(const AmxProducts&) = delete;
  AmxProducts& operator=(const AmxProducts&) = delete;
  ~AmxProducts() {
    if (prepared_ != NOTHING) _tile_release();
  }

  // Sets the tiles up for so many rows: those of few rows are small.
  void prepare(int64_t num_rows) {
    const Prepared wanted = num_rows <= MAX_FEW_ROWS ? FEW_ROWS : MANY_ROWS;
    if (wanted == FEW_ROWS && prepared_ != wanted) load_config(few_rows_config());
    if (wanted == MANY_ROWS && prepared_ != wanted) load_config(TileConfig(16, 16));
    prepared_ = wanted;
  }

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
  static void score(const Memory& q, int64_t num_rows, int64_t stride, int64_t head_dim, const KeyBlock<bf16>& block,
                    const KeyBlock<bf16>& ahead, Memory& staging, float* scores) {
    KeyTile keys[BLOCK_KEYS / TILE];
    for (int64_t k = 0; k < block.count; k += TILE)
      keys[k / TILE] = locate_or_stage(block, k, head_dim, (bf16*)staging.floats() + k * width(head_dim));
    tiles_read_memory();
    if (stride > TILE) {
      // Rows of a prompt come back to the same keys soon, and find them in the cache: nothing to ask for.
      for (int64_t k = 0; k < block.count; k += TILE) {
        int64_t r = 0;
        for (; r + 3 * TILE <= stride; r += 3 * TILE)
          score_many_rows(q.floats() + r, stride, keys[k / TILE], head_dim, scores + k * stride + r);
        for (; r < stride; r += TILE)
          score_keys<1>(q.floats() + r, stride, keys + k / TILE, head_dim, scores + k * stride + r, stride);
      }
      return;
    }
    alignas(64) float few[BLOCK_KEYS * MAX_FEW_ROWS];  // [key][MAX_FEW_ROWS]
    const bool is_few = num_rows <= MAX_FEW_ROWS;
    float* out = is_few ? few : scores;
    const int64_t out_stride = is_few ? MAX_FEW_ROWS : stride;
    for (int64_t k = 0; k < block.count; k += 2 * TILE) {
      ahead.ask_for_keys(k, 2 * TILE, head_dim);
      const auto score = k + TILE < block.count ? score_keys<2> : score_keys<1>;
      score(q.floats(), stride, keys + k / TILE, head_dim, out + k * out_stride, out_stride);
    }
    if (is_few)
      for (int64_t k = 0; k < block.count; k += TILE) turn_few_rows(few + k * MAX_FEW_ROWS, num_rows, scores + k);
  }

  // Adds to sums [rows][width], whose columns are in the order of the unpacked values.
  static void add(const float* weights, int64_t num_rows, int64_t stride, int64_t head_dim, const KeyBlock<bf16>& block,
                  const KeyBlock<bf16>& ahead, Memory& staging, float* sums) {
    const int64_t columns = width(head_dim), key_tiles = (block.count + TILE_K - 1) / TILE_K;
    float* values = staging.floats();  // [BLOCK_KEYS / 2][columns] of pairs
    for (int64_t j = 0; j < key_tiles * TILE_K; j += 2) {
      if (stride == TILE) ahead.ask_for_values(j, 2, head_dim);
      pair_values(j < block.count ? block.values[j] : nullptr, j + 1 < block.count ? block.values[j + 1] : nullptr,
                  head_dim, values + j / 2 * columns);
    }
    alignas(64) float packed[BLOCK_KEYS / TILE_K][TILE][TILE];  // a row's weights in pairs
    if (num_rows <= MAX_FEW_ROWS) {
      for (int64_t t = 0; t < key_tiles; ++t) pack_few_rows(weights, num_rows, t * TILE_K, block.count, packed[t]);
      for (int64_t d = 0; d < columns; d += 2 * TILE) add_few_rows(packed, key_tiles, values + d, columns, sums + d);
      return;
    }
    for (int64_t r = 0; r < stride; r += TILE) {
      for (int64_t t = 0; t < key_tiles; ++t) pack_weights(weights + r, stride, t * TILE_K, block.count, packed[t]);
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
  enum Prepared { NOTHING, FEW_ROWS, MANY_ROWS };
  Prepared prepared_ = NOTHING;

  // 16 keys, whose rows are `stride` elements apart.
  struct KeyTile {
    const bf16* rows;
    int64_t stride;
  };

  // Tiles 0 and 1 are scores [key][row], 2 queries, 3 and 7 keys or values, 4 and 5 sums, 6 weights.
  static TileConfig few_rows_config() {
    TileConfig config(16, 16);
    for (int tile : {0, 1, 2}) config.row_bytes[tile] = MAX_FEW_ROWS * 4;
    for (int tile : {4, 5, 6}) config.rows[tile] = MAX_FEW_ROWS;
    return config;
  }

  static __m512i load_pairs(const bf16* row, int64_t count) {
    const __mmask32 mask = count >= TILE_K ? ~(__mmask32)0 : ((__mmask32)1 << count) - 1;
    return _mm512_maskz_loadu_epi16(mask, row);
  }

  // The keys of a block from k on where they lie, or in one piece and padded with zeros.
  static KeyTile locate_or_stage(const KeyBlock<bf16>& block, int64_t k, int64_t head_dim, bf16* staging) {
    const int64_t count = std::min<int64_t>(TILE, block.count - k), columns = width(head_dim);
    if (block.is_one_piece(k, TILE) && head_dim == columns) return {block.keys[k], head_dim};
    for (int64_t j = 0; j < TILE; ++j)
      for (int64_t d = 0; d < columns; d += TILE_K)
        _mm512_storeu_si512(staging + j * columns + d,
                            j < count ? load_pairs(block.keys[k + j] + d, head_dim - d) : _mm512_setzero_si512());
    return {staging, columns};
  }

  // Scores [key][..] of one or two tiles of keys and as many rows as a tile of queries has. Two are not kept waiting
  // by each other's sums.
  template <int TILES>
  static void score_keys(const float* q, int64_t stride, const KeyTile* keys, int64_t head_dim, float* scores,
                         int64_t out_stride) {
    _tile_zero(0);
    if constexpr (TILES > 1) _tile_zero(1);
    for (int64_t d = 0; d < head_dim; d += TILE_K, q += TILE * stride) {
      _tile_loadd(2, q, stride * 4);
      _tile_loadd(3, keys[0].rows + d, keys[0].stride * 2);
      _tile_dpbf16ps(0, 3, 2);
      if constexpr (TILES > 1) {
        _tile_loadd(7, keys[1].rows + d, keys[1].stride * 2);
        _tile_dpbf16ps(1, 7, 2);
      }
    }
    _tile_stored(0, scores, out_stride * 4);
    if constexpr (TILES > 1) _tile_stored(1, scores + TILE * out_stride, out_stride * 4);
  }

  // The same for one tile of keys and three of queries. Tiles 0 to 2 are sums, 4 keys, 5 to 7 queries.
  static void score_many_rows(const float* q, int64_t stride, const KeyTile& keys, int64_t head_dim, float* scores) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    for (int64_t d = 0; d < head_dim; d += TILE_K, q += TILE * stride) {
      _tile_loadd(4, keys.rows + d, keys.stride * 2);
      _tile_loadd(5, q, stride * 4);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, q + TILE, stride * 4);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, q + 2 * TILE, stride * 4);
      _tile_dpbf16ps(2, 4, 7);
    }
    _tile_stored(0, scores, stride * 4);
    _tile_stored(1, scores + TILE, stride * 4);
    _tile_stored(2, scores + 2 * TILE, stride * 4);
  }

  // Scores [16 keys][MAX_FEW_ROWS] as [row][BLOCK_KEYS].
  static void turn_few_rows(const float* scores, int64_t num_rows, float* out) {
    static_assert(MAX_FEW_ROWS == 4);
    const VI every_fourth = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
    const V keys[] = {load(scores), load(scores + 16), load(scores + 32), load(scores + 48)};  // four in each
    for (int64_t r = 0; r < num_rows; ++r) {
      const __m512i lanes = (__m512i)(every_fourth + (int32_t)r);
      const __m512 low = _mm512_permutex2var_ps((__m512)keys[0], lanes, (__m512)keys[1]);
      const __m512 high = _mm512_permutex2var_ps((__m512)keys[2], lanes, (__m512)keys[3]);
      store(out + r * BLOCK_KEYS, (V)_mm512_mask_blend_ps(0xff00, low, high));
    }
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

  // The same of weights [row][BLOCK_KEYS], MAX_FEW_ROWS rows.
  static void pack_few_rows(const float* weights, int64_t num_rows, int64_t first_key, int64_t count,
                            float (*packed)[TILE]) {
    const int64_t left = count - first_key;
    const __mmask32 mask = left >= TILE_K ? ~(__mmask32)0 : ((__mmask32)1 << left) - 1;
    const auto halves = [](const float* weights) {
      return _mm512_cvtepi32_epi16((__m512i)(((VU)load(weights) + 0x8000u) >> 16));
    };
    for (int64_t r = 0; r < MAX_FEW_ROWS; ++r, weights += BLOCK_KEYS) {
      if (r >= num_rows) {
        store(packed[r], V{});
        continue;
      }
      const float* row = weights + first_key;
      const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(halves(row)), halves(row + TILE), 1);
      _mm512_storeu_si512(packed[r], _mm512_maskz_mov_epi16(mask, both));
    }
  }

  static void add_few_rows(const float (*packed)[TILE][TILE], int64_t key_tiles, const float* values, int64_t columns,
                           float* sums) {
    tiles_read_memory();
    _tile_loadd(4, sums, columns * 4);
    _tile_loadd(5, sums + TILE, columns * 4);
    for (int64_t t = 0; t < key_tiles; ++t, values += TILE * columns) {
      _tile_loadd(6, packed[t], TILE * 4);
      _tile_loadd(3, values, columns * 4);
      _tile_dpbf16ps(4, 6, 3);
      _tile_loadd(7, values + TILE, columns * 4);
      _tile_dpbf16ps(5, 6, 7);
    }
    _tile_stored(4, sums, columns * 4);
    _tile_stored(5, sums + TILE, columns * 4);
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
