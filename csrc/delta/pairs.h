// The delta rule for two tokens at once: what passes over S, and the numbers that make one pass of two tokens do.
//
//     x_c = k_cᵀ a_c S      δ₁ = β₁ (v₁ − x₁)      δ₂ = β₂ (v₂ − x₂ − (k₂ᵀ e₂ k₁) δ₁)          a₁ = e₁,  a₂ = e₁e₂,  e = e^g
//     o₁ = q₁ᵀ a₁ S + (q₁ᵀk₁) δ₁               o₂ = q₂ᵀ a₂ S + (q₂ᵀ e₂ k₁) δ₁ + (q₂ᵀk₂) δ₂
//     S ← a₂ S + e₂ k₁ δ₁ᵀ + k₂ δ₂ᵀ
//
// All four products with S read the same S, and the next pair's pass adds what this pair writes: a row of S is loaded and stored
// once for two tokens, with 12 multiplications. Every factor is at most 1: no decay is divided by.
//
// Where a token's decay is one number, S is not multiplied by it: S = γ S̃, and what is added to S̃ is divided by γ instead. Only
// when γ has become small are the rows multiplied on their way, and γ is 1 again.
#pragma once

#include "delta/tokens.h"

namespace tarnn {
namespace TARNN_ISA {

constexpr int pair_vectors = 2;  // whose columns of S pass at a time: 12 sums and what enters fit 16 registers
constexpr double least_gamma = 1e-3;

/// What decays do to S on its way: nothing, one number for all of it, or one for each row.
enum class Decay { none, all, rows };

/// What two tokens are multiplied with; see above. read, ask: of qᵀS̃ and kᵀS̃; by: S̃, before what enters.
template <typename T>
struct Pair {
  T beta[2], read[2], ask[2], enter[2], k2k1, q1k1, q2k1, q2k2, by;
};

/// The rows of k and q that pass over N vectors' columns of S: those that enter, from the pair before, and those that read.
template <typename T>
struct PairRows {
  const T *enter[2], *k[2], *q[2], *keep;
};

/// A pass. S: d rows, N vectors apart.
template <int N, bool enters, bool reads, Decay decay, typename T>
TARNN_INLINE void pass_pair(T* S, Index d, const PairRows<T>& at, T by, const Vec<T> (&delta)[2 * N], Vec<T> (&x)[2 * N], Vec<T> (&o)[2 * N]) {
  const T *e0 = at.enter[0], *e1 = at.enter[1], *k0 = at.k[0], *k1 = at.k[1], *q0 = at.q[0], *q1 = at.q[1], *keep = at.keep;
  unrolled<2 * N>([&](auto i) TARNN_LAMBDA { x[i] = o[i] = Vec<T>{}; });
  const auto row = [&](Index i) TARNN_LAMBDA {
    T* to = S + i * (N * width<T>);
    Vec<T> s[N];
    unrolled<N>([&](auto n) TARNN_LAMBDA {
      s[n] = load(to + n * width<T>);
      if constexpr (decay == Decay::all) s[n] *= by;
      if constexpr (decay == Decay::rows) s[n] *= keep[i];
    });
    if constexpr (enters) {
      const Vec<T> a = broadcast<T>(e0[i]), b = broadcast<T>(e1[i]);
      unrolled<N>([&](auto n) TARNN_LAMBDA { s[n] += a * delta[n]; });
      unrolled<N>([&](auto n) TARNN_LAMBDA { s[n] += b * delta[N + n]; });
    }
    unrolled<N>([&](auto n) TARNN_LAMBDA { store(to + n * width<T>, s[n]); });
    if constexpr (reads) {
      unrolled<N>([&](auto n) TARNN_LAMBDA { x[n] += broadcast<T>(k0[i]) * s[n]; });
      unrolled<N>([&](auto n) TARNN_LAMBDA { x[N + n] += broadcast<T>(k1[i]) * s[n]; });
      unrolled<N>([&](auto n) TARNN_LAMBDA { o[n] += broadcast<T>(q0[i]) * s[n]; });
      unrolled<N>([&](auto n) TARNN_LAMBDA { o[N + n] += broadcast<T>(q1[i]) * s[n]; });
    }
  };
  Index i = 0;
  for (; i + 2 <= d; i += 2) row(i), row(i + 1);
  if (i < d) row(i);
}

/// From kᵀS̃ and qᵀS̃ to δ and o; delta: as it enters S̃.
template <int N, typename T>
TARNN_INLINE void solve_pair(const Pair<T>& p, const T* const (&v)[2], Vec<T> (&x)[2 * N], Vec<T> (&o)[2 * N], Vec<T> (&delta)[2 * N],
                             T* const (&to)[2]) {
  unrolled<N>([&](auto n) TARNN_LAMBDA {
    constexpr Index w = width<T>;
    const Vec<T> first = load(v[0] + n * w) * p.beta[0] - x[n] * p.ask[0];
    const Vec<T> second = (load(v[1] + n * w) * p.beta[1] - x[N + n] * p.ask[1]) - first * p.k2k1;
    delta[n] = first * p.enter[0];
    delta[N + n] = second * p.enter[1];
    store(to[0] + n * w, o[n] * p.read[0] + first * p.q1k1);
    store(to[1] + n * w, (o[N + n] * p.read[1] + first * p.q2k1) + second * p.q2k2);
  });
}

}  // namespace TARNN_ISA
}  // namespace tarnn
