// Softmax attention of one token, over a cache of keys and values. Keys are taken in blocks of fixed length, each by one task:
// of each query its own largest score, its sum and its sum of values; these are put together in their order. So nothing
// depends on who computed which.
#pragma once

#include "common/maximum.h"
#include "common/memory.h"
#include "common/one_token.h"
#include "runtime/cache.h"

namespace tarnn {
namespace TARNN_ISA {

constexpr Index keys_a_block = 512;
constexpr Index keys_a_tile = 32;  // so many stay in the first level of cache, for one query of their head after the other

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

/// The queries of a key head: `each` of one token, then of the next, each of which has one key more. q: ldq apart, with zeros up to
/// whole vectors. scores: room for a block of each; of each, its part comes to `partial`, ldp apart, ld_token for the next token.
struct Queries {
  Index tokens, each, ldq, ldp, ld_token;
  const float* q;
  float *scores, *partial;
};

/// One block of keys for the queries of its head; the cache is as it was before the first token's key.
template <typename Format>
void attend_block_in(const Cache& cache, Index head, Index d, Index e, Index block, const Queries& of) {
  using Stored = typename Format::Stored;
  const Index queries = of.tokens * of.each, begin = block * keys_a_block;
  const auto keys_of = [&](Index r) { return smaller(keys_a_block, cache.length + 1 + r / of.each - begin); };
  const auto partial_of = [&](Index r) { return of.partial + r / of.each * of.ld_token + r % of.each * of.ldp; };
  const Index n = keys_of(queries - 1), tile = queries > 1 ? keys_a_tile : n;
  const Index at = head * cache.capacity + begin;
  const Index ldv = cache.v ? e : d;
  const Stored *keys = static_cast<const Stored*>(cache.k) + at * d, *values = cache.v ? static_cast<const Stored*>(cache.v) + at * e : keys;
  // the processor sees long blocks coming; of short ones, the first asks for what comes next: its values, the next head's keys
  const bool asks = cache.length < keys_a_block;
  for (Index j = 0; j < n; j += tile)
    for (Index r = 0; r < queries; ++r)
      score_keys<Format>(keys + j * d, asks && r == 0 && cache.v ? values + j * ldv : nullptr, asks || r > 0, of.q + r * of.ldq,
                         d, smaller(tile, keys_of(r) - j), of.scores + r * keys_a_block + j);
  for (Index r = 0; r < queries; ++r) {
    if (keys_of(r) <= 0) continue;
    weigh(of.scores + r * keys_a_block, keys_of(r), partial_of(r));
    clear(partial_of(r) + 2, whole<float>(e));
  }
  const Stored* next = keys + cache.capacity * d;
  for (Index j = 0; j < n; j += tile)
    for (Index r = 0; r < queries; ++r)
      if (keys_of(r) > j)
        sum_values<Format>(values + j * ldv, ldv, asks && r == 0 ? next + j * d : nullptr, of.scores + r * keys_a_block + j, e,
                           smaller(tile, keys_of(r) - j), partial_of(r) + 2);
}

inline void attend_block(const Cache& cache, Index head, Index d, Index e, Index block, const Queries& of) {
  in_format(cache, [&](auto format) { attend_block_in<decltype(format)>(cache, head, d, e, block, of); });
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
