// Queries, keys and the numbers of tokens as the delta rule's kernels read them: tiles in the wide type, masked and normalised.
#pragma once

#include <cmath>

#include "common/memory.h"
#include "delta/problem.h"
#include "simd/tiles.h"

namespace tarnn {
namespace TARNN_ISA {

/// One output head of one sequence: where its tensors are.
struct DeltaHead {
  Index row, sequence, begin, end;  // positions of the row
  Index o, q, k, v;                 // heads; v is that of β, decays and states too
  DeltaHead(const DeltaProblem& p, Index sequence, Index head)
      : row(p.bounds ? 0 : sequence), sequence(sequence), begin(p.bounds ? p.bounds[sequence] : 0),
        end(p.bounds ? p.bounds[sequence + 1] : p.t), o(head), q(head / p.q_share), k(head / p.k_share), v(head / p.v_share) {}
  /// Whether it is the one, of several that share a state, which writes it: the last, when all have read what was before.
  bool writes_state(const DeltaProblem& p) const { return o % p.v_share == p.v_share - 1; }
};

/// How many of `count` heads, or groups of such, one task goes through side by side, a few tokens of each after the other. Where heads
/// lie side by side in memory, as in (b, t, h·d), one head's rows are a few cache lines of every row of the tensor, and each page is
/// looked up once for every head; so a task takes several, as many as their states (of so many bytes) leave room in the cache, if that
/// makes no thread wait longer for another. It changes no bit.
inline Index heads_at_once(const DeltaProblem& p, Index count, Index bytes) {
  constexpr Index most_bytes = 5 << 16;
  const auto rounds = [&](Index heads) {  // that the slowest thread is busy, in heads
    return (p.sequences * ((count + heads - 1) / heads) + p.threads - 1) / p.threads * heads;
  };
  Index heads = p.v.stride[1] < p.v.stride[2] ? smaller(count, most_bytes / (bytes + 1)) : 1;
  while (heads > 1 && rounds(heads) > rounds(1)) --heads;
  return heads < 1 ? 1 : heads;
}

/// This head's matrix among states (sequences, heads, d, e); null if there are none.
template <typename T>
T* state_of(const DeltaProblem& p, const DeltaHead& h, const void* states) {
  const Index at = (h.sequence * (p.heads / p.v_share) + h.v) * p.d * p.e;
  return states ? static_cast<T*>(const_cast<void*>(states)) + at : nullptr;
}

/// Where the state before position `time` is kept for backward, or null.
template <typename T>
T* kept_state_of(const DeltaProblem& p, const DeltaHead& h, Index time) {
  if (!p.kept || time == h.begin || (time - h.begin) % p.segment) return nullptr;
  return static_cast<T*>(p.kept.data) + offset(p.kept, h.row, h.v, time / p.segment - 1);
}

TARNN_INLINE bool is_masked(const DeltaProblem& p, const DeltaHead& h, Index time) {
  return p.mask && !static_cast<const bool*>(p.mask.data)[h.row * p.mask.stride[0] + time * p.mask.stride[2]];
}

/// Σx² of some rows.
template <typename T>
void squares(const T* x, Index ld, Index rows, Index n, T* to) {
  for (Index i = 0; i < rows; ++i) to[i] = dot(x + i * ld, x + i * ld, n);
}

/// factor (rows) of the rows of x: those that normalise them, times `scale`.
template <typename T>
void normalizers(const DeltaProblem& p, const T* x, Index ld, Index rows, T scale, T* factor) {
  if (!p.normalize) return std::fill_n(factor, rows, scale), void();
  squares(x, ld, rows, p.d, factor);
  const T eps = static_cast<T>(p.norm_eps);
  for (Index i = 0; i < rows; ++i) factor[i] = scale / std::sqrt(factor[i] + eps);
}

/// Zeros in rows whose keys are masked.
template <typename T>
void clear_masked(const DeltaProblem& p, const DeltaHead& h, Index time, Index rows, T* x, Index ld, Index n) {
  for (Index i = 0; p.mask && i < rows; ++i)
    if (is_masked(p, h, time + i)) clear(x + i * ld, n);
}

/// Keys of positions time … time + rows − 1, and the factor of each.
template <typename T>
void load_delta_keys(const DeltaProblem& p, const DeltaHead& h, Index time, Index rows, T* to, Index ld, T* factor) {
  load_tile(p.k, h.row, h.k, time, rows, p.d, to, ld);
  clear_masked(p, h, time, rows, to, ld, p.d);
  normalizers(p, to, ld, rows, T(1), factor);
  if (p.normalize) scale_rows(to, ld, rows, p.d, factor);
}

/// The queries, times `scale`.
template <typename T>
void load_delta_queries(const DeltaProblem& p, const DeltaHead& h, Index time, Index rows, T scale, T* to, Index ld, T* factor) {
  load_tile(p.q, h.row, h.q, time, rows, p.d, to, ld);
  normalizers(p, to, ld, rows, scale, factor);
  scale_rows(to, ld, rows, p.d, factor);
}

/// β and e^g of some positions, 0 and 1 where they are masked; decay: whole vectors of numbers, or rows of `ld` channels.
template <typename T>
void load_betas(const DeltaProblem& p, const DeltaHead& h, Index time, Index rows, T* beta) {
  for (Index i = 0; i < rows; ++i) beta[i] = is_masked(p, h, time + i) ? T(0) : element<T>(p.beta, h.row, h.v, time + i);
}

template <typename T>
void load_decays(const DeltaProblem& p, const DeltaHead& h, Index time, Index rows, T* decay, Index ld) {
  if (p.channels) {
    load_tile(p.log_decay, h.row, h.v, time, rows, p.d, decay, ld);
    clear_masked(p, h, time, rows, decay, ld, ld);
    for (Index j = 0; j < rows * ld; j += width<T>) store(decay + j, exp_nonpositive(load(decay + j)));
    return;
  }
  for (Index i = 0; i < whole<T>(rows); ++i)
    decay[i] = i < rows && p.log_decay && !is_masked(p, h, time + i) ? element<T>(p.log_decay, h.row, h.v, time + i) : T(0);
  for (Index i = 0; p.log_decay && i < rows; i += width<T>) store(decay + i, exp_nonpositive(load(decay + i)));
  if (!p.log_decay) std::fill_n(decay, whole<T>(rows), T(1));
}

}  // namespace TARNN_ISA
}  // namespace tarnn
