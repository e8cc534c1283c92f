// Products of many rows in bfloat16 with a matrix of any format: a strip of its columns is widened to a panel of pairs of
// bfloat16 in a near cache, once for all rows.
#pragma once

#include "products.h"
#include "rows.h"

constexpr int64_t kDeep = 1024;      // rows of a strip that are widened at a time: 128 KB
constexpr int64_t kRowsATime = 256;  // of x, whose sums with a strip take 64 KB

// Vectors of columns of a matrix, which need not be neighbours: up projections have gates and what they gate apart.
struct Strip {
  int64_t count, at[kPanelVectors];
};

// x[k] in the lower halves, x[k + 1] in the upper ones, each rounded to bfloat16
inline Words rounded_pairs(const Floats& low, const Floats& high) {
  const Words a = (Words)low, b = (Words)high;
  return ((a + 0x7fff + ((a >> 16) & 1)) >> 16) | ((b + 0x7fff + ((b >> 16) & 1)) & 0xffff0000);
}

inline void widen_vector(const Matrix<bfloat16>& w, int64_t first, int64_t last, int64_t n, uint32_t* to) {
  for (int64_t k = first; k < last; k += 2, to += kPanel) {
    const bfloat16* row = w.data + k * w.N + n;
    __builtin_prefetch(row + 16 * w.N), __builtin_prefetch(row + 17 * w.N);
    store(to, paired(row, row + w.N));
  }
}

template <Format kFormat>
inline void widen_vector(const Blocks<kFormat>& w, int64_t first, int64_t last, int64_t n, uint32_t* to) {
  constexpr bool kTwoAByte = Blocks<kFormat>::kTwoAByte;
  const Table table = table_of(w.kValues);
  for (int64_t begin = first; begin < last;) {
    const int64_t end = std::min(last, (begin / w.kBlock + 1) * w.kBlock);
    const Floats scales = w.scales_at(begin, n);
    for (int64_t k = begin; k < end; k += 2, to += kPanel) {
      const uint8_t* row = w.data + (kTwoAByte ? k / 2 : k) * w.N + n;
      __builtin_prefetch(row + 16 * w.N);
      Floats low, high;
      if constexpr (kTwoAByte) {
        const FloatPair both = look_up(table, row);
        low = both.low, high = both.high;
      } else {
        low = w.values(row), high = w.values(row + w.N);
      }
      store(to, rounded_pairs(low * scales, high * scales));
    }
    begin = end;
  }
}

// sums[r, 64] of at most kRowsATime rows of x with the strip of w
template <class W>
inline void product_with_strip(const W& w, const Strip& columns, const bfloat16* const* x, int64_t rows, float* sums) {
  alignas(64) static thread_local uint32_t strip[kDeep / 2 * kPanel];
  for (int64_t first = 0; first < w.K; first += kDeep) {
    const int64_t last = std::min(w.K, first + kDeep);
    for (int64_t v = 0; v < columns.count; v++) widen_vector(w, first, last, columns.at[v], strip + v * kLanes);
    const Panel panel{strip, kPanel, columns.count};
    multiply(Rows{x, first}, rows, panel, (last - first) / 2, sums, kPanel, first > 0);
  }
}
