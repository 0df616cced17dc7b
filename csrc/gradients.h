// What the backward passes share: the queries of a chunk with the gradients of their outputs, and the way of gradients of
// features to gradients of inputs.
#pragma once

#include "stretches.h"

namespace tarnn {
namespace TARNN_ISA {

/// The queries of a chunk and head, and G' = [G | G_z]: the gradient of numerator and denominator,
/// G = grad_o · factor, G_z = −factor · (grad_o · o).
template <typename T>
struct Queries {
  T *phi, *weighted, *scale;  // (c × f), query ⊙ phi, (c)
  T *G, *G_z;                 // (c × e), (c)
  T *o, *grad_phi, *x;        // (c × e), (c × f), (c × f) x for the derivative of relu²
};

template <typename T>
Queries<T> take_queries(Scratch& scratch, const Problem& p, const Sizes<T>& n, bool plain) {
  Queries<T> q{};
  q.phi = scratch.take<T>(n.rows() * n.ldf);
  q.weighted = plain ? q.phi : scratch.take<T>(n.rows() * n.ldf);
  q.scale = scratch.take<T>(n.ldc);
  q.G = scratch.take<T>(n.rows() * n.lde);
  q.G_z = scratch.take<T>(n.ldc);
  q.o = scratch.take<T>(n.rows() * n.lde);
  q.grad_phi = scratch.take<T>(n.rows() * n.ldf);
  q.x = p.map == Map::squared_relu ? scratch.take<T>(n.rows() * n.ldf) : nullptr;
  return q;
}

/// M: the units of each row's sums, or null where all are in those of `M_all`.
template <typename T>
void load_queries(const Problem& p, const Sizes<T>& n, Index row, Index head, Index time, Index rows, const T* M, T M_all,
                  Queries<T>& q) {
  load_tile(p.q, row, head, time, rows, n.f, q.phi, n.ldf);
  features(p.map, q.phi, n.ldf, rows, n.f, q.scale);
  load_tile(p.grad_o, row, head, time, rows, n.e, q.G, n.lde);
  if (p.normalize) load_tile(p.o, row, head, time, rows, n.e, q.o, n.lde);
  const T* den = static_cast<const T*>(p.den.data) + offset(p.den, row, head, time);
  for (Index i = 0; i < rows; ++i) {
    const T factor = output_factor(p, den[i], M ? M[i] : M_all, p.map == Map::exp ? q.scale[i] : T(0));
    q.G_z[i] = p.normalize ? -factor * dot(q.G + i * n.lde, q.o + i * n.lde, n.e) : T(0);
    for (Index j = 0; j < n.e; j += width<T>) store(q.G + i * n.lde + j, load(q.G + i * n.lde + j) * factor);
  }
}

/// rows of x += a_i · y (f).
template <typename T>
void add_outer(T* x, const T* a, const T* y, Index ld, Index rows, Index n) {
  for (Index i = 0; i < rows; ++i)
    for (Index j = 0; j < n; j += width<T>) store(x + i * ld + j, load(x + i * ld + j) + a[i] * load(y + j));
}

/// y (f) += Σ_i a_i · row i of x.
template <typename T>
void add_rows(T* y, const T* a, const T* x, Index ld, Index rows, Index n) {
  for (Index j = 0; j < n; j += width<T>) {
    Vec<T> total = load(y + j);
    for (Index i = 0; i < rows; ++i) total += a[i] * load(x + i * ld + j);
    store(y + j, total);
  }
}

/// Gradients of features (a tile, overwritten) to those of the inputs, stored in `to`. x: a tile to load inputs into.
template <typename T>
void store_feature_gradients(const Problem& p, const Sizes<T>& n, const View& input, const View& to, Index row, Index head,
                             Index time, Index rows, const T* phi, T* grad, T* x) {
  if (p.map == Map::squared_relu) load_tile(input, row, head, time, rows, n.f, x, n.ldf);
  features_backward(p.map, grad, phi, x, n.ldf, rows, n.f);
  store_tile(grad, n.ldf, to, row, head, time, rows, n.f);
}

/// Gradients of a chunk's keys and values (tiles, overwritten), of its log-weights too; 0 at masked keys.
template <typename T>
void store_key_gradients(const Problem& p, const Sizes<T>& n, const Stretch& s, Index time, const Keys<T>& keys, T* grad_phi,
                         T* grad_v, T* x) {
  if (p.mask)
    for (Index i = 0; i < keys.rows; ++i)
      if (is_masked(p, s.row, time + i)) clear(grad_phi + i * n.ldf, n.ldf), clear(grad_v + i * n.lde, n.lde);
  if (p.grad_key_log_weight) {
    T* w = static_cast<T*>(p.grad_key_log_weight.data) + offset(p.grad_key_log_weight, s.row, s.head, time);
    for (Index i = 0; i < keys.rows; ++i)
      w[i * p.grad_key_log_weight.stride[2]] = dot(keys.phi + i * n.ldf, grad_phi + i * n.ldf, n.f);
  }
  store_feature_gradients(p, n, p.k, p.grad_k, s.row, s.head, time, keys.rows, keys.phi, grad_phi, x);
  store_tile(grad_v, n.lde, p.grad_v, s.row, s.head, time, keys.rows, n.e);
}

/// Sᵀ (e × f) of a state's S (f × e), with zeros behind each row.
template <typename T>
void transpose_state(const Sizes<T>& n, T* S, T* S_t) {
  clear(S + n.f * n.lde, (n.f_rows() - n.f) * n.lde);
  transpose(S, n.lde, n.f, n.e, S_t, n.ldf);
}

}  // namespace TARNN_ISA
}  // namespace tarnn
