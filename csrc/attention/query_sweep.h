// The forward sweep of the backward pass: the gradients of queries. It runs the state once more.
#pragma once

#include "attention/decay_flow.h"

namespace tarnn {
namespace TARNN_ISA {

/// grad_phi += A φ(K) where the decay has channels.
template <typename T>
void channel_query_gradients(const Keys<T>& keys, const Sizes<T>& n, const T* A, T* key, T* grad_phi) {
  for (Index j = 0; j < keys.rows; ++j) {
    for (Index x = 0; x < n.f; x += width<T>) store(key + x, load(keys.phi + j * n.ldf + x) * keys.weights.u[j]);
    for (Index i = j; i < keys.rows; ++i) {
      if (i > j) multiply(key, keys.weights.a + i * n.ldf, n.ldf, 1, n.f, key);
      add_rows(grad_phi + i * n.ldf, A + i * n.ldc + j, key, n.ldf, 1, n.f);
    }
  }
}

/// Of one query head in the chunk that `at.keys` holds.
template <typename T>
void query_gradients(const Problem& p, const Sizes<T>& n, const Stretch& s, Index r, Index time, const Head<T>& own,
                     BackwardScratch<T>& at) {
  const Keys<T>& keys = at.keys;
  const Index rows = keys.rows, head = s.head * p.r + r;
  Queries<T>& q = at.queries;
  load_queries(p, n, s, head, time, rows, keys.weights.plain ? nullptr : keys.weights.M, T(0), q, &at.ahead);
  pair_gradients(keys, n, q, at.v_t, at.A, &at.ahead);
  weigh_pairs(keys, n, at.A);
  if (begins_empty(p, s, time)) {
    clear(q.grad_phi, rows * n.ldf);
  } else {
    matmul(rows, n.f, n.e, {q.G, n.lde, 1}, own.S.S, n.ldf, q.grad_phi, n.ldf, false, &at.ahead);
    add_outer(q.grad_phi, q.G_z, own.S.z, n.ldf, rows, n.f);
    weigh_rows(keys.weights, keys.weights.query, n, rows, q.grad_phi);
  }
  if (p.grad_log_decay) keep_flow(p, n, s, time, rows, q);
  if (keys.weights.channels) channel_query_gradients(keys, n, at.A, keys.phi_t, q.grad_phi);
  else matmul<Part::lower_left>(rows, n.f, rows, {at.A, n.ldc, 1}, keys.phi, n.ldf, q.grad_phi, n.ldf, true, &at.ahead);
  store_feature_gradients(p, n, s, p.q, p.grad_q, head, time, rows, q.phi, q.grad_phi, q.x, q.grad_x, own.grad_omega,
                          &at.ahead);
}

/// To R of the stretch's own queries alone, as its beginning sees it: added chunk by chunk, forward.
template <typename T>
void add_own_queries(const Sizes<T>& n, const Head<T>& own, BackwardScratch<T>& at) {
  const Keys<T>& keys = at.keys;
  Queries<T>& q = at.queries;
  weighted_queries(keys, n, q.phi, keys.rows, q.weighted);
  if (!keys.weights.plain) scale_columns(q.weighted, n.ldf, keys.rows, n.f, own.reach);
  matmul(n.e, n.f, keys.rows, {q.G, 1, n.lde}, q.weighted, n.ldf, own.R.S, n.ldf, true, &at.ahead);
  add_rows(own.R.z, q.G_z, q.weighted, n.ldf, keys.rows, n.f);
}

/// A chunk of one head in the bundle.
template <typename T>
void query_chunk(const Problem& p, const Sizes<T>& n, const Bundle& bundle, Index i, Index time, Kept<T>& kept,
                 BackwardScratch<T>& at) {
  const Stretch& s = bundle[i];
  Head<T>& own = at.heads[i];
  const Index chunk = (time - s.begin) / n.c;
  if (T* M = kept.M(s)) M[chunk] = own.M;
  if (T* to = kept.checkpoints(s); to && chunk % chunks_a_checkpoint == 0)
    own.S.copy_to(Transposed<T>(to + chunk / chunks_a_checkpoint * Transposed<T>::block(n), n), n);
  load_keys(p, n, s, time, smaller(n.c, s.end - time), own.M, at.keys, &at.ahead);
  transpose(at.keys.v, at.keys.ldv, at.keys.rows, n.e, at.v_t, n.ldc);
  if (p.grad_log_decay) clear_flow(p, n, s, time, at.keys.rows);
  for (Index r = 0; r < p.r; ++r) {
    const Onward next(p, bundle, i, r, time, time + n.c);
    at.ahead.clear();
    want_queries(p, next, at.ahead);
    next.want_of_queries(p.grad_q, p.d, at.ahead);
    query_gradients(p, n, s, r, time, own, at);
    if (!s.first) add_own_queries(n, own, at);
  }
  if (!s.first && !at.keys.weights.plain)
    for (Index j = 0; j < n.f; ++j) own.reach[j] *= at.keys.weights.keep[p.channels ? j : 0];
  if (time + n.c < s.end) own.S.absorb(at.keys, n, &at.ahead, begins_empty(p, s, time));
  own.M = at.keys.weights.M_out;
}

/// Gradients of the queries of a bundle, from the states that its heads hold.
template <typename T>
void query_sweep(const Problem& p, const Sizes<T>& n, const Bundle& bundle, Kept<T>& kept, BackwardScratch<T>& at) {
  for (Index i = 0; i < bundle.heads; ++i) {
    if (bundle[i].first) continue;
    at.heads[i].R.clear(n);
    for (Index j = 0; j < n.ldf; ++j) at.heads[i].reach[j] = 1;
  }
  for (Index time = bundle[0].begin; time < bundle[0].end; time += n.c)
    for (Index i = 0; i < bundle.heads; ++i) query_chunk(p, n, bundle, i, time, kept, at);
  for (Index i = 0; i < bundle.heads; ++i) {
    if (bundle[i].first) continue;
    const typename Kept<T>::Own to = kept.own(bundle[i]);
    at.heads[i].R.copy_to(to.R, n);
    std::memcpy(to.reach, at.heads[i].reach, static_cast<std::size_t>(n.ldf) * sizeof(T));
  }
}

}  // namespace TARNN_ISA
}  // namespace tarnn
