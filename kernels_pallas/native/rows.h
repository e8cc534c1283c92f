// Products of a few rows with a matrix that is read once: y[t, n] = sum over k of x[t, k] w[k, n].
//
// Memory gives its speed to a few long streams. So threads share out the matrix by slices of k, whose rows are read from
// end to end, a few side by side; TB rows of x at a time have TB x NV vectors of sums in registers. Every (t, n) is added
// up in one order (in a slice as `product` says, then slice by slice), whatever other rows and threads there are.
#pragma once

#include <algorithm>
#include <type_traits>

#include "parallel.h"
#include "vectors.h"

constexpr int64_t kFewRows = 32;  // at most so many rows of x are multiplied with a matrix in its format

// How many parts of k, multiples of 32, are added up by themselves: four where they are worth a thread's while.
inline int64_t slices_of(int64_t K, int64_t num_bytes) {
  return num_bytes < (128 << 10) ? 1 : std::min<int64_t>(4, (K + 31) / 32);
}

inline int64_t slice_begin(int64_t K, int64_t slices, int64_t i) {
  return std::min(K, i * ((K + 32 * slices - 1) / (32 * slices) * 32));
}

// Rows of floats are read side by side out of kStreams parts of a slice, so far apart that a processor can fetch each part
// ahead by itself.
constexpr int64_t kStreams = 4;

// Matrices say how products take a row of x in pairs, and whether (kInPairs): `pair_up` makes them in place of the numbers
// [first, last), which are for a slice.

// A matrix [K, N] of floats, N contiguous. Pairs are of a stream and the next, rows that are left over alone.
template <class T>
struct Matrix {
  static constexpr bool kInPairs = std::is_same_v<T, bfloat16>;
  static constexpr int64_t kColumn = sizeof(T);  // bytes from a column to the next
  const T* data;
  int64_t K, N;
  static int64_t bytes(int64_t K, int64_t N) { return K * N * int64_t(sizeof(T)); }

  static void pair_up(float* x, int64_t first, int64_t last) {
    const int64_t apart = (last - first) / kStreams, streams = first + kStreams * apart;
    for (int64_t stream = first; stream < streams; stream += 2 * apart) {
      float *low = x + stream, *high = low + apart;
      int64_t i = 0;
      for (; i + kLanes <= apart; i += kLanes) store(low + i, paired(load<Floats>(low + i), load<Floats>(high + i)));
      for (; i < apart; i++) low[i] = pair_of(low[i], high[i]);
    }
    for (int64_t k = streams; k < last; k++) x[k] = pair_of(x[k], 0);
  }
};

// One of 4 or 8 bits in blocks of 32 or 128 inputs, in the formats of kernels_pallas/compressed.py.
enum class Format { kFloat = 0, kMxfp4 = 1, kInt4 = 2, kInt8 = 3, kFp8 = 4 };

// Pairs are of neighbours; fp8 is widened to floats.
template <Format kFormat>
struct Blocks {
  static constexpr int64_t kChunk = 32, kColumn = 1;
  static constexpr bool kInPairs = kFormat != Format::kFp8;
  static constexpr bool kTwoAByte = kFormat == Format::kMxfp4 || kFormat == Format::kInt4;
  using Scale = std::conditional_t<
      kFormat == Format::kMxfp4, uint8_t, std::conditional_t<kFormat == Format::kFp8, float, bfloat16>>;
  static constexpr int64_t kBlock = kFormat == Format::kFp8 ? 128 : 32;
  const uint8_t* data;
  const Scale* scales;
  int64_t K, N;
  static int64_t bytes(int64_t K, int64_t N) { return K * N / (kTwoAByte ? 2 : 1); }

  // What 4 bits stand for; of mxfp4 twice that, which scales_at makes up for
  static constexpr Sixteen kValues = kFormat == Format::kMxfp4
                                         ? Sixteen{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}
                                         : Sixteen{-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  Floats scales_at(int64_t k, int64_t n) const {
    const Scale* from = scales + k / kBlock * N + n;
    if constexpr (kFormat == Format::kMxfp4)
      return (Floats)(words(load<Bytes>(from)) << 23) * 0.5f;
    else
      return kFormat == Format::kFp8 ? floats(from) * 256.0f : floats(from);
  }
  static Floats values(const uint8_t* from) {  // of one byte each; of fp8 1/256, which scales_at makes up for
    if constexpr (kFormat == Format::kFp8)
      return e4m3_over_256(load<Bytes>(from));
    else
      return floats(load<Chars>(from));
  }
  float at(int64_t k, int64_t n) const {
    float value, scale;
    if constexpr (kTwoAByte)
      value = kValues[(data[k / 2 * N + n] >> (k % 2 * 4)) & 15];
    else if constexpr (kFormat == Format::kFp8)
      value = e4m3_over_256(Bytes{} + data[k * N + n])[0] * 256.0f;
    else
      value = int8_t(data[k * N + n]);
    if constexpr (kFormat == Format::kMxfp4) {
      const uint32_t bits = uint32_t(scales[k / kBlock * N + n]) << 23;
      std::memcpy(&scale, &bits, 4);
      scale *= 0.5f;
    } else
      scale = scales[k / kBlock * N + n];
    return value * scale;
  }
  static void pair_up(float* x, int64_t first, int64_t last) {  // multiples of 32
    typedef uint64_t Longs __attribute__((vector_size(4 * kLanes)));
    for (int64_t k = first; k < last; k += kLanes) {
      const Longs both = load<Longs>(x + k);
      store(x + k, (both >> 16 & 0xffff) | (both >> 32 & 0xffff0000));
    }
  }
};

// Words of a row of inputs in 8 bits (integers.h)
struct Rounded {
  uint32_t word;
};

// Whether products with W take rows of x in 8 bits
template <class W>
concept IsRounded = requires(float* row) { W::round(row, 0); };

// What products with W take rows of x of dtype T as
template <class T, class W>
using Number = std::conditional_t<
    IsRounded<W>, Rounded, std::conditional_t<kHasPairs && W::kInPairs && std::is_same_v<T, bfloat16>, Pair, float>>;

// Makes that of a row of x, which is widened.
template <class T, class W>
inline void prepare(float* x, int64_t K, int64_t slices) {
  if constexpr (IsRounded<W>)
    W::round(x, K);
  else if constexpr (std::is_same_v<Number<T, W>, Pair>)
    for (int64_t i = 0; i < slices; i++) W::pair_up(x, slice_begin(K, slices, i), slice_begin(K, slices, i + 1));
}

// Number k of a row; odd: it is the second of a pair, `apart` behind the first.
inline float number(const float* x, int64_t k, bool, int64_t) { return x[k]; }
inline float number(const Pair* x, int64_t k, bool odd, int64_t apart) { return odd ? high(x[k - apart]) : low(x[k]); }

// Rows [k, end) of a matrix. fresh: they are the first that are added up; ahead: what is fetched, this many bytes further.
struct Chunk {
  int64_t k, end;
  bool fresh;
  int64_t ahead;
};

// The chunk of rows at k of [first, last). What is fetched is the same place of the next chunk, after the last one that of
// `then`, while two chunks fit a near cache; else what is a little further along the same rows.
template <class W>
inline Chunk chunk_of(const W& w, int64_t k, int64_t first, int64_t last, const uint8_t* then) {
  constexpr int64_t kNear = 64 << 10, kAlong = 512;
  const int64_t num_bytes = W::bytes(W::kChunk, w.N), next = k + W::kChunk;
  int64_t ahead = num_bytes;
  if (num_bytes > kNear)
    ahead = kAlong;
  else if (next >= last)
    ahead = then ? then - reinterpret_cast<const uint8_t*>(w.data) - W::bytes(k, w.N) : 0;
  return {k, std::min(last, next), k == first, ahead};
}

// Into the second cache: a chunk takes more than the first one has.
template <int64_t num_bytes>
inline void fetch(const void* from, int64_t ahead) {
  for (int64_t line = 0; line < num_bytes; line += 64)
    __builtin_prefetch(static_cast<const char*>(from) + line + ahead, 0, 2);
}

// Adds a chunk of rows of w, at most 32 inputs under one scale, to y[t, n ... n + 16 NV) for TB rows of x: values are added
// up first, then multiplied by it.
template <int TB, int NV, Format kFormat, class X>
inline void add_block(
    const Blocks<kFormat>& w, const Chunk& chunk, const X* x, int64_t x_stride, int64_t n, float* y, int64_t y_stride) {
  constexpr bool kPaired = std::is_same_v<X, Pair>, kTwoAByte = Blocks<kFormat>::kTwoAByte;
  Floats sums[TB][NV];
  for (int t = 0; t < TB; t++)
    for (int v = 0; v < NV; v++) sums[t][v] = splat(0);
  const Table table = table_of(w.kValues);
  for (int64_t k = chunk.k; k < chunk.end; k += kTwoAByte || kPaired ? 2 : 1) {
    const uint8_t* row = w.data + (kTwoAByte ? k / 2 : k) * w.N + n;
    const uint8_t* next = kPaired && !kTwoAByte ? row + w.N : row;
    fetch<NV * kLanes>(row, chunk.ahead);
    if constexpr (kPaired && !kTwoAByte) fetch<NV * kLanes>(next, chunk.ahead);
    for (int v = 0; v < NV; v++) {
      const uint8_t* at = row + v * kLanes;
      if constexpr (kPaired) {
        Words part;
        if constexpr (kTwoAByte)
          part = look_up_pairs(table, words(load<Bytes>(at)));
        else
          part = paired(w.values(at), w.values(next + v * kLanes));
        for (int t = 0; t < TB; t++) sums[t][v] = add(sums[t][v], part, x[t * x_stride + k]);
      } else if constexpr (kTwoAByte) {
        const auto [low, high] = look_up(table, at);
        for (int t = 0; t < TB; t++) {
          sums[t][v] = add(sums[t][v], low, x[t * x_stride + k]);
          sums[t][v] = add(sums[t][v], high, x[t * x_stride + k + 1]);
        }
      } else {
        const Floats part = w.values(at);
        for (int t = 0; t < TB; t++) sums[t][v] = add(sums[t][v], part, x[t * x_stride + k]);
      }
    }
  }
  for (int v = 0; v < NV; v++) {
    const Floats scales = w.scales_at(chunk.end - 1, n + v * kLanes);
    for (int t = 0; t < TB; t++) {
      float* to = y + t * y_stride + n + v * kLanes;
      store(to, add(chunk.fresh ? splat(0) : load<Floats>(to), sums[t][v], scales));
    }
  }
}

// Numbers between two rows of x or y: rows that are a multiple of 4 KB apart drive each other out of a cache.
constexpr int64_t kPad = kLanes;

// y[t, begin ... end) of the rows [first, last) of w, for `rows` rows of x, in runs as wide as registers allow; for many
// rows some columns after the others, whose sums stay in a cache. then: the row of a matrix of as many columns, or null,
// that is read after them.
template <Format kFormat, class X>
inline void product(
    const Blocks<kFormat>& w, int64_t first, int64_t last, const X* x, int64_t x_stride, int64_t rows, int64_t begin,
    int64_t end, float* y, int64_t y_stride, const uint8_t* then) {
  using W = Blocks<kFormat>;
  const int64_t width = rows < 8 ? std::max<int64_t>(1, end - begin) : 512;
  int64_t n = begin;
  for (int64_t left = begin; left < end; left += width) {
    const int64_t right = std::min(end, left + width);
    const uint8_t* next = then;
    if (right < end) next = reinterpret_cast<const uint8_t*>(w.data) + W::bytes(first, w.N) + width * W::kColumn;
    for (int64_t k = first; k < last; k += W::kChunk) {
      const Chunk chunk = chunk_of(w, k, first, last, next);
      int64_t t = 0;
      auto block = [&]<int TB, int NV>(std::integral_constant<int, TB>, std::integral_constant<int, NV>) {
        for (; t + TB <= rows; t += TB)
          add_block<TB, NV>(w, chunk, x + t * x_stride, x_stride, n, y + t * y_stride, y_stride);
      };
      auto run = [&]<int NV>(std::integral_constant<int, NV> wide) {
        for (; n + NV * kLanes <= right; n += NV * kLanes) {
          t = 0;
          constexpr int kSums = kManyRegisters ? 16 : 8;
          if constexpr (8 * NV <= kSums) block(std::integral_constant<int, 8>(), wide);
          if constexpr (4 * NV <= kSums) block(std::integral_constant<int, 4>(), wide);
          if constexpr (2 * NV <= kSums) block(std::integral_constant<int, 2>(), wide);
          block(std::integral_constant<int, 1>(), wide);
        }
      };
      n = left;
      if (rows == 1 && kManyRegisters) run(std::integral_constant<int, 16>());
      if (rows == 1 || (rows <= 3 && kManyRegisters)) run(std::integral_constant<int, 8>());
      if (rows <= 3 || (rows < 8 && kManyRegisters)) run(std::integral_constant<int, 4>());
      if (rows < 8 || kManyRegisters) run(std::integral_constant<int, 2>());
      run(std::integral_constant<int, 1>());
    }
  }
  for (; n < end; n++)  // fp8 alone has numbers of columns that are not multiples of 16
    for (int64_t t = 0; t < rows; t++) {
      float total = 0;
      for (int64_t k = first; k < last; k++)
        total = std::fma(w.at(k, n), number(x + t * x_stride, k, k % 2, 1), total);
      y[t * y_stride + n] = total;
    }
}

// `steps` rows of a matrix from row k on, and as many of each other stream, `apart` rows further. They are added step by
// step, of each step stream by stream. fresh: they are the first.
struct Streams {
  int64_t k, apart, steps;
  bool fresh;
};

// Weights as rows of x are multiplied with them: one row, or in pairs it and the next (null: none). The last argument
// gives the type of x.
template <class T>
inline Floats weights(const T* w, const T*, const float*) {
  return floats(w);
}
inline Words weights(const bfloat16* w, const bfloat16* next, const Pair*) { return paired(w, next); }

// Adds rows of NS streams, which begin at w and x, to y[t, n ... n + 16 NV) for TB rows of x.
template <int TB, int NV, int NS, bool kFetch, class T, class X>
inline void add_block(
    const T* w, int64_t N, const Streams& rows, const X* x, int64_t x_stride, float* y, int64_t y_stride) {
  constexpr int kTogether = NS > 1 && std::is_same_v<X, Pair> ? 2 : 1;
  Floats sums[TB][NV];
  for (int t = 0; t < TB; t++)
    for (int v = 0; v < NV; v++) sums[t][v] = rows.fresh ? splat(0) : load<Floats>(y + t * y_stride + v * kLanes);
  for (int64_t i = 0; i < rows.steps; i++)
    for (int r = 0; r < NS; r += kTogether) {
      const int64_t k = i + r * rows.apart;
      const T *row = w + k * N, *next = kTogether > 1 ? row + rows.apart * N : row;
      if constexpr (kFetch) fetch<NV * kLanes * sizeof(T)>(row, rows.steps * N * sizeof(T));
      if constexpr (kFetch && kTogether > 1) fetch<NV * kLanes * sizeof(T)>(next, rows.steps * N * sizeof(T));
      for (int v = 0; v < NV; v++, row += kLanes, next += kLanes) {
        const auto part = weights(row, kTogether > 1 ? next : nullptr, x);
        for (int t = 0; t < TB; t++) sums[t][v] = add(sums[t][v], part, x[t * x_stride + k]);
      }
    }
  for (int t = 0; t < TB; t++)
    for (int v = 0; v < NV; v++) store(y + t * y_stride + v * kLanes, sums[t][v]);
}

// The same to all columns [begin, end), for `count` rows of x.
template <int NS, bool kFetch, class T, class X>
inline void add_rows(
    const Matrix<T>& w, const Streams& rows, const X* x, int64_t x_stride, int64_t count, int64_t begin, int64_t end,
    float* y, int64_t y_stride) {
  const T* from = w.data + rows.k * w.N;
  int64_t t = 0;
  auto block = [&]<int TB, int NV>(std::integral_constant<int, TB>, std::integral_constant<int, NV>) {
    for (; t + TB <= count; t += TB) {
      const X* mine = x + t * x_stride + rows.k;
      float* to = y + t * y_stride;
      int64_t n = begin;
      for (; n + NV * kLanes <= end; n += NV * kLanes)
        add_block<TB, NV, NS, kFetch>(from + n, w.N, rows, mine, x_stride, to + n, y_stride);
      for (; n + kLanes <= end; n += kLanes)
        add_block<TB, 1, NS, kFetch>(from + n, w.N, rows, mine, x_stride, to + n, y_stride);
      for (; n < end; n++)
        for (int j = 0; j < TB; j++) {
          float total = rows.fresh ? 0 : to[j * y_stride + n];
          for (int64_t i = 0; i < rows.steps; i++)
            for (int r = 0; r < NS; r++) {
              const int64_t k = i + r * rows.apart;
              total = std::fma(float(from[k * w.N + n]), number(mine + j * x_stride, k, r % 2, rows.apart), total);
            }
          to[j * y_stride + n] = total;
        }
    }
  };
  block(std::integral_constant<int, 8>(), std::integral_constant<int, kManyRegisters ? 2 : 1>());
  block(std::integral_constant<int, 4>(), std::integral_constant<int, kManyRegisters ? 4 : 2>());
  block(std::integral_constant<int, 2>(), std::integral_constant<int, 4>());
  block(std::integral_constant<int, 1>(), std::integral_constant<int, 4>());
}

// y[t, begin ... end) of the rows [first, last) of w, for `count` rows of x: streams first, then rows that are left over.
// For four rows of x and more several steps at a time, or their sums would be read and written too often; rows of w that
// follow each other are then read in turn, so that they are fetched, as many as stay in the second cache.
template <class T, class X>
inline void product(
    const Matrix<T>& w, int64_t first, int64_t last, const X* x, int64_t x_stride, int64_t count, int64_t begin,
    int64_t end, float* y, int64_t y_stride, const uint8_t* = nullptr) {
  const int64_t apart = (last - first) / kStreams, left = first + kStreams * apart;
  const int64_t steps = count < 4 ? 1 : count < 8 || w.N * sizeof(T) > 4096 ? 2 : 4;
  for (int64_t i = 0; i < apart; i += steps) {
    const Streams rows{first + i, apart, std::min(steps, apart - i), i == 0};
    if (steps == 1)
      add_rows<kStreams, false>(w, rows, x, x_stride, count, begin, end, y, y_stride);
    else
      add_rows<kStreams, true>(w, rows, x, x_stride, count, begin, end, y, y_stride);
  }
  if (left < last || apart == 0)  // an empty slice gives zeros
    add_rows<1, false>(w, {left, 0, last - left, apart == 0}, x, x_stride, count, begin, end, y, y_stride);
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
  for (; kManyRegisters && t + 4 <= rows; t += 4) dots<4, TN>(w, K, x + t * K, K, y + t * y_stride, y_stride);
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
