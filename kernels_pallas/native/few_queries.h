// Scores of keys and sums of values for up to four queries, read once for all of them; rows are of whole vectors. Each
// query is added up in one order, whatever others there are.
#pragma once

#include <type_traits>
#include <utility>

#include "vectors.h"

constexpr int kMostAtOnce = 4;                          // queries
constexpr int kKeysAtOnce = kManyRegisters ? 4 : 2;     // whose sums are in registers
constexpr int kVectorsAtOnce = kManyRegisters ? 4 : 2;  // of values

#if defined(__clang__)
#define JMOE_CHOOSE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define JMOE_CHOOSE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

// a[i] + a[i + kApart] in lanes i without the bit kApart, b[i - kApart] + b[i] in those with it
template <int kApart, int... i>
inline Floats folded(const Floats& a, const Floats& b, std::integer_sequence<int, i...>) {
  return JMOE_CHOOSE(a, b, (i & kApart ? i - kApart + kLanes : i)...) +
         JMOE_CHOOSE(a, b, (i & kApart ? i + kLanes : i + kApart)...);
}

// In lane i the sum of x[i].
template <int kApart = kLanes / 2>
inline Floats sums_of(Floats (&x)[kLanes]) {
#pragma GCC unroll 8
  for (int i = 0; i < kApart; i++)
    x[i] = folded<kApart>(x[i], x[i + kApart], std::make_integer_sequence<int, kLanes>());
  if constexpr (kApart > 1) return sums_of<kApart / 2>(x);
  return x[0];
}

// scores[r * row + n] = query r times key n, for `kLanes` keys. q: [R, d].
template <int R, class S>
inline void score_lanes(const S* keys, int64_t d, const float* q, float* scores, int64_t row) {
  Floats sums[R][kLanes];
  for (int n = 0; n < kLanes; n += kKeysAtOnce) {
    Floats of_key[kKeysAtOnce][R] = {};
    for (int64_t i = 0; i < d; i += kLanes) {
#pragma GCC unroll 4
      for (int k = 0; k < kKeysAtOnce; k++) {
        const Floats y = floats(keys + (n + k) * d + i);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) of_key[k][r] = add(of_key[k][r], load<Floats>(q + r * d + i), y);
      }
    }
#pragma GCC unroll 4
    for (int k = 0; k < kKeysAtOnce; k++)
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) sums[r][n + k] = of_key[k][r];
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) store(scores + r * row, sums_of(sums[r]));
}

// sums[r, column] = kept[r] times itself, and the values of `keys` keys times weights[r * weights_row + n]; V vectors of
// columns.
template <int R, int V, class S>
inline void add_columns(
    const S* values, int64_t values_row, int64_t keys, const float* weights, int64_t weights_row, const float* kept,
    float* sums, int64_t sums_row) {
  Floats x[R][V];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) x[r][v] = load<Floats>(sums + r * sums_row + v * kLanes) * kept[r];
  for (int64_t n = 0; n < keys; n++) {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      const Floats y = floats(values + n * values_row + v * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) x[r][v] = add(x[r][v], y, weights[r * weights_row + n]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) store(sums + r * sums_row + v * kLanes, x[r][v]);
}

// The same for all columns, a multiple of a vector.
template <int R, class S>
inline void add_rows_of_values(
    const S* values, int64_t values_row, int64_t keys, const float* weights, int64_t weights_row, const float* kept,
    int64_t columns, float* sums, int64_t sums_row) {
  int64_t c = 0;
  for (; c + kVectorsAtOnce * kLanes <= columns; c += kVectorsAtOnce * kLanes)
    add_columns<R, kVectorsAtOnce>(values + c, values_row, keys, weights, weights_row, kept, sums + c, sums_row);
  for (; c < columns; c += kLanes)
    add_columns<R, 1>(values + c, values_row, keys, weights, weights_row, kept, sums + c, sums_row);
}

// Calls `call` with a constant of as many queries, at most four.
template <class F>
inline void with_queries(int64_t count, const F& call) {
  switch (count) {
    case 1: return call(std::integral_constant<int, 1>{});
    case 2: return call(std::integral_constant<int, 2>{});
    case 3: return call(std::integral_constant<int, 3>{});
    default: return call(std::integral_constant<int, 4>{});
  }
}
