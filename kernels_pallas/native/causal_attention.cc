// Causal attention of whole sequences and its gradient, in bfloat16 with sums in float32.
//
// Scores are made transposed, [keys, queries]: a vector is sixteen queries, so that the softmax needs no sums across a
// vector, and the probabilities lie as the next product takes them.
#include <cmath>
#include <limits>

#include "xla/ffi/api/ffi.h"

#include "background.h"
#include "parallel.h"
#include "products.h"
#include "scratch.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kBlock = kPanel;  // queries, and keys, that are computed at once

struct Shape {
  int64_t B, S, H, G, d, e;  // sequences, their length, query heads, key heads, dimensions of a key and of a value
  int64_t group() const { return H / G; }
  int64_t blocks() const { return (S + kBlock - 1) / kBlock; }
  int64_t padded() const { return blocks() * kBlock; }
};

thread_local Scratch scratch;

// The number of the queries first..first + 15
Ints queries(int64_t first) {
  Ints number;
  for (int i = 0; i < kLanes; i++) number[i] = int32_t(first + i);
  return number;
}

// One head of one sequence; q, out: [S, ...] with rows q_row and out_row apart, k, v: with k_row and v_row.
struct Head {
  const bfloat16 *q, *k, *v;
  int64_t q_row, k_row, v_row, out_row;
};

void forward(const Shape& s, const Head& head, float scale, bfloat16* out, float* lse) {
  const int64_t P = s.padded();
  scratch.begin(P * s.d / 2 + P / 2 * s.e + P * kBlock + P / 2 * kBlock + kBlock * s.e);
  uint32_t* q_packed = scratch.take<uint32_t>(P * s.d / 2);
  uint32_t* v_packed = scratch.take<uint32_t>(P / 2 * s.e);
  float* scores = scratch.take<float>(P * kBlock);
  uint32_t* weights = scratch.take<uint32_t>(P / 2 * kBlock);
  float* sums = scratch.take<float>(kBlock * s.e);
  pack_transposed(head.q, head.q_row, s.S, s.d, P, q_packed);
  pack_rows(head.v, head.v_row, s.S, s.e, P / 2, v_packed);
  for (int64_t first = 0; first < s.S; first += kBlock) {
    const int64_t num_queries = std::min(kBlock, s.S - first), num_keys = first + num_queries;
    const Right q_block{q_packed + first * s.d / 2, s.d / 2, kBlock};
    multiply({as_words(head.k), head.k_row / 2, 1}, num_keys, q_block, s.d / 2, scores, kBlock);
    if (num_keys % 2) std::fill_n(scores + num_keys * kBlock, kBlock, 0.0f);
    float total[kBlock];
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      const Ints query = queries(first + i);
      Floats top = splat(-std::numeric_limits<float>::infinity());
      for (int64_t key = 0; key < num_keys; key++) {
        Floats score = load<Floats>(scores + key * kBlock + i) * scale;
        if (key > first + i) score = query < int32_t(key) ? splat(-std::numeric_limits<float>::infinity()) : score;
        store(scores + key * kBlock + i, score);
        top = score > top ? score : top;
      }
      Floats added = splat(0);
      for (int64_t key = 0; key < num_keys; key += 2) {
        const Floats even = exp(load<Floats>(scores + key * kBlock + i) - top);
        const Floats odd =
            key + 1 < num_keys ? exp(load<Floats>(scores + (key + 1) * kBlock + i) - top) : splat(0);
        added += even + odd;
        store(weights + key / 2 * kBlock + i, narrow(even) | narrow(odd) << 16);
      }
      store(total + i, added);
      for (int64_t j = 0; j < std::min<int64_t>(kLanes, num_queries - i); j++)
        lse[first + i + j] = top[j] + std::log(added[j]);
    }
    multiply({weights, 1, kBlock}, num_queries, {v_packed, P / 2, s.e}, (num_keys + 1) / 2, sums, s.e);
    for (int64_t j = 0; j < num_queries; j++)
      for (int64_t n = 0; n < s.e; n += kLanes)
        put(load<Floats>(sums + j * s.e + n) / total[j], out + (first + j) * head.out_row + n);
  }
}

// What the gradient of one head reads beside `Head`, and where its queries' goes.
struct HeadGradient {
  const bfloat16 *out, *dout;
  const float* lse;
  bfloat16* dq;
};

// Adds to dk [P, d] and dv [P, e]; k_packed has the keys as inner dimension.
void backward(
    const Shape& s, const Head& head, const HeadGradient& given, float scale, const uint32_t* k_packed,
    float* dk, float* dv) {
  const int64_t P = s.padded();
  uint32_t* q_columns = scratch.take<uint32_t>(P * s.d / 2);
  uint32_t* q_rows = scratch.take<uint32_t>(P * s.d / 2);
  uint32_t* do_columns = scratch.take<uint32_t>(P * s.e / 2);
  uint32_t* do_rows = scratch.take<uint32_t>(P * s.e / 2);
  float* dq = scratch.take<float>(P * s.d);
  float* lse = scratch.take<float>(P);
  float* delta = scratch.take<float>(P);
  float* scores = scratch.take<float>(kBlock * kBlock);
  float* dweights = scratch.take<float>(kBlock * kBlock);
  bfloat16* weights_rows = scratch.take<bfloat16>(kBlock * kBlock);
  bfloat16* dscores_rows = scratch.take<bfloat16>(kBlock * kBlock);
  uint32_t* dscores_pairs = scratch.take<uint32_t>(kBlock / 2 * kBlock);
  pack_transposed(head.q, head.q_row, s.S, s.d, P, q_columns);
  pack_rows(head.q, head.q_row, s.S, s.d, P / 2, q_rows);
  pack_transposed(given.dout, head.out_row, s.S, s.e, P, do_columns);
  pack_rows(given.dout, head.out_row, s.S, s.e, P / 2, do_rows);
  std::fill_n(dq, P * s.d, 0.0f);
  for (int64_t i = 0; i < P; i++) {
    lse[i] = i < s.S ? given.lse[i] : std::numeric_limits<float>::infinity();  // a query past the end weighs nothing
    Floats products = splat(0);
    for (int64_t n = 0; n < s.e && i < s.S; n += kLanes)
      products += floats(given.out + i * head.out_row + n) * floats(given.dout + i * head.out_row + n);
    delta[i] = sum(products);
  }
  for (int64_t key = 0; key < s.S; key += kBlock) {
    const int64_t num_keys = std::min(kBlock, s.S - key);
    const Left k{as_words(head.k + key * head.k_row), head.k_row / 2, 1};
    const Left v{as_words(head.v + key * head.v_row), head.v_row / 2, 1};
    for (int64_t first = key; first < P; first += kBlock) {
      multiply(k, num_keys, {q_columns + first * s.d / 2, s.d / 2, kBlock}, s.d / 2, scores, kBlock);
      multiply(v, num_keys, {do_columns + first * s.e / 2, s.e / 2, kBlock}, s.e / 2, dweights, kBlock);
      for (int64_t i = 0; i < kBlock; i += kLanes) {
        const Floats lses = load<Floats>(lse + first + i), deltas = load<Floats>(delta + first + i);
        const Ints query = queries(first + i);
        Words even{};
        for (int64_t j = 0; j < num_keys + num_keys % 2; j++) {
          Words weight{}, dscore{};
          if (j < num_keys) {
            Floats p = exp(load<Floats>(scores + j * kBlock + i) * scale - lses);
            if (key + j > first + i) p = query < int32_t(key + j) ? splat(0) : p;
            weight = narrow(p);
            dscore = narrow(p * (load<Floats>(dweights + j * kBlock + i) - deltas) * scale);
            store(weights_rows + j * kBlock + i, halves(weight));
            store(dscores_rows + j * kBlock + i, halves(dscore));
          }
          if (j % 2) store(dscores_pairs + j / 2 * kBlock + i, even | dscore << 16);
          even = dscore;
        }
      }
      multiply(
          {as_words(weights_rows), kBlock / 2, 1}, num_keys, {do_rows, P / 2, s.e, first / 2}, kBlock / 2,
          dv + key * s.e, s.e, true);
      multiply(
          {as_words(dscores_rows), kBlock / 2, 1}, num_keys, {q_rows, P / 2, s.d, first / 2}, kBlock / 2,
          dk + key * s.d, s.d, true);
      multiply(
          {dscores_pairs, 1, kBlock}, kBlock, {k_packed, P / 2, s.d, key / 2}, (num_keys + 1) / 2, dq + first * s.d,
          s.d, true);
    }
  }
  for (int64_t i = 0; i < s.S; i++)
    for (int64_t n = 0; n < s.d; n += kLanes) put(load<Floats>(dq + i * s.d + n), given.dq + i * head.q_row + n);
}

int64_t backward_words(const Shape& s) {
  const int64_t P = s.padded();
  const int64_t of_group = P * s.d / 2 + P * (s.d + s.e);
  return of_group + P * (s.d + s.e) + P * s.d + 2 * P + 2 * kBlock * kBlock + 3 * kBlock * kBlock / 2;
}

Shape shape_of(const ffi::AnyBuffer& q, const ffi::AnyBuffer& k, const ffi::AnyBuffer& v) {
  const auto dims = q.dimensions();
  return {dims[0], dims[1], dims[2], k.dimensions()[2], dims[3], v.dimensions()[3]};
}

const bfloat16* data(const ffi::AnyBuffer& x) { return static_cast<const bfloat16*>(x.untyped_data()); }
bfloat16* data(ffi::Result<ffi::AnyBuffer>& x) { return static_cast<bfloat16*>(x->untyped_data()); }

Head head_of(const Shape& s, const bfloat16* q, const bfloat16* k, const bfloat16* v, int64_t b, int64_t h) {
  const int64_t g = h / s.group();
  return {
      q + (b * s.S * s.H + h) * s.d, k + (b * s.S * s.G + g) * s.d, v + (b * s.S * s.G + g) * s.e,
      s.H * s.d, s.G * s.d, s.G * s.e, s.H * s.e};
}

struct Gradients {
  bfloat16 *q, *k, *v;
};

// The gradients of the keys and values of head g of sequence b, and of the queries that look at them.
void backward_group(
    const Shape& s, const bfloat16* q, const bfloat16* k, const bfloat16* v, const bfloat16* out, const float* lse,
    const bfloat16* dout, float scale, int64_t b, int64_t g, const Gradients& to) {
  const int64_t P = s.padded();
  for (int64_t r = 0; r < s.group(); r++) {
    const int64_t h = g * s.group() + r, at = (b * s.S * s.H + h) * s.e;
    const Head head = head_of(s, q, k, v, b, h);
    scratch.begin(backward_words(s));
    uint32_t* k_packed = scratch.take<uint32_t>(P * s.d / 2);
    float* dk_sum = scratch.take<float>(P * s.d);
    float* dv_sum = scratch.take<float>(P * s.e);
    if (r == 0) {
      pack_rows(head.k, head.k_row, s.S, s.d, P / 2, k_packed);
      std::fill_n(dk_sum, P * s.d, 0.0f);
      std::fill_n(dv_sum, P * s.e, 0.0f);
    }
    const HeadGradient given{out + at, dout + at, lse + (b * s.H + h) * s.S, to.q + (b * s.S * s.H + h) * s.d};
    backward(s, head, given, scale, k_packed, dk_sum, dv_sum);
    if (r + 1 < s.group()) continue;
    for (int64_t row = 0; row < s.S; row++) {
      bfloat16* dk_row = to.k + ((b * s.S + row) * s.G + g) * s.d;
      bfloat16* dv_row = to.v + ((b * s.S + row) * s.G + g) * s.e;
      for (int64_t n = 0; n < s.d; n += kLanes) put(load<Floats>(dk_sum + row * s.d + n), dk_row + n);
      for (int64_t n = 0; n < s.e; n += kLanes) put(load<Floats>(dv_sum + row * s.e + n), dv_row + n);
    }
  }
}

ffi::Future handle_forward(
    ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::Result<ffi::AnyBuffer> out,
    ffi::ResultBuffer<ffi::F32> lse, float scale, bool background) {
  if (!kHasPairs) return refuse("causal attention: this processor has no AVX512-BF16");
  auto work = [s = shape_of(q, k, v), q = data(q), k = data(k), v = data(v), out = data(out),
               lse = lse->typed_data(), scale] {
    Phase all(int(s.B * s.H), [&](int i) {
      const int64_t b = i / s.H, h = i % s.H;
      forward(s, head_of(s, q, k, v, b, h), scale, out + (b * s.S * s.H + h) * s.e, lse + i * s.S);
    });
    Pool::get().run({&all});
  };
  return start(threads, background, work);
}

ffi::Future handle_backward(
    ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer out,
    ffi::Buffer<ffi::F32> lse, ffi::AnyBuffer dout, ffi::Result<ffi::AnyBuffer> dq, ffi::Result<ffi::AnyBuffer> dk,
    ffi::Result<ffi::AnyBuffer> dv, float scale, bool background) {
  if (!kHasPairs) return refuse("causal attention: this processor has no AVX512-BF16");
  auto work = [s = shape_of(q, k, v), q = data(q), k = data(k), v = data(v), out = data(out),
               lse = lse.typed_data(), dout = data(dout), to = Gradients{data(dq), data(dk), data(dv)}, scale] {
    Phase all(int(s.B * s.G), [&](int i) {
      backward_group(s, q, k, v, out, lse, dout, scale, i / s.G, i % s.G, to);
    });
    Pool::get().run({&all});
  };
  return start(threads, background, work);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jmoe_causal_attention, handle_forward,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Attr<float>("scale")
        .Attr<bool>("background"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jmoe_causal_attention_gradient, handle_backward,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>()
        .Attr<float>("scale")
        .Attr<bool>("background"));
