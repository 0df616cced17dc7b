// The reverse sweep of the backward pass: the gradients of keys and values. It runs R, the gradient of the state.
#pragma once

#include "attention/decay_flow.h"

namespace tarnn {
namespace TARNN_ISA {

/// grad_phi += Aᵀ φ(Q) where the decay has channels.
template <typename T>
void channel_key_gradients(const Keys<T>& keys, const Sizes<T>& n, const T* A, const T* phi_q, T* grad_phi) {
  for (Index j = 0; j < keys.rows; ++j)
    for (Index x = 0; x < n.f; x += width<T>) {
      Vec<T> reach = broadcast<T>(keys.weights.u[j]), total = load(grad_phi + j * n.ldf + x);
      for (Index i = j; i < keys.rows; ++i) {
        if (i > j) reach *= load(keys.weights.a + i * n.ldf + x);
        total += load(phi_q + i * n.ldf + x) * reach * A[i * n.ldc + j];
      }
      store(grad_phi + j * n.ldf + x, total);
    }
}

/// What one query head adds to the gradients of the chunk's keys and values, and to R.
template <typename T>
void add_query_head(const Problem& p, const Sizes<T>& n, const Stretch& s, Index r, Index time, const Transposed<T>& R,
                    BackwardScratch<T>& at) {
  const Keys<T>& keys = at.keys;
  const Index rows = keys.rows;
  Queries<T>& q = at.queries;
  load_queries(p, n, s, s.head * p.r + r, time, rows, keys.weights.plain ? nullptr : keys.weights.M, T(0), q, &at.ahead);
  pairs(keys, n, q.phi, at.P, &at.ahead);
  pair_gradients(keys, n, q, at.v_t, at.A, &at.ahead);
  if (p.grad_log_decay && !p.channels) add_pair_flow(n, rows, at.A, at.P, at.flow);
  if (p.grad_log_decay && p.channels) add_channel_flow(keys, n, at.A, q.phi, at.terms, at.flow);
  weigh_pairs(keys, n, at.A);
  if (p.channels) channel_key_gradients(keys, n, at.A, q.phi, at.grad_phi);
  else matmul<Part::upper_left>(rows, n.f, rows, {at.A, 1, n.ldc}, q.phi, n.ldf, at.grad_phi, n.ldf, true, &at.ahead);
  matmul<Part::lower_right>(n.e, rows, rows, {q.G, 1, n.lde}, at.P, n.ldc, at.grad_v_t, n.ldc, true, &at.ahead);
  if (time == s.begin && !(s.first && p.grad_before.z)) return;  // nobody reads R any more
  const T* phi = weighted_queries(keys, n, q.phi, rows, q.weighted);
  matmul(n.e, n.f, rows, {q.G, 1, n.lde}, phi, n.ldf, R.S, n.ldf, true, &at.ahead);
  add_rows(R.z, q.G_z, phi, n.ldf, rows, n.f);
}

/// Asks for what comes next, and for the place of the gradients of the keys that are new then.
inline void want_keys_and_queries(const Problem& p, const Onward& next, Ahead& ahead) {
  ahead.clear();
  want_queries(p, next, ahead);
  next.want_of_keys(p.grad_k, p.d, ahead);
  next.want_of_keys(p.grad_v, p.e, ahead);
}

/// A chunk of one head in the bundle. M: the maximum before it; state: that before it, where a decay's gradient is wanted.
template <typename T>
void key_chunk(const Problem& p, const Sizes<T>& n, const Bundle& bundle, Index i, Index time, T M, const T* state,
               BackwardScratch<T>& at) {
  const Stretch& s = bundle[i];
  const Transposed<T>& R = at.heads[i].R;
  Keys<T>& keys = at.keys;
  load_keys(p, n, s, time, smaller(n.c, s.end - time), M, keys, &at.ahead);
  const Index rows = keys.rows, before = time - n.c;
  want_keys_and_queries(p, Onward(p, bundle, i, 0, time, before), at.ahead);
  transpose(keys.v, keys.ldv, rows, n.e, at.v_t, n.ldc);
  if (!p.channels) transpose(keys.phi, n.ldf, rows, n.f, keys.phi_t, n.ldc);
  if (!keys.weights.plain) transpose(keys.weighted, n.ldf, rows, n.f, at.weighted_t, n.ldc);
  if (ends_unread(p, s, time + rows)) {
    clear(at.grad_phi, rows * n.ldf);
    clear(at.grad_v_t, n.e * n.ldc);
  } else {
    for (Index i = 0; i < rows; ++i) std::memcpy(at.grad_phi + i * n.ldf, R.z, static_cast<std::size_t>(n.ldf) * sizeof(T));
    matmul(rows, n.f, n.e, {keys.v, keys.ldv, 1}, R.S, n.ldf, at.grad_phi, n.ldf, true, &at.ahead);
    weigh_rows(keys.weights, keys.weights.key, n, rows, at.grad_phi);
    matmul(n.e, rows, n.f, {R.S, n.ldf, 1}, at.weighted_t, n.ldc, at.grad_v_t, n.ldc, false, &at.ahead);
  }
  if (p.grad_log_decay) {
    keep_entered(p, n, Transposed<T>(const_cast<T*>(state), n), R, at);
    clear(at.flow, rows * (p.channels ? n.ldf : 1));
  }
  R.decay(keys.weights, n);
  for (Index r = 0; r < p.r; ++r) {
    if (r > 0) want_keys_and_queries(p, Onward(p, bundle, i, r, time, before), at.ahead);
    add_query_head(p, n, s, r, time, R, at);
  }
  if (p.grad_log_decay) store_decay_gradients(p, n, s, time, at);
  transpose(at.grad_v_t, n.ldc, n.e, rows, at.grad_v, n.lde);
  store_key_gradients(p, n, s, time, keys, at.grad_phi, at.grad_v, at.x, at.queries.grad_x, at.heads[i].grad_omega,
                      &at.ahead);
}

/// Gradients of a bundle's keys and values, from the last chunk to the first; R is that behind it, then that before it.
template <typename T>
void key_sweep(const Problem& p, const Sizes<T>& n, const Bundle& bundle, Kept<T>& kept, BackwardScratch<T>& at) {
  const Index begin = bundle[0].begin, chunks = (bundle[0].end - begin + n.c - 1) / n.c, block = Transposed<T>::block(n);
  Index made_to = chunks;  // the states before chunks from a checkpoint up to this one are there
  for (Index chunk = chunks; chunk-- > 0;)
    for (Index i = 0; i < bundle.heads; ++i) {
      const T *M = kept.M(bundle[i]), *checkpoints = kept.checkpoints(bundle[i]), *state = nullptr;
      if (checkpoints) {  // then the bundle is of one head
        const Index first = chunk / chunks_a_checkpoint * chunks_a_checkpoint;
        if (chunk + 1 == made_to) {
          states_of(p, n, bundle[i], first, chunk + 1, M, checkpoints + first / chunks_a_checkpoint * block, at);
          made_to = first;
        }
        state = at.states + (chunk - first) * block;
      }
      key_chunk(p, n, bundle, i, begin + chunk * n.c, M ? M[chunk] : T(0), state, at);
    }
}

}  // namespace TARNN_ISA
}  // namespace tarnn
