// Products of many rows with a matrix of any format: a strip of its columns is widened in a near cache, once for all rows.
// Rows of bfloat16 take a strip of pairs of bfloat16, rows of floats one of floats.
#pragma once

#include "products.h"
#include "rows.h"

constexpr int64_t kDeep = 1024;      // rows of a strip that are widened at a time: 128 KB of pairs
constexpr int64_t kDeepFloats = (128 << 10) / (kPanel * sizeof(float));
constexpr int64_t kRowsATime = 256;  // of x, whose sums with a strip take 64 KB

// Vectors of columns of a matrix, which need not be neighbours: up projections have gates and what they gate apart.
struct Strip {
  int64_t count, at[kPanelVectors];
};

// Columns [n, n + kPanel) of N, a multiple of 16, or those that are left
inline Strip neighbours(int64_t n, int64_t N) {
  Strip strip{std::min(kPanel, N - n) / kLanes, {}};
  for (int64_t v = 0; v < strip.count; v++) strip.at[v] = n + v * kLanes;
  return strip;
}

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

// sums[r, kPanel] = rows r of x, at most kRowsATime, times the strip of w
template <class T, class W>
inline void product_with_strip(const W& w, const Strip& columns, const bfloat16* const* x, int64_t rows, float* sums) {
  alignas(64) static thread_local uint32_t strip[kDeep / 2 * kPanel];
  for (int64_t first = 0; first < w.K; first += kDeep) {
    const int64_t last = std::min(w.K, first + kDeep);
    for (int64_t v = 0; v < columns.count; v++) widen_vector(w, first, last, columns.at[v], strip + v * kLanes);
    const Panel panel{strip, kPanel, columns.count};
    multiply(Rows{x, first}, rows, panel, (last - first) / 2, sums, kPanel, first > 0);
  }
}

// A strip of floats is computed in parts of kFloatVectors vectors: registers hold their sums with 6 rows.
constexpr int64_t kFloatVectors = kManyRegisters ? 4 : 2, kFloatColumns = kFloatVectors * kLanes;

// Writes rows [first, last) of a vector of columns at n as floats, kFloatColumns apart; compressed weights are rounded to T.
template <class T>
inline void widen_to_floats(const Matrix<T>& w, int64_t first, int64_t last, int64_t n, float* to) {
  for (int64_t k = first; k < last; k++, to += kFloatColumns) {
    const T* row = w.data + k * w.N + n;
    __builtin_prefetch(row + 16 * w.N);
    store(to, floats(row));
  }
}

template <class T, Format kFormat>
inline void widen_to_floats(const Blocks<kFormat>& w, int64_t first, int64_t last, int64_t n, float* to) {
  constexpr bool kTwoAByte = Blocks<kFormat>::kTwoAByte;
  const T* type = nullptr;
  const Table table = table_of(w.kValues);
  for (int64_t begin = first; begin < last;) {
    const int64_t end = std::min(last, (begin / w.kBlock + 1) * w.kBlock);
    const Floats scales = w.scales_at(begin, n);
    for (int64_t k = begin; k < end; k += kTwoAByte ? 2 : 1, to += (kTwoAByte ? 2 : 1) * kFloatColumns) {
      const uint8_t* row = w.data + (kTwoAByte ? k / 2 : k) * w.N + n;
      __builtin_prefetch(row + 16 * w.N);
      if constexpr (kTwoAByte) {
        const FloatPair both = look_up(table, row);
        store(to, rounded(both.low * scales, type));
        store(to + kFloatColumns, rounded(both.high * scales, type));
      } else {
        store(to, rounded(w.values(row) * scales, type));
      }
    }
    begin = end;
  }
}

// c[m, V vectors] = sum over k < depth of x[m][first + k] right[k], added to c if `more`; for R rows m, c's being kPanel
// apart. Each sum is in the order of k, whatever other rows there are.
template <int R, int V>
inline void tile_of_floats(
    const float* const* x, int64_t first, const float* right, int64_t depth, float* c, bool more) {
  Floats sums[R][V];
  const float* row[R];
  for (int m = 0; m < R; m++) {
    row[m] = x[m] + first;
    for (int v = 0; v < V; v++) sums[m][v] = more ? load<Floats>(c + m * kPanel + v * kLanes) : splat(0);
  }
  for (int64_t k = 0; k < depth; k++, right += kFloatColumns) {
    Floats part[V];
    for (int v = 0; v < V; v++) part[v] = load<Floats>(right + v * kLanes);
    for (int m = 0; m < R; m++) {
      const Floats mine = splat(row[m][k]);
      for (int v = 0; v < V; v++) sums[m][v] = add(sums[m][v], part[v], mine);
    }
  }
  for (int m = 0; m < R; m++)
    for (int v = 0; v < V; v++) store(c + m * kPanel + v * kLanes, sums[m][v]);
}

// The same for any number of rows
template <int V>
inline void tiles_of_floats(
    const float* const* x, int64_t rows, int64_t first, const float* right, int64_t depth, float* c, bool more) {
  int64_t m = 0;
  auto tiles = [&]<int R>(std::integral_constant<int, R>) {
    for (; m + R <= rows; m += R) tile_of_floats<R, V>(x + m, first, right, depth, c + m * kPanel, more);
  };
  tiles(std::integral_constant<int, 6>());
  tiles(std::integral_constant<int, 3>());
  tiles(std::integral_constant<int, 1>());
}

// The same for rows of floats. T: dtype that compressed weights are rounded to
template <class T, class W>
inline void product_with_strip(const W& w, const Strip& columns, const float* const* x, int64_t rows, float* sums) {
  alignas(64) static thread_local float strip[kDeepFloats * kFloatColumns];
  for (int64_t v = 0; v < columns.count; v += kFloatVectors)
    for (int64_t first = 0; first < w.K; first += kDeepFloats) {
      const int64_t last = std::min(w.K, first + kDeepFloats), vectors = std::min(kFloatVectors, columns.count - v);
      for (int64_t i = 0; i < vectors; i++)
        widen_to_floats<T>(w, first, last, columns.at[v + i], strip + i * kLanes);
      const auto multiply = [&]<int V>(std::integral_constant<int, V>) {
        tiles_of_floats<V>(x, rows, first, strip, last - first, sums + v * kLanes, first > 0);
      };
      switch (vectors) {
        case 4: multiply(std::integral_constant<int, 4>()); break;
        case 3: multiply(std::integral_constant<int, 3>()); break;
        case 2: multiply(std::integral_constant<int, 2>()); break;
        case 1: multiply(std::integral_constant<int, 1>()); break;
      }
    }
}
