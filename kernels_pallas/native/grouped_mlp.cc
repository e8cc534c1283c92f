// The experts' MLPs over groups of rows, and their gradients, in bfloat16 with sums in float32.
//
// Rows are taken as they are grouped, however unevenly, in blocks that stay in a core's cache from the first product to
// the last; the activation is part of the first product's end. D hidden, F expert hidden, U = 2F (SwiGLU) or F (GELU).
#include <cstring>
#include <vector>

#include "xla/ffi/api/ffi.h"

#include "activations.h"
#include "background.h"
#include "parallel.h"
#include "products.h"
#include "scratch.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kBlockRows = 96;  // rows of a group that are computed at once, an even number

struct Shape {
  int64_t T, N, L, D, U, F;
  bool gated() const { return U == 2 * F; }
  int64_t activation() const { return gated() ? kSwiglu : kGelu; }
  int64_t pairs() const { return N / 2 + L; }  // enough for every group to begin with a pair of its own
};

// Rows [first, first + count) of a group. pair: that of the first one.
struct Block {
  int64_t group, first, count, pair;
};

struct Blocks {
  std::vector<Block> all;
  std::vector<int64_t> pair, count;  // of each group
  int64_t rows = 0;

  Blocks(const Shape& s, const int32_t* sizes) {
    int64_t at = 0;
    for (int64_t l = 0; l < s.L; l++) {
      const int64_t size = std::clamp<int64_t>(sizes[l], 0, s.N - rows);
      pair.push_back(at);
      count.push_back(size);
      for (int64_t i = 0; i < size; i += kBlockRows)
        all.push_back({l, rows + i, std::min(kBlockRows, size - i), at + i / 2});
      rows += size;
      at += (size + 1) / 2;
    }
  }
};

// What all calls read: x [T, D], of which row n is x[source[n]], some row where that is T, or x[n]; weights; biases, and
// the factor of each row's output, where they are not null.
struct Inputs {
  const bfloat16* x;
  const int32_t* source;
  const bfloat16 *w_up, *w_down;
  const float *b_up, *b_down, *scale;

  const bfloat16* row(const Shape& s, int64_t n) const { return x + std::min(s.T - 1, source ? source[n] : n) * s.D; }
};

thread_local Scratch scratch;

// w_up [D, U] as one or two right operands of F columns, and w_down [F, D], each group's after the other
struct Packed {
  uint32_t *up, *down;

  Right gate(const Shape& s, int64_t l) const { return {up + l * s.D / 2 * s.U, s.D / 2, s.F}; }
  Right other(const Shape& s, int64_t l) const { return {up + l * s.D / 2 * s.U + s.D / 2 * s.F, s.D / 2, s.F}; }
  Right of_down(const Shape& s, int64_t l) const { return {down + l * s.F / 2 * s.D, s.F / 2, s.D}; }
};

void forward_block(
    const Shape& s, const Inputs& in, const Packed& packed, const Block& block, bfloat16* y, bfloat16* h) {
  scratch.begin(kBlockRows * (s.D / 2 + s.F / 2 + 2 * kPanel));
  bfloat16* x = scratch.take<bfloat16>(kBlockRows * s.D);
  bfloat16* a = scratch.take<bfloat16>(kBlockRows * s.F);
  float* gates = scratch.take<float>(kBlockRows * kPanel);
  float* ups = scratch.take<float>(kBlockRows * kPanel);
  const int64_t l = block.group;
  for (int64_t i = 0; i < block.count; i++)
    std::memcpy(x + i * s.D, in.row(s, block.first + i), s.D * sizeof(bfloat16));
  const Left rows{as_words(x), s.D / 2, 1};
  const Right gate = packed.gate(s, l), other = packed.other(s, l), down = packed.of_down(s, l);
  for (int64_t n = 0; n < s.F; n += kPanel) {
    multiply(rows, block.count, gate.panel(n), s.D / 2, gates, kPanel);
    if (s.gated()) multiply(rows, block.count, other.panel(n), s.D / 2, ups, kPanel);
    for (int64_t i = 0; i < block.count; i++) {
      const Floats factor = splat(in.scale ? in.scale[block.first + i] : 1.0f);
      for (int64_t j = 0; j < gate.width(n); j += kLanes) {
        bfloat16* to = h + (block.first + i) * s.U + n + j;
        Floats g = load<Floats>(gates + i * kPanel + j), u = splat(0);
        if (in.b_up) g += load<Floats>(in.b_up + l * s.U + n + j);
        put(g, to);
        if (s.gated()) {
          u = load<Floats>(ups + i * kPanel + j);
          if (in.b_up) u += load<Floats>(in.b_up + l * s.U + s.F + n + j);
          put(u, to + s.F);
          u = floats(to + s.F);
        }
        put(factor * activated(floats(to), u, s.activation()), a + i * s.F + n + j);
      }
    }
  }
  for (int64_t n = 0; n < s.D; n += kPanel) {
    multiply(Left{as_words(a), s.F / 2, 1}, block.count, down.panel(n), s.F / 2, gates, kPanel);
    for (int64_t i = 0; i < block.count; i++) {
      const Floats factor = splat(in.scale ? in.scale[block.first + i] : 1.0f);
      for (int64_t j = 0; j < down.width(n); j += kLanes) {
        Floats sum = load<Floats>(gates + i * kPanel + j);
        if (in.b_down) sum += factor * load<Floats>(in.b_down + l * s.D + n + j);
        put(sum, y + (block.first + i) * s.D + n + j);
      }
    }
  }
}

// Of the gradients: weights with their columns as inner dimension, and what the products for the weights' gradients
// take, rows as inner dimension: x and a by pair and column, dy and dh as right operands. dh_sums: of each block.
struct Workspace {
  uint32_t *up, *down, *x, *a, *dy, *dh;
  float* dh_sums;

  static int64_t words(const Shape& s) {
    const int64_t weights = s.L * s.D * (s.U + s.F) / 2, blocks = s.N / kBlockRows + s.L;
    return weights + s.pairs() * (2 * s.D + s.F + s.U) + blocks * s.U;
  }
  Workspace(const Shape& s, uint32_t* at) {
    up = at;
    down = up + s.L * s.D * s.U / 2;
    x = down + s.L * s.F * s.D / 2;
    a = x + s.pairs() * s.D;
    dy = a + s.pairs() * s.F;
    dh = dy + s.pairs() * s.D;
    dh_sums = reinterpret_cast<float*>(dh + s.pairs() * s.U);
  }
};

// The gradient of each row's factor through its bias: dy b_down.
void bias_part_of_dscale(const Shape& s, const Inputs& in, const Block& block, const bfloat16* dy, float* dscale) {
  for (int64_t i = block.first; i < block.first + block.count; i++) {
    Floats dot = splat(0);
    for (int64_t n = 0; in.b_down && n < s.D; n += kLanes)
      dot += floats(dy + i * s.D + n) * load<Floats>(in.b_down + block.group * s.D + n);
    dscale[i] = sum(dot);
  }
}

// dscale: null without factors.
void backward_block(
    const Shape& s, const Inputs& in, const Workspace& to, const Block& block, int64_t number, const bfloat16* h,
    const bfloat16* dy, bfloat16* dx, float* dscale) {
  scratch.begin(kBlockRows * (s.U / 2 + kPanel));
  bfloat16* dh = scratch.take<bfloat16>(kBlockRows * s.U);
  float* sums = scratch.take<float>(kBlockRows * kPanel);
  if (dscale) bias_part_of_dscale(s, in, block, dy, dscale);
  float* dh_sums = to.dh_sums + number * s.U;
  const int64_t l = block.group, P = s.pairs();
  for (int64_t i = 0; i < block.count; i += 2) {
    const bool two = i + 1 < block.count;
    const bfloat16 *x = in.row(s, block.first + i), *next = two ? in.row(s, block.first + i + 1) : nullptr;
    const bfloat16* d = dy + (block.first + i) * s.D;
    for (int64_t n = 0; n < s.D; n += kLanes) {
      store(to.x + (block.pair + i / 2) * s.D + n, paired(x + n, next ? next + n : nullptr));
      store(to.dy + Right::at(P, s.D, block.pair + i / 2, n), paired(d + n, two ? d + s.D + n : nullptr));
    }
  }
  const Left dy_rows{as_words(dy + block.first * s.D), s.D / 2, 1};
  const Right down{to.down + l * s.F * s.D / 2, s.D / 2, s.F}, up{to.up + l * s.D * s.U / 2, s.U / 2, s.D};
  for (int64_t n = 0; n < s.F; n += kPanel) {
    multiply(dy_rows, block.count, down.panel(n), s.D / 2, sums, kPanel);
    for (int64_t j = 0; j < down.width(n); j += kLanes) {
      Floats gate_sum = splat(0), up_sum = splat(0);
      for (int64_t i = 0; i < block.count; i += 2) {
        Words a{}, gate{}, other{};
        for (int64_t r = 0; r < std::min<int64_t>(2, block.count - i); r++) {
          const bfloat16* from = h + (block.first + i + r) * s.U + n + j;
          const Floats factor = splat(in.scale ? in.scale[block.first + i + r] : 1.0f);
          const Floats dscaled = load<Floats>(sums + (i + r) * kPanel + j), da = factor * dscaled;
          const Derivative d = derivative(floats(from), s.gated() ? floats(from + s.F) : splat(0), da, s.activation());
          gate_sum += d.gate;
          up_sum += d.up;
          if (dscale) dscale[block.first + i + r] += sum(dscaled * d.value);
          const Words a_row = narrow(factor * d.value), gate_row = narrow(d.gate), other_row = narrow(d.up);
          store(dh + (i + r) * s.U + n + j, halves(gate_row));
          if (s.gated()) store(dh + (i + r) * s.U + s.F + n + j, halves(other_row));
          a |= a_row << (16 * r);
          gate |= gate_row << (16 * r);
          other |= other_row << (16 * r);
        }
        const int64_t pair = block.pair + i / 2;
        store(to.a + pair * s.F + n + j, a);
        store(to.dh + Right::at(P, s.U, pair, n + j), gate);
        if (s.gated()) store(to.dh + Right::at(P, s.U, pair, s.F + n + j), other);
      }
      store(dh_sums + n + j, gate_sum);
      if (s.gated()) store(dh_sums + s.F + n + j, up_sum);
    }
  }
  for (int64_t n = 0; n < s.D; n += kPanel) {
    multiply(Left{as_words(dh), s.U / 2, 1}, block.count, up.panel(n), s.U / 2, sums, kPanel);
    for (int64_t i = 0; i < block.count; i++)
      for (int64_t j = 0; j < up.width(n); j += kLanes)
        put(load<Floats>(sums + i * kPanel + j), dx + (block.first + i) * s.D + n + j);
  }
}

// dw [rows, columns] of a group, its rows [first, first + count): sums over the group's pairs of left[pair, row] right.
void weight_gradient(
    const uint32_t* left, int64_t rows, const Right& right, int64_t pairs, int64_t first, int64_t count, float* dw) {
  scratch.begin(std::max<int64_t>(1, pairs) * count);
  uint32_t* mine = scratch.take<uint32_t>(pairs * count);
  for (int64_t p = 0; p < pairs; p++)
    std::memcpy(mine + p * count, left + (right.first + p) * rows + first, count * sizeof(uint32_t));
  multiply({mine, 1, count}, count, right, pairs, dw + first * right.columns, right.columns);
}

Shape shape_of(
    const ffi::AnyBuffer& x, const ffi::AnyBuffer& w_up, const ffi::AnyBuffer& w_down,
    const ffi::Buffer<ffi::S32>& source) {
  const auto up = w_up.dimensions(), down = w_down.dimensions();
  const int64_t rows = source.element_count() ? int64_t(source.element_count()) : x.dimensions()[0];
  return {x.dimensions()[0], rows, up[0], up[1], up[2], down[1]};
}

const bfloat16* data(const ffi::AnyBuffer& x) { return static_cast<const bfloat16*>(x.untyped_data()); }
bfloat16* data(ffi::Result<ffi::AnyBuffer>& x) { return static_cast<bfloat16*>(x->untyped_data()); }

Inputs inputs_of(
    const ffi::AnyBuffer& x, const ffi::Buffer<ffi::S32>& source, const ffi::AnyBuffer& w_up,
    const ffi::AnyBuffer& w_down, const ffi::Buffer<ffi::F32>& b_up, const ffi::Buffer<ffi::F32>& b_down,
    const ffi::Buffer<ffi::F32>& scale) {
  const auto optional = [](const ffi::Buffer<ffi::F32>& x) { return x.element_count() ? x.typed_data() : nullptr; };
  return {
      data(x), source.element_count() ? source.typed_data() : nullptr, data(w_up), data(w_down),
      optional(b_up), optional(b_down), optional(scale)};
}

void forward(const Shape& s, const Inputs& in, const int32_t* sizes, bfloat16* y, bfloat16* h, uint32_t* up) {
  const Blocks blocks(s, sizes);
  const Packed packed{up, up + s.L * s.D / 2 * s.U};
  Phase pack(int(2 * s.L), [&](int i) {
    const int64_t l = i / 2;
    if (!blocks.count[l]) return;
    if (i % 2) {
      pack_rows(in.w_down + l * s.F * s.D, s.D, s.F, s.D, s.F / 2, packed.down + l * s.F / 2 * s.D);
      return;
    }
    uint32_t* to = packed.up + l * s.D / 2 * s.U;
    pack_rows(in.w_up + l * s.D * s.U, s.U, s.D, s.F, s.D / 2, to);
    if (s.gated()) pack_rows(in.w_up + l * s.D * s.U + s.F, s.U, s.D, s.F, s.D / 2, to + s.D / 2 * s.F);
  });
  Phase compute(int(blocks.all.size()) + 1, [&](int i) {
    if (i < int(blocks.all.size())) return forward_block(s, in, packed, blocks.all[i], y, h);
    std::fill(y + blocks.rows * s.D, y + s.N * s.D, bfloat16{});
  });
  Pool::get().run({&pack, &compute});
}

// Where the gradients go; biases and factors where they are not null.
struct Gradients {
  bfloat16* x;
  float *w_up, *w_down, *b_up, *b_down, *scale;
};

void backward(
    const Shape& s, const Inputs& in, const int32_t* sizes, const bfloat16* h, const bfloat16* dy,
    const Gradients& out, uint32_t* workspace) {
  const Blocks blocks(s, sizes);
  const Workspace to(s, workspace);
  const int num_blocks = int(blocks.all.size());
  Phase pack(int(2 * s.L), [&](int i) {
    const int64_t l = i / 2;
    if (!blocks.count[l]) return;
    if (i % 2)
      pack_transposed(in.w_down + l * s.F * s.D, s.D, s.F, s.D, s.F, to.down + l * s.F * s.D / 2);
    else
      pack_transposed(in.w_up + l * s.D * s.U, s.U, s.D, s.U, s.D, to.up + l * s.D * s.U / 2);
  });
  Phase rows(num_blocks + 1, [&](int i) {
    if (i < num_blocks) return backward_block(s, in, to, blocks.all[i], i, h, dy, out.x, out.scale);
    std::fill(out.x + blocks.rows * s.D, out.x + s.N * s.D, bfloat16{});
    if (out.scale) std::fill(out.scale + blocks.rows, out.scale + s.N, 0.0f);
  });
  const int64_t up_tasks = (s.D + kBlockRows - 1) / kBlockRows, down_tasks = (s.F + kBlockRows - 1) / kBlockRows;
  Phase weights(int(s.L * (up_tasks + down_tasks)), [&](int i) {
    const int64_t l = i / (up_tasks + down_tasks), task = i % (up_tasks + down_tasks);
    const int64_t pairs = (blocks.count[l] + 1) / 2, P = s.pairs();
    if (task < up_tasks) {
      const int64_t first = task * kBlockRows, count = std::min(kBlockRows, s.D - first);
      const Right dh{to.dh, P, s.U, blocks.pair[l]};
      weight_gradient(to.x, s.D, dh, pairs, first, count, out.w_up + l * s.D * s.U);
    } else {
      const int64_t first = (task - up_tasks) * kBlockRows, count = std::min(kBlockRows, s.F - first);
      const Right dys{to.dy, P, s.D, blocks.pair[l]};
      weight_gradient(to.a, s.F, dys, pairs, first, count, out.w_down + l * s.F * s.D);
    }
  });
  Phase biases(out.b_up ? int(s.L) : 0, [&](int l) {
    float *up = out.b_up + l * s.U, *down = out.b_down + l * s.D;
    std::fill_n(up, s.U, 0.0f);
    std::fill_n(down, s.D, 0.0f);
    for (int b = 0; b < num_blocks; b++) {
      const Block& block = blocks.all[b];
      if (block.group != l) continue;
      for (int64_t n = 0; n < s.U; n += kLanes)
        store(up + n, load<Floats>(up + n) + load<Floats>(to.dh_sums + b * s.U + n));
      for (int64_t i = block.first; i < block.first + block.count; i++) {
        const Floats factor = splat(in.scale ? in.scale[i] : 1.0f);
        for (int64_t n = 0; n < s.D; n += kLanes)
          store(down + n, load<Floats>(down + n) + factor * floats(dy + i * s.D + n));
      }
    }
  });
  Pool::get().run({&pack, &rows, &weights, &biases});
}

ffi::Future handle_forward(
    ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> source, ffi::Buffer<ffi::S32> sizes,
    ffi::AnyBuffer w_up, ffi::AnyBuffer w_down, ffi::Buffer<ffi::F32> b_up, ffi::Buffer<ffi::F32> b_down,
    ffi::Buffer<ffi::F32> scale, ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> h,
    ffi::ResultBuffer<ffi::U32> workspace, bool background) {
  if (!kHasPairs) return refuse("grouped MLP: this processor has no AVX512-BF16");
  auto work = [s = shape_of(x, w_up, w_down, source), in = inputs_of(x, source, w_up, w_down, b_up, b_down, scale),
               sizes = sizes.typed_data(), y = data(y), h = data(h), up = workspace->typed_data()] {
    forward(s, in, sizes, y, h, up);
  };
  return start(threads, background, work);
}

ffi::Future handle_backward(
    ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> source, ffi::Buffer<ffi::S32> sizes,
    ffi::AnyBuffer w_up, ffi::AnyBuffer w_down, ffi::Buffer<ffi::F32> b_down, ffi::Buffer<ffi::F32> scale,
    ffi::AnyBuffer h, ffi::AnyBuffer dy, ffi::Result<ffi::AnyBuffer> dx, ffi::ResultBuffer<ffi::F32> dw_up,
    ffi::ResultBuffer<ffi::F32> dw_down, ffi::ResultBuffer<ffi::F32> db_up, ffi::ResultBuffer<ffi::F32> db_down,
    ffi::ResultBuffer<ffi::F32> dscale, ffi::ResultBuffer<ffi::U32> workspace, bool background) {
  if (!kHasPairs) return refuse("grouped MLP: this processor has no AVX512-BF16");
  const Shape s = shape_of(x, w_up, w_down, source);
  if (int64_t(workspace->element_count()) < Workspace::words(s))
    return refuse("grouped MLP: the workspace is too small");
  const Inputs in = inputs_of(x, source, w_up, w_down, b_down, b_down, scale);  // b_up is not read
  const auto optional = [](ffi::ResultBuffer<ffi::F32>& x) { return x->element_count() ? x->typed_data() : nullptr; };
  const Gradients out{
      data(dx), dw_up->typed_data(), dw_down->typed_data(), optional(db_up), optional(db_down), optional(dscale)};
  auto work = [s, in, sizes = sizes.typed_data(), h = data(h), dy = data(dy), out,
               workspace = workspace->typed_data()] { backward(s, in, sizes, h, dy, out, workspace); };
  return start(threads, background, work);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jmoe_grouped_mlp, handle_forward,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>()
        .Ret<ffi::Buffer<ffi::U32>>()
        .Attr<bool>("background"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jmoe_grouped_mlp_gradient, handle_backward,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::U32>>()
        .Attr<bool>("background"));
