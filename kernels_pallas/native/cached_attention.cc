// Attention of new tokens over blocks of a KV cache that is written in place, and the best scores of a row.
#include <limits>
#include <vector>

#include "xla/ffi/api/ffi.h"

#include "many_rows.h"
#include "parallel.h"
#include "rows.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kBlock = 128;  // positions of a block of the cache
static_assert(kBlock % kPanel == 0, "a panel of keys lies in one block");

struct Shape {
  int64_t P, C, H, d, e, G, S;  // rows of the step, tokens a row, query heads, dims, key heads, positions of a table
  int64_t group() const { return H / G; }
  int64_t width() const { return S / kBlock; }  // blocks of a table
};

// The keys or the values of one row and key head. The cache is [blocks, G, kBlock, dim].
template <class T>
struct Head {
  T* first;                // this head in block 0
  int64_t block_elements;  // of all heads of a block
  int64_t dim;
  const int32_t* table;  // the row's blocks
  T* at(int64_t position) const {
    return first + table[position / kBlock] * block_elements + position % kBlock * dim;
  }
};

// The last position, at most `last`, of the block that has this one.
int64_t end_of_block(int64_t position, int64_t last) { return std::min(last, position / kBlock * kBlock + kBlock - 1); }

template <class T>
struct Caches {
  T *k, *v;
  const int32_t* tables;  // [P, blocks of a table]
  Head<T> keys(const Shape& s, int64_t p, int64_t g) const {
    return {k + g * kBlock * s.d, s.G * kBlock * s.d, s.d, tables + p * s.width()};
  }
  Head<T> values(const Shape& s, int64_t p, int64_t g) const {
    return {v + g * kBlock * s.e, s.G * kBlock * s.e, s.e, tables + p * s.width()};
  }
};

// Writes the keys and values of a row's new tokens, of one key head, into the cache; returns the positions that it has.
template <class T>
int64_t write(
    const Shape& s, const int32_t* positions, const T* k_new, const T* v_new, const Head<T>& keys,
    const Head<T>& values) {
  int64_t longest = 0;
  for (int64_t c = 0; c < s.C; c++) {
    const int64_t at = positions[c];
    if (at >= s.S) continue;
    std::memcpy(keys.at(at), k_new + c * s.G * s.d, s.d * sizeof(T));
    std::memcpy(values.at(at), v_new + c * s.G * s.e, s.e * sizeof(T));
    longest = std::max(longest, at + 1);
  }
  return longest;
}

// Q new tokens x heads of one key head of one row: softmax over positions [first, last], then values.
template <class T>
void attend(
    const Shape& s, const T* q, const int32_t* positions, const T* k_new, const T* v_new,
    const Head<T>& keys, const Head<T>& values, const float* sinks, int64_t window, float scale, T* out) {
  // q, out: of this row; k_new, v_new: of its tokens
  thread_local std::vector<float> scratch;
  const int64_t R = s.group();
  const int64_t longest = write(s, positions, k_new, v_new, keys, values);
  scratch.resize(longest + kLanes + s.d + s.e);
  float* weights = scratch.data();
  float* wide = weights + longest + kLanes;
  float* sums = wide + s.d;
  for (int64_t c = 0; c < s.C; c++) {
    const int64_t at = positions[c];
    for (int64_t r = 0; r < R; r++) {
      T* to = out + (c * s.H + r) * s.e;
      if (at >= s.S) {  // padding
        std::fill(to, to + s.e, T{});
        continue;
      }
      const int64_t first = window < 0 ? 0 : std::max<int64_t>(0, at - window + 1);
      widen(q + (c * s.H + r) * s.d, s.d, wide);
      float top = sinks ? sinks[r] : -std::numeric_limits<float>::infinity();
      for (int64_t i = first; i <= at;) {
        const T* key = keys.at(i);
        for (const int64_t last = end_of_block(i, at); i <= last; i++, key += s.d) {
          float score;
          dots<1, 1>(key, s.d, wide, s.d, &score, 1);
          weights[i] = score * scale;
          top = std::max(top, weights[i]);
        }
      }
      float total = sinks ? std::exp(sinks[r] - top) : 0.0f;
      std::fill(sums, sums + s.e, 0.0f);
      int64_t i = first;
      for (; i + kLanes <= at + 1; i += kLanes) {
        const Floats w = exp(load<Floats>(weights + i) - top);
        store(weights + i, w);
        total += sum(w);
      }
      for (; i <= at; i++) total += weights[i] = std::exp(weights[i] - top);
      for (i = first; i <= at;) {
        const T* value = values.at(i);
        for (const int64_t last = end_of_block(i, at); i <= last; i++, value += s.e) {
          int64_t n = 0;
          for (; n + kLanes <= s.e; n += kLanes)
            store(sums + n, load<Floats>(sums + n) + floats(value + n) * weights[i]);
          for (; n < s.e; n++) sums[n] += float(value[n]) * weights[i];
        }
      }
      for (int64_t n = 0; n < s.e; n++) put(sums[n] / total, to + n);
    }
  }
}

constexpr int64_t kFewTokens = 32, kKeys = kPanel;
constexpr float kNone = -1e30f;  // of what is not seen: a number, so that differences are
Ints counted() {
  Ints number;
  for (int i = 0; i < kLanes; i++) number[i] = i;
  return number;
}

float largest(const Floats& v) {
  float top = v[0];
  for (int i = 1; i < kLanes; i++) top = std::max(top, v[i]);
  return top;
}

// Some of the new tokens of a row, with the heads of one key head, over keys in blocks with a running maximum; the cache
// has been written. q, out: of the first of these tokens.
void attend_in_blocks(
    const Shape& s, int64_t tokens, const bfloat16* q, const int32_t* positions, const Head<bfloat16>& all_keys,
    const Head<bfloat16>& all_values, const float* sinks, int64_t window, float scale, bfloat16* out) {
  struct Scratch {
    std::vector<uint32_t> strip;
    std::vector<float> scores, sums, top, total;
    std::vector<bfloat16> weights;
    std::vector<const bfloat16*> q_rows, w_rows;
  };
  static thread_local Scratch a;
  const int64_t R = s.group(), rows = tokens * R, strips = (s.e + kPanel - 1) / kPanel;
  int64_t first = s.S, end = 0;
  for (int64_t c = 0; c < tokens; c++) {
    if (positions[c] >= s.S) continue;
    first = std::min<int64_t>(first, window < 0 ? 0 : std::max<int64_t>(0, positions[c] - window + 1));
    end = std::max<int64_t>(end, positions[c] + 1);
  }
  a.strip.resize(std::max(s.d / 2, kKeys / 2) * kPanel);
  a.scores.resize(rows * kKeys), a.weights.resize(rows * kKeys);
  a.sums.assign(strips * rows * kPanel, 0.0f);
  a.top.resize(rows), a.total.assign(rows, sinks ? 1.0f : 0.0f);
  a.q_rows.resize(rows), a.w_rows.resize(rows);
  for (int64_t r = 0; r < rows; r++) {
    a.top[r] = sinks ? sinks[r % R] : kNone;
    a.q_rows[r] = q + (r / R * s.H + r % R) * s.d;
    a.w_rows[r] = a.weights.data() + r * kKeys;
  }
  for (int64_t begin = first / kKeys * kKeys; begin < end; begin += kKeys) {
    const int64_t keys = std::min(kKeys, end - begin);
    const bfloat16 *first_key = all_keys.at(begin), *first_value = all_values.at(begin);
    for (int64_t n = 0; n < kKeys; n++)
      for (int64_t p = 0; p < s.d / 2; p++)
        if (n < keys) std::memcpy(&a.strip[p * kKeys + n], first_key + n * s.d + 2 * p, 4);
        else a.strip[p * kKeys + n] = 0;
    const Panel packed_keys{a.strip.data(), kPanel, kPanelVectors};
    multiply(Rows{a.q_rows.data(), 0}, rows, packed_keys, s.d / 2, a.scores.data(), kPanel);
    for (int64_t r = 0; r < rows; r++) {
      const int32_t at = positions[r / R];
      float* score = a.scores.data() + r * kKeys;
      Floats tops = splat(a.top[r]);
      for (int64_t n = 0; n < kKeys; n += kLanes) {
        const Ints key = counted() + int32_t(begin + n);
        const Ints seen = (key <= at) & (key > int32_t(window < 0 ? -1 : at - window));
        const Floats mine = seen ? load<Floats>(score + n) * scale : splat(kNone);
        tops = mine > tops ? mine : tops;
        store(score + n, mine);
      }
      const float top = largest(tops);
      Floats total = splat(0);
      for (int64_t n = 0; n < kKeys; n += kLanes) {
        const Floats w = exp(load<Floats>(score + n) - top);
        put(w, a.weights.data() + r * kKeys + n);
        total += w;
      }
      const float kept = exp(splat(a.top[r] - top))[0];
      if (kept != 1.0f)
        for (int64_t i = 0; i < strips; i++) {
          float* to = a.sums.data() + (i * rows + r) * kPanel;
          for (int64_t n = 0; n < kPanel; n += kLanes) store(to + n, load<Floats>(to + n) * kept);
        }
      a.total[r] = a.total[r] * kept + sum(total);
      a.top[r] = top;
    }
    for (int64_t i = 0; i < strips; i++) {
      const int64_t vectors = std::min(kPanel, s.e - i * kPanel) / kLanes;
      for (int64_t v = 0; v < vectors; v++) {
        const int64_t column = i * kPanel + v * kLanes;
        const Matrix<bfloat16> values{first_value, keys, s.e};
        widen_vector(values, 0, keys / 2 * 2, column, a.strip.data() + v * kLanes);
        if (keys % 2)  // what lies behind the last one is nothing, perhaps not even a number
          store(&a.strip[keys / 2 * kPanel + v * kLanes],
                words(load<Halves>(values.data + (keys - 1) * s.e + column)));
      }
      float* to = a.sums.data() + i * rows * kPanel;
      const Panel packed_values{a.strip.data(), kPanel, vectors};
      multiply(Rows{a.w_rows.data(), 0}, rows, packed_values, (keys + 1) / 2, to, kPanel, true);
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    bfloat16* to = out + (r / R * s.H + r % R) * s.e;
    const float part = positions[r / R] < s.S ? 1.0f / a.total[r] : 0.0f;  // padding: 0
    for (int64_t n = 0; n < s.e; n += kLanes) {
      const float* from = a.sums.data() + (n / kPanel * rows + r) * kPanel + n % kPanel;
      put(part == 0.0f ? splat(0) : load<Floats>(from) * part, to + n);
    }
  }
}

// The same result for many tokens: the cache is written, then blocks of queries are tasks, the last first.
void attention_of_many(
    const Shape& s, const bfloat16* q, const bfloat16* k, const bfloat16* v, const int32_t* positions,
    const int32_t* window, const float* sinks, float scale, bfloat16* out, const Caches<bfloat16>& caches) {
  const int64_t tokens = std::max<int64_t>(1, std::min<int64_t>(64, 128 / s.group()));
  const int64_t blocks = (s.C + tokens - 1) / tokens;
  Phase write_all(int(s.P * s.G), [&](int i) {
    const int64_t p = i / s.G, g = i % s.G;
    write(s, positions + p * s.C, k + (p * s.C * s.G + g) * s.d, v + (p * s.C * s.G + g) * s.e,
          caches.keys(s, p, g), caches.values(s, p, g));
  });
  Phase attend_all(int(blocks * s.P * s.G), [&](int i) {
    const int64_t p = i / s.G % s.P, g = i % s.G, c = (blocks - 1 - i / (s.P * s.G)) * tokens;
    attend_in_blocks(
        s, std::min(tokens, s.C - c), q + ((p * s.C + c) * s.H + g * s.group()) * s.d, positions + p * s.C + c,
        caches.keys(s, p, g), caches.values(s, p, g),
        sinks ? sinks + g * s.group() : nullptr, window ? *window : -1, scale,
        out + ((p * s.C + c) * s.H + g * s.group()) * s.e);
  });
  Pool::get().run({&write_all, &attend_all});
}

template <class T>
void attention(
    const Shape& s, const T* q, const T* k, const T* v, const int32_t* positions, const int32_t* window,
    const float* sinks, float scale, T* out, const Caches<T>& caches) {
  auto task = [=](int i) {
    const int64_t p = i / s.G, g = i % s.G;
    attend<T>(
        s, q + (p * s.C * s.H + g * s.group()) * s.d, positions + p * s.C,
        k + (p * s.C * s.G + g) * s.d, v + (p * s.C * s.G + g) * s.e, caches.keys(s, p, g),
        caches.values(s, p, g), sinks ? sinks + g * s.group() : nullptr, window ? *window : -1, scale,
        out + (p * s.C * s.H + g * s.group()) * s.e);
  };
  Phase all(int(s.P * s.G), task);
  Pool::get().run({&all});
}

// tables: [P, S / kBlock]; window: [1], or [0] for none; sinks: [H], or [0]. The caches are the results too, in place.
ffi::Error handle_attention(
    ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::Buffer<ffi::S32> tables,
    ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> window, ffi::Buffer<ffi::F32> sinks, ffi::AnyBuffer k_in,
    ffi::AnyBuffer v_in, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> k_cache,
    ffi::Result<ffi::AnyBuffer> v_cache, float scale) {
  const auto dims = q.dimensions();
  const Shape s{dims[0], dims[1], dims[2], dims[3], v.dimensions()[3], k.dimensions()[2], tables.dimensions()[1] * kBlock};
  if (k_in.untyped_data() != k_cache->untyped_data() || v_in.untyped_data() != v_cache->untyped_data())
    return ffi::Error::Internal("attention: the cache was copied");
  if (k_cache->dimensions()[2] != kBlock)
    return ffi::Error::InvalidArgument("attention: a block must have 128 positions");
  const int32_t* limit = window.element_count() ? window.typed_data() : nullptr;
  const float* sink = sinks.element_count() ? sinks.typed_data() : nullptr;
  auto call = [&]<class T>(T*) {
    auto data = [](auto&& buffer) { return static_cast<T*>(buffer.untyped_data()); };
    const Caches<T> caches{data(*k_cache), data(*v_cache), tables.typed_data()};
    if constexpr (kHasPairs && std::is_same_v<T, bfloat16>)
      if (s.P * s.C > kFewTokens && s.d % 2 == 0 && s.e % kLanes == 0)
        return attention_of_many(
            s, data(q), data(k), data(v), positions.typed_data(), limit, sink, scale, data(*out), caches);
    attention<T>(s, data(q), data(k), data(v), positions.typed_data(), limit, sink, scale, data(*out), caches);
  };
  if (q.element_type() == ffi::F32)
    call((float*)nullptr);
  else if (q.element_type() == ffi::BF16)
    call((bfloat16*)nullptr);
  else
    return ffi::Error::InvalidArgument("attention: dtype must be float32 or bfloat16");
  return ffi::Error::Success();
}

// Columns of the k largest scores of each row, by falling score; ties go to the lowest column.
ffi::Error handle_top_k(ffi::Buffer<ffi::F32> scores, ffi::ResultBuffer<ffi::S32> idx) {
  const int64_t rows = scores.dimensions()[0], columns = scores.dimensions()[1], k = idx->dimensions()[1];
  thread_local std::vector<float> left;
  for (int64_t t = 0; t < rows; t++) {
    left.assign(scores.typed_data() + t * columns, scores.typed_data() + (t + 1) * columns);
    for (int64_t j = 0; j < k; j++) {
      int64_t best = 0;
      for (int64_t n = 1; n < columns; n++)
        if (left[n] > left[best]) best = n;
      idx->typed_data()[t * k + j] = int32_t(best);
      left[best] = -std::numeric_limits<float>::infinity();
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jmoe_attention, handle_attention,
    ffi::Ffi::Bind()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>()
        .Attr<float>("scale"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jmoe_top_k, handle_top_k, ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::S32>>());
