// The pairs of a chunk of causal attention, P = (φ(Q) φ(K)ᵀ) ⊙ pair, lower triangle: what gradients go by. `weights.h` has the factors.
#pragma once

#include "linear/stretches.h"

namespace tarnn {
namespace TARNN_ISA {

/// P (rows × rows) for a decay with channels: key j, multiplied up position by position, meets query after query.
template <typename T>
void channel_pairs(const Keys<T>& keys, const Sizes<T>& n, const T* phi_q, T* P, T* key) {
  for (Index i = 0; i < keys.rows; ++i) clear(P + i * n.ldc, n.ldc);
  for (Index j = 0; j < keys.rows; ++j) {
    for (Index x = 0; x < n.f; x += width<T>) store(key + x, load(keys.phi + j * n.ldf + x) * keys.weights.u[j]);
    for (Index i = j; i < keys.rows; ++i) {
      if (i > j) multiply(key, keys.weights.a + i * n.ldf, n.ldf, 1, n.f, key);
      P[i * n.ldc + j] = dot(phi_q + i * n.ldf, key, n.f);
    }
  }
}

/// Zero above the diagonal, and times `pair`.
template <typename T>
void mask_pairs(const Keys<T>& keys, const Sizes<T>& n, T* P) {
  const Integers<T> lane = iota<T>();
  const bool weigh = !keys.weights.plain && !keys.weights.channels;
  for (Index i = 0; i < keys.rows; ++i)
    for (Index j = 0; j < keys.rows; j += width<T>) {
      T* at = P + i * n.ldc + j;
      Vec<T> x = lane <= static_cast<int>(i - j) ? load(at) : Vec<T>{};
      store(at, weigh && j <= i ? x * load(keys.weights.pair + i * n.ldc + j) : x);
    }
}

/// φ(Q) φ(K)ᵀ, of which the lower triangle counts.
template <typename T>
void pair_products(const Keys<T>& keys, const Sizes<T>& n, const T* phi_q, T* to, Ahead* ahead) {
  matmul<Part::lower_result>(keys.rows, keys.rows, n.f, {phi_q, n.ldf, 1}, keys.phi_t, n.ldc, to, n.ldc, false, ahead);
}

/// P, masked and weighted. (Where the decay has channels, φ(K)ᵀ is not formed, and its place is used for one key.)
template <typename T>
void pairs(const Keys<T>& keys, const Sizes<T>& n, const T* phi_q, T* P, Ahead* ahead) {
  if (keys.weights.channels) return channel_pairs(keys, n, phi_q, P, keys.phi_t);
  pair_products(keys, n, phi_q, P, ahead);
  mask_pairs(keys, n, P);
}

template <typename T>
void store_denominators(const Problem& p, Index row, Index head, Index time, Index rows, const T* den) {
  if (!p.den) return;
  std::memcpy(static_cast<T*>(p.den.data) + offset(p.den, row, head, time), den, static_cast<std::size_t>(rows) * sizeof(T));
}

}  // namespace TARNN_ISA
}  // namespace tarnn
