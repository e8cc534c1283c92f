// AdamW on the host, in place: w, m, v and g are read once and w, m, v written once, whatever the number of steps; beside
// them the new w rounded to bfloat16, if asked for.
//
// The arithmetic is XLA:CPU's of `jmoe/optim/adamw.py`, operation by operation: the same products are fused with the same
// sums, subnormal numbers count as zero. So both give the same bits, on every instruction set.
#include <algorithm>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "parallel.h"
#include "vectors.h"

extern "C" {

// One parameter. wide: the gradient is float32, else bfloat16. g: null for zeros. copy: null for none. decay: weight decay
// applies.
struct AdamWArray {
  float *w, *m, *v;
  const void* g;
  bfloat16* copy;
  int64_t size;
  int32_t wide, decay;
};

// factors: of m and v, 1 / (1 - beta^t), by which XLA multiplies where the formula divides.
struct AdamWStep {
  float lr, m_factor, v_factor;
};

// clip: factor of the gradient, which belongs to the first step.
struct AdamWConstants {
  float beta1, rest1, beta2, rest2, eps, weight_decay, clip;
};

struct RoundedArray {
  const float* from;
  bfloat16* to;
  int64_t size;
};

}  // extern "C"

namespace {

constexpr int64_t kBlock = 1 << 15;  // elements of a task: 128 KB of each array
constexpr int kAtOnce = kManyRegisters ? 4 : 2;  // vectors: a division takes long, and the next can begin before it ends

// Subnormal numbers are zeros, as in XLA's threads, until the end of the scope.
class FlushSubnormals {
#if defined(__SSE2__)
 public:
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#endif
};

// w x + sum, rounded once on every processor
inline Floats fused(const Floats& w, const Floats& x, const Floats& sum) {
#if defined(__FMA__)
  return add(sum, w, x);
#else
  Floats y;
  for (int i = 0; i < kLanes; i++) y[i] = std::fma(w[i], x[i], sum[i]);
  return y;
#endif
}

inline Floats square_root(const Floats& x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (Floats)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE2__)
  return (Floats)_mm_sqrt_ps((__m128)x);
#else
  Floats y;
  for (int i = 0; i < kLanes; i++) y[i] = std::sqrt(x[i]);
  return y;
#endif
}

struct Steps {
  const AdamWStep* at;
  int64_t count;
};

// Some vectors of one parameter through all steps.
template <int kVectors, class G>
inline void update(float* w, float* m, float* v, const G* g, bfloat16* copy, bool decay, const Steps& steps,
                   const AdamWConstants& k) {
  Floats ws[kVectors], ms[kVectors], vs[kVectors], gs[kVectors];
  for (int i = 0; i < kVectors; i++) {
    ws[i] = floats(w + i * kLanes), ms[i] = floats(m + i * kLanes), vs[i] = floats(v + i * kLanes);
    gs[i] = g ? floats(g + i * kLanes) : splat(0);
    gs[i] = gs[i] * k.clip;
  }
  for (int64_t s = 0; s < steps.count; s++) {
    const AdamWStep& step = steps.at[s];
    for (int i = 0; i < kVectors; i++) {
      const Floats scaled = splat(k.rest2) * gs[i];
      ms[i] = fused(splat(k.beta1), ms[i], splat(k.rest1) * gs[i]);
      vs[i] = fused(splat(k.beta2), vs[i], scaled * gs[i]);
      Floats update = (ms[i] * step.m_factor) / (square_root(vs[i] * step.v_factor) + k.eps);
      if (decay) update = fused(splat(k.weight_decay), ws[i], update);
      ws[i] = fused(splat(-step.lr), update, ws[i]);
      gs[i] = splat(0);
    }
  }
  for (int i = 0; i < kVectors; i++) {
    put(ws[i], w + i * kLanes), put(ms[i], m + i * kLanes), put(vs[i], v + i * kLanes);
    if (copy) put(ws[i], copy + i * kLanes);
  }
}

template <class G>
void update_block(const AdamWArray& a, int64_t begin, int64_t end, const Steps& steps, const AdamWConstants& k) {
  const G* g = static_cast<const G*>(a.g);
  constexpr int64_t kGroup = kAtOnce * kLanes;
  const auto from = [&](int64_t n) { return g ? g + n : nullptr; };
  const auto to = [&](int64_t n) { return a.copy ? a.copy + n : nullptr; };
  int64_t n = begin;
  for (; n + kGroup <= end; n += kGroup) update<kAtOnce>(a.w + n, a.m + n, a.v + n, from(n), to(n), a.decay, steps, k);
  for (; n + kLanes <= end; n += kLanes) update<1>(a.w + n, a.m + n, a.v + n, from(n), to(n), a.decay, steps, k);
  if (n == end) return;
  // a vector that the rest does not fill: the same operations on a copy, padded by zeros
  const int64_t rest = end - n;
  float w[kLanes] = {}, m[kLanes] = {}, v[kLanes] = {};
  G gs[kLanes] = {};
  bfloat16 copy[kLanes] = {};
  std::copy_n(a.w + n, rest, w), std::copy_n(a.m + n, rest, m), std::copy_n(a.v + n, rest, v);
  if (g) std::copy_n(g + n, rest, gs);
  update<1>(w, m, v, g ? gs : nullptr, a.copy ? copy : nullptr, a.decay, steps, k);
  std::copy_n(w, rest, a.w + n), std::copy_n(m, rest, a.m + n), std::copy_n(v, rest, a.v + n);
  if (a.copy) std::copy_n(copy, rest, a.copy + n);
}

void round_block(const RoundedArray& a, int64_t begin, int64_t end) {
  int64_t n = begin;
  for (; n + kLanes <= end; n += kLanes) put(floats(a.from + n), a.to + n);
  for (; n < end; n++) put(a.from[n], a.to + n);
}

// f(array, begin, end) over blocks of all arrays, on all cores
template <class Array, class F>
void over_blocks(const Array* arrays, int64_t count, F f) {
  std::vector<int64_t> first(1, 0);  // block of each array, and behind the last
  for (int64_t a = 0; a < count; a++) first.push_back(first.back() + (arrays[a].size + kBlock - 1) / kBlock);
  Phase all(int(first.back()), [&](int i) {
    const int64_t a = std::upper_bound(first.begin(), first.end(), int64_t(i)) - first.begin() - 1;
    const int64_t begin = (i - first[a]) * kBlock;
    f(arrays[a], begin, std::min(arrays[a].size, begin + kBlock));
  });
  Pool::of_updates().run({&all});
}

}  // namespace

// For the host, which calls them by ctypes: that runs without the interpreter's lock.
extern "C" {

void jmoe_adamw(
    const AdamWArray* arrays, int64_t count, const AdamWStep* steps, int64_t num_steps, const AdamWConstants* constants) {
  const Steps all{steps, num_steps};
  over_blocks(arrays, count, [&](const AdamWArray& a, int64_t begin, int64_t end) {
    const FlushSubnormals flush;
    if (a.wide) update_block<float>(a, begin, end, all, *constants);
    else update_block<bfloat16>(a, begin, end, all, *constants);
  });
}

void jmoe_round_to_bfloat16(const RoundedArray* arrays, int64_t count) {
  over_blocks(arrays, count, round_block);
}

}  // extern "C"
