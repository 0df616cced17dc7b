// Softmax attention of one token, over a cache of keys and values. Keys are taken in blocks of fixed length, each by one task:
// with its own largest score, its sum and its sum of values; these are put together in their order. So nothing depends on
// who computed which.
#pragma once

#include "attention/step.h"
#include "model_step/stack.h"

namespace tarnn {
namespace TARNN_ISA {

constexpr Index keys_a_block = 512;

inline Index key_blocks(Index length) { return (length + keys_a_block - 1) / keys_a_block; }

/// Of one head's query and one block: the largest score, Σ e^(score − it), and behind these Σ e^(score − it) v.
inline Index partial_size(Index d) { return 2 + whole<float>(d); }

/// Scores of keys begin … begin + n − 1, (n): q·k/√d, −∞ where masked; `scores` has whole vectors.
inline void score_keys(const Cache& cache, Index row, const float* keys, const float* q, Index d, Index begin, Index n, float* scores) {
  const float scale = 1.f / __builtin_sqrtf(static_cast<float>(d));
  for (Index j = 0; j < n; ++j, keys += d) {
    Vec<float> sum{};
    for (Index c = 0; c < d; c += width<float>) sum += load(q + c) * read(keys + c, d - c);
    const bool masked = cache.mask && !cache.mask[row * cache.capacity + begin + j];
    scores[j] = masked ? minus_infinity<float> : scale * TARNN_ISA::sum<float>(sum);
  }
  for (Index j = n; j < whole<float>(n); ++j) scores[j] = minus_infinity<float>;
}

/// N vectors of channels of Σ_j weight_j v_j.
template <int N>
TARNN_INLINE void sum_values(const float* values, const float* weights, Index d, Index n, Index left, float* out) {
  Vec<float> sums[N];
  unrolled<N>([&](auto i) TARNN_LAMBDA { sums[i] = Vec<float>{}; });
  for (Index j = 0; j < n; ++j, values += d)
    unrolled<N>([&](auto i) TARNN_LAMBDA {
      sums[i] += read(values + i * width<float>, N == 1 ? left : width<float>) * weights[j];
    });
  unrolled<N>([&](auto i) TARNN_LAMBDA { store(out + i * width<float>, sums[i]); });
}

/// One block of keys for one query. q: d channels, zeros up to whole vectors. scores: room for a block.
inline void attend_block(const Cache& cache, Index row, Index head, Index g, Index d, Index length, Index block, const float* q,
                         float* scores, float* partial) {
  const Index begin = block * keys_a_block, n = smaller(keys_a_block, length - begin);
  const Index at = ((row * g + head) * cache.capacity + begin) * d;
  score_keys(cache, row, cache.k + at, q, d, begin, n, scores);
  Vec<float> most{}, total{};
  most += minus_infinity<float>;
  for (Index j = 0; j < n; j += width<float>) most = load(scores + j) > most ? load(scores + j) : most;
  const float top = partial[0] = largest<float>(most);
  for (Index j = 0; j < n; j += width<float>) {
    const Vec<float> weight = exp_nonpositive(load(scores + j) - finite(top));
    store(scores + j, weight);
    total += weight;
  }
  partial[1] = sum<float>(total);
  const float* values = cache.v + at;
  for (Index j = 0; j < d;) {
    const Index left = d - j;
    if (left >= 4 * width<float>) sum_values<4>(values + j, scores, d, n, left, partial + 2 + j), j += 4 * width<float>;
    else sum_values<1>(values + j, scores, d, n, left, partial + 2 + j), j += width<float>;
  }
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
