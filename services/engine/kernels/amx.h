// The matrix tiles of some x86 processors: whether they are there, and their configuration.
#pragma once

#include "vector.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(TANDEM_AVX512) && defined(__linux__) && \
    !defined(TANDEM_NO_AMX)
#define TANDEM_AMX 1

#include <algorithm>
#include <sys/syscall.h>
#include <unistd.h>

namespace tandem {

constexpr int64_t TILE = 16;    // rows of a tile register, and its 32-bit columns
constexpr int64_t TILE_K = 32;  // bfloat16 columns of a tile register

// The operating system grants the tile registers once per process.
inline bool has_amx() {
  static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
  return granted;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  // Tiles 0 and 1 are sums of the upper rows, 2 and 3 of the lower ones, 4 and 5 their inputs; 6 and 7 are whole.
  TileConfig(int upper_rows, int lower_rows) {
    const int wanted[8] = {upper_rows, upper_rows, lower_rows, lower_rows, upper_rows, lower_rows, 16, 16};
    for (int tile = 0; tile < 8; ++tile) {
      rows[tile] = (uint8_t)std::max(wanted[tile], 1);
      row_bytes[tile] = 64;
    }
  }
};

// Stands between what writes memory and the tile loads from it: of those and of configurations GCC takes it that they
// read nothing, or 8 bytes, so that it may leave out or put off what was written for them.
inline void tiles_read_memory() { asm volatile("" : : : "memory"); }

inline void load_config(const TileConfig& config) {
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// The configuration for the rows of a product, and the tiles' end.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  ~Tiles() {
    if (rows_) _tile_release();
  }
  void configure(int64_t rows) {
    if (rows != rows_) load_config({(int)std::min(rows, TILE), (int)std::max<int64_t>(rows - TILE, 0)});
    rows_ = rows;
  }

 private:
  int64_t rows_ = 0;
};

}  // namespace tandem

#else

namespace tandem {

class Tiles {};

}  // namespace tandem

#endif
