// Products of inputs in 8 bits with weights of 4 or 8 bits: of each block of 32 inputs the products are added up as
// integers, exactly, and the sum is multiplied by the scales of both. Inputs are rounded, -127 ... 127 times a scale.
//
// Four inputs of a block and one output lie in a word. VNNI adds four products to a sum in one instruction; AVX2 adds two
// pairs of them to two sums of 16 bits. Both take one side as unsigned: weights are moved up by kOffset, and sums begin
// with what makes up for it.
#pragma once

#include "rows.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define JMOE_DOTS_512
#elif defined(__AVX2__)
#define JMOE_DOTS_256
#endif

#if defined(JMOE_DOTS_512) || defined(__AVXVNNI__)
constexpr bool kAddsFour = true;
#else
constexpr bool kAddsFour = false;
#endif

// A block of inputs, as products with one format take it, in so many words
struct InputBlock {
  int8_t values[32];
  float scale;
  int32_t start;  // of sums; where they have 16 bits, of the words' lower and upper two products
};
constexpr int64_t kBlockWords = sizeof(InputBlock) / sizeof(Rounded);

template <Format kFormat>
struct IntegerBlocks : Blocks<kFormat> {
  using Base = Blocks<kFormat>;
  static_assert(Base::kBlock == 32);
  static constexpr bool kTwoAByte = Base::kTwoAByte, kInPairs = false;
  static constexpr int kOffset = kFormat == Format::kInt4 ? 8 : kFormat == Format::kMxfp4 ? 12 : kAddsFour ? 128 : 0;
  static constexpr Sixteen kMoved = Base::kValues + int8_t(kTwoAByte ? kOffset : 0);  // used with 4 bits
  static constexpr bool kSumsOf16Bits = kTwoAByte && !kAddsFour;

  // Which input of a block is at place i: products take the low bits of four bytes, then the high ones.
  static constexpr int source(int i) { return kTwoAByte ? i / 8 * 8 + i % 4 * 2 + i / 4 % 2 : i; }

  // Rounds the numbers [K] of a row, in its place.
  static void round(float* row, int64_t K) {
    for (int64_t k = 0; k < K; k += 32) {
      Ints largest{};  // of the bits of magnitudes: what is not a number is larger than any
      for (int i = 0; i < 32; i += kLanes) {
        const Ints bits = load<Ints>(row + k + i) & 0x7fffffff;
        largest = bits > largest ? bits : largest;
      }
      int32_t bits = 0;
      for (int i = 0; i < kLanes; i++) bits = std::max(bits, largest[i]);
      float peak;
      std::memcpy(&peak, &bits, 4);
      const float steps = peak > 1e-30f && peak < 3e38f ? 127.0f / peak : 0.0f;
      constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: sums with it are rounded to whole numbers, in their low bits
      alignas(64) int32_t whole[32];
      for (int i = 0; i < 32; i += kLanes)
        store(whole + i, (Ints)(load<Floats>(row + k + i) * steps + kWhole) - (Ints)splat(kWhole));
      InputBlock block;
      int32_t sums[2] = {0, 0};
      for (int i = 0; i < 32; i++) {
        block.values[i] = int8_t(whole[source(i)]);
        sums[i / 2 % 2] += block.values[i];
      }
      block.scale = peak / 127.0f;
      if constexpr (kSumsOf16Bits)
        block.start = int32_t(uint32_t(-kOffset * sums[0]) & 0xffff) | int32_t(uint32_t(-kOffset * sums[1]) << 16);
      else
        block.start = -kOffset * (sums[0] + sums[1]);
      std::memcpy(row + k / 32 * kBlockWords, &block, sizeof block);
    }
  }
};

#if defined(JMOE_DOTS_512)
struct Dots {
  using Vector = __m512i;
  static constexpr int64_t kColumns = 64;
  static Vector all(uint32_t word) { return _mm512_set1_epi32(int32_t(word)); }
  static Vector all(const Sixteen& x) { return _mm512_broadcast_i32x4((__m128i)x); }
  template <bool kHalf>
  static Vector bytes(const uint8_t* from) {
    if constexpr (kHalf) return _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)from));
    return _mm512_loadu_si512(from);
  }
  static Vector low8(Vector a, Vector b) { return _mm512_unpacklo_epi8(a, b); }
  static Vector high8(Vector a, Vector b) { return _mm512_unpackhi_epi8(a, b); }
  static Vector low16(Vector a, Vector b) { return _mm512_unpacklo_epi16(a, b); }
  static Vector high16(Vector a, Vector b) { return _mm512_unpackhi_epi16(a, b); }
  static Vector low_bits(Vector x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
  static Vector high_bits(Vector x) { return low_bits(_mm512_srli_epi16(x, 4)); }
  static Vector look_up(Vector table, Vector x) { return _mm512_shuffle_epi8(table, x); }
  static Vector moved(Vector x) { return _mm512_xor_si512(x, _mm512_set1_epi8(-128)); }
  template <bool>
  static Vector add(Vector sum, Vector w, Vector x) {
    return _mm512_dpbusd_epi32(sum, w, x);
  }
  // The sums of four vectors of words, whose lanes of four words have outputs in turn, in the outputs' order
  template <bool>
  static void in_order(const Vector (&sums)[4], Floats (&to)[4]) {
    const __m512i a = _mm512_shuffle_i32x4(sums[0], sums[1], 0x44), b = _mm512_shuffle_i32x4(sums[0], sums[1], 0xee);
    const __m512i c = _mm512_shuffle_i32x4(sums[2], sums[3], 0x44), d = _mm512_shuffle_i32x4(sums[2], sums[3], 0xee);
    to[0] = (Floats)_mm512_cvtepi32_ps(_mm512_shuffle_i32x4(a, c, 0x88));
    to[1] = (Floats)_mm512_cvtepi32_ps(_mm512_shuffle_i32x4(a, c, 0xdd));
    to[2] = (Floats)_mm512_cvtepi32_ps(_mm512_shuffle_i32x4(b, d, 0x88));
    to[3] = (Floats)_mm512_cvtepi32_ps(_mm512_shuffle_i32x4(b, d, 0xdd));
  }
};
#elif defined(JMOE_DOTS_256)
struct Dots {
  using Vector = __m256i;
  static constexpr int64_t kColumns = 32;
  static Vector all(uint32_t word) { return _mm256_set1_epi32(int32_t(word)); }
  static Vector all(const Sixteen& x) { return _mm256_broadcastsi128_si256((__m128i)x); }
  template <bool>
  static Vector bytes(const uint8_t* from) {
    return _mm256_loadu_si256((const __m256i*)from);
  }
  static Vector low8(Vector a, Vector b) { return _mm256_unpacklo_epi8(a, b); }
  static Vector high8(Vector a, Vector b) { return _mm256_unpackhi_epi8(a, b); }
  static Vector low16(Vector a, Vector b) { return _mm256_unpacklo_epi16(a, b); }
  static Vector high16(Vector a, Vector b) { return _mm256_unpackhi_epi16(a, b); }
  static Vector low_bits(Vector x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
  static Vector high_bits(Vector x) { return low_bits(_mm256_srli_epi16(x, 4)); }
  static Vector look_up(Vector table, Vector x) { return _mm256_shuffle_epi8(table, x); }
  static Vector moved(Vector x) { return kAddsFour ? _mm256_xor_si256(x, _mm256_set1_epi8(-128)) : x; }
  template <bool kSumsOf16Bits>
  static Vector add(Vector sum, Vector w, Vector x) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sum, w, x);
#else
    if constexpr (kSumsOf16Bits) return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));
    // signed weights: their magnitudes by the inputs with their signs; two products of 128 * 127 fit 16 bits
    const __m256i two = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(two, _mm256_set1_epi16(1)));
#endif
  }
  template <bool kSumsOf16Bits>
  static void in_order(const Vector (&sums)[4], Floats (&to)[32 / kLanes]) {
    __m256 wide[4];
    for (int i = 0; i < 4; i++)
      wide[i] = _mm256_cvtepi32_ps(kSumsOf16Bits ? _mm256_madd_epi16(sums[i], _mm256_set1_epi16(1)) : sums[i]);
    const __m256 in_turn[4] = {
        _mm256_permute2f128_ps(wide[0], wide[1], 0x20), _mm256_permute2f128_ps(wide[2], wide[3], 0x20),
        _mm256_permute2f128_ps(wide[0], wide[1], 0x31), _mm256_permute2f128_ps(wide[2], wide[3], 0x31)};
#if defined(__AVX512F__)
    for (int i = 0; i < 2; i++)
      to[i] = (Floats)_mm512_insertf32x8(_mm512_castps256_ps512(in_turn[2 * i]), in_turn[2 * i + 1], 1);
#else
    for (int i = 0; i < 4; i++) to[i] = (Floats)in_turn[i];
#endif
  }
};
#endif

#if defined(JMOE_DOTS_512) || defined(JMOE_DOTS_256)
constexpr int64_t kDotColumns = Dots::kColumns;
constexpr int kStepWords = 8;  // of a block, for each output

// Four rows of bytes: of each output four bytes in a word, in four vectors of a few outputs each
template <bool kHalf>
inline void interleave(const uint8_t* from, int64_t N, Dots::Vector (&to)[4]) {
  const auto a = Dots::bytes<kHalf>(from), b = Dots::bytes<kHalf>(from + N);
  const auto c = Dots::bytes<kHalf>(from + 2 * N), d = Dots::bytes<kHalf>(from + 3 * N);
  const auto ab_low = Dots::low8(a, b), ab_high = Dots::high8(a, b);
  const auto cd_low = Dots::low8(c, d), cd_high = Dots::high8(c, d);
  to[0] = Dots::low16(ab_low, cd_low), to[1] = Dots::high16(ab_low, cd_low);
  to[2] = Dots::low16(ab_high, cd_high), to[3] = Dots::high16(ab_high, cd_high);
}

// Calls use(word, [4] vectors of weights) for the eight words of a block's inputs, and kDotColumns outputs from n on.
template <bool kHalf, Format kFormat, class Use>
inline void for_words(const IntegerBlocks<kFormat>& w, const Chunk& chunk, int64_t n, const Use& use) {
  constexpr bool kTwoAByte = IntegerBlocks<kFormat>::kTwoAByte;
  const auto table = Dots::all(w.kMoved);
  const uint8_t* from = w.data + (kTwoAByte ? chunk.k / 2 : chunk.k) * w.N + n;
  for (int word = 0; word < kStepWords; word += kTwoAByte ? 2 : 1, from += 4 * w.N) {
    Dots::Vector both[4];
    interleave<kHalf>(from, w.N, both);
    if (n % 64 == 0)
      for (int i = 0; i < 4; i++) fetch<64>(from + i * w.N, chunk.ahead);
    Dots::Vector part[4];
    for (int i = 0; i < 4; i++) {
      part[i] = kTwoAByte ? Dots::low_bits(both[i]) : Dots::moved(both[i]);
      if constexpr (kFormat == Format::kMxfp4) part[i] = Dots::look_up(table, part[i]);
    }
    use(word, part);
    if constexpr (kTwoAByte) {
      for (int i = 0; i < 4; i++) {
        part[i] = Dots::high_bits(both[i]);
        if constexpr (kFormat == Format::kMxfp4) part[i] = Dots::look_up(table, part[i]);
      }
      use(word + 1, part);
    }
  }
}

// Adds the products of a block to y[t, n ...) for TB rows of x; words(use) is `for_words` or reads what it has given.
template <int TB, bool kHalf, Format kFormat, class Words>
inline void add_block(
    const IntegerBlocks<kFormat>& w, const Chunk& chunk, const Rounded* x, int64_t x_stride, int64_t n, float* y,
    int64_t y_stride, const Words& words) {
  constexpr bool k16 = IntegerBlocks<kFormat>::kSumsOf16Bits;
  constexpr int kVectors = int((kHalf ? 32 : kDotColumns) / kLanes);
  const InputBlock* blocks[TB];
  Dots::Vector sums[TB][4];
  for (int t = 0; t < TB; t++) {
    blocks[t] = reinterpret_cast<const InputBlock*>(x + t * x_stride + chunk.k / 32 * kBlockWords);
    for (int i = 0; i < 4; i++) sums[t][i] = Dots::all(uint32_t(blocks[t]->start));
  }
  words([&](int word, const Dots::Vector (&part)[4]) {
    for (int t = 0; t < TB; t++) {
      const auto mine = Dots::all(load<uint32_t>(blocks[t]->values + 4 * word));
      for (int i = 0; i < 4; i++) sums[t][i] = Dots::add<k16>(sums[t][i], part[i], mine);
    }
  });
  for (int t = 0; t < TB; t++) {
    Floats wide[kDotColumns / kLanes];
    Dots::in_order<k16>(sums[t], wide);
    for (int v = 0; v < kVectors; v++) {
      float* to = y + t * y_stride + n + v * kLanes;
      const Floats scales = w.scales_at(chunk.k, n + v * kLanes) * blocks[t]->scale;
      store(to, add(chunk.fresh ? splat(0) : load<Floats>(to), wide[v], scales));
    }
  }
}

// The same for all of a few columns [n, end), a multiple of 32, and any number of rows; for more than a few rows weights
// are taken apart once.
template <Format kFormat>
inline void add_columns(
    const IntegerBlocks<kFormat>& w, const Chunk& chunk, const Rounded* x, int64_t x_stride, int64_t rows, int64_t n,
    int64_t end, float* y, int64_t y_stride) {
  constexpr int kRows = kDotColumns == 64 ? 4 : 2;
  auto columns = [&]<bool kHalf>(std::bool_constant<kHalf>) {
    auto block = [&]<int TB>(std::integral_constant<int, TB>, int64_t t, const auto& words) {
      add_block<TB, kHalf>(w, chunk, x + t * x_stride, x_stride, n, y + t * y_stride, y_stride, words);
    };
    auto from_memory = [&](const auto& use) { for_words<kHalf>(w, chunk, n, use); };
    if (rows == 1) return block(std::integral_constant<int, 1>(), 0, from_memory);
    if (rows == 2) return block(std::integral_constant<int, 2>(), 0, from_memory);
    Dots::Vector kept[kStepWords][4];
    for_words<kHalf>(w, chunk, n, [&](int word, const Dots::Vector (&part)[4]) {
      for (int i = 0; i < 4; i++) kept[word][i] = part[i];
    });
    auto again = [&](const auto& use) {
      for (int word = 0; word < kStepWords; word++) use(word, kept[word]);
    };
    int64_t t = 0;
    for (; t + kRows <= rows; t += kRows) block(std::integral_constant<int, kRows>(), t, again);
    for (; t < rows; t++) block(std::integral_constant<int, 1>(), t, again);
  };
  for (; n + kDotColumns <= end; n += kDotColumns) columns(std::false_type());
  if (n < end) columns(std::true_type());
}
#else
// Without such instructions: one input after the other
template <Format kFormat>
inline void add_columns(
    const IntegerBlocks<kFormat>& w, const Chunk& chunk, const Rounded* x, int64_t x_stride, int64_t rows, int64_t n,
    int64_t end, float* y, int64_t y_stride) {
  using W = IntegerBlocks<kFormat>;
  for (; n < end; n += kLanes)
    for (int64_t t = 0; t < rows; t++) {
      const auto& block = *reinterpret_cast<const InputBlock*>(x + t * x_stride + chunk.k / 32 * kBlockWords);
      int32_t sums[kLanes] = {};
      for (int i = 0; i < 32; i++) {
        const int64_t k = chunk.k + W::source(i);
        const uint8_t* row = w.data + (W::kTwoAByte ? k / 2 : k) * w.N + n;
        for (int j = 0; j < kLanes; j++) {
          const int value = W::kTwoAByte ? w.kValues[(row[j] >> (k % 2 * 4)) & 15] : int8_t(row[j]);
          sums[j] += value * block.values[i];
        }
      }
      float* to = y + t * y_stride + n;
      const Floats wide = __builtin_convertvector(load<Ints>(sums), Floats);
      const Floats scales = w.scales_at(chunk.k, n) * block.scale;
      store(to, add(chunk.fresh ? splat(0) : load<Floats>(to), wide, scales));
    }
}
#endif

// y[t, begin ... end) of the inputs [first, last) of w, both multiples of 32, for `rows` rows of x
template <Format kFormat>
inline void product(
    const IntegerBlocks<kFormat>& w, int64_t first, int64_t last, const Rounded* x, int64_t x_stride, int64_t rows,
    int64_t begin, int64_t end, float* y, int64_t y_stride, const uint8_t* then) {
  using W = IntegerBlocks<kFormat>;
  const int64_t width = rows < 8 ? std::max<int64_t>(1, end - begin) : 512;
  for (int64_t left = begin; left < end; left += width) {
    const int64_t right = std::min(end, left + width);
    const uint8_t* next = then;
    if (right < end) next = w.data + W::bytes(first, w.N) + width * W::kColumn;
    for (int64_t k = first; k < last; k += W::kChunk)
      add_columns(w, chunk_of(w, k, first, last, next), x, x_stride, rows, left, right, y, y_stride);
  }
}
