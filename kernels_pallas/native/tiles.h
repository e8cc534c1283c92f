// Products of many rows in AMX's tiles, where the processor has them and the kernel lets the process use them: sixteen
// pairs of the inner dimension in one instruction, for 32 rows by two vectors of columns.
#pragma once

#include "operands.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define JMOE_TILES

#include <sys/syscall.h>
#include <unistd.h>

#include <vector>

constexpr int64_t kTileSize = 16;             // rows of a tile, and words of each
constexpr int64_t kPassRows = 2 * kTileSize;  // rows that are computed at once

// Asked once: Linux keeps tiles from processes that have not asked.
inline bool has_tiles() {
  constexpr int kAsk = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
  static const bool may = syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
  return may;
}

// What the tiles are, as LDTILECFG reads it. 0 and 1: sums of the first sixteen rows of a pass, 2 and 3: of the rows
// after them; 4 and 5: the left operand's rows; 6 and 7: the right one's pairs, sixteen columns each.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  explicit TileShapes(int64_t pass_rows) {
    const uint8_t first = uint8_t(std::min(kTileSize, pass_rows));
    const uint8_t second = uint8_t(std::max<int64_t>(1, pass_rows - kTileSize));  // unused where the first are all
    for (int t = 0; t < 8; t++) {
      row_bytes[t] = 64;
      rows[t] = t >= 6 ? kTileSize : t == 2 || t == 3 || t == 5 ? second : first;
    }
  }
};

// Compilers do not know which memory an instruction on tiles reads: what was written before is to be there.
inline void memory_is_written() { asm volatile("" : : : "memory"); }

// The first `count` of sixteen words; the others are zero and not read
inline Words load_some(const void* from, int64_t count) {
  const uint32_t mask = count >= kLanes ? 0xffff : count <= 0 ? 0 : (1u << count) - 1;
  return (Words)_mm512_maskz_loadu_epi32(__mmask16(mask), from);
}

// Blocks of `distance` words off the diagonal change places.
template <int distance>
inline void swap_blocks(Words (&x)[16]) {
  const Words lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Words of_two = (lane & distance) != 0 ? lane + (16 - distance) : lane;
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++)
    if (!(i & distance)) {
      const __m512i above = (__m512i)x[i], below = (__m512i)x[i + distance];
      x[i] = (Words)_mm512_permutex2var_epi32(above, (__m512i)of_two, below);
      x[i + distance] = (Words)_mm512_permutex2var_epi32(above, (__m512i)(of_two + distance), below);
    }
}

// Sixteen rows of words become columns.
inline void transpose(Words (&x)[16]) {
  swap_blocks<1>(x), swap_blocks<2>(x), swap_blocks<4>(x), swap_blocks<8>(x);
}

// to [rows, count]: pairs first.. of the rows; up to a multiple of sixteen zeros follow.
inline void lay(const Left& a, int64_t rows, int64_t first, int64_t count, uint32_t* to, int64_t to_row) {
  if (a.step == 1) {
    for (int64_t m = 0; m < rows; m++)
      for (int64_t p = 0; p < count; p += kLanes)
        store(to + m * to_row + p, load_some(a.data + m * a.row + first + p, count - p));
    return;
  }
  for (int64_t m = 0; m < rows; m += kLanes)  // neighbouring words are those of neighbouring rows
    for (int64_t p = 0; p < count; p += kLanes) {
      Words block[16];
#pragma GCC unroll 16
      for (int64_t i = 0; i < 16; i++)
        block[i] = load_some(a.data + (first + p + i) * a.step + m, p + i < count ? rows - m : 0);
      transpose(block);
#pragma GCC unroll 16
      for (int64_t i = 0; i < 16; i++)
        if (m + i < rows) store(to + (m + i) * to_row + p, block[i]);
    }
}

inline void lay(const Rows& a, int64_t rows, int64_t first, int64_t count, uint32_t* to, int64_t to_row) {
  for (int64_t m = 0; m < rows; m++)
    for (int64_t p = 0; p < count; p += kLanes)
      store(to + m * to_row + p, load_some(a.at[m] + a.first + 2 * (first + p), count - p));
}

// Where rows of pairs are, so many words apart; `last`: the last sixteen pairs or fewer, filled up with zeros, and the
// distance of their rows.
struct Tiles {
  const uint32_t* data;
  int64_t row;
  const uint32_t* last;
  int64_t last_row;
  Tiles from(int64_t words) const { return {data + words, row, last + words, last_row}; }
};

// Left operands that already lie in rows of pairs are read where they are.
inline Tiles in_place(const Left& a) { return {a.step == 1 ? a.data : nullptr, a.row, nullptr, 0}; }
inline Tiles in_place(const Rows&) { return {nullptr, 0, nullptr, 0}; }

// sums [16 M rows, N vectors] = a b, or more of it
template <int M, int N>
inline void tile_product(const Tiles& a, const Tiles& b, int64_t pairs, float* sums, int64_t sums_row, bool add) {
  const int64_t stride = 4 * sums_row;
  float* below = sums + kTileSize * sums_row;
  memory_is_written();
  if (add) {
    _tile_loadd(0, sums, stride);
    if constexpr (N == 2) _tile_loadd(1, sums + kLanes, stride);
    if constexpr (M == 2) _tile_loadd(2, below, stride);
    if constexpr (M == 2 && N == 2) _tile_loadd(3, below + kLanes, stride);
  } else {
    _tile_zero(0);
    if constexpr (N == 2) _tile_zero(1);
    if constexpr (M == 2) _tile_zero(2);
    if constexpr (M == 2 && N == 2) _tile_zero(3);
  }
  for (int64_t p = 0; p < pairs; p += kTileSize) {
    const bool whole = p + kTileSize <= pairs;
    const uint32_t *rows = whole ? a.data + p : a.last, *columns = whole ? b.data + p * b.row : b.last;
    const int64_t row = whole ? a.row : a.last_row, column = whole ? b.row : b.last_row;
    _tile_loadd(6, columns, 4 * column);
    if constexpr (N == 2) _tile_loadd(7, columns + kLanes, 4 * column);
    _tile_loadd(4, rows, 4 * row);
    if constexpr (M == 2) _tile_loadd(5, rows + kTileSize * row, 4 * row);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N == 2) _tile_dpbf16ps(1, 4, 7);
    if constexpr (M == 2) _tile_dpbf16ps(2, 5, 6);
    if constexpr (M == 2 && N == 2) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, stride);
  if constexpr (N == 2) _tile_stored(1, sums + kLanes, stride);
  if constexpr (M == 2) _tile_stored(2, below, stride);
  if constexpr (M == 2 && N == 2) _tile_stored(3, below + kLanes, stride);
}

// c [rows, columns], rows c_row floats apart, = a b or, where add, more of it; panel(n): the columns of b from n on.
// Each row is added up alike, whatever others there are.
template <class L, class P>
inline void multiply_in_tiles(
    const L& a, int64_t rows, int64_t columns, const P& panel, int64_t pairs, float* c, int64_t c_row, bool add) {
  static thread_local std::vector<uint32_t> laid;
  alignas(64) uint32_t last_rows[kPassRows * kTileSize], last_columns[kTileSize * kPanel];
  const int64_t whole = pairs / kTileSize * kTileSize, rest = pairs - whole, padded = rest ? whole + kTileSize : whole;
  int64_t shaped_for = 0;
  for (int64_t m = 0; m < rows; m += kPassRows) {
    const int64_t here = std::min(kPassRows, rows - m);
    Tiles left = in_place(a.from(m));
    if (left.data) {
      left.last = last_rows, left.last_row = kTileSize;
      lay(a.from(m), here, whole, rest, last_rows, kTileSize);
    } else {
      if (int64_t(laid.size()) < kPassRows * padded) laid.resize(kPassRows * padded);
      lay(a.from(m), here, 0, pairs, laid.data(), padded);
      left = {laid.data(), padded, laid.data() + whole, padded};
    }
    if (here != shaped_for) {
      const TileShapes shapes(here);
      memory_is_written();
      _tile_loadconfig(&shapes);
      shaped_for = here;
    }
    for (int64_t n = 0; n < columns; n += kPanel) {
      const Panel b = panel(n);
      const Tiles right{b.data, b.row, last_columns, kPanel};
      for (int64_t p = 0; p < (rest ? kTileSize : 0); p++)
        for (int64_t v = 0; v < b.vectors * kLanes; v += kLanes)
          store(last_columns + p * kPanel + v, p < rest ? load<Words>(b.data + (whole + p) * b.row + v) : Words{});
      for (int64_t v = 0; v < b.vectors; v += 2) {
        const bool high = here > kTileSize, wide = v + 1 < b.vectors;
        const auto product = high ? (wide ? tile_product<2, 2> : tile_product<2, 1>)
                                  : (wide ? tile_product<1, 2> : tile_product<1, 1>);
        product(left, right.from(v * kLanes), pairs, c + m * c_row + n + v * kLanes, c_row, add);
      }
    }
  }
  _tile_release();
}
#endif
