// Products of a few rows with a matrix that is read once: y[t, n] = sum over k of x[t, k] w[k, n].
//
// Memory gives its speed to a few long streams. So threads share out the matrix by slices of k, whose rows are read from
// end to end, a few side by side; TB rows of x at a time have TB x NV vectors of sums in registers. Every (t, n) is added
// up in one order, by k in a slice and then slice by slice, whatever other rows and however many threads there are.
#pragma once

#include <algorithm>
#include <type_traits>

#include "parallel.h"
#include "vectors.h"

// A matrix [K, N], N contiguous.
template <class T>
struct Matrix {
  const T* data;
  int64_t K, N;
  // Parts of k that are added up by themselves: four where they are worth a thread's while.
  int64_t slices() const { return K * N * int64_t(sizeof(T)) < (128 << 10) ? 1 : std::min<int64_t>(4, (K + 31) / 32); }
  int64_t slice_begin(int64_t i) const { return std::min(K, i * ((K + slices() - 1) / slices())); }
};

constexpr int64_t kChunk = 16;    // rows that are read side by side: each is a stream that the processor fetches ahead
constexpr int64_t kAhead = 512;   // bytes that each is fetched ahead beside that

// Adds rows [k, end) of w to y[t, n ... n + 16 NV) for TB rows of x; from 0 if `fresh`.
template <int TB, int NV, class T>
inline void add_block(
    const Matrix<T>& w, int64_t k, int64_t end, bool fresh, const float* x, int64_t x_stride, int64_t n, float* y,
    int64_t y_stride) {
  Floats sums[TB][NV];
  for (int t = 0; t < TB; t++)
    for (int v = 0; v < NV; v++) sums[t][v] = fresh ? splat(0) : load<Floats>(y + t * y_stride + n + v * kLanes);
  for (; k < end; k++) {
    const T* row = w.data + k * w.N + n;
    for (int line = 0; line < int(NV * kLanes * sizeof(T)); line += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(row) + line + kAhead);
    for (int v = 0; v < NV; v++) {
      const Floats part = floats(row + v * kLanes);
      for (int t = 0; t < TB; t++) sums[t][v] += part * x[t * x_stride + k];
    }
  }
  for (int t = 0; t < TB; t++)
    for (int v = 0; v < NV; v++) store(y + t * y_stride + n + v * kLanes, sums[t][v]);
}

// y[t, begin ... end) of slice i for rows rows of x, in runs as wide as registers allow for so many rows
template <class T>
inline void product(
    const Matrix<T>& w, int64_t i, const float* x, int64_t x_stride, int64_t rows, int64_t begin, int64_t end, float* y,
    int64_t y_stride) {
  const int64_t first = w.slice_begin(i), last = w.slice_begin(i + 1);
  int64_t n = begin;
  for (int64_t k = first; k < last; k += kChunk) {
    int64_t t = 0;
    auto block = [&]<int TB, int NV>(std::integral_constant<int, TB>, std::integral_constant<int, NV>) {
      for (; t + TB <= rows; t += TB)
        add_block<TB, NV>(
            w, k, std::min(last, k + kChunk), k == first, x + t * x_stride, x_stride, n, y + t * y_stride, y_stride);
    };
    auto run = [&]<int NV>(std::integral_constant<int, NV> wide) {
      for (; n + NV * kLanes <= end; n += NV * kLanes) {
        t = 0;
        if constexpr (NV <= 2) block(std::integral_constant<int, 8>(), wide);
        if constexpr (NV <= 4) block(std::integral_constant<int, 4>(), wide);
        if constexpr (NV <= 8) block(std::integral_constant<int, 2>(), wide);
        block(std::integral_constant<int, 1>(), wide);
      }
    };
    n = begin;
    if (rows == 1) run(std::integral_constant<int, 16>());
    if (rows <= 3) run(std::integral_constant<int, 8>());
    if (rows < 8) run(std::integral_constant<int, 4>());
    run(std::integral_constant<int, 2>());
    run(std::integral_constant<int, 1>());
  }
  for (; n < end; n++)
    for (int64_t t = 0; t < rows; t++) {
      float total = 0;
      for (int64_t k = first; k < last; k++) total = std::fma(float(w.data[k * w.N + n]), x[t * x_stride + k], total);
      y[t * y_stride + n] = total;
    }
}

// y[t, n] = sum over k of x[t, k] w[n, k], K contiguous: TN rows of w, each of K numbers, with TB rows of x
template <int TB, int TN, class T>
inline void dots(const T* w, int64_t K, const float* x, int64_t x_stride, float* y, int64_t y_stride) {
  Floats sums[TB][TN];
  for (int t = 0; t < TB; t++)
    for (int n = 0; n < TN; n++) sums[t][n] = splat(0);
  int64_t k = 0;
  for (; k + kLanes <= K; k += kLanes) {
    Floats part[TN];
    for (int n = 0; n < TN; n++) part[n] = floats(w + n * K + k);
    for (int t = 0; t < TB; t++) {
      const Floats mine = floats(x + t * x_stride + k);
      for (int n = 0; n < TN; n++) sums[t][n] += part[n] * mine;
    }
  }
  for (int t = 0; t < TB; t++)
    for (int n = 0; n < TN; n++) {
      float total = sum(sums[t][n]);
      for (int64_t rest = k; rest < K; rest++)
        total = std::fma(float(w[n * K + rest]), x[t * x_stride + rest], total);
      y[t * y_stride + n] = total;
    }
}

template <int TN, class T>
inline void all_dots(const T* w, int64_t K, const float* x, int64_t rows, float* y, int64_t y_stride) {
  int64_t t = 0;
  for (; t + 4 <= rows; t += 4) dots<4, TN>(w, K, x + t * K, K, y + t * y_stride, y_stride);
  for (; t + 2 <= rows; t += 2) dots<2, TN>(w, K, x + t * K, K, y + t * y_stride, y_stride);
  for (; t < rows; t++) dots<1, TN>(w, K, x + t * K, K, y + t * y_stride, y_stride);
}

// x as floats [T, K], in memory that a thread keeps
template <class T>
inline void widen(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, floats(from + i));
  for (; i < count; i++) to[i] = from[i];
}

inline void add_to(float* to, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; i++) to[i] += from[i];
}

// Tasks for `things` that are done by themselves, each on N columns: cut by columns too where threads would be idle.
class Spread {
 public:
  Spread(int64_t things, int64_t N) : things_(things), N_(N) {
    const int64_t wanted = (2 * Pool::get().threads() + things - 1) / std::max<int64_t>(1, things);
    width_ = std::max<int64_t>(256, ((N + wanted - 1) / wanted + 63) / 64 * 64);
    parts_ = (N + width_ - 1) / width_;
  }
  int tasks() const { return int(things_ * parts_); }
  int64_t of(int i) const { return i / parts_; }
  int64_t begin(int i) const { return i % parts_ * width_; }
  int64_t end(int i) const { return std::min(N_, begin(i) + width_); }

 private:
  int64_t things_, N_, width_, parts_;
};
