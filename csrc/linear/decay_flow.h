// The gradient of a decay at l: what flows from keys before l to queries from l on, in four parts, each a sum of its own:
//
//     Σ_{j<l≤i} A_ij φ(q_i)·φ(k_j) + Σ_{i≥l} y_i + Σ_{j<l} x_j + ⟨keep·S_in, R_out⟩
//     y_i = φ(q_i)·(query ⊙ (…))_i     x_j = φ(k_j)·(key ⊙ (…))_j
//
// term by term, as no difference of larger sums.
#pragma once

#include "linear/backward.h"

namespace tarnn {
namespace TARNN_ISA {

/// y_i of one query head, added to those of the others in `read`.
template <typename T>
void add_read_flow(const Sizes<T>& n, bool channels, Index rows, const Queries<T>& q, T* read) {
  for (Index i = 0; i < rows; ++i) {
    const T *phi = q.phi + i * n.ldf, *grad = q.grad_phi + i * n.ldf;
    if (!channels) read[i] += dot(phi, grad, n.f);
    for (Index j = 0; channels && j < n.f; ++j) read[i * n.ldf + j] += phi[j] * grad[j];
  }
}

/// Adds to flow_l what flows from keys before l to queries from l on within the chunk, Σ_{j<l≤i} A_ij P_ij.
template <typename T>
void add_pair_flow(const Sizes<T>& n, Index rows, const T* A, const T* P, T* flow) {
  for (Index i = 1; i < rows; ++i) {
    T from_before = 0;
    for (Index j = 0; j < i; ++j) {
      from_before += A[i * n.ldc + j] * P[i * n.ldc + j];
      flow[j + 1] += from_before;
    }
  }
}

/// The same where the decay has channels, a vector of them at a time. terms: one vector per key.
template <typename T>
void add_channel_flow(const Keys<T>& keys, const Sizes<T>& n, const T* A, const T* phi_q, T* terms, T* flow) {
  constexpr Index w = width<T>;
  for (Index x = 0; x < n.f; x += w)
    for (Index i = 1; i < keys.rows; ++i) {
      Vec<T> decay = load(phi_q + i * n.ldf + x), from_before{};
      for (Index j = i; j-- > 0;) {
        decay *= load(keys.weights.a + (j + 1) * n.ldf + x);
        store(terms + j * w, decay * (keys.weights.u[j] * A[i * n.ldc + j]) * load(keys.phi + j * n.ldf + x));
      }
      for (Index j = 0; j < i; ++j) {
        from_before += load(terms + j * w);
        T* to = flow + (j + 1) * n.ldf + x;
        store(to, load(to) + from_before);
      }
    }
}

/// Before R passes the chunk: x_j of each key, and, in the last row, ⟨keep·S_in, R_out⟩.
template <typename T>
void keep_entered(const Problem& p, const Sizes<T>& n, const Transposed<T>& S, const Transposed<T>& R, BackwardScratch<T>& at) {
  const Index rows = at.keys.rows;
  if (!p.channels) {
    for (Index j = 0; j < rows; ++j) at.entered[j] = dot(at.keys.phi + j * n.ldf, at.grad_phi + j * n.ldf, n.f);
    T across = dot(S.z, R.z, n.f);
    for (Index i = 0; i < n.e; ++i) across += dot(S.S + i * n.ldf, R.S + i * n.ldf, n.f);
    at.entered[rows] = across * at.keys.weights.keep[0];
    return;
  }
  multiply(at.keys.phi, at.grad_phi, n.ldf, rows, n.f, at.entered);
  for (Index x = 0; x < n.f; x += width<T>) {
    Vec<T> across = load(S.z + x) * load(R.z + x);
    for (Index i = 0; i < n.e; ++i) across += load(S.S + i * n.ldf + x) * load(R.S + i * n.ldf + x);
    store(at.entered + rows * n.ldf + x, across * load(at.keys.weights.keep + x));
  }
}

/// The gradient of a chunk's log-decays: flow within, Σ_{i≥l} y_i, Σ_{j<l} x_j, and across.
/// Sums only grow: none is a difference of larger ones.
template <typename T>
void store_decay_gradients(const Problem& p, const Sizes<T>& n, const Stretch& s, Index time, const BackwardScratch<T>& at) {
  const Index rows = at.keys.rows, width = p.channels ? n.f : 1, ld = p.channels ? n.ldf : 1;
  const View& to = p.grad_log_decay;
  T* grad = static_cast<T*>(to.data) + offset(to, s.row, s.head, time);
  for (Index x = 0; x < width; ++x) {
    T entered = at.entered[rows * ld + x], read = 0;
    for (Index l = 0; l < rows; ++l) {
      at.flow[l * ld + x] += entered;
      entered += at.entered[l * ld + x];
    }
    for (Index l = rows; l-- > 0;) {
      read += at.read[l * ld + x];
      grad[l * to.stride[2] + x] = is_masked(p, s.row, time + l) ? T(0) : at.flow[l * ld + x] + read;
    }
  }
}

}  // namespace TARNN_ISA
}  // namespace tarnn
