// What an expert's MLP does between its two products; kinds as ACTIVATIONS in api.py numbers them.
#pragma once

#include <algorithm>
#include <cmath>

#include "vectors.h"

constexpr int64_t kSwiglu = 0, kGelu = 1, kClamped = 2;
constexpr float kLimit = 7.0f, kAlpha = 1.702f;  // of gpt-oss

inline Floats reciprocal(const Floats& x) { return splat(1) / x; }

// 1 + erf(h / sqrt(2)), with an error below 2e-7 (Abramowitz and Stegun, 7.1.26). bell: exp(-h^2 / 2)
inline Floats one_plus_erf(const Floats& h, const Floats& bell) {
  const Floats size = h < splat(0) ? -h : h, t = reciprocal(1.0f + 0.3275911f * 0.70710678f * size);
  Floats p = splat(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const Floats rest = p * t * bell;  // 1 - erf of the size
  return h < splat(0) ? rest : 2.0f - rest;
}

inline float activated(float gate, float up, int64_t kind) {
  if (kind == kGelu) return 0.5f * gate * (1.0f + std::erf(gate * 0.70710678f));
  if (kind == kClamped) {
    gate = std::min(gate, kLimit);
    up = std::max(-kLimit, std::min(up, kLimit)) + 1.0f;
    return gate / (1.0f + std::exp(-kAlpha * gate)) * up;
  }
  return gate / (1.0f + std::exp(-gate)) * up;
}

inline Floats activated(Floats gate, Floats up, int64_t kind) {
  if (kind == kGelu) return 0.5f * gate * one_plus_erf(gate, exp(-0.5f * gate * gate));
  if (kind == kClamped) {
    gate = gate > splat(kLimit) ? splat(kLimit) : gate;
    up = up > splat(kLimit) ? splat(kLimit) : (up < splat(-kLimit) ? splat(-kLimit) : up);
    return gate / (exp(gate * -kAlpha) + 1.0f) * (up + 1.0f);
  }
  return gate / (exp(-gate) + 1.0f) * up;
}

// The activation, and the gradients of what it is of, given its own; of SwiGLU and GELU.
struct Derivative {
  Floats value, gate, up;
};

inline Derivative derivative(const Floats& gate, const Floats& up, const Floats& da, int64_t kind) {
  if (kind == kGelu) {
    const Floats bell = exp(-0.5f * gate * gate), twice = one_plus_erf(gate, bell);
    return {0.5f * gate * twice, da * (0.5f * twice + gate * bell * 0.39894228f), splat(0)};
  }
  const Floats s = reciprocal(1.0f + exp(-gate)), silu = gate * s;
  return {silu * up, da * up * (s + silu * (1.0f - s)), da * silu};
}
