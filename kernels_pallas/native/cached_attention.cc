// Attention of new tokens over blocks of a KV cache that is written in place, and the best scores of a row.
//
// A cache of latents has no values apart: they are the first numbers of the keys, of one head that all query heads
// share.
#include <limits>
#include <vector>

#include "xla/ffi/api/ffi.h"

#include "few_queries.h"
#include "many_rows.h"
#include "parallel.h"
#include "rows.h"
#include "scratch.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kBlock = 128;  // positions of a block of the cache
constexpr int64_t kKeys = 64;    // of them that are read at a time
static_assert(kBlock % kKeys == 0, "keys that are read at a time lie in one block");

struct Shape {
  int64_t P, C, H, d, e, G, S;  // rows of the step, tokens a row, query heads, dims, key heads, positions of a table
  int64_t value_row;            // numbers from a value of the cache to the next: e, or d where values are part of keys
  int64_t group() const { return H / G; }
  int64_t width() const { return S / kBlock; }  // blocks of a table
};

// The keys or the values of one row and key head. The cache is [blocks, G, kBlock, row].
template <class T>
struct Head {
  T* first;                // this head in block 0
  int64_t block_elements;  // of all heads of a block
  int64_t row;             // numbers from a position to the next
  const int32_t* table;    // the row's blocks
  T* at(int64_t position) const {
    return first + table[position / kBlock] * block_elements + position % kBlock * row;
  }
};

// What the new tokens of one row have to do with one key head. Query i is that of a token and of a head of the group.
// T: of queries and results. S: of the cache, T or e4m3.
template <class T, class S>
struct HeadOfRow {
  Shape s;
  const T *q, *k_new, *v_new;  // of the first token
  const int32_t* positions;
  const float* sinks;          // of the group's heads, or null
  Head<S> keys, values;
  T* out;

  int64_t queries() const { return s.C * s.group(); }
  int64_t place(int64_t i) const { return i / s.group() * s.H + i % s.group(); }  // among the tokens' heads
  int32_t position(int64_t i) const { return positions[i / s.group()]; }
};

template <class T, class S>
struct Call {
  Shape s;
  const T *q, *k, *v;
  const int32_t *tables, *positions;  // tables: [P, blocks of a table]
  int64_t window;  // negative: none
  const float* sinks;
  float scale;
  T* out;
  S *k_cache, *v_cache;  // v_cache: k_cache where values are part of keys

  int64_t heads() const { return s.P * s.G; }
  HeadOfRow<T, S> head(int64_t i) const {
    const int64_t p = i / s.G, g = i % s.G, token = p * s.C, first = token * s.H + g * s.group();
    const int32_t* table = tables + p * s.width();
    return {s,
            q + first * s.d,
            k + (token * s.G + g) * s.d,
            v + (token * s.G + g) * s.e,
            positions + token,
            sinks ? sinks + g * s.group() : nullptr,
            {k_cache + g * kBlock * s.d, s.G * kBlock * s.d, s.d, table},
            {v_cache + g * kBlock * s.value_row, s.G * kBlock * s.value_row, s.value_row, table},
            out + first * s.e};
  }
};

template <class T, class S>
void put_all(const T* from, int64_t count, S* to) {
  if constexpr (std::is_same_v<T, S>)
    std::memcpy(to, from, count * sizeof(T));
  else
    for (int64_t n = 0; n < count; n++) to[n] = S::round(from[n]);
}

// Writes the keys and values of the new tokens into the cache; returns the positions that the row has.
template <class T, class S>
int64_t write(const HeadOfRow<T, S>& h) {
  const Shape& s = h.s;
  int64_t longest = 0;
  for (int64_t c = 0; c < s.C; c++) {
    const int64_t at = h.positions[c];
    if (at >= s.S) continue;
    put_all(h.k_new + c * s.G * s.d, s.d, h.keys.at(at));
    if (s.value_row == s.e) put_all(h.v_new + c * s.G * s.e, s.e, h.values.at(at));
    longest = std::max(longest, at + 1);
  }
  return longest;
}

constexpr int64_t kFewTokens = 32;
constexpr int64_t kFewHeads = 8;  // of a group, at most, for `FewQueries`
constexpr int64_t kSplit = 512;  // keys of a part that is a task by itself where tasks are few
constexpr int64_t kFewQueries = 64, kManyQueries = 128, kManyTokens = 64;  // of a task
constexpr float kNone = -1e30f;  // of what is not seen: a number, so that differences are

int64_t in_lanes(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Running softmax of some queries: their largest scores, sums of weights, and sums of weights times values, a row each.
struct Softmax {
  int64_t count, width, row;
  float *top, *total, *sums;
  static int64_t size(int64_t count, int64_t e) { return 2 * in_lanes(count) + count * (in_lanes(e) + kPad); }
  Softmax(float* memory, int64_t count, int64_t e)
      : count(count), width(in_lanes(count)), row(in_lanes(e) + kPad), top(memory), total(top + width),
        sums(total + width) {}

  void clear() {
    std::fill(top, top + width, kNone);
    std::fill(total, total + width, 0.0f);
    std::fill(sums, sums + count * row, 0.0f);
  }

  void add(const Softmax& other) {
    for (int64_t i = 0; i < count; i++) {
      const float most = std::max(top[i], other.top[i]);
      const Floats mine = exp(splat(top[i] - most)), theirs = exp(splat(other.top[i] - most));
      top[i] = most;
      total[i] = total[i] * mine[0] + other.total[i] * theirs[0];
      float *to = sums + i * row, *from = other.sums + i * row;
      for (int64_t n = 0; n < row; n += kLanes)
        store(to + n, load<Floats>(to + n) * mine + load<Floats>(from + n) * theirs);
    }
  }
};

// Writes the results of the queries from `begin` on; sinks, which have no value, take part here.
template <class T, class S>
void finish(const HeadOfRow<T, S>& h, int64_t begin, const Softmax& from) {
  for (int64_t i = 0; i < from.count; i++) {
    T* to = h.out + h.place(begin + i) * h.s.e;
    float part = 0;  // of padding
    if (h.position(begin + i) < h.s.S) {
      const float sink = h.sinks ? h.sinks[(begin + i) % h.s.group()] : kNone, most = std::max(sink, from.top[i]);
      const float mine = exp(splat(from.top[i] - most))[0], its = h.sinks ? exp(splat(sink - most))[0] : 0;
      part = mine / (from.total[i] * mine + its);
    }
    const float* sums = from.sums + i * from.row;
    int64_t n = 0;
    for (; n + kLanes <= h.s.e; n += kLanes) put(part == 0 ? splat(0) : load<Floats>(sums + n) * part, to + n);
    for (; n < h.s.e; n++) put(part == 0 ? 0 : sums[n] * part, to + n);
  }
}

// Whether keys and values are multiplied in pairs
template <class T>
bool in_pairs(const Shape& s) {
  return kHasPairs && std::is_same_v<T, bfloat16> && s.d % 2 == 0 && s.e % kLanes == 0;
}

// Queries [begin, begin + count) of a head: scores and weights of some keys are [keys, queries], so that keys are
// read as they lie, once for all queries.
template <class T, class S>
class Queries {
 public:
  Queries(const Call<T, S>& call, const HeadOfRow<T, S>& head, int64_t begin, int64_t count)
      : window_(call.window), scale_(call.scale), h_(head), begin_(begin), count_(count), width_(in_lanes(count)) {
    const Shape& s = h_.s;
    static thread_local Scratch memory;
    memory.begin(width_ * (s.d + 2 * kKeys + 3) + kKeys * (s.d + std::max(s.d, s.value_row)) + kKeys / 2 * kPanel);
    packed_ = memory.take<uint32_t>(width_ * s.d);
    scores_ = memory.take<float>(kKeys * width_);
    weights_ = memory.take<uint32_t>(kKeys * width_);
    last_ = memory.take<int32_t>(width_);
    before_ = memory.take<int32_t>(width_);
    kept_ = memory.take<float>(width_);
    wide_ = memory.take<float>(kKeys * s.d);
    strip_ = memory.take<uint32_t>(kKeys / 2 * kPanel);
    decoded_ = memory.take<T>(kKeys * std::max(s.d, s.value_row));
    first_ = s.S;
    for (int64_t i = 0; i < width_; i++) {
      const int32_t at = i < count_ ? h_.position(begin_ + i) : s.S;
      const bool real = at < s.S;
      last_[i] = real ? at : -1;
      before_[i] = real && window_ >= 0 ? int32_t(at - window_) : -1;
      if (!real) continue;
      first_ = std::min<int64_t>(first_, std::max<int64_t>(0, before_[i] + 1));
      end_ = std::max<int64_t>(end_, at + 1);
    }
    pack();
  }

  // Adds the keys [first, end) that the queries see.
  void attend(int64_t first, int64_t end, Softmax& to) {
    first = std::max(first, first_ / kKeys * kKeys), end = std::min(end, end_);
    for (int64_t key = first; key < end; key += kKeys) {
      const int64_t keys = std::min(kKeys, end - key);
      score(key, keys);
      weigh(key, keys, to);
      add_values(key, keys, to);
    }
  }

 private:
  // Numbers of the cache as T, until the next call
  const T* decoded(const S* from, int64_t count) {
    if constexpr (std::is_same_v<T, S>) {
      return from;
    } else {
      int64_t n = 0;
      for (; n + kLanes <= count; n += kLanes) put(floats(from + n), decoded_ + n);
      for (; n < count; n++) put(float(from[n]), decoded_ + n);
      return decoded_;
    }
  }

  const bfloat16* narrow(const T* x) const { return reinterpret_cast<const bfloat16*>(x); }

  // Queries as columns of a right operand, in pairs or as floats
  void pack() {
    const int64_t d = h_.s.d;
    float* columns = reinterpret_cast<float*>(packed_);
    for (int64_t i = 0; i < width_; i++) {
      const T* q = i < count_ ? h_.q + h_.place(begin_ + i) * d : nullptr;
      if (in_pairs<T>(h_.s))
        for (int64_t p = 0; p < d / 2; p++)
          packed_[Right::at(d / 2, width_, p, i)] = q ? as_words(narrow(q))[p] : 0;
      else
        for (int64_t n = 0; n < d; n++) columns[n * width_ + i] = q ? float(q[n]) : 0;
    }
  }

  void score(int64_t key, int64_t keys) {
    const int64_t d = h_.s.d;
    const S* from = h_.keys.at(key);
    if (in_pairs<T>(h_.s)) {
      const Right columns{packed_, d / 2, width_};
      return multiply(Left{as_words(narrow(decoded(from, keys * d))), d / 2, 1}, keys, columns, d / 2, scores_, width_);
    }
    widen(from, keys * d, wide_);
    const Matrix<float> columns{reinterpret_cast<const float*>(packed_), d, width_};
    add_rows<1, false>(columns, Streams{0, 0, d, true}, wide_, d, keys, 0, width_, scores_, width_);
  }

  // Makes weights of scores; what was added up under a smaller maximum is kept in proportion.
  void weigh(int64_t key, int64_t keys, Softmax& to) {
    for (int64_t i = 0; i < width_; i += kLanes) {
      const Ints last = load<Ints>(last_ + i), before = load<Ints>(before_ + i);
      const Floats top_before = load<Floats>(to.top + i);
      Floats top = top_before, total = splat(0);
      float* score = scores_ + i;
      for (int64_t n = 0; n < keys; n++, score += width_) {
        const Ints at = Ints{} + int32_t(key + n);
        const Ints seen = (at <= last) & (at > before);
        const Floats mine = seen ? load<Floats>(score) * scale_ : splat(kNone);
        top = mine > top ? mine : top;
        store(score, mine);
      }
      score = scores_ + i;
      for (int64_t n = 0; n < keys; n++, score += width_) {
        const Floats w = exp(load<Floats>(score) - top);
        store(score, w);
        total += w;
      }
      const Floats kept = exp(top_before - top);
      store(to.total + i, load<Floats>(to.total + i) * kept + total);
      store(to.top + i, top);
      store(kept_ + i, kept);
    }
    for (int64_t i = 0; i < count_; i++) {
      float* sums = to.sums + i * to.row;
      if (kept_[i] != 1.0f)
        for (int64_t n = 0; n < to.row; n += kLanes) store(sums + n, load<Floats>(sums + n) * kept_[i]);
    }
  }

  void add_values(int64_t key, int64_t keys, Softmax& to) {
    const Shape& s = h_.s;
    const T* from = decoded(h_.values.at(key), keys * s.value_row);
    if (!in_pairs<T>(s)) {
      float* by_query = reinterpret_cast<float*>(weights_);  // [queries, keys]
      for (int64_t n = 0; n < keys; n++)
        for (int64_t i = 0; i < count_; i++) by_query[i * kKeys + n] = scores_[n * width_ + i];
      const Matrix<T> values{from, keys, s.value_row};
      return add_rows<1, false>(
          values, Streams{0, 0, keys, false}, by_query, kKeys, count_, 0, s.e, to.sums, to.row);
    }
    const Matrix<bfloat16> values{narrow(from), keys, s.value_row};
    for (int64_t n = 0; n < keys; n += 2)  // behind the last key is nothing, perhaps not even a number
      for (int64_t i = 0; i < width_; i += kLanes) {
        const Floats second = n + 1 < keys ? load<Floats>(scores_ + (n + 1) * width_ + i) : splat(0);
        store(weights_ + n / 2 * width_ + i, rounded_pairs(load<Floats>(scores_ + n * width_ + i), second));
      }
    for (int64_t column = 0; column < s.e; column += kPanel) {
      const int64_t vectors = std::min(kPanel, s.e - column) / kLanes;
      for (int64_t v = 0; v < vectors; v++) {
        const int64_t at = column + v * kLanes;
        widen_vector(values, 0, keys / 2 * 2, at, strip_ + v * kLanes);
        if (keys % 2)
          store(strip_ + keys / 2 * kPanel + v * kLanes,
                words(load<Halves>(values.data + (keys - 1) * values.N + at)));
      }
      const Panel panel{strip_, kPanel, vectors};
      multiply(Left{weights_, 1, width_}, count_, panel, (keys + 1) / 2, to.sums + column, to.row, true);
    }
  }

  int64_t window_;
  float scale_;
  HeadOfRow<T, S> h_;
  int64_t begin_, count_, width_, first_, end_ = 0;
  uint32_t *packed_, *weights_, *strip_;
  float *scores_, *kept_, *wide_;
  T* decoded_;
  int32_t *last_, *before_;
};

// As `Queries`, for at most kFewHeads: scores and weights are [queries, keys], and vectors are of keys.
template <class T, class S>
class FewQueries {
 public:
  FewQueries(const Call<T, S>& call, const HeadOfRow<T, S>& head, int64_t begin, int64_t count)
      : window_(call.window), scale_(call.scale), h_(head), begin_(begin), count_(count) {
    const int64_t d = h_.s.d;
    static thread_local Scratch memory;
    memory.begin(count * (d + kKeys + 1));
    wide_ = memory.take<float>(count * d);
    weights_ = memory.take<float>(count * kKeys);
    kept_ = memory.take<float>(count);
    first_ = h_.s.S;
    for (int64_t i = 0; i < count; i++) {
      widen(h_.q + h_.place(begin + i) * d, d, wide_ + i * d);
      const int64_t at = h_.position(begin + i);
      if (at >= h_.s.S) continue;  // padding
      first_ = std::min(first_, first_of(at));
      end_ = std::max(end_, at + 1);
    }
  }

  // Adds the keys [first, end) that the queries see.
  void attend(int64_t first, int64_t end, Softmax& to) {
    first = std::max(first, first_ / kKeys * kKeys), end = std::min(end, end_);
    for (int64_t key = first; key < end; key += kKeys) {
      const int64_t keys = std::min(kKeys, end - key);
      const S* next = key + kKeys < end ? h_.keys.at(key + kKeys) : nullptr;
      score(key, keys);
      for (int64_t i = 0; i < count_; i++) weigh(key, keys, i, to);
      add_values(key, keys, next, to);
    }
  }

 private:
  int64_t first_of(int64_t at) const { return window_ < 0 ? 0 : std::max<int64_t>(0, at - window_ + 1); }

  static void fetch(const S* from, int64_t count) {
    const char* bytes = reinterpret_cast<const char*>(from);
    for (int64_t line = 0; line < count * int64_t(sizeof(S)); line += 64) __builtin_prefetch(bytes + line, 0, 2);
  }

  // Of whole vectors: behind the last key is the rest of its block. Values are fetched meanwhile.
  void score(int64_t key, int64_t keys) {
    const Shape& s = h_.s;
    const S *from = h_.keys.at(key), *values = h_.values.at(key);
    for (int64_t n = 0; n < keys; n += kLanes) {
      fetch(values + n * s.value_row, kLanes * s.value_row);
      for (int64_t i = 0; i < count_; i += kMostAtOnce)
        with_queries(count_ - i, [&](auto r) {
          score_lanes<r.value>(from + n * s.d, s.d, wide_ + i * s.d, weights_ + i * kKeys + n, kKeys);
        });
    }
  }

  // Makes weights of query i's scores.
  void weigh(int64_t key, int64_t keys, int64_t i, Softmax& to) {
    const int64_t at = h_.position(begin_ + i);
    const int32_t last = at < h_.s.S ? int32_t(at) : -1, first = int32_t(first_of(at));
    float* scores = weights_ + i * kKeys;
    Ints lane;
    for (int n = 0; n < kLanes; n++) lane[n] = n;
    Floats tops = splat(to.top[i]);
    for (int64_t n = 0; n < keys; n += kLanes) {
      const Ints place = lane + int32_t(key + n);
      const Floats mine = (place <= last) & (place >= first) ? load<Floats>(scores + n) * scale_ : splat(kNone);
      tops = mine > tops ? mine : tops;
      store(scores + n, mine);
    }
    float top = tops[0];
    for (int n = 1; n < kLanes; n++) top = std::max(top, tops[n]);
    Floats totals = splat(0);
    for (int64_t n = 0; n < keys; n += kLanes) {
      const Floats w = exp(load<Floats>(scores + n) - top);
      store(scores + n, w);
      totals += w;
    }
    kept_[i] = exp(splat(to.top[i] - top))[0];
    to.total[i] = to.total[i] * kept_[i] + sum(totals);
    to.top[i] = top;
  }

  void add_values(int64_t key, int64_t keys, const S* next, Softmax& to) {
    const Shape& s = h_.s;
    const int64_t unseen = std::max<int64_t>(0, first_ - key);  // before the window: perhaps not even numbers
    const S* values = h_.values.at(key) + unseen * s.value_row;
    if (next) fetch(next, kKeys * s.d);
    for (int64_t i = 0; i < count_; i += kMostAtOnce)
      with_queries(count_ - i, [&](auto r) {
        add_rows_of_values<r.value>(
            values, s.value_row, keys - unseen, weights_ + i * kKeys + unseen, kKeys, kept_ + i, s.e,
            to.sums + i * to.row, to.row);
      });
  }

  int64_t window_;
  float scale_;
  HeadOfRow<T, S> h_;
  int64_t begin_, count_, first_, end_ = 0;
  float *wide_, *weights_, *kept_;
};

// Runs of at most so many queries of every row and key head
struct Runs {
  int64_t queries, most, per_head;
  Runs(int64_t queries, int64_t most) : queries(queries), most(most), per_head((queries + most - 1) / most) {}
  int64_t head(int64_t i) const { return i / per_head; }
  int64_t begin(int64_t i) const { return i % per_head * most; }
  int64_t count(int64_t i) const { return std::min(most, queries - begin(i)); }
};

// For many tokens: runs of queries are tasks, the last of each row first.
template <class T, class C>
void attend_to_blocks(const Call<T, C>& call) {
  const Shape& s = call.s;
  const Runs runs(s.C * s.group(), std::min(kManyQueries, kManyTokens * s.group()));
  const int64_t count = call.heads() * runs.per_head;
  Phase write_all(int(call.heads()), [&](int i) { write(call.head(i)); });
  Phase attend_all(int(count), [&](int i) {
    static thread_local std::vector<float> memory;
    const int64_t at = i % call.heads() * runs.per_head + runs.per_head - 1 - i / call.heads();
    memory.resize(Softmax::size(runs.count(at), s.e));
    Queries<T, C> queries(call, call.head(runs.head(at)), runs.begin(at), runs.count(at));
    Softmax sums(memory.data(), runs.count(at), s.e);
    sums.clear();
    queries.attend(0, s.S, sums);
    finish(call.head(runs.head(at)), runs.begin(at), sums);
  });
  Pool::get().run({&write_all, &attend_all});
}

// For few tokens: keys are added up in parts, each by itself, so that they can be tasks too. The parts are the same
// whatever other tokens and threads there are.
template <template <class, class> class Some, class T, class C>
void attend_to_parts(const Call<T, C>& call, int64_t most_queries) {
  constexpr int64_t kMostBytes = 64 << 20;  // of parts that wait to be added
  const Shape& s = call.s;
  const Runs runs(s.C * s.group(), most_queries);
  const int64_t count = call.heads() * runs.per_head, size = Softmax::size(std::min(runs.queries, runs.most), s.e);
  int64_t end = 0;
  for (int64_t i = 0; i < s.P * s.C; i++)
    if (call.positions[i] < s.S) end = std::max<int64_t>(end, call.positions[i] + 1);
  const int64_t parts = std::max<int64_t>(1, (end + kSplit - 1) / kSplit);
  const bool apart = parts > 1 && count < 2 * Pool::get().threads() &&
                     count * parts * size * int64_t(sizeof(float)) <= kMostBytes;
  static thread_local std::vector<float> partial;
  if (apart) partial.resize(count * parts * size);
  float* all_parts = partial.data();

  auto part_of = [&](Some<T, C>& queries, int64_t part, Softmax sums) {
    sums.clear();
    queries.attend(part * kSplit, (part + 1) * kSplit, sums);
    return sums;
  };
  auto queries_of = [&](int64_t run) {
    return Some<T, C>(call, call.head(runs.head(run)), runs.begin(run), runs.count(run));
  };
  Phase write_all(int(call.heads()), [&](int i) { write(call.head(i)); });
  Phase attend_parts(apart ? int(count * parts) : 0, [&](int i) {
    Some<T, C> queries = queries_of(i / parts);
    part_of(queries, i % parts, Softmax(all_parts + i * size, runs.count(i / parts), s.e));
  });
  Phase add_parts(int(count), [&](int run) {
    static thread_local std::vector<float> memory;
    memory.resize(2 * size);
    const auto sums_at = [&](float* at) { return Softmax(at, runs.count(run), s.e); };
    Softmax total = sums_at(memory.data());
    total.clear();
    if (apart) {
      for (int64_t part = 0; part < parts; part++) total.add(sums_at(all_parts + (run * parts + part) * size));
    } else {
      Some<T, C> queries = queries_of(run);
      for (int64_t part = 0; part < parts; part++) total.add(part_of(queries, part, sums_at(memory.data() + size)));
    }
    finish(call.head(runs.head(run)), runs.begin(run), total);
  });
  Pool::get().run({&write_all, &attend_parts, &add_parts});
}

template <class T, class C>
void attend(const Call<T, C>& call) {
  const Shape& s = call.s;
  if (in_pairs<T>(s) && s.P * s.C > kFewTokens) return attend_to_blocks(call);
  const bool whole = s.d % kLanes == 0 && s.e % kLanes == 0;  // vectors
  if (whole && s.group() <= kFewHeads) return attend_to_parts<FewQueries>(call, kFewHeads);
  attend_to_parts<Queries>(call, kFewQueries);
}

// What both operations take. tables: [P, S / kBlock]; window: [1], or [0] for none; sinks: [H], or [0].
struct Inputs {
  ffi::AnyBuffer q, k, v;
  ffi::Buffer<ffi::S32> tables, positions, window;
  ffi::Buffer<ffi::F32> sinks;
};

ffi::Error attend(const Inputs& in, ffi::AnyBuffer out, ffi::AnyBuffer k_cache, ffi::AnyBuffer v_cache, float scale) {
  const auto dims = in.q.dimensions();
  const int64_t e = in.v.dimensions()[3], value_row = v_cache.dimensions()[3], S = in.tables.dimensions()[1] * kBlock;
  const Shape s{dims[0], dims[1], dims[2], dims[3], e, in.k.dimensions()[2], S, value_row};
  if (k_cache.dimensions()[2] != kBlock)
    return ffi::Error::InvalidArgument("attention: a block must have 128 positions");
  auto call_with = [&]<class T, class C>(T*, C*) {
    attend(Call<T, C>{
        s, static_cast<const T*>(in.q.untyped_data()), static_cast<const T*>(in.k.untyped_data()),
        static_cast<const T*>(in.v.untyped_data()), in.tables.typed_data(), in.positions.typed_data(),
        in.window.element_count() ? *in.window.typed_data() : -1,
        in.sinks.element_count() ? in.sinks.typed_data() : nullptr, scale, static_cast<T*>(out.untyped_data()),
        static_cast<C*>(k_cache.untyped_data()), static_cast<C*>(v_cache.untyped_data())});
  };
  auto call = [&]<class T>(T* none) {
    if (k_cache.element_type() == ffi::U8)
      call_with(none, (e4m3*)nullptr);
    else
      call_with(none, none);
  };
  if (in.q.element_type() == ffi::F32)
    call((float*)nullptr);
  else if (in.q.element_type() == ffi::BF16)
    call((bfloat16*)nullptr);
  else
    return ffi::Error::InvalidArgument("attention: dtype must be float32 or bfloat16");
  return ffi::Error::Success();
}

// The caches are the results too, in place.
bool is_copied(const ffi::AnyBuffer& in, const ffi::AnyBuffer& out) { return in.untyped_data() != out.untyped_data(); }
ffi::Error copied() { return ffi::Error::Internal("attention: the cache was copied"); }

ffi::Error handle_attention(
    ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::Buffer<ffi::S32> tables,
    ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> window, ffi::Buffer<ffi::F32> sinks, ffi::AnyBuffer k_in,
    ffi::AnyBuffer v_in, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> k_cache,
    ffi::Result<ffi::AnyBuffer> v_cache, float scale) {
  if (is_copied(k_in, *k_cache) || is_copied(v_in, *v_cache)) return copied();
  return attend({q, k, v, tables, positions, window, sinks}, *out, *k_cache, *v_cache, scale);
}

ffi::Error handle_latent_attention(
    ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::Buffer<ffi::S32> tables,
    ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> window, ffi::Buffer<ffi::F32> sinks, ffi::AnyBuffer k_in,
    ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> k_cache, float scale) {
  if (is_copied(k_in, *k_cache)) return copied();
  return attend({q, k, v, tables, positions, window, sinks}, *out, *k_cache, *k_cache, scale);
}

// Columns of the k largest scores of each row, by falling score; ties go to the lowest column.
ffi::Error handle_top_k(ffi::Buffer<ffi::F32> scores, ffi::ResultBuffer<ffi::S32> idx) {
  const int64_t rows = scores.dimensions()[0], columns = scores.dimensions()[1], k = idx->dimensions()[1];
  thread_local std::vector<float> left;
  for (int64_t t = 0; t < rows; t++) {
    left.assign(scores.typed_data() + t * columns, scores.typed_data() + (t + 1) * columns);
    for (int64_t j = 0; j < k; j++) {
      int64_t best = 0;
      for (int64_t n = 1; n < columns; n++)
        if (left[n] > left[best]) best = n;
      idx->typed_data()[t * k + j] = int32_t(best);
      left[best] = -std::numeric_limits<float>::infinity();
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jmoe_attention, handle_attention,
    ffi::Ffi::Bind()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>()
        .Attr<float>("scale"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jmoe_latent_attention, handle_latent_attention,
    ffi::Ffi::Bind()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>()
        .Attr<float>("scale"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jmoe_top_k, handle_top_k, ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::S32>>());
