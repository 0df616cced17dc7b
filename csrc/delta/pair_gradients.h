// The gradients of keys and queries by the pairs of tokens within a chunk, and of the decays between them.
//
//     dQ_i = Σ_j dP_ij E_ij K_j      dK_i = Σ_j dA_ij E_ij K_j + Σ_l E_li (dA_li K_l + dP_li Q_l)
//     dg_l = Σ_{j<l≤i} (dA_ij A_ij + dP_ij P_ij), channel by channel where there are such
#pragma once

#include "delta/chunk.h"

namespace tarnn {
namespace TARNN_ISA {

/// One decay per token. to: dK, then dQ; dA and dP are multiplied by E. flow (c): added to, or null.
template <typename T>
void pair_gradients(const DeltaProblem& p, const Chunk<T>& c, T* dA, T* dP, T* to, T* flow) {
  const Index rows = c.rows, ld = c.ldc, ldd = c.ldd;
  for (Index i = 0; i < rows; ++i) {
    T crosses = 0;
    const T *a = dA + i * ld, *b = dP + i * ld;
    for (Index j = 0; flow && j < i; ++j) {
      crosses += a[j] * c.A[i * ld + j] + b[j] * c.P[i * ld + j];
      flow[j + 1] += crosses;
    }
  }
  weigh_triangle(c, 0, dA);
  weigh_triangle(c, 1, dP);
  matmul<Part::lower_left>(rows, p.d, rows, Left<T>{dA, ld, 1}, c.kq, ldd, to, ldd, false);
  matmul<Part::lower_left>(rows, p.d, rows, Left<T>{dP, ld, 1}, c.kq, ldd, to + rows * ldd, ldd, false);
  matmul<Part::upper_left>(rows, p.d, rows, Left<T>{dA, 1, ld}, c.kq, ldd, to, ldd, true);
  matmul<Part::upper_left>(rows, p.d, rows, Left<T>{dP, 1, ld}, c.q(), ldd, to, ldd, true);
}

/// A decay per channel, a vector of channels at a time. terms: one vector per token; flow (c × d): added to, or null.
template <typename T>
void pair_gradients_by_channels(const DeltaProblem& p, const Chunk<T>& c, const T* dA, const T* dP, T* to, T* terms, T* flow) {
  constexpr Index w = width<T>;
  const Index rows = c.rows, ld = c.ldd;
  const T *k = c.kq, *q = c.q();
  T *grad_k = to, *grad_q = to + rows * ld;
  for (Index x = 0; x < p.d; x += w) {
    for (Index i = 0; i < rows; ++i) {
      const Vec<T> own_k = load(k + i * ld + x), own_q = load(q + i * ld + x), itself = broadcast<T>(dP[i * c.ldc + i]);
      Vec<T> by_k{}, by_q = itself * own_k, fade = broadcast<T>(T(1));
      for (Index j = i; j-- > 0;) {
        const T a = dA[i * c.ldc + j], b = dP[i * c.ldc + j];
        fade *= load(c.decay + (j + 1) * ld + x);
        const Vec<T> key = load(k + j * ld + x), faded = key * fade, back = (own_k * a + own_q * b) * fade;
        by_k += faded * a;
        by_q += faded * b;
        store(grad_k + j * ld + x, load(grad_k + j * ld + x) + back);
        store(terms + j * w, back * key);
      }
      store(grad_k + i * ld + x, by_k + itself * own_q);
      store(grad_q + i * ld + x, by_q);
      Vec<T> crosses{};
      for (Index j = 0; flow && j < i; ++j) {
        crosses += load(terms + j * w);
        T* at = flow + (j + 1) * ld + x;
        store(at, load(at) + crosses);
      }
    }
  }
}

}  // namespace TARNN_ISA
}  // namespace tarnn
