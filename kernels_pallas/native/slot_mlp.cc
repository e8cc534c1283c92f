// The experts of tokens, out of slots: out = y + sum over a token's experts of weight * mlp(h), by ascending number.
//
// A slot is a run of bytes that holds one expert's arrays at given offsets; `table[expert]` is an expert's slot. Four
// phases for a few tokens: up projections, an expert's slice a task; activations; down projections; then the sums, a token
// a task. For many tokens three: a task is a strip of columns of an expert's matrix, and activations are part of the first.
#include <memory>
#include <vector>

#include "xla/ffi/api/ffi.h"

#include "activations.h"
#include "integers.h"
#include "many_rows.h"
#include "parallel.h"
#include "rows.h"

namespace ffi = xla::ffi;

namespace {

constexpr bool kWideVectors = kLanes >= 8;
constexpr int64_t kMostRows = 4096;   // of all experts, computed at once: their sums are memory that a thread keeps

struct Shape {
  int64_t tokens, choices, experts, D, F, slot_bytes;
  int64_t w_up, w_up_scales, w_down, w_down_scales, b_up, b_down;  // offsets in a slot; -1: none
  int64_t activation;
  bool wide_biases;
  int64_t columns() const { return activation == kGelu ? F : 2 * F; }
};

// A bias in a slot, float32 or bfloat16; null: zeros.
struct Bias {
  const uint8_t* data;
  bool wide;
  Floats vector(int64_t n) const {
    if (!data) return splat(0);
    return wide ? floats((const float*)data + n) : floats((const bfloat16*)data + n);
  }
  float at(int64_t n) const { return !data ? 0.0f : wide ? ((const float*)data)[n] : float(((const bfloat16*)data)[n]); }
};

// Turns a row of pre-activations [U], with [F] for the gate and what it gates, into what the down projection takes.
template <class T>
void activate(float* row, const Bias& bias, int64_t F, bool gated, int64_t kind) {
  const T* type = nullptr;
  int64_t n = 0;
  for (; n + kLanes <= F; n += kLanes) {
    const Floats a = load<Floats>(row + n) + bias.vector(n);
    const Floats b = gated ? load<Floats>(row + F + n) + bias.vector(F + n) : splat(0);
    store(row + n, rounded(activated(rounded(a, type), rounded(b, type), kind), type));
  }
  for (; n < F; n++) {
    const float a = row[n] + bias.at(n), b = gated ? row[F + n] + bias.at(F + n) : 0.0f;
    row[n] = rounded(activated(rounded(a, type), rounded(b, type), kind), type);
  }
}

template <class W>
W matrix(const uint8_t* slot, int64_t values, int64_t scales, int64_t K, int64_t N) {
  if constexpr (std::is_aggregate_v<W> && requires { typename W::Scale; })
    return W{slot + values, reinterpret_cast<const typename W::Scale*>(slot + scales), K, N};
  else
    return W{reinterpret_cast<decltype(W::data)>(slot + values), K, N};
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

// Gives each assignment a row, sorted by expert, and each expert in use its rows; returns the number of rows.
int64_t sort_by_expert(
    const Shape& s, const int32_t* idx, const uint8_t* slots, const int32_t* table, Scratch& a) {
  const int64_t assignments = s.tokens * s.choices;
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
  return rows;
}

// Calls add(row, choice) for each expert of a token, by ascending row, that is by ascending expert.
template <class Add>
void for_choices(const Shape& s, const Scratch& a, int64_t token, const Add& add) {
  int64_t before = -1;
  for (int64_t n = 0; n < s.choices; n++) {
    int64_t row = -1, choice = 0;
    for (int64_t k = 0; k < s.choices; k++) {
      const int64_t place = a.place[token * s.choices + k];
      if (place > before && (row < 0 || place < row)) row = place, choice = k;
    }
    if (row < 0) break;
    before = row;
    add(row, choice);
  }
}

template <class T, class W>
void slot_mlp(
    const Shape& s, const T* h, const int32_t* idx, const float* weights, const float* y,
    const uint8_t* slots, const int32_t* table, float* out) {
  thread_local Scratch kept;
  Scratch& a = kept;
  const int64_t U = s.columns();
  const int64_t d_stride = s.D + kPad, u_stride = U + kPad;
  const int64_t rows = sort_by_expert(s, idx, slots, table, a);
  const int64_t groups = a.groups.size();
  const bool few = s.tokens <= kFewRows;  // else there is work for all threads without slices, and sums take memory
  const int64_t up_slices = few ? slices_of(s.D, W::bytes(s.D, U)) : 1;
  const int64_t down_slices = few ? slices_of(s.F, W::bytes(s.F, s.D)) : 1;
  a.x.resize(rows * d_stride);
  a.up.resize(up_slices * rows * u_stride);      // [slices, rows, U], then the activations in the first slice
  a.down.resize(down_slices * rows * d_stride);  // [slices, rows, D]
  const auto numbers = [](const float* x) { return reinterpret_cast<const Number<T, W>*>(x); };
  Scratch* scratch = &a;
  auto read_row = [=](int64_t r) {
    float* row = scratch->x.data() + r * d_stride;
    widen(h + scratch->token[r] * s.D, s.D, row);
    prepare<T, W>(row, s.D, up_slices);
  };
  for (int64_t r = 0; few && r < rows; r++) read_row(r);
  Phase read_rows(few ? 0 : int(rows), read_row);
  const Spread up_spread(groups * up_slices, U), down_spread(groups * down_slices, s.D);
  const int threads = Pool::get().threads();
  // where tasks begin to read, and what a thread reads after task i, to be fetched where the processor does not by itself
  // (Blocks): the others take as long, so that it gets i + threads
  auto up_begin = [=](int i) {
    const uint8_t* slot = scratch->groups[up_spread.of(i) / up_slices].slot;
    return slot + s.w_up + W::bytes(slice_begin(s.D, up_slices, up_spread.of(i) % up_slices), U) +
           up_spread.begin(i) * W::kColumn;
  };
  auto down_begin = [=](int i) {
    const uint8_t* slot = scratch->groups[down_spread.of(i) / down_slices].slot;
    return slot + s.w_down + W::bytes(slice_begin(s.F, down_slices, down_spread.of(i) % down_slices), s.D) +
           down_spread.begin(i) * W::kColumn;
  };
  Phase project_up(up_spread.tasks(), [=](int i) {
    const Group& group = scratch->groups[up_spread.of(i) / up_slices];
    const int64_t slice = up_spread.of(i) % up_slices, next = i + threads, after = next - up_spread.tasks();
    const uint8_t* then = after < 0 ? up_begin(next) : after < down_spread.tasks() ? down_begin(after) : nullptr;
    product(
        matrix<W>(group.slot, s.w_up, s.w_up_scales, s.D, U), slice_begin(s.D, up_slices, slice),
        slice_begin(s.D, up_slices, slice + 1), numbers(scratch->x.data()) + group.begin * d_stride, d_stride,
        group.count, up_spread.begin(i), up_spread.end(i),
        scratch->up.data() + (slice * rows + group.begin) * u_stride, u_stride,
        then ? then - up_spread.begin(i) * W::kColumn : nullptr);
  });
  Phase activate_rows(int(groups), [=](int g) {
    const Group& group = scratch->groups[g];
    const Bias bias{s.b_up < 0 ? nullptr : group.slot + s.b_up, s.wide_biases};
    for (int64_t r = group.begin; r < group.begin + group.count; r++) {
      float* row = scratch->up.data() + r * u_stride;
      for (int64_t slice = 1; slice < up_slices; slice++) add_to(row, row + slice * rows * u_stride, U);
      activate<T>(row, bias, s.F, U > s.F, s.activation);
      prepare<T, W>(row, s.F, down_slices);
    }
  });
  Phase project_down(down_spread.tasks(), [=](int i) {
    const Group& group = scratch->groups[down_spread.of(i) / down_slices];
    const int64_t slice = down_spread.of(i) % down_slices, next = i + threads;
    const uint8_t* then = next < down_spread.tasks() ? down_begin(next) : nullptr;
    product(
        matrix<W>(group.slot, s.w_down, s.w_down_scales, s.F, s.D), slice_begin(s.F, down_slices, slice),
        slice_begin(s.F, down_slices, slice + 1), numbers(scratch->up.data()) + group.begin * u_stride, u_stride,
        group.count, down_spread.begin(i), down_spread.end(i),
        scratch->down.data() + (slice * rows + group.begin) * d_stride, d_stride,
        then ? then - down_spread.begin(i) * W::kColumn : nullptr);
  });
  Phase add(int(s.tokens), [=](int token) {
    float* to = out + token * s.D;
    if (to != y + token * s.D) std::memcpy(to, y + token * s.D, s.D * sizeof(float));
    for_choices(s, *scratch, token, [&](int64_t row, int64_t choice) {
      const int32_t expert = idx[token * s.choices + choice];
      const uint8_t* slot = slots + int64_t(table[expert]) * s.slot_bytes;
      const Bias bias{s.b_down < 0 ? nullptr : slot + s.b_down, s.wide_biases};
      const float weight = weights[token * s.choices + choice];
      float* from = scratch->down.data() + row * d_stride;
      for (int64_t slice = 1; slice < down_slices; slice++) add_to(from, from + slice * rows * d_stride, s.D);
      const T* type = nullptr;
      int64_t d = 0;
      for (; d + kLanes <= s.D; d += kLanes)
        store(to + d, load<Floats>(to + d) + rounded(load<Floats>(from + d) + bias.vector(d), type) * weight);
      for (; d < s.D; d++) to[d] = std::fma(weight, rounded(from[d] + bias.at(d), type), to[d]);
    });
  });
  Pool::get().run({&read_rows, &project_up, &activate_rows, &project_down, &add});
}

// Some rows of an expert and a strip of columns: what a task of many tokens computes.
struct Part {
  const Group* group;
  int64_t begin, count, column;
};

// Every strip of `width` columns for all groups, for at most kRowsATime rows each.
std::vector<Part> parts_of(const std::vector<Group>& groups, int64_t columns, int64_t width) {
  std::vector<Part> parts;
  for (const Group& group : groups)
    for (int64_t row = 0; row < group.count; row += kRowsATime)
      for (int64_t column = 0; column < columns; column += width)
        parts.push_back({&group, group.begin + row, std::min(kRowsATime, group.count - row), column});
  return parts;
}

// The same for many tokens; D and F are multiples of 16. X: dtype of the rows that products take, float32 where the
// processor does not multiply pairs of bfloat16.
template <class T, class W>
void slot_mlp_of_many(
    const Shape& s, const T* h, const int32_t* idx, const float* weights, const float* y, const uint8_t* slots,
    const int32_t* table, float* out) {
  using X = std::conditional_t<kHasPairs, T, float>;
  constexpr int64_t kTokens = 16;  // of a task of the sums
  const T* const type = nullptr;
  const bool gated = s.activation != kGelu;
  Scratch a;
  const int64_t rows = sort_by_expert(s, idx, slots, table, a);
  const std::unique_ptr<X[]> inner(new X[rows * s.F]);
  const std::unique_ptr<T[]> outputs(new T[rows * s.D]);
  constexpr bool kWidens = !std::is_same_v<T, X>;
  const std::unique_ptr<X[]> widened(kWidens ? new X[s.tokens * s.D] : nullptr);
  const int64_t width = gated ? kPanel / 2 : kPanel;
  const std::vector<Part> up = parts_of(a.groups, s.F, width), down = parts_of(a.groups, s.D, kPanel);
  alignas(64) static thread_local float sums[kRowsATime * kPanel];
  static thread_local const X* x[kRowsATime];
  const X* const inputs = kWidens ? widened.get() : reinterpret_cast<const X*>(h);

  Phase widen_tokens(kWidens ? int(s.tokens) : 0, [&](int t) {
    if constexpr (kWidens) widen(h + t * s.D, s.D, widened.get() + t * s.D);
  });
  Phase project_up(int(up.size()), [&](int i) {
    const Part& part = up[i];
    const uint8_t* slot = part.group->slot;
    const int64_t vectors = (std::min(width, s.F - part.column)) / kLanes;
    Strip strip{gated ? 2 * vectors : vectors, {}};
    for (int64_t v = 0; v < vectors; v++) {
      strip.at[v] = part.column + v * kLanes;
      if (gated) strip.at[vectors + v] = s.F + strip.at[v];
    }
    for (int64_t r = 0; r < part.count; r++) x[r] = inputs + int64_t(a.token[part.begin + r]) * s.D;
    product_with_strip<T>(matrix<W>(slot, s.w_up, s.w_up_scales, s.D, s.columns()), strip, x, part.count, sums);
    const Bias bias{s.b_up < 0 ? nullptr : slot + s.b_up, s.wide_biases};
    for (int64_t r = 0; r < part.count; r++)
      for (int64_t v = 0; v < vectors; v++) {
        const float* from = sums + r * kPanel + v * kLanes;
        const Floats gate = load<Floats>(from) + bias.vector(strip.at[v]);
        Floats other = splat(0);
        if (gated) other = load<Floats>(from + vectors * kLanes) + bias.vector(s.F + strip.at[v]);
        const Floats value = activated(rounded(gate, type), rounded(other, type), s.activation);
        X* const to = inner.get() + (part.begin + r) * s.F + strip.at[v];
        if constexpr (kWidens)
          store(to, rounded(value, type));
        else
          put(value, to);
      }
  });
  Phase project_down(int(down.size()), [&](int i) {
    const Part& part = down[i];
    const uint8_t* slot = part.group->slot;
    const Strip strip = neighbours(part.column, s.D);
    for (int64_t r = 0; r < part.count; r++) x[r] = inner.get() + (part.begin + r) * s.F;
    product_with_strip<T>(matrix<W>(slot, s.w_down, s.w_down_scales, s.F, s.D), strip, x, part.count, sums);
    const Bias bias{s.b_down < 0 ? nullptr : slot + s.b_down, s.wide_biases};
    for (int64_t r = 0; r < part.count; r++)
      for (int64_t v = 0; v < strip.count; v++)
        put(load<Floats>(sums + r * kPanel + v * kLanes) + bias.vector(strip.at[v]),
            outputs.get() + (part.begin + r) * s.D + strip.at[v]);
  });
  Phase add(int((s.tokens + kTokens - 1) / kTokens), [&](int i) {
    for (int64_t token = i * kTokens; token < std::min(s.tokens, (i + 1) * kTokens); token++) {
      float* to = out + token * s.D;
      if (to != y + token * s.D) std::memcpy(to, y + token * s.D, s.D * sizeof(float));
      for_choices(s, a, token, [&](int64_t row, int64_t choice) {
        const T* from = outputs.get() + row * s.D;
        const float weight = weights[token * s.choices + choice];
        for (int64_t d = 0; d < s.D; d += kLanes) store(to + d, load<Floats>(to + d) + floats(from + d) * weight);
      });
    }
  });
  Pool::get().run({&widen_tokens, &project_up, &project_down, &add});
}

ffi::Error handle(
    ffi::AnyBuffer h, ffi::Buffer<ffi::S32> idx, ffi::Buffer<ffi::F32> weights, ffi::Buffer<ffi::F32> y,
    ffi::Buffer<ffi::U8> slots, ffi::Buffer<ffi::S32> table, ffi::ResultBuffer<ffi::F32> out, int64_t hidden,
    int64_t w_up, int64_t w_up_scales, int64_t w_down, int64_t w_down_scales, int64_t b_up, int64_t b_down,
    int64_t activation, int64_t form, bool wide_biases, bool int8_activations) {
  const Shape s{idx.dimensions()[0], idx.dimensions()[1], table.dimensions()[0], h.dimensions()[1], hidden,
                slots.dimensions()[1], w_up, w_up_scales, w_down, w_down_scales, b_up, b_down, activation,
                wide_biases};
  auto call = [&]<class T, class W>(const T*, const W*) {
    const T* tokens = static_cast<const T*>(h.untyped_data());
    if constexpr (kWideVectors && !IsRounded<W>)
      if (s.tokens > kFewRows && s.D % kLanes == 0 && s.F % kLanes == 0)
        return slot_mlp_of_many<T, W>(
            s, tokens, idx.typed_data(), weights.typed_data(), y.typed_data(), slots.typed_data(), table.typed_data(),
            out->typed_data());
    // parts of more than `kFewRows` tokens each, as a token's sums depend on whether they are few
    const int64_t parts = std::max<int64_t>(1, std::min(s.tokens * s.choices / kMostRows, s.tokens / (kFewRows + 1)));
    for (int64_t i = 0; i < parts; i++) {
      const int64_t first = s.tokens * i / parts;
      Shape part = s;
      part.tokens = s.tokens * (i + 1) / parts - first;
      slot_mlp<T, W>(
          part, tokens + first * s.D, idx.typed_data() + first * s.choices, weights.typed_data() + first * s.choices,
          y.typed_data() + first * s.D, slots.typed_data(), table.typed_data(), out->typed_data() + first * s.D);
    }
  };
  auto of_format = [&]<class T>(const T* type) {
    switch (Format(form)) {
      case Format::kMxfp4:
        if (int8_activations) return call(type, (const IntegerBlocks<Format::kMxfp4>*)nullptr);
        return call(type, (const Blocks<Format::kMxfp4>*)nullptr);
      case Format::kInt4:
        if (int8_activations) return call(type, (const IntegerBlocks<Format::kInt4>*)nullptr);
        return call(type, (const Blocks<Format::kInt4>*)nullptr);
      case Format::kInt8:
        if (int8_activations) return call(type, (const IntegerBlocks<Format::kInt8>*)nullptr);
        return call(type, (const Blocks<Format::kInt8>*)nullptr);
      case Format::kFp8: return call(type, (const Blocks<Format::kFp8>*)nullptr);
      default: return call(type, (const Matrix<T>*)nullptr);
    }
  };
  if (h.element_type() == ffi::F32)
    of_format((const float*)nullptr);
  else if (h.element_type() == ffi::BF16)
    of_format((const bfloat16*)nullptr);
  else
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
        .Attr<int64_t>("w_up_scales")
        .Attr<int64_t>("w_down")
        .Attr<int64_t>("w_down_scales")
        .Attr<int64_t>("b_up")
        .Attr<int64_t>("b_down")
        .Attr<int64_t>("activation")
        .Attr<int64_t>("form")
        .Attr<bool>("wide_biases")
        .Attr<bool>("int8_activations"));

// Whether products of many bfloat16 rows multiply pairs, and whether vectors are wide enough to multiply many rows of floats
// faster than XLA does. Sizes are multiples of 16.
extern "C" int32_t jmoe_multiplies_many_rows() { return kHasPairs; }
extern "C" int32_t jmoe_has_wide_vectors() { return kWideVectors; }
