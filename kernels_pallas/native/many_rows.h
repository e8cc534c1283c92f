// Products of many rows in bfloat16 with a matrix of any format: a strip of its columns is widened to pairs of bfloat16
// in a near cache, once for all rows, which then take the processor's products of such pairs.
#pragma once

#include "rows.h"

#if defined(__AVX512BF16__)
constexpr bool kManyRows = true;
#else
constexpr bool kManyRows = false;
#endif

constexpr int64_t kStripVectors = 4, kStripColumns = kStripVectors * kLanes;
constexpr int64_t kDeep = 1024;      // rows of a strip that are widened at a time: 128 KB
constexpr int64_t kRowsATime = 256;  // of x, whose sums with a strip take 64 KB

// Vectors of columns of a matrix, which need not be neighbours: up projections have gates and what they gate apart.
struct Strip {
  int64_t count, at[kStripVectors];
};

// x[k] in the lower halves, x[k + 1] in the upper ones, each rounded to bfloat16
inline Words paired(const Floats& low, const Floats& high) {
  const Words a = (Words)low, b = (Words)high;
  return ((a + 0x7fff + ((a >> 16) & 1)) >> 16) | ((b + 0x7fff + ((b >> 16) & 1)) & 0xffff0000);
}

inline void widen_vector(const Matrix<bfloat16>& w, int64_t first, int64_t last, int64_t n, uint32_t* to) {
  for (int64_t k = first; k < last; k += 2, to += kStripColumns) {
    const bfloat16* row = w.data + k * w.N + n;
    __builtin_prefetch(row + 16 * w.N), __builtin_prefetch(row + 17 * w.N);
    store(to, words(load<Halves>(row)) | (words(load<Halves>(row + w.N)) << 16));
  }
}

template <Format kFormat>
inline void widen_vector(const Blocks<kFormat>& w, int64_t first, int64_t last, int64_t n, uint32_t* to) {
  const Floats table = w.table();
  for (int64_t begin = first; begin < last;) {
    const int64_t end = std::min(last, (begin / w.kBlock + 1) * w.kBlock);
    const Floats scales = w.scales_at(begin, n);
    for (int64_t k = begin; k < end; k += 2, to += kStripColumns) {
      const uint8_t* row = w.data + (w.kPairs ? k / 2 : k) * w.N + n;
      __builtin_prefetch(row + 16 * w.N);
      Floats low, high;
      if constexpr (w.kPairs) {
        const Words codes = words(load<Bytes>(row));
        low = look_up(table, codes), high = look_up(table, codes >> 4);
      } else {
        low = w.values(row), high = w.values(row + w.N);
      }
      store(to, paired(low * scales, high * scales));
    }
    begin = end;
  }
}

// sums[r, 64] (+)= rows r of x, each pairs of bfloat16, times a widened strip
template <int R, int V>
inline void multiply(const uint32_t* strip, int64_t pairs, const bfloat16* const* x, float* sums, bool fresh) {
#if defined(__AVX512BF16__)
  __m512 total[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++)
      total[r][v] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * kStripColumns + v * kLanes);
  for (int64_t p = 0; p < pairs; p++) {
    __m512bh w[V];
    for (int v = 0; v < V; v++) w[v] = (__m512bh)_mm512_loadu_si512(strip + p * kStripColumns + v * kLanes);
    for (int r = 0; r < R; r++) {
      int32_t both;
      std::memcpy(&both, x[r] + 2 * p, 4);
      const __m512bh a = (__m512bh)_mm512_set1_epi32(both);
      for (int v = 0; v < V; v++) total[r][v] = _mm512_dpbf16_ps(total[r][v], a, w[v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) _mm512_storeu_ps(sums + r * kStripColumns + v * kLanes, total[r][v]);
#endif
}

// The same for any number of rows, from number `first` of each on, and 1 to 4 vectors.
inline void multiply_rows(
    const uint32_t* strip, int64_t pairs, int64_t vectors, const bfloat16* const* x, int64_t first, int64_t rows,
    float* sums, bool fresh) {
  const bfloat16* at[6];
  auto run = [&]<int R>(std::integral_constant<int, R>, int64_t r) {
    for (int i = 0; i < R; i++) at[i] = x[r + i] + first;
    float* to = sums + r * kStripColumns;
    if (vectors == 4) multiply<R, 4>(strip, pairs, at, to, fresh);
    else if (vectors == 3) multiply<R, 3>(strip, pairs, at, to, fresh);
    else if (vectors == 2) multiply<R, 2>(strip, pairs, at, to, fresh);
    else multiply<R, 1>(strip, pairs, at, to, fresh);
  };
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6) run(std::integral_constant<int, 6>(), r);
  if (r + 3 <= rows) run(std::integral_constant<int, 3>(), r), r += 3;
  for (; r < rows; r++) run(std::integral_constant<int, 1>(), r);
}

// sums[r, 64] of at most kRowsATime rows of x with the strip of w
template <class W>
inline void product_with_strip(const W& w, const Strip& columns, const bfloat16* const* x, int64_t rows, float* sums) {
  alignas(64) static thread_local uint32_t strip[kDeep / 2 * kStripColumns];
  for (int64_t first = 0; first < w.K; first += kDeep) {
    const int64_t last = std::min(w.K, first + kDeep);
    for (int64_t v = 0; v < columns.count; v++) widen_vector(w, first, last, columns.at[v], strip + v * kLanes);
    multiply_rows(strip, (last - first) / 2, columns.count, x, first, rows, sums, first == 0);
  }
}
