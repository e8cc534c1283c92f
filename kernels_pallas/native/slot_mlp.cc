// The experts of a few tokens, out of slots: out = y + sum over a token's experts of weight * mlp(h), by ascending number.
//
// A slot is a run of bytes that holds one expert's arrays at given offsets; `table[expert]` is an expert's slot. Four
// phases: up projections, an expert's slice a task; activations; down projections; then the sums, a token a task.
#include <vector>

#include "xla/ffi/api/ffi.h"

#include "parallel.h"
#include "rows.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kSwiglu = 0, kGelu = 1, kClamped = 2;
constexpr float kLimit = 7.0f, kAlpha = 1.702f;  // of gpt-oss

struct Shape {
  int64_t tokens, choices, experts, D, F, slot_bytes;
  int64_t w_up, w_down, b_up, b_down;  // offsets in a slot; -1: none
  int64_t activation;
  int64_t columns() const { return activation == kGelu ? F : 2 * F; }
};

float activated(float gate, float up, int64_t kind) {
  if (kind == kGelu) return 0.5f * gate * (1.0f + std::erf(gate * 0.70710678f));
  if (kind == kClamped) {
    gate = std::min(gate, kLimit);
    up = std::max(-kLimit, std::min(up, kLimit)) + 1.0f;
    return gate / (1.0f + std::exp(-kAlpha * gate)) * up;
  }
  return gate / (1.0f + std::exp(-gate)) * up;
}

Floats activated(Floats gate, Floats up, int64_t kind) {
  if (kind == kGelu) {
    for (int i = 0; i < kLanes; i++) gate[i] = activated(gate[i], 0.0f, kind);
    return gate;
  }
  if (kind == kClamped) {
    gate = gate > splat(kLimit) ? splat(kLimit) : gate;
    up = up > splat(kLimit) ? splat(kLimit) : (up < splat(-kLimit) ? splat(-kLimit) : up);
    return gate / (exp(gate * -kAlpha) + 1.0f) * (up + 1.0f);
  }
  return gate / (exp(-gate) + 1.0f) * up;
}

// Turns a row's pre-activations [begin, end) into what the down projection takes; `up` is null for GELU.
template <class T, class B>
void activate(float* gate, const float* up, const B* gate_bias, const B* up_bias, int64_t count, int64_t kind) {
  const T* type = nullptr;
  int64_t n = 0;
  for (; n + kLanes <= count; n += kLanes) {
    Floats a = load<Floats>(gate + n), b = up ? load<Floats>(up + n) : splat(0);
    if (gate_bias) a += floats(gate_bias + n);
    if (up_bias) b += floats(up_bias + n);
    store(gate + n, rounded(activated(rounded(a, type), rounded(b, type), kind), type));
  }
  for (; n < count; n++) {
    float a = gate[n], b = up ? up[n] : 0.0f;
    if (gate_bias) a += float(gate_bias[n]);
    if (up_bias) b += float(up_bias[n]);
    gate[n] = rounded(activated(rounded(a, type), rounded(b, type), kind), type);
  }
}

// One expert in use and its rows [begin, begin + count) of the sorted assignments.
struct Group {
  const uint8_t* slot;
  int64_t begin, count;
};

struct Scratch {
  std::vector<Group> groups;
  std::vector<int32_t> token, place, count;  // of a row; where an assignment's row is; rows of an expert
  std::vector<float> x, up, down;
};

template <class T, class B>
void slot_mlp(
    const Shape& s, const T* h, const int32_t* idx, const float* weights, const float* y,
    const uint8_t* slots, const int32_t* table, float* out) {
  thread_local Scratch kept;
  Scratch& a = kept;
  const int64_t U = s.columns(), assignments = s.tokens * s.choices;
  // rows sorted by expert, by counting
  a.count.assign(s.experts + 1, 0);
  for (int64_t i = 0; i < assignments; i++) a.count[std::min<int64_t>(idx[i], s.experts)]++;
  a.groups.clear();
  std::vector<int32_t>& next = a.count;  // becomes the next row of an expert
  int64_t rows = 0;
  for (int64_t e = 0; e < s.experts; e++) {
    const int64_t count = next[e];
    if (count) a.groups.push_back({slots + int64_t(table[e]) * s.slot_bytes, rows, count});
    next[e] = int32_t(rows);
    rows += count;
  }
  a.token.resize(rows);
  a.place.resize(assignments);
  for (int64_t i = 0; i < assignments; i++) {
    if (idx[i] >= s.experts) {
      a.place[i] = -1;
      continue;
    }
    a.place[i] = next[idx[i]]++;
    a.token[a.place[i]] = int32_t(i / s.choices);
  }
  const int64_t groups = a.groups.size();
  const Matrix<T> up{nullptr, s.D, U}, down{nullptr, s.F, s.D};
  const int64_t up_slices = up.slices(), down_slices = down.slices();
  a.x.resize(rows * s.D);
  a.up.resize(up_slices * rows * U);      // [slices, rows, U], then the activations in the first slice
  a.down.resize(down_slices * rows * s.D);  // [slices, rows, D]
  for (int64_t r = 0; r < rows; r++) widen(h + a.token[r] * s.D, s.D, a.x.data() + r * s.D);

  Scratch* scratch = &a;
  const Spread up_spread(groups * up_slices, U), down_spread(groups * down_slices, s.D);
  Phase project_up(up_spread.tasks(), [=](int i) {
    const Group& group = scratch->groups[up_spread.of(i) / up_slices];
    const int64_t slice = up_spread.of(i) % up_slices;
    const Matrix<T> w{reinterpret_cast<const T*>(group.slot + s.w_up), s.D, U};
    product(
        w, slice, scratch->x.data() + group.begin * s.D, s.D, group.count, up_spread.begin(i), up_spread.end(i),
        scratch->up.data() + (slice * rows + group.begin) * U, U);
  });
  Phase activate_rows(int(groups), [=](int g) {
    const Group& group = scratch->groups[g];
    const B* bias = s.b_up < 0 ? nullptr : reinterpret_cast<const B*>(group.slot + s.b_up);
    const bool gated = U > s.F;
    for (int64_t r = group.begin; r < group.begin + group.count; r++) {
      float* row = scratch->up.data() + r * U;
      for (int64_t slice = 1; slice < up_slices; slice++) add_to(row, row + slice * rows * U, U);
      activate<T, B>(
          row, gated ? row + s.F : nullptr, bias, bias && gated ? bias + s.F : nullptr, s.F, s.activation);
    }
  });
  Phase project_down(down_spread.tasks(), [=](int i) {
    const Group& group = scratch->groups[down_spread.of(i) / down_slices];
    const int64_t slice = down_spread.of(i) % down_slices;
    const Matrix<T> w{reinterpret_cast<const T*>(group.slot + s.w_down), s.F, s.D};
    product(
        w, slice, scratch->up.data() + group.begin * U, U, group.count, down_spread.begin(i), down_spread.end(i),
        scratch->down.data() + (slice * rows + group.begin) * s.D, s.D);
  });
  Phase add(int(s.tokens), [=](int token) {
    float* to = out + token * s.D;
    if (to != y + token * s.D) std::memcpy(to, y + token * s.D, s.D * sizeof(float));
    int64_t before = -1;
    for (int64_t n = 0; n < s.choices; n++) {  // by ascending row, that is by ascending expert
      int64_t row = -1, choice = 0;
      for (int64_t k = 0; k < s.choices; k++) {
        const int64_t place = scratch->place[token * s.choices + k];
        if (place > before && (row < 0 || place < row)) row = place, choice = k;
      }
      if (row < 0) break;
      before = row;
      const int32_t expert = idx[token * s.choices + choice];
      const uint8_t* slot = slots + int64_t(table[expert]) * s.slot_bytes;
      const B* bias = s.b_down < 0 ? nullptr : reinterpret_cast<const B*>(slot + s.b_down);
      const float weight = weights[token * s.choices + choice];
      float* from = scratch->down.data() + row * s.D;
      for (int64_t slice = 1; slice < down_slices; slice++) add_to(from, from + slice * rows * s.D, s.D);
      if (bias)
        for (int64_t d = 0; d < s.D; d++) from[d] += float(bias[d]);
      const T* type = nullptr;
      int64_t d = 0;
      for (; d + kLanes <= s.D; d += kLanes)
        store(to + d, load<Floats>(to + d) + rounded(load<Floats>(from + d), type) * weight);
      for (; d < s.D; d++) to[d] = std::fma(weight, rounded(from[d], type), to[d]);
    }
  });
  Pool::get().run({&project_up, &activate_rows, &project_down, &add});
}

ffi::Error handle(
    ffi::AnyBuffer h, ffi::Buffer<ffi::S32> idx, ffi::Buffer<ffi::F32> weights,
    ffi::Buffer<ffi::F32> y, ffi::Buffer<ffi::U8> slots, ffi::Buffer<ffi::S32> table, ffi::ResultBuffer<ffi::F32> out,
    int64_t hidden, int64_t w_up, int64_t w_down, int64_t b_up, int64_t b_down, int64_t activation, bool wide_biases) {
  const Shape s{idx.dimensions()[0], idx.dimensions()[1], table.dimensions()[0], h.dimensions()[1], hidden,
                slots.dimensions()[1], w_up, w_down, b_up, b_down, activation};
  auto call = [&]<class T, class B>(const T* from, const B*) {
    slot_mlp<T, B>(
        s, from, idx.typed_data(), weights.typed_data(), y.typed_data(), slots.typed_data(), table.typed_data(),
        out->typed_data());
  };
  const float* wide = nullptr;
  const bfloat16* narrow = nullptr;
  if (h.element_type() == ffi::F32)
    wide_biases ? call(h.typed_data<float>(), wide) : call(h.typed_data<float>(), narrow);
  else if (h.element_type() == ffi::BF16) {
    const auto* from = static_cast<const bfloat16*>(h.untyped_data());
    wide_biases ? call(from, wide) : call(from, narrow);
  } else
    return ffi::Error::InvalidArgument("slot_mlp: dtype must be float32 or bfloat16");
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jmoe_slot_mlp, handle,
    ffi::Ffi::Bind()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::U8>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Attr<int64_t>("hidden")
        .Attr<int64_t>("w_up")
        .Attr<int64_t>("w_down")
        .Attr<int64_t>("b_up")
        .Attr<int64_t>("b_down")
        .Attr<int64_t>("activation")
        .Attr<bool>("wide_biases"));
