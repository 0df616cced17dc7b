// Softmax attention of one token, over a cache of keys and values. Keys are taken in blocks of fixed length, each by one task:
// of each query its own largest score, its sum and its sum of values; these are put together in their order. So nothing
// depends on who computed which.
#pragma once

#include "common/maximum.h"
#include "common/memory.h"
#include "common/one_token.h"
#include "runtime/cache.h"
#include "simd/matmul.h"

namespace tarnn {
namespace TARNN_ISA {

constexpr Index keys_a_block = 512;
constexpr Index keys_a_tile = 32;  // so many stay in the first level of cache, for one query of their head after the other
constexpr Index scores_apart = keys_a_block + 16;  // of a query and the next: a power of two would be the same few places of the cache

inline Index key_blocks(Index length) { return (length + keys_a_block - 1) / keys_a_block; }

/// Of one query and one block: the largest score, Σ e^(score − it), and behind these Σ e^(score − it) v.
inline Index partial_size(Index d) { return 2 + whole<float>(d); }

/// Calls f with the format in which a cache keeps its numbers, f(Format()).
template <typename F>
TARNN_INLINE void in_format(const Cache& cache, F f) {
  if (cache.type == Type::bfloat16) f(Bfloat16());
  else f(Same<float>());
}

/// Writes the key (d) and value (e), if it is kept, of one head behind the others.
inline void append(const Cache& cache, Index head, Index d, Index e, const float* key, const float* value) {
  const Index place = head * cache.capacity + cache.length;
  in_format(cache, [&](auto format) {
    using Format = decltype(format);
    using Stored = typename Format::Stored;
    const auto put = [](const float* from, Index n, Stored* to) {
      Index c = 0;
      for (; c + width<float> <= n; c += width<float>) Format::store(to + c, load(from + c));
      if (c == n) return;
      Stored lanes[width<float>];
      Format::store(lanes, read(from + c, n - c));  // and no more: what lies behind may be another thread's
      std::copy_n(lanes, n - c, to + c);
    };
    put(key, d, static_cast<Stored*>(cache.k) + place * d);
    if (cache.v) put(value, e, static_cast<Stored*>(cache.v) + place * e);
  });
}

/// Asks for n numbers, which are wanted soon; not where they are null.
template <typename Stored>
TARNN_INLINE void ask(const Stored* numbers, Index n) {
  constexpr Index a_line = 64 / sizeof(Stored);
  for (Index i = 0; numbers && i < n; i += a_line) __builtin_prefetch(numbers + i, 0, 2);
}

/// q·k, in lanes that are still to be summed.
template <typename Format>
TARNN_INLINE Vec<float> lanes_of_score(const typename Format::Stored* key, const float* q, Index d) {
  Vec<float> sum{};
  Index c = 0;
  for (; c + width<float> <= d; c += width<float>) sum += load(q + c) * Format::load(key + c);
  if (c < d) sum += load(q + c) * load_some<Format>(key + c, 1, d - c);
  return sum;
}

/// Scores of whole vectors of keys that are near, d = V vectors: q stays in registers. The same numbers as below, in half the time.
template <typename Format, int V, typename Stored = typename Format::Stored>
Index score_near_keys(const Stored* keys, const float* q, Index n, float scale, float* scores) {
  constexpr int w = width<float>, d = V * w;
  Vec<float> own[V];
  unrolled<V>([&](auto c) TARNN_LAMBDA { own[c] = load(q + c * w); });
  Index j = 0;
  for (; j + w <= n; j += w) {
    Vec<float> lanes[w]{};
    unrolled<w>([&](auto i) TARNN_LAMBDA {
      unrolled<V>([&](auto c) TARNN_LAMBDA { lanes[i] += own[c] * Format::load(keys + (j + i) * d + c * w); });
    });
    store(scores + j, scale * sums<float>(lanes));
  }
  return j;
}

/// Scores of n keys: q·k/√d. Lanes of as many keys as a vector has are summed at once; a score is the same number
/// either way. Not so of float32 from memory (not `near`), which is read fastest one key after the other. `next` is asked for.
template <typename Format, typename Stored = typename Format::Stored>
void score_keys(const Stored* keys, const Stored* next, bool near, const float* q, Index d, Index n, float* scores) {
  constexpr int w = width<float>;
  const float scale = 1.f / __builtin_sqrtf(static_cast<float>(d));
  Index j = 0;
  if (near && !next && d == 64) j = score_near_keys<Format, 64 / w>(keys, q, n, scale, scores);
  if (near && !next && d == 128) j = score_near_keys<Format, 128 / w>(keys, q, n, scale, scores);
  if (near && !next && d == 256) j = score_near_keys<Format, 256 / w>(keys, q, n, scale, scores);
  for (; j + w <= n && (near || sizeof(Stored) < sizeof(float)); j += w) {
    Vec<float> lanes[w];
    unrolled<w>([&](auto i) TARNN_LAMBDA {
      lanes[i] = lanes_of_score<Format>(keys + (j + i) * d, q, d);
      ask(next ? next + (j + i) * d : nullptr, d);
    });
    store(scores + j, scale * sums<float>(lanes));
  }
  for (; j < n; ++j) {
    scores[j] = scale * sum<float>(lanes_of_score<Format>(keys + j * d, q, d));
    ask(next ? next + j * d : nullptr, d);
  }
}

/// N vectors of channels from `at` on: out += Σ_j weight_j v_j. Values (d) are ldv apart.
template <typename Format, int N, typename Stored = typename Format::Stored>
TARNN_INLINE void sum_columns(const Stored* values, Index ldv, const Stored* next, const float* weights, Index d, Index at, Index n, float* out) {
  Vec<float> sums[N];
  unrolled<N>([&](auto i) TARNN_LAMBDA { sums[i] = load(out + at + i * width<float>); });
  for (Index j = 0; j < n; ++j, values += ldv) {
    unrolled<N>([&](auto i) TARNN_LAMBDA {
      const Index c = at + i * width<float>;
      const bool in_part = N == 1 && d - c < width<float>;
      sums[i] += (in_part ? load_some<Format>(values + c, 1, d - c) : Format::load(values + c)) * weights[j];
    });
    ask(next ? next + j * d + at : nullptr, N * width<float>);
  }
  unrolled<N>([&](auto i) TARNN_LAMBDA { store(out + at + i * width<float>, sums[i]); });
}

template <typename Format, typename Stored = typename Format::Stored>
void sum_values(const Stored* values, Index ldv, const Stored* next, const float* weights, Index d, Index n, float* out) {
  for (Index c = 0; c < d;) {
    if (d - c >= 4 * width<float>) sum_columns<Format, 4>(values, ldv, next, weights, d, c, n, out), c += 4 * width<float>;
    else sum_columns<Format, 1>(values, ldv, next, weights, d, c, n, out), c += width<float>;
  }
}

/// Scores become weights, e^(score − the largest); that and their sum begin `partial`.
inline void weigh(float* scores, Index n, float* partial) {
  for (Index j = n; j < whole<float>(n); ++j) scores[j] = minus_infinity<float>;
  Vec<float> most{};
  most += minus_infinity<float>;
  for (Index j = 0; j < n; j += width<float>) most = load(scores + j) > most ? load(scores + j) : most;
  const float top = partial[0] = largest<float>(most);
  partial[1] = exp_in_units(scores, n, finite(top));
}

// --- many queries at once: prompts
//
// Scores are products of small matrices, too, and yet the numbers that one query alone gets (score_keys), whose lanes are summed along
// d and then onto each other (`across`). So keys are turned: of each channel a row of keys. A lane's channels are summed first, one after the
// other; then the lanes, by the same additions, all of them vertical.

constexpr int key_vectors = 2;  // of keys in a tile of scores
constexpr Index keys_together = key_vectors * width<float>;
constexpr Index values_at_once = 64;
constexpr Index many_queries = 8;  // from so many on, turning keys pays

/// The lane that comes i-th: `across` adds the first two, adds these sums of two and so on.
constexpr Index lane_in_order(Index i) {
  Index lane = 0;
  for (Index bit = 1; bit < width<float>; bit *= 2) lane = 2 * lane + (i & bit ? 1 : 0);
  return lane;
}

/// What a thread has for many queries: some keys, turned; some values; of each query a sum of values.
struct ManyRoom {
  Index ldv, ldo;
  float *keys, *values, *o;
  ManyRoom(Scratch& scratch, Index queries, Index d, Index e)
      : ldv(padded<float>(e)), ldo(whole<float>(e)), keys(scratch.take<float>(keys_together * whole<float>(d))),
        values(scratch.take<float>(values_at_once * ldv)), o(scratch.take<float>(queries * ldo)) {}
};

/// n keys as rows of `keys_together` numbers, zeros behind: channels of the first lane in order, then of the next one.
template <typename Format>
void turn_keys(const typename Format::Stored* keys, Index d, Index n, float* to) {
  constexpr int w = width<float>;
  const Index vectors = whole<float>(d) / w;
  for (Index j = 0; j < keys_together; j += w)
    for (Index c = 0; c < d; c += w) {
      Vec<float> a[w];
      unrolled<w>([&](auto i) TARNN_LAMBDA { a[i] = j + i < n ? read_as<Format>(keys + (j + i) * d + c, d - c) : Vec<float>{}; });
      transpose_lanes<float>(a);
      unrolled<w>([&](auto i) TARNN_LAMBDA { store(to + (lane_in_order(i) * vectors + c / w) * keys_together + j, a[i]); });
    }
}

/// Scores of R queries, of so many vectors each, with turned keys.
template <int R>
void score_tile(Index vectors, const float* keys, const float* q, Index ldq, float scale, float* scores) {
  constexpr int w = width<float>, all = R * key_vectors;
  Vec<float> sums[all], held[4][all];  // held: of 1, 2, 4 … lanes, which wait for as many
  for (Index i = 0; i < w; ++i) {
    unrolled<all>([&](auto x) TARNN_LAMBDA { sums[x] = Vec<float>{}; });
    const float* channel = q + lane_in_order(i);
    for (Index c = 0; c < vectors; ++c, channel += w, keys += keys_together) {
      Vec<float> right[key_vectors];
      unrolled<key_vectors>([&](auto n) TARNN_LAMBDA { right[n] = load(keys + n * w); });
      unrolled<R>([&](auto r) TARNN_LAMBDA {
        const Vec<float> left = broadcast(channel[r * ldq]);
        unrolled<key_vectors>([&](auto n) TARNN_LAMBDA { sums[r * key_vectors + n] += left * right[n]; });
      });
    }
    Index level = 0;
    for (; i >> level & 1; ++level) unrolled<all>([&](auto x) TARNN_LAMBDA { sums[x] += held[level][x]; });
    if (i + 1 < w) unrolled<all>([&](auto x) TARNN_LAMBDA { held[level][x] = sums[x]; });
  }
  unrolled<all>([&](auto x) TARNN_LAMBDA { store(scores + x / key_vectors * scores_apart + x % key_vectors * w, scale * sums[x]); });
}

/// Weighted values of k keys are added to the sums of R queries, N vectors of channels.
template <int R, int N>
void add_values(Index k, Left<float> weights, const float* values, Index ldv, float* o, Index ldo) {
  Vec<float> sums[R * N];
  unrolled<R * N>([&](auto x) TARNN_LAMBDA { sums[x] = load(o + x / N * ldo + x % N * width<float>); });
  accumulate<float, R, N>(k, weights, values, ldv, sums, nullptr);
  unrolled<R * N>([&](auto x) TARNN_LAMBDA { store(o + x / N * ldo + x % N * width<float>, sums[x]); });
}

/// The queries of a key head: `each` of one token, then of the next, each of which has one key more. q: ldq apart, with zeros up to
/// whole vectors. scores: room for a block of each, scores_apart; of each, its part comes to `partial`, ldp apart, ld_token for the next token.
struct Queries {
  Index tokens, each, ldq, ldp, ld_token;
  const float* q;
  float *scores, *partial;
  ManyRoom room;
};

/// One block of keys for the queries of its head; the cache is as it was before the first token's key.
template <typename Format>
class BlockOfKeys {
  using Stored = typename Format::Stored;

 public:
  BlockOfKeys(const Cache& cache, Index head, Index d, Index e, Index block, const Queries& of)
      : of_(of), d_(d), e_(e), queries_(of.tokens * of.each), first_(cache.length + 1 - block * keys_a_block), n_(keys_of(queries_ - 1)),
        capacity_(cache.capacity), ldv_(cache.v ? e : d), alone_(cache.length < keys_a_block), has_values_(cache.v) {
    const Index at = head * cache.capacity + block * keys_a_block;
    keys_ = static_cast<const Stored*>(cache.k) + at * d;
    values_ = cache.v ? static_cast<const Stored*>(cache.v) + at * e : keys_;
  }

  void attend() const {
    if (queries_ >= many_queries) return score_many(), weigh_all(), sum_many();
    score_few(), weigh_all();
    for (Index r = 0; r < queries_; ++r) clear(partial_of(r) + 2, whole<float>(e_));
    sum_few();
  }

 private:
  /// Keys of the block that a query sees; none where it is not positive.
  Index keys_of(Index r) const { return smaller(keys_a_block, first_ + r / of_.each); }
  float* partial_of(Index r) const { return of_.partial + r / of_.each * of_.ld_token + r % of_.each * of_.ldp; }
  float* scores_of(Index r) const { return of_.scores + r * scores_apart; }

  // the processor sees long blocks coming; of one that is the only one, the first query asks for what comes next: its values, the next head's keys
  void score_few() const {
    const Index tile = queries_ > 1 ? keys_a_tile : n_;
    for (Index j = 0; j < n_; j += tile)
      for (Index r = 0; r < queries_; ++r)
        score_keys<Format>(keys_ + j * d_, alone_ && r == 0 && has_values_ ? values_ + j * ldv_ : nullptr, alone_ || r > 0, of_.q + r * of_.ldq,
                           d_, smaller(tile, keys_of(r) - j), scores_of(r) + j);
  }

  void sum_few() const {
    const Index tile = queries_ > 1 ? keys_a_tile : n_;
    const Stored* next = keys_ + capacity_ * d_;
    for (Index j = 0; j < n_; j += tile)
      for (Index r = 0; r < queries_; ++r)
        if (keys_of(r) > j)
          sum_values<Format>(values_ + j * ldv_, ldv_, alone_ && r == 0 ? next + j * d_ : nullptr, scores_of(r) + j, e_,
                             smaller(tile, keys_of(r) - j), partial_of(r) + 2);
  }

  void weigh_all() const {
    for (Index r = 0; r < queries_; ++r)
      if (keys_of(r) > 0) weigh(scores_of(r), keys_of(r), partial_of(r));
  }

  /// Scores of keys that a query does not see are computed along, and not looked at.
  void score_many() const {
    constexpr int most = tile_rows(key_vectors);
    const float scale = 1.f / __builtin_sqrtf(static_cast<float>(d_));
    for (Index j = 0; j < n_; j += keys_together) {
      turn_keys<Format>(keys_ + j * d_, d_, smaller(keys_together, n_ - j), of_.room.keys);
      Index r = j < first_ ? 0 : (j - first_ + 1) * of_.each;  // the first query that sees one of these keys
      for (Index left = (queries_ - r + most - 1) / most, rows; left > 0; r += rows, --left) {
        rows = (queries_ - r + left - 1) / left;
        with_constant<most>(rows, [&](auto R) TARNN_LAMBDA {
          score_tile<R>(whole<float>(d_) / width<float>, of_.room.keys, of_.q + r * of_.ldq, of_.ldq, scale, scores_of(r) + j);
        });
      }
    }
  }

  /// Values are added in the order of their keys, those that all queries of a tile see at once.
  void sum_many() const {
    const ManyRoom& room = of_.room;
    clear(room.o, queries_ * room.ldo);
    const Index wide = room.ldo;
    for (Index j = 0; j < n_; j += values_at_once) {
      const Index there = smaller(values_at_once, n_ - j);
      const float* values = room.values;
      Index ldv = room.ldv;
      if constexpr (std::is_same_v<Stored, float>)
        if (e_ == wide) values = values_ + j * ldv_, ldv = ldv_;
      if (values == room.values) load_rows<Format>(values_ + j * ldv_, ldv_, 1, there, e_, room.values, ldv, AsItIs());
      over_tiles<float>(queries_, wide, [&](Index r, Index c, Index rows, auto N) TARNN_LAMBDA {
        const auto seen = [&](Index i) { return smaller(there, keys_of(i) - j); };
        if (seen(r + rows - 1) <= 0) return;
        const Index all = seen(r) > 0 ? seen(r) : 0;
        with_constant<tile_rows(N)>(rows, [&](auto R) TARNN_LAMBDA {
          add_values<R, N>(all, {scores_of(r) + j, scores_apart, 1}, values + c, ldv, room.o + r * room.ldo + c, room.ldo);
        });
        for (Index i = r; i < r + rows; ++i)
          if (seen(i) > all) sum_columns<Same<float>, N>(values + all * ldv, ldv, static_cast<const float*>(nullptr), scores_of(i) + j + all, wide, c, seen(i) - all, room.o + i * room.ldo);
      });
    }
    for (Index r = 0; r < queries_; ++r)
      if (keys_of(r) > 0) std::copy_n(room.o + r * room.ldo, whole<float>(e_), partial_of(r) + 2);
  }

  const Queries& of_;
  const Index d_, e_, queries_, first_, n_, capacity_, ldv_;
  const bool alone_, has_values_;
  const Stored *keys_, *values_;
};

inline void attend_block(const Cache& cache, Index head, Index d, Index e, Index block, const Queries& of) {
  in_format(cache, [&](auto format) { BlockOfKeys<decltype(format)>(cache, head, d, e, block, of).attend(); });
}

/// o (d) of one query, of its blocks' parts.
inline void join_blocks(const float* partial, Index blocks, Index d, float* o) {
  const Index size = partial_size(d);
  float top = minus_infinity<float>, total = 0;
  for (Index i = 0; i < blocks; ++i) top = partial[i * size] > top ? partial[i * size] : top;
  for (Index c = 0; c < d; ++c) o[c] = 0;
  float nan = 0;
  for (Index i = 0; i < blocks; ++i, partial += size) {
    const float factor = exp_one<float>(partial[0] - finite(top));
    total += factor * partial[1];
    nan += partial[1] - partial[1];
    for (Index c = 0; c < d; ++c) o[c] += factor * partial[2 + c];
  }
  for (Index c = 0; c < d; ++c) o[c] = o[c] / total + nan;
}

}  // namespace TARNN_ISA
}  // namespace tarnn
