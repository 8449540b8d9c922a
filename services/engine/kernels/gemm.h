// Matrix products y = x * w^T + bias with weights packed once. Every element of y is one chain of operations over k in
// ascending order, whatever the number of rows, the tile it falls into or the thread that computes it.
#pragma once

#include <vector>

#include "amx.h"
#include "parallel.h"
#include "rows.h"
#include "vector.h"

namespace tandem {

constexpr int PANEL = 2 * W;             // output features that are packed together
constexpr int MAX_TILE_ROWS = W == 8 ? 6 : 12;  // as many accumulators as the register file holds
constexpr int64_t BLOCK_ROWS = 96;       // rows whose inputs stay in cache while the panels pass
constexpr int64_t BLOCK_K = 512;         // input features whose panel stays in cache while the rows pass
constexpr int64_t K_UNIT = 32;           // bfloat16 panels are padded to whole matrix tiles

struct Linear {
  const void* packed;
  const float* bias;  // or null
  int64_t out_features, in_features;
};

inline int64_t panels_of(int64_t out_features) { return (out_features + PANEL - 1) / PANEL; }

inline int64_t padded_k(int64_t k, const float*) { return k; }
inline int64_t padded_k(int64_t k, const bf16*) { return (k + K_UNIT - 1) / K_UNIT * K_UNIT; }

// float32 panels are [k][PANEL]; bfloat16 panels hold pairs of k: [k / 2][PANEL][2]. Unused columns and k are zero.
inline int64_t packed_at(int64_t column, int64_t k, const float*) { return k * PANEL + column; }
inline int64_t packed_at(int64_t column, int64_t k, const bf16*) {
  return (k / 2) * PANEL * 2 + column * 2 + k % 2;
}

template <typename E>
inline int64_t packed_elements(int64_t out_features, int64_t in_features) {
  return panels_of(out_features) * PANEL * padded_k(in_features, (const E*)nullptr);
}

template <typename E>
inline void pack(const E* weight, int64_t out_features, int64_t in_features, E* packed, Team team) {
  const int64_t panel_elements = PANEL * padded_k(in_features, weight);
  const Range mine = share(panels_of(out_features), team);
  for (int64_t panel = mine.begin; panel < mine.end; ++panel) {
    E* out = packed + panel * panel_elements;
    std::memset(out, 0, panel_elements * sizeof(E));
    const int64_t columns = std::min<int64_t>(PANEL, out_features - panel * PANEL);
    for (int64_t column = 0; column < columns; ++column) {
      const E* row = weight + (panel * PANEL + column) * in_features;
      for (int64_t k = 0; k < in_features; ++k) out[packed_at(column, k, weight)] = row[k];
    }
  }
}

// acc + x * w for one k (float32) or a pair of k (bfloat16) in each lane.
inline V multiply_add(V acc, V x, V w, const float*) { return fma(x, w, acc); }

inline V multiply_add(V acc, V x, V w, const bf16*) {
#if defined(__AVX512BF16__) && defined(TANDEM_AVX512)
  return (V)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)w);
#else
  const VU high = VU{} + 0xffff0000u;
  acc = fma((V)((VU)x << 16), (V)((VU)w << 16), acc);
  return fma((V)((VU)x & high), (V)((VU)w & high), acc);
#endif
}

inline float load_x(const float* row, int64_t step) { return row[step]; }
inline float load_x(const bf16* row, int64_t step) {
  float pair;
  std::memcpy(&pair, row + 2 * step, sizeof pair);
  return pair;
}

// A block of k of one panel and what to do with its sums.
template <typename E>
struct PanelBlock {
  const E* panel;
  int64_t steps;      // k (float32) or pairs of k (bfloat16)
  bool is_first;      // else the sums so far are read from acc
  bool is_last_tile;  // the block will not be needed again: time to ask for what follows it in memory
};

// `acc` is [ROWS][PANEL].
template <int ROWS, typename E>
void multiply_tile(const E* x, int64_t x_stride, const PanelBlock<E>& block, float* acc) {
  V sums[ROWS][2];
  for (int r = 0; r < ROWS; ++r)
    for (int half = 0; half < 2; ++half) sums[r][half] = block.is_first ? V{} : load(acc + r * PANEL + half * W);
  const int64_t ahead = block.is_last_tile ? block.steps * PANEL : 0;
  const float* w = (const float*)block.panel;
  for (int64_t step = 0; step < block.steps; ++step, w += PANEL) {
    for (int half = 0; half < 2; ++half) __builtin_prefetch(w + ahead + half * W);
    const V w0 = load(w), w1 = load(w + W);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const V value = all(load_x(x + r * x_stride, step));
      sums[r][0] = multiply_add(sums[r][0], value, w0, x);
      sums[r][1] = multiply_add(sums[r][1], value, w1, x);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int half = 0; half < 2; ++half) store(acc + r * PANEL + half * W, sums[r][half]);
}

template <int ROWS, typename E>
void multiply_rows(int rows, const E* x, int64_t x_stride, const PanelBlock<E>& block, float* acc) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) return multiply_tile<ROWS>(x, x_stride, block, acc);
    multiply_rows<ROWS - 1>(rows, x, x_stride, block, acc);
  }
}

// The rows of one block times one panel, into acc [rows][PANEL].
template <typename E>
void multiply_panel(const E* x, int64_t x_stride, int64_t rows, const E* panel, int64_t k, float* acc) {
  constexpr int64_t PER_STEP = sizeof(float) / sizeof(E);
  const int64_t tiles = (rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
  for (int64_t from = 0; from < k; from += BLOCK_K) {
    const int64_t steps = (std::min(BLOCK_K, k - from) + PER_STEP - 1) / PER_STEP;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t first = rows * tile / tiles, end = rows * (tile + 1) / tiles;
      const PanelBlock<E> block{panel + from * PANEL, steps, from == 0, tile == tiles - 1};
      multiply_rows<MAX_TILE_ROWS>((int)(end - first), x + first * x_stride + from, x_stride, block,
                                   acc + first * PANEL);
    }
  }
}

#if defined(TANDEM_AMX)
inline void multiply_tiles_amx(const bf16* x, int64_t x_stride, int64_t rows, const bf16* panel, int64_t k,
                               float* acc) {
  const bool has_lower = rows > 16;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t from = 0; from < k; from += K_UNIT) {
    const bf16* w = panel + from * PANEL;
    _tile_loadd(6, w, PANEL * 4);
    _tile_loadd(7, w + 32, PANEL * 4);
    _tile_loadd(4, x + from, x_stride * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (has_lower) {
      _tile_loadd(5, x + 16 * x_stride + from, x_stride * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, acc, PANEL * 4);
  _tile_stored(1, acc + 16, PANEL * 4);
  if (has_lower) {
    _tile_stored(2, acc + 16 * PANEL, PANEL * 4);
    _tile_stored(3, acc + 16 * PANEL + 16, PANEL * 4);
  }
}

inline void multiply_panel_amx(const bf16* x, int64_t x_stride, int64_t rows, const bf16* panel, int64_t k,
                               float* acc) {
  int64_t configured = 0;
  for (int64_t first = 0; first < rows; first += 32) {
    const int64_t count = std::min<int64_t>(32, rows - first);
    if (count != configured) configure_tiles((int)std::min<int64_t>(count, 16), (int)std::max<int64_t>(count - 16, 0));
    configured = count;
    multiply_tiles_amx(x + first * x_stride, x_stride, count, panel, k, acc + first * PANEL);
  }
  _tile_release();
}
#endif

template <typename E>
void multiply_block(const E* x, int64_t x_stride, int64_t rows, const E* panel, int64_t k, float* acc) {
#if defined(TANDEM_AMX)
  if constexpr (sizeof(E) == 2) {
    // Decided by the layer's shape and the machine, never by the number of rows: the two paths round differently.
    if (has_amx() && k % K_UNIT == 0) return multiply_panel_amx(x, x_stride, rows, panel, k, acc);
  }
#endif
  multiply_panel(x, x_stride, rows, panel, k, acc);
}

template <typename Out>
void store_block(const float* acc, const float* bias, int64_t rows, int64_t columns, Out* y, int64_t y_stride) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; c += W) {
      const V sum = load(acc + r * PANEL + c);
      store_first(y + r * y_stride + c, bias ? sum + load_first(bias + c, columns - c) : sum, columns - c);
    }
}

template <typename E>
std::vector<E> with_even_rows(const E* x, int64_t rows, int64_t k) {
  std::vector<E> even((size_t)(rows * (k + 1)));
  for (int64_t r = 0; r < rows; ++r) std::memcpy(even.data() + r * (k + 1), x + r * k, (size_t)k * sizeof(E));
  return even;
}

// Calls use(first, count, panel, multiply) for this thread's blocks of rows and panels; multiply(panel, acc) gives the
// block's products [count][PANEL] with a panel. Ends without a barrier.
template <typename E, typename Use>
void for_each_block(const Linear& linear, const E* x, int64_t rows, int64_t panels, Team team, const Use& use) {
  const int64_t k = linear.in_features, panel_elements = PANEL * padded_k(k, x);
  const int64_t blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  const Range mine = share(blocks * panels, team);
  for (int64_t item = mine.begin; item < mine.end; ++item) {
    const int64_t first = item / panels * BLOCK_ROWS, count = std::min(BLOCK_ROWS, rows - first);
    use(first, count, item % panels, [&](int64_t panel, float* acc) {
      const E* packed = (const E*)linear.packed + panel * panel_elements;
      if (sizeof(E) == 2 && k % 2) {
        // The last pair of k reaches into the next row: its weight is zero, but zero times NaN is not.
        const std::vector<E> even = with_even_rows(x + first * k, count, k);
        multiply_block(even.data(), k + 1, count, packed, k, acc);
      } else {
        multiply_block(x + first * k, k, count, packed, k, acc);
      }
    });
  }
}

// y [rows][out_features] = x [rows][in_features] * w^T + bias, x and y contiguous. Ends without a barrier.
template <typename E, typename Out>
void apply_linear(const Linear& linear, const E* x, int64_t rows, Out* y, Team team) {
  const int64_t n = linear.out_features;
  alignas(64) float acc[BLOCK_ROWS * PANEL];
  for_each_block(linear, x, rows, panels_of(n), team, [&](int64_t first, int64_t count, int64_t panel, auto multiply) {
    const int64_t column = panel * PANEL;
    multiply(panel, acc);
    store_block(acc, linear.bias ? linear.bias + column : nullptr, count, std::min<int64_t>(PANEL, n - column),
                y + first * n + column, n);
  });
}

// y [rows][half] = silu(gate) * up, where gate and up are the halves of what apply_linear gives, and with its bits. The
// products never reach memory. Only where half is made of whole panels. Ends without a barrier.
template <typename E>
void apply_gated(const Linear& gate_up, const E* x, int64_t rows, E* y, Team team) {
  const int64_t half = gate_up.out_features / 2, panels = half / PANEL;
  const float* bias = gate_up.bias;
  alignas(64) float gates[BLOCK_ROWS * PANEL], ups[BLOCK_ROWS * PANEL];
  for_each_block(gate_up, x, rows, panels, team, [&](int64_t first, int64_t count, int64_t panel, auto multiply) {
    multiply(panel, gates);
    multiply(panel + panels, ups);
    for (int64_t r = 0; r < count; ++r)
      for (int64_t c = 0; c < PANEL; c += W) {
        const int64_t column = panel * PANEL + c;
        V gate = load(gates + r * PANEL + c), up = load(ups + r * PANEL + c);
        if (bias) gate = gate + load(bias + column), up = up + load(bias + half + column);
        store(y + (first + r) * half + column, gated(rounded<E>(gate), rounded<E>(up), y));
      }
  });
}

}  // namespace tandem
