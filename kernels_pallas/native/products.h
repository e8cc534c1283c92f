// Products of many rows in bfloat16, added up in float32: AVX512-BF16 takes two neighbours of the inner dimension, a
// *pair*, at once, AMX sixteen of them (tiles.h).
#pragma once

#include <algorithm>
#include <cstdint>

#include "operands.h"
#include "tiles.h"
#include "vectors.h"

constexpr int64_t kTileRows = 6;  // 6 x 4 vectors of sums leave registers for a row of the panel

template <int R, int V, class L>
inline void tile(const L& a, const Panel& b, int64_t pairs, float* c, int64_t c_row, bool add) {
#if defined(__AVX512BF16__)
  __m512 sums[R][V];
  for (int m = 0; m < R; m++)
    for (int v = 0; v < V; v++) sums[m][v] = add ? _mm512_loadu_ps(c + m * c_row + v * kLanes) : _mm512_setzero_ps();
  for (int64_t p = 0; p < pairs; p++) {
    __m512i right[V];
    for (int v = 0; v < V; v++) right[v] = _mm512_loadu_si512(b.data + p * b.row + v * kLanes);
    for (int m = 0; m < R; m++) {
      const __m512bh left = (__m512bh)_mm512_set1_epi32(int32_t(a.pair(m, p)));
      for (int v = 0; v < V; v++) sums[m][v] = _mm512_dpbf16_ps(sums[m][v], left, (__m512bh)right[v]);
    }
  }
  for (int m = 0; m < R; m++)
    for (int v = 0; v < V; v++) _mm512_storeu_ps(c + m * c_row + v * kLanes, sums[m][v]);
#endif
}

template <int V, class L>
inline void tiles(const L& a, int64_t rows, const Panel& b, int64_t pairs, float* c, int64_t c_row, bool add) {
  int64_t m = 0;
  for (; m + kTileRows <= rows; m += kTileRows) tile<kTileRows, V>(a.from(m), b, pairs, c + m * c_row, c_row, add);
  const L rest = a.from(m);
  c += m * c_row;
  switch (rows - m) {
    case 5: return tile<5, V>(rest, b, pairs, c, c_row, add);
    case 4: return tile<4, V>(rest, b, pairs, c, c_row, add);
    case 3: return tile<3, V>(rest, b, pairs, c, c_row, add);
    case 2: return tile<2, V>(rest, b, pairs, c, c_row, add);
    case 1: return tile<1, V>(rest, b, pairs, c, c_row, add);
  }
}

// c [rows, columns of the panel] = a b over so many pairs, or c += a b. Each is added up pair by pair, whatever others
// there are.
template <class L>
inline void multiply(
    const L& a, int64_t rows, const Panel& b, int64_t pairs, float* c, int64_t c_row, bool add = false) {
#if defined(JMOE_TILES)
  if (has_tiles())
    return multiply_in_tiles(a, rows, b.vectors * kLanes, [&](int64_t) { return b; }, pairs, c, c_row, add);
#endif
  switch (b.vectors) {
    case 4: return tiles<4>(a, rows, b, pairs, c, c_row, add);
    case 3: return tiles<3>(a, rows, b, pairs, c, c_row, add);
    case 2: return tiles<2>(a, rows, b, pairs, c, c_row, add);
    case 1: return tiles<1>(a, rows, b, pairs, c, c_row, add);
  }
}

// The same for all columns.
inline void multiply(
    const Left& a, int64_t rows, const Right& b, int64_t pairs, float* c, int64_t c_row, bool add = false) {
#if defined(JMOE_TILES)
  if (has_tiles())
    return multiply_in_tiles(a, rows, b.columns, [&](int64_t n) { return b.panel(n); }, pairs, c, c_row, add);
#endif
  for (int64_t n = 0; n < b.columns; n += kPanel) multiply(a, rows, b.panel(n), pairs, c + n, c_row, add);
}

inline const uint32_t* as_words(const bfloat16* x) { return reinterpret_cast<const uint32_t*>(x); }

// A float rounded to bfloat16, in the lower half of a word
inline Words narrow(const Floats& x) {
#if defined(__AVX512BF16__)
  return words((Halves)_mm512_cvtneps_pbh((__m512)x));
#else
  return (Words)rounded(x, (const bfloat16*)nullptr) >> 16;
#endif
}

// Write the matrix [rows, columns], whose rows are `stride` apart, as a right operand with its rows as inner dimension;
// rows from `rows` on are zero.
inline void pack_rows(const bfloat16* from, int64_t stride, int64_t rows, int64_t columns, int64_t pairs, uint32_t* to) {
  for (int64_t p = 0; p < pairs; p++)  // rows are read from end to end: a panel's alone would be a short piece of each
    for (int64_t n = 0; n < columns; n += kLanes) {
      const bfloat16* at = from + 2 * p * stride + n;
      Words both{};
      if (2 * p < rows) both = paired(at, 2 * p + 1 < rows ? at + stride : nullptr);
      store(to + Right::at(pairs, columns, p, n), both);
    }
}

// The same with its columns, an even number, as inner dimension: row r is column r of the operand; rows from `rows` up
// to `columns` are zero.
inline void pack_transposed(
    const bfloat16* from, int64_t stride, int64_t rows, int64_t inner, int64_t columns, uint32_t* to) {
  for (int64_t n = 0; n < columns; n += kPanel) {
    const int64_t width = std::min(kPanel, columns - n);
    for (int64_t i = 0; i < width; i += kLanes) {
      const int64_t left = std::clamp<int64_t>(rows - n - i, 0, kLanes);
      const uint32_t* at = as_words(from + (n + i) * stride);
#if defined(__AVX512F__)
      const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
      const __m512i steps = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(int32_t(stride / 2)));
      const __mmask16 mask = __mmask16((1u << left) - 1);
      for (int64_t p = 0; p < inner / 2; p++)
        _mm512_storeu_si512(
            to + p * width + i, _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), mask, steps, at + p, 4));
#else
      for (int64_t p = 0; p < inner / 2; p++)
        for (int64_t j = 0; j < kLanes; j++) to[p * width + i + j] = j < left ? at[j * (stride / 2) + p] : 0;
#endif
    }
    to += inner / 2 * width;
  }
}
