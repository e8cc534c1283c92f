// Operands of products of many rows in bfloat16. The left one is read as it lies, the right one in panels of packed
// pairs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vectors.h"

constexpr int64_t kPanelVectors = 4, kPanel = kPanelVectors * kLanes;  // columns of a right operand that lie together

// Left operands: `pair(m, p)` is pair p of row m, `from(m)` the rows from m on.

// Of rows and pairs at even distances, in words.
struct Left {
  const uint32_t* data;
  int64_t row, step;
  uint32_t pair(int64_t m, int64_t p) const { return data[m * row + p * step]; }
  Left from(int64_t m) const { return {data + m * row, row, step}; }
};

// Of rows anywhere, each from number `first` on.
struct Rows {
  const bfloat16* const* at;
  int64_t first;
  uint32_t pair(int64_t m, int64_t p) const {
    uint32_t both;
    std::memcpy(&both, at[m] + first + 2 * p, 4);
    return both;
  }
  Rows from(int64_t m) const { return {at + m, first}; }
};

// Some columns of a right operand: of each pair so many vectors, `row` words apart.
struct Panel {
  const uint32_t* data;
  int64_t row, vectors;
};

// A right operand [pairs, columns], panel by panel; of the last as many columns as there are, a multiple of 16.
// first: the pair at which to begin.
struct Right {
  const uint32_t* data;
  int64_t pairs, columns, first = 0;

  int64_t width(int64_t n) const { return std::min(kPanel, columns - n); }
  Panel panel(int64_t n) const { return {data + n * pairs + first * width(n), width(n), width(n) / kLanes}; }
  // Where in such memory the word of a pair and a column is; the columns after it follow up to a multiple of 16.
  static int64_t at(int64_t pairs, int64_t columns, int64_t pair, int64_t column) {
    const int64_t n = column / kPanel * kPanel;
    return n * pairs + pair * std::min(kPanel, columns - n) + column - n;
  }
};
