// Vectors of floats for whatever the compiler was told the machine has (AVX-512, AVX2, or 4 lanes of anything).
//
// The whole folder keeps one rule: the arithmetic of a row (order of operations, fused or not, lanes) is written out
// and is the same for every batch, tile and thread count. Hence no -ffast-math, and -ffp-contract=off with explicit
// fused multiply-adds.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace tandem {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define TANDEM_AVX512 1
constexpr int W = 16;  // lanes
#elif defined(__AVX2__) && defined(__FMA__)
#define TANDEM_AVX2 1
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float V __attribute__((vector_size(W * 4)));
typedef int32_t VI __attribute__((vector_size(W * 4)));
typedef uint32_t VU __attribute__((vector_size(W * 4)));
typedef uint16_t VH __attribute__((vector_size(W * 2)));

// Scratch memory that begins with a cache line.
class Memory {
 public:
  explicit Memory(int64_t num_floats) : lines_((size_t)(num_floats + 15) / 16) {}
  float* floats() { return (float*)lines_.data(); }
  const float* floats() const { return (const float*)lines_.data(); }

 private:
  struct alignas(64) Line {
    float data[16];
  };
  std::vector<Line> lines_;
};

struct bf16 {
  uint16_t bits;
};

inline V load(const float* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, V v) { std::memcpy(p, &v, sizeof v); }

// `x` in every lane, bit for bit.
inline V all(float x) {
#if defined(TANDEM_AVX512)
  return (V)_mm512_set1_ps(x);
#elif defined(TANDEM_AVX2)
  return (V)_mm256_set1_ps(x);
#else
  return V{x, x, x, x};
#endif
}

inline V fma(V a, V b, V c) {
#if defined(TANDEM_AVX512)
  return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(TANDEM_AVX2)
  return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
  V r;
  for (int i = 0; i < W; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#else
  return a * b + c;
#endif
}

// The second one where either is not a number.
inline V max(V a, V b) {
#if defined(TANDEM_AVX512)
  return (V)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(TANDEM_AVX2)
  return (V)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

inline V min(V a, V b) {
#if defined(TANDEM_AVX512)
  return (V)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(TANDEM_AVX2)
  return (V)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

inline bool any(VI mask) {
  int32_t found = 0;
  for (int i = 0; i < W; ++i) found |= mask[i];
  return found != 0;
}

// The lanes exchanged with those STEP further (the lowest bits of their numbers swapped).
template <int STEP>
inline V exchange(V v) {
  VI lanes;
  for (int i = 0; i < W; ++i) lanes[i] = i ^ STEP;
  return __builtin_shuffle(v, lanes);
}

// Sum and maximum of the lanes, by halving.
template <int STEP = W / 2>
inline float sum_lanes(V v) {
  if constexpr (STEP == 0)
    return v[0];
  else
    return sum_lanes<STEP / 2>(v + exchange<STEP>(v));
}

template <int STEP = W / 2>
inline float max_lanes(V v) {
  if constexpr (STEP == 0)
    return v[0];
  else
    return max_lanes<STEP / 2>(max(v, exchange<STEP>(v)));
}

// e^x to about one unit in the last place; saturates instead of overflowing, keeps NaN.
inline V exp(V x) {
  const V low = all(-87.3f), high = all(88.3f);
  x = min(high, max(low, x));
  const V shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const V shifted = fma(x, all(1.44269504088896341f), shift);
  const V n = shifted - shift;
  V r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  V p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = fma(p, r * r, r + all(1.0f));
  const VI exponent = ((VI)shifted - (VI)shift + 127) << 23;
  return p * (V)exponent;
}

// 2^x for what is at most 127, to about two units in the last place: exactly 1 for 0, exactly 0 below -127; keeps NaN.
inline V exp2(V x) {
  const V low = all(-127.0f), shift = all(12582912.0f + 127.0f);  // adding it rounds; 127 is the exponent's bias
  x = max(low, x);
  const V shifted = x + shift;
  const V r = x - (shifted - shift);
  V p = all(1.326474594e-3f);
  p = fma(p, r, all(9.671512991e-3f));
  p = fma(p, r, all(5.550733581e-2f));
  p = fma(p, r, all(2.402224243e-1f));
  p = fma(p, r, all(6.931470037e-1f));
  p = fma(p, r, all(1.0f));
  return p * (V)((VI)shifted << 23);
}

// Lanes that differ from their partner's in bit BIT of their number change places between the two: a step of transpose.
template <int BIT>
inline void swap_lanes(V& a, V& b) {
  VI low, high;
  for (int i = 0; i < W; ++i) {
    low[i] = i & BIT ? i - BIT + W : i;
    high[i] = i & BIT ? i + W : i + BIT;
  }
  const V first = __builtin_shuffle(a, b, low), second = __builtin_shuffle(a, b, high);
  a = first;
  b = second;
}

// Lane i of vector j becomes lane j of vector i.
template <int BIT = W / 2, int COUNT = W>
inline void transpose(V* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < COUNT; ++i)
    if (!(i & BIT)) swap_lanes<BIT>(rows[i], rows[i + BIT]);
  if constexpr (BIT > 1) transpose<BIT / 2, COUNT>(rows);
}

// The same for each four lanes of four vectors.
inline void transpose_fours(V* rows) { transpose<2, 4>(rows); }

inline V from_bf16(VH h) { return (V)(__builtin_convertvector(h, VU) << 16); }

inline V load(const bf16* p) {
  VH h;
  std::memcpy(&h, p, sizeof h);
  return from_bf16(h);
}

// Four floats from each of rows[0], rows[4], ...: what fills a vector.
inline V load_fours(const float* const* rows, int64_t at) {
#if defined(TANDEM_AVX512)
  __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(rows[0] + at));
  v = _mm512_insertf32x4(v, _mm_loadu_ps(rows[4] + at), 1);
  v = _mm512_insertf32x4(v, _mm_loadu_ps(rows[8] + at), 2);
  return (V)_mm512_insertf32x4(v, _mm_loadu_ps(rows[12] + at), 3);
#elif defined(TANDEM_AVX2)
  const __m256 v = _mm256_castps128_ps256(_mm_loadu_ps(rows[0] + at));
  return (V)_mm256_insertf128_ps(v, _mm_loadu_ps(rows[4] + at), 1);
#else
  return load(rows[0] + at);
#endif
}

// Lane j of columns[i] is element `at` + i of rows[j]. Half the work of a transpose is done by the loads.
inline void load_columns(const float* const* rows, int64_t at, V* columns) {
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) columns[i] = load_fours(rows + i % 4, at + i / 4 * 4);
#pragma GCC unroll 4
  for (int i = 0; i < W; i += 4) transpose_fours(columns + i);
}

// The same rounding as from_float, in the upper half of each lane.
inline VU round_to_bf16(V v) {
  const VU bits = (VU)v;
  const VU rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return (bits & 0x7fffffffu) > 0x7f800000u ? (bits | 0x400000u) : rounded;
}

inline VH to_bf16(V v) {
#if defined(__AVX512BF16__) && defined(TANDEM_AVX512)
  return (VH)_mm512_cvtneps_pbh((__m512)v);  // what bfloat16 has no normal number for becomes zero
#else
  return __builtin_convertvector(round_to_bf16(v) >> 16, VH);
#endif
}

inline void store(bf16* p, V v) {
  const VH h = to_bf16(v);
  std::memcpy(p, &h, sizeof h);
}

inline void store_two(float* p, V low, V high) {
  store(p, low);
  store(p + W, high);
}

inline void store_two(bf16* p, V low, V high) {
#if defined(__AVX512BF16__) && defined(TANDEM_AVX512)
  const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  std::memcpy(p, &both, sizeof both);
#else
  store(p, low);
  store(p + W, high);
#endif
}

// What storing in type E and loading again gives.
template <typename E>
inline V rounded(V v) {
  if constexpr (sizeof(E) == sizeof(float))
    return v;
  else
    return from_bf16(to_bf16(v));
}

// The first `count` lanes (the others are zero), for the end of a row.
template <typename E>
inline V load_first(const E* p, int64_t count) {
  if (count >= W) return load(p);
  E padded[W] = {};
  std::memcpy(padded, p, (size_t)count * sizeof(E));
  return load(padded);
}

template <typename E>
inline void store_first(E* p, V v, int64_t count) {
  if (count >= W) return store(p, v);
  E padded[W];
  store(padded, v);
  std::memcpy(p, padded, (size_t)count * sizeof(E));
}

}  // namespace tandem
