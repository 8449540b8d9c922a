// Matrix products y = x * w^T + bias with weights packed once. Every element of y is one chain of operations over k in
// ascending order, whatever the number of rows, the tile it falls into or the thread that computes it.
#pragma once

#include <array>
#include <vector>

#include "amx.h"
#include "parallel.h"
#include "rows.h"
#include "vector.h"

namespace tandem {

constexpr int PANEL = 2 * W;             // output features that are packed together
constexpr int MAX_TILE_ROWS = W == 8 ? 6 : 12;  // as many accumulators as the register file holds
constexpr int64_t BLOCK_ROWS = 96;       // rows that are multiplied with a panel at a time
constexpr int64_t BLOCK_K = 512;         // input features whose panel stays in cache while the rows pass
constexpr int64_t CACHE_BYTES = 1 << 20; // of inputs that stay in a core's cache while the panels pass
constexpr int64_t ROW_UNIT = 32;         // rows of a matrix tile's upper and lower half
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
// At most ROW_UNIT rows times a panel, into acc [rows][PANEL]. `asks_ahead`: for what follows the panel in memory.
template <bool asks_ahead>
inline void multiply_tiles_amx(const bf16* x, int64_t x_stride, int64_t rows, const bf16* panel, int64_t k,
                               float* acc) {
  const bool has_lower = rows > TILE;
  tiles_read_memory();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t from = 0; from < k; from += K_UNIT) {
    const bf16* w = panel + from * PANEL;
    if constexpr (asks_ahead)
      for (int64_t i = 0; i < K_UNIT * PANEL; i += 32) __builtin_prefetch(w + k * PANEL + i, 0, 2);
    _tile_loadd(6, w, PANEL * 4);
    _tile_loadd(7, w + 32, PANEL * 4);
    _tile_loadd(4, x + from, x_stride * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (has_lower) {
      _tile_loadd(5, x + TILE * x_stride + from, x_stride * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, acc, PANEL * 4);
  _tile_stored(1, acc + TILE, PANEL * 4);
  if (has_lower) {
    _tile_stored(2, acc + TILE * PANEL, PANEL * 4);
    _tile_stored(3, acc + TILE * PANEL + TILE, PANEL * 4);
  }
}

// As multiply_panels.
template <int PANELS, typename Finish>
void multiply_panels_amx(const bf16* x, int64_t x_stride, int64_t rows, const bf16* const* panels, int64_t k,
                         Tiles& tiles, const Finish& finish) {
  alignas(64) float acc[PANELS][ROW_UNIT * PANEL];
  for (int64_t first = 0; first < rows; first += ROW_UNIT) {
    const int64_t count = std::min(ROW_UNIT, rows - first);
    tiles.configure(count);
    const auto multiply = rows <= BLOCK_ROWS && first + ROW_UNIT >= rows ? multiply_tiles_amx<true>
                                                                         : multiply_tiles_amx<false>;
    for (int p = 0; p < PANELS; ++p) multiply(x + first * x_stride, x_stride, count, panels[p], k, acc[p]);
    for (int64_t r = 0; r < count; ++r) finish(first + r, acc[0] + r * PANEL, ROW_UNIT * PANEL);
  }
}
#endif

// Rows times some panels. Calls finish(row, sums, stride) for each row, whose products [PANEL] with panels[p] are at
// sums + p * stride.
template <int PANELS, typename E, typename Finish>
void multiply_panels(const E* x, int64_t x_stride, int64_t rows, const E* const* panels, int64_t k,
                     [[maybe_unused]] Tiles& tiles, const Finish& finish) {
#if defined(TANDEM_AMX)
  if constexpr (sizeof(E) == 2) {
    // Decided by the layer's shape and the machine, never by the number of rows: the two paths round differently.
    if (has_amx() && k % K_UNIT == 0) return multiply_panels_amx<PANELS>(x, x_stride, rows, panels, k, tiles, finish);
  }
#endif
  alignas(64) float acc[PANELS][BLOCK_ROWS * PANEL];
  for (int64_t first = 0; first < rows; first += BLOCK_ROWS) {
    const int64_t count = std::min(BLOCK_ROWS, rows - first);
    for (int p = 0; p < PANELS; ++p) multiply_panel(x + first * x_stride, x_stride, count, panels[p], k, acc[p]);
    for (int64_t r = 0; r < count; ++r) finish(first + r, acc[0] + r * PANEL, BLOCK_ROWS * PANEL);
  }
}

template <typename E>
std::vector<E> with_even_rows(const E* x, int64_t rows, int64_t k) {
  std::vector<E> even((size_t)(rows * (k + 1)));
  for (int64_t r = 0; r < rows; ++r) std::memcpy(even.data() + r * (k + 1), x + r * k, (size_t)k * sizeof(E));
  return even;
}

// Rows whose inputs stay in cache while all panels pass: equal parts of all rows.
template <typename E>
inline int64_t rows_in_cache(int64_t rows, int64_t k) {
  const int64_t most = std::max(BLOCK_ROWS, CACHE_BYTES / (k * (int64_t)sizeof(E)));
  const int64_t parts = (rows + most - 1) / most;
  return ((rows + parts - 1) / parts + ROW_UNIT - 1) / ROW_UNIT * ROW_UNIT;
}

// Calls use(first, panel, multiply) for this thread's panels and blocks of rows, which begin at `first`;
// multiply(panels, finish) is multiply_panels for the block. `next` as in take_items. Ends without a barrier.
template <typename E, typename Use>
void for_each_block(const Linear& linear, const E* x, int64_t rows, int64_t panels, Team team,
                    Next next, const Use& use) {
  const int64_t k = linear.in_features;
  Tiles tiles;
  const auto use_panel = [&](int64_t first, int64_t count, int64_t panel) {
    use(first, panel, [&](auto packed, const auto& finish) {
      constexpr int PANELS = std::tuple_size_v<decltype(packed)>;
      if (sizeof(E) == 2 && k % 2) {
        // The last pair of k reaches into the next row: its weight is zero, but zero times NaN is not.
        const std::vector<E> even = with_even_rows(x + first * k, count, k);
        multiply_panels<PANELS, E>(even.data(), k + 1, count, packed.data(), k, tiles, finish);
      } else {
        multiply_panels<PANELS, E>(x + first * k, k, count, packed.data(), k, tiles, finish);
      }
    });
  };
  if (rows <= BLOCK_ROWS) {
    // Reading the panels takes all the time, and each asks for the one behind it in memory.
    const Range mine = share(panels, team);
    for (int64_t panel = mine.begin; panel < mine.end; ++panel) use_panel(0, rows, panel);
    return;
  }
  // Each core begins with the rows that it has in its cache.
  const auto rows_of = [&](Team part) { return share_units(rows, ROW_UNIT, part); };
  const auto size_of = [&](Range part) { return rows_in_cache<E>(part.end - part.begin, k); };
  const auto items_of = [&](Team team) {
    const Range part = rows_of(team);
    return part.end > part.begin ? (part.end - part.begin + size_of(part) - 1) / size_of(part) * panels : 0;
  };
  take_items(next, team, items_of, [&](Team team, int64_t item) {
    const Range part = rows_of(team);
    const int64_t first = part.begin + item / panels * size_of(part);
    use_panel(first, std::min(size_of(part), part.end - first), item % panels);
  });
}

template <typename E>
inline const E* panel_of(const Linear& linear, int64_t panel, const E* x) {
  return (const E*)linear.packed + panel * PANEL * padded_k(linear.in_features, x);
}

// y [rows][out_features] = x [rows][in_features] * w^T + bias, x and y contiguous. `next` as in take_items. Ends
// without a barrier.
template <typename E, typename Out>
void apply_linear(const Linear& linear, const E* x, int64_t rows, Out* y, Team team, Next next) {
  const int64_t n = linear.out_features;
  const auto store_rows = [&](int64_t first, int64_t panel, const auto& multiply) {
    const int64_t column = panel * PANEL, columns = std::min<int64_t>(PANEL, n - column);
    float bias[PANEL] = {};
    if (linear.bias) std::copy_n(linear.bias + column, columns, bias);
    const bool has_bias = linear.bias;
    multiply(std::array{panel_of(linear, panel, x)}, [&](int64_t row, const float* sums, int64_t) {
      V low = load(sums), high = load(sums + W);
      if (has_bias) low = low + load(bias), high = high + load(bias + W);
      Out* out = y + (first + row) * n + column;
      if (columns == PANEL) return store_two(out, low, high);
      store_first(out, low, columns);
      if (columns > W) store_first(out + W, high, columns - W);
    });
  };
  for_each_block(linear, x, rows, panels_of(n), team, next, store_rows);
}

// y [rows][half] = silu(gate) * up, where gate and up are the halves of what apply_linear gives, and with its bits. The
// products never reach memory. Only where half is made of whole panels. `next` as in take_items. Ends without a
// barrier.
template <typename E>
void apply_gated(const Linear& gate_up, const E* x, int64_t rows, E* y, Team team, Next next) {
  const int64_t half = gate_up.out_features / 2, panels = half / PANEL;
  const float* bias = gate_up.bias;
  const auto join = [&](int64_t first, int64_t panel, const auto& multiply) {
    const int64_t column = panel * PANEL;
    const std::array both{panel_of(gate_up, panel, x), panel_of(gate_up, panel + panels, x)};
    multiply(both, [&](int64_t row, const float* gates, int64_t stride) {
      V joined[2];
      for (int part = 0; part < 2; ++part) {
        const int64_t at = part * W;
        V gate = load(gates + at), up = load(gates + stride + at);
        if (bias) gate = gate + load(bias + column + at), up = up + load(bias + half + column + at);
        joined[part] = gated(rounded<E>(gate), rounded<E>(up), y);
      }
      store_two(y + (first + row) * half + column, joined[0], joined[1]);
    });
  };
  for_each_block(gate_up, x, rows, panels, team, next, join);
}

}  // namespace tandem
