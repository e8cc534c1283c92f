// As many numbers at a time as a register has, in GCC's and Clang's vector types: 16 with AVX-512, 8 with AVX2, else 4.
// Wider vectors would lie in memory: compilers split their operations, and keep none of them in registers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr bool kManyRegisters = kLanes == 16;  // 32 registers, else 16: half as many sums at a time

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef int8_t Chars __attribute__((vector_size(kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

template <class V>
inline V load(const void* from) {  // from any address
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}

template <class V>
inline void store(void* to, const V& v) {
  std::memcpy(to, &v, sizeof(V));
}

// Bytes and halves as numbers, and 1/256 of 8-bit floats of four bits of exponent and three of mantissa (NaN is not
// known): instructions that compilers do not find by themselves.
#if defined(__AVX512F__)
inline Words words(const Bytes& x) { return (Words)_mm512_cvtepu8_epi32((__m128i)x); }
inline Words words(const Halves& x) { return (Words)_mm512_cvtepu16_epi32((__m256i)x); }
inline Halves halves(const Words& x) { return (Halves)_mm512_cvtepi32_epi16((__m512i)x); }
inline Floats floats(const Chars& x) { return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)x)); }
inline Floats e4m3_over_256(const Bytes& x) {  // what they are as halves, whose exponent has a bias larger by 8
  const __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16((__m128i)x), 7);  // the sign in both upper bits
  return (Floats)_mm512_cvtph_ps(_mm256_and_si256(bits, _mm256_set1_epi16(short(0xbfff))));
}
#elif defined(__AVX2__)
inline __m128i widened(const void* from) { return _mm_loadl_epi64((const __m128i*)from); }
inline Words words(const Bytes& x) { return (Words)_mm256_cvtepu8_epi32(widened(&x)); }
inline Words words(const Halves& x) { return (Words)_mm256_cvtepu16_epi32((__m128i)x); }
inline Halves halves(const Words& x) {  // the upper halves are zero
  const __m256i packed = _mm256_packus_epi32((__m256i)x, (__m256i)x);
  return (Halves)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
inline Floats floats(const Chars& x) { return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(widened(&x))); }
inline Floats e4m3_over_256(const Bytes& x) {
  const __m128i bits = _mm_slli_epi16(_mm_cvtepi8_epi16(widened(&x)), 7);
  return (Floats)_mm256_cvtph_ps(_mm_and_si128(bits, _mm_set1_epi16(short(0xbfff))));
}
#else
inline Words words(const Bytes& x) { return __builtin_convertvector(x, Words); }
inline Words words(const Halves& x) { return __builtin_convertvector(x, Words); }
inline Halves halves(const Words& x) { return __builtin_convertvector(x, Halves); }
inline Floats floats(const Chars& x) { return __builtin_convertvector(__builtin_convertvector(x, Ints), Floats); }
inline Floats e4m3_over_256(const Bytes& x) {
  const Words all = words(x), magnitude = all & 0x7f;
  const Floats normal = (Floats)((magnitude << 20) + (112u << 23));
  const Floats tiny = __builtin_convertvector((Ints)magnitude, Floats) * (1 / 512.0f / 256);  // without leading one
  const Words y = (Words)((Ints)magnitude < 8 ? tiny : normal);
  return (Floats)(y | (all >> 7 << 31));
}
#endif

#if defined(__AVX512F__)
inline Floats splat(float x) { return (Floats)_mm512_set1_ps(x); }
#elif defined(__AVX2__)
inline Floats splat(float x) { return (Floats)_mm256_set1_ps(x); }
#else
inline Floats splat(float x) { return Floats{} + x; }
#endif

// table[low 4 bits] and table[high 4 bits] of as many bytes as a vector has numbers; the table has sixteen whole numbers.
struct FloatPair {
  Floats low, high;
};

typedef int8_t Sixteen __attribute__((vector_size(16)));

#if defined(__AVX512F__)
typedef Floats Table;
inline Table table_of(const Sixteen& values) { return floats((Chars)values); }
inline FloatPair look_up(const Table& table, const uint8_t* codes) {
  const Words index = words(load<Bytes>(codes));
  const auto at = [&](const Words& i) { return (Floats)_mm512_permutexvar_ps((__m512i)i, (__m512)table); };
  return {at(index), at(index >> 4)};
}
#else
typedef Sixteen Table;
inline Table table_of(const Sixteen& values) { return values; }
inline FloatPair look_up(const Table& table, const uint8_t* codes) {
#if defined(__AVX2__)
  const __m128i both = widened(codes), low_bits = _mm_set1_epi8(15);
  const __m128i low = _mm_and_si128(both, low_bits), high = _mm_and_si128(_mm_srli_epi16(both, 4), low_bits);
  const auto at = [&](const __m128i& i) {
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_shuffle_epi8((__m128i)table, i)));
  };
  return {at(low), at(high)};
#else
  FloatPair y;
  for (int i = 0; i < kLanes; i++) y.low[i] = table[codes[i] & 15], y.high[i] = table[codes[i] >> 4];
  return y;
#endif
}
#endif

struct bfloat16 {
  uint16_t bits;
  operator float() const {
    const uint32_t word = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &word, 4);
    return x;
  }
  static bfloat16 round(float x) {  // to nearest, ties to even; NaN stays NaN
    uint32_t word;
    std::memcpy(&word, &x, 4);
    if ((word & 0x7fffffff) > 0x7f800000) return {uint16_t((word >> 16) | 0x40)};
    return {uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16)};
  }
};

inline Floats floats(const float* from) { return load<Floats>(from); }
inline Floats floats(const bfloat16* from) { return (Floats)(words(load<Halves>(from)) << 16); }

// FP8 of four bits of exponent and three of mantissa, as kernels_pallas/cached_values.py rounds to it and reads it.
inline Floats e4m3_floats(const Bytes& x) {
  const Ints is_nan = (Ints)(words(x) & 0x7f) == 0x7f;
  return is_nan ? splat(NAN) : e4m3_over_256(x) * 256.0f;
}

struct e4m3 {
  uint8_t bits;
  operator float() const { return e4m3_floats(Bytes{} + bits)[0]; }
  static e4m3 round(float x) {  // to nearest, ties to even; 448 beyond it, NaN for what is not finite
    uint32_t word;
    std::memcpy(&word, &x, 4);
    const uint8_t sign = word >> 24 & 0x80;
    const uint32_t size = word & 0x7fffffff, limited = size < 0x43e00000 ? size : 0x43e00000;
    if (size >= 0x7f800000) return {uint8_t(sign | 0x7f)};
    if (limited >= 0x3c800000)  // 2^-6, the smallest with a leading one
      return {uint8_t(sign | (((limited + 0x7ffff + (limited >> 20 & 1)) >> 20) - (120 << 3)))};
    float small;
    std::memcpy(&small, &limited, 4);
    small += 16384.0f;  // from here on numbers differ by 2^-9, the smallest of all
    std::memcpy(&word, &small, 4);
    return {uint8_t(sign | (word & 0xf))};
  }
};

inline Floats floats(const e4m3* from) { return e4m3_floats(load<Bytes>(from)); }

// Two numbers of bfloat16 in the bits of a float: processors with AVX512-BF16 multiply and add both at once, and take
// subnormal ones as zeros.
struct Pair {
  float bits;
};

inline float low(Pair x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  return bfloat16{uint16_t(word)};
}
inline float high(Pair x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  return bfloat16{uint16_t(word >> 16)};
}

// Floats that are numbers of bfloat16, two by two
inline Words paired(const Floats& low, const Floats& high) {
  return ((Words)low >> 16) | ((Words)high & 0xffff0000);
}
inline float pair_of(float low, float high) { return ((Floats)paired(splat(low), splat(high)))[0]; }
// Two rows, two by two; no second one: zeros
inline Words paired(const bfloat16* low, const bfloat16* high) {
  return words(load<Halves>(low)) | (high ? words(load<Halves>(high)) << 16 : Words{});
}

// sum + w x, with AVX2 and AVX-512 rounded once whatever the code around it; of pairs both products are added
#if defined(__AVX512F__)
inline Floats add(const Floats& sum, const Floats& w, const Floats& x) {
  return (Floats)_mm512_fmadd_ps((__m512)w, (__m512)x, (__m512)sum);
}
#elif defined(__AVX2__) && defined(__FMA__)
inline Floats add(const Floats& sum, const Floats& w, const Floats& x) {
  return (Floats)_mm256_fmadd_ps((__m256)w, (__m256)x, (__m256)sum);
}
#else
inline Floats add(const Floats& sum, const Floats& w, const Floats& x) { return sum + w * x; }
#endif
inline Floats add(const Floats& sum, const Floats& w, float x) { return add(sum, w, splat(x)); }
#if defined(__AVX512BF16__)
constexpr bool kHasPairs = true;
inline Floats add(const Floats& sum, const Words& w, Pair x) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_ps(x.bits));
}
// table[index % 16] and table[index / 16 % 16] of each; what is in the table are numbers of bfloat16.
inline Words look_up_pairs(const Table& table, const Words& index) {
  const __m512i twice = _mm512_broadcast_i64x4((__m256i)halves((Words)table >> 16));
  return (Words)_mm512_permutexvar_epi16((__m512i)(index | index << 12), twice);
}
#else
constexpr bool kHasPairs = false;  // what is for pairs compiles, and is not to be called
Words look_up_pairs(const Table& table, const Words& index);
#endif

inline float rounded(float x, const float*) { return x; }
inline float rounded(float x, const bfloat16*) { return bfloat16::round(x); }
inline Floats rounded(const Floats& x, const float*) { return x; }
inline Floats rounded(const Floats& x, const bfloat16*) {
  const Words word = (Words)x;
  const Words up = (word + 0x7fff + ((word >> 16) & 1)) & 0xffff0000;
  return x != x ? x : (Floats)up;
}
inline void put(float x, float* to) { *to = x; }
inline void put(float x, bfloat16* to) { *to = bfloat16::round(x); }
inline void put(const Floats& x, float* to) { store(to, x); }
inline void put(const Floats& x, bfloat16* to) {
  const Floats near = rounded(x, to);
  store(to, halves((Words)near >> 16));
}

inline float sum(const Floats& v) {
  float total = 0;
  for (int i = 0; i < kLanes; i++) total += v[i];
  return total;
}

// exp, 2 ulp or so: 2^n times a polynomial. Below -87 it is 0, above 88 infinity is approached; NaN stays NaN.
inline Floats exp(Floats x) {
  const Floats limited = x < splat(-87.3f) ? splat(-87.3f) : (x > splat(88.3f) ? splat(88.3f) : x);
  const Floats scaled = limited * 1.44269504f;
  const Ints n = __builtin_convertvector(scaled + (scaled < splat(0) ? splat(-0.5f) : splat(0.5f)), Ints);
  const Floats whole = __builtin_convertvector(n, Floats);
  const Floats r = limited - whole * 0.693359375f + whole * 2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Floats e = p * r * r + r + 1.0f;
  const Floats y = e * (Floats)((n + 127) << 23);
  return x < splat(-87.3f) ? splat(0) : (x != x ? x : y);
}
