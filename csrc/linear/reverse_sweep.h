// The sweep of the causal backward pass, from the last chunk to the first: of each chunk all gradients. It runs R, the gradient
// of the state. The states are made a segment at a time, forward, from the one before it, which the forward pass kept.
#pragma once

#include "linear/decay_flow.h"

namespace tarnn {
namespace TARNN_ISA {

/// grad_phi += A φ(K) where the decay has channels. key: a vector for one key at a time.
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

/// The gradients of one head's queries, from the pairs' (A, none where another head of the task has it) and from S, the state before
/// the chunk.
template <typename T>
void query_gradients(const Problem& p, const Sizes<T>& n, const Stretch& s, Index head, Index time, const Transposed<T>& S, const T* A,
                     T* grad_omega, BackwardScratch<T>& at) {
  const Keys<T>& keys = at.keys;
  Queries<T>& q = at.queries;
  const Index rows = keys.rows;
  if (begins_empty(p, s, time)) {
    clear(q.grad_phi, rows * n.ldf);
  } else {
    matmul(rows, n.f, n.e, {q.G, n.lde, 1}, S.S, n.ldf, q.grad_phi, n.ldf, false, &at.ahead);
    add_outer(q.grad_phi, q.G_z, S.z, n.ldf, rows, n.f);
    if (!keys.weights.plain) weigh_rows(keys.weights, keys.weights.query, n, rows, q.grad_phi, q.grad_phi);
  }
  if (p.grad_log_decay) add_read_flow(n, p.channels, rows, q, at.read);
  if (p.channels) channel_query_gradients(keys, n, at.A, keys.phi_t, q.grad_phi);
  else if (A) matmul<Part::lower_left>(rows, n.f, rows, {A, n.ldc, 1}, keys.phi, n.ldf, q.grad_phi, n.ldf, true, &at.ahead);
  store_feature_gradients(p, n, s, p.q, p.grad_q, head, time, rows, q.phi, q.grad_phi, q.from, q.x, q.grad_x, grad_omega, q.shared, &at.ahead);
}

/// P of a head: from the products that the first head of the task has made for all.
template <typename T>
void shared_pairs(const Problem& p, const Sizes<T>& n, const Stretch& s, BackwardScratch<T>& at) {
  if (s.head % p.together == 0) pair_products(at.keys, n, at.queries.phi, at.products, &at.ahead);
  std::memcpy(at.P, at.products, static_cast<std::size_t>(at.keys.rows * n.ldc) * sizeof(T));
  mask_pairs(at.keys, n, at.P);
}

/// Adds A of a head to those of the task's heads before it; their sum, once it is there.
template <typename T>
const T* summed_pairs(const Problem& p, const Sizes<T>& n, const Stretch& s, BackwardScratch<T>& at) {
  const Index i = s.head % p.together;
  for (Index j = 0; j < at.keys.rows * n.ldc; j += width<T>)
    store(at.A_sum + j, i ? load(at.A_sum + j) + load(at.A + j) : load(at.A + j));
  return i + 1 == p.together ? at.A_sum : nullptr;
}

/// One query head in the chunk that `at.keys` holds: its gradients, and what it adds to those of keys and values, and to R.
template <typename T>
void add_query_head(const Problem& p, const Sizes<T>& n, const Stretch& s, Index r, Index time, const Transposed<T>& S,
                    const Head<T>& own, BackwardScratch<T>& at) {
  const Keys<T>& keys = at.keys;
  const Index rows = keys.rows, head = s.head * p.r + r;
  Queries<T>& q = at.queries;
  load_queries(p, n, s, head, time, rows, keys.weights.M, T(0), q, &at.ahead);
  if (shares_products(p, n)) shared_pairs(p, n, s, at);
  else pairs(keys, n, q.phi, at.P, &at.ahead);
  pair_gradients(keys, n, q, at.v_t, at.A, &at.ahead);
  if (p.grad_log_decay && !p.channels) add_pair_flow(n, rows, at.A, at.P, at.flow);
  if (p.grad_log_decay && p.channels) add_channel_flow(keys, n, at.A, q.phi, at.terms, at.flow);
  weigh_pairs(keys, n, at.A);
  const T* A = shares_products(p, n) ? summed_pairs(p, n, s, at) : at.A;
  if (p.channels) channel_key_gradients(keys, n, at.A, q.phi, at.grad_phi);
  else if (A) matmul<Part::upper_left>(rows, n.f, rows, {A, 1, n.ldc}, q.phi, n.ldf, at.grad_phi, n.ldf, true, &at.ahead);
  matmul<Part::upper_left>(rows, n.e, rows, {at.P, 1, n.ldc}, q.G, n.lde, at.grad_v, n.lde, true, &at.ahead);
  if (time > s.begin || (s.first && p.grad_before.z)) {  // somebody reads R
    const T* phi = weighted_queries(keys, n, q.phi, rows, q.weighted);
    matmul(n.e, n.f, rows, {q.G, 1, n.lde}, phi, n.ldf, own.R.S, n.ldf, true, &at.ahead);
    add_rows(own.R.z, q.G_z, phi, n.ldf, rows, n.f);
  }
  query_gradients(p, n, s, head, time, S, A, own.grad_omega, at);
}

/// Asks for the chunk before this one, whose keys have just been read, or for the keys of the segment before, and for the place
/// of the gradients.
inline void want_before(const Problem& p, const Bundle& bundle, Index i, Index r, Index time, bool begins, Ahead& ahead) {
  const Onward next(p, bundle, i, r, time, time - p.chunk);
  ahead.clear();
  if (begins && next.new_keys) want_keys(p, Onward(p, bundle, i, r, time, time - p.segment), ahead);
  else want_queries(p, next, ahead);
  next.want_of_queries(p.grad_q, p.d, ahead);
  next.want_of_keys(p.grad_k, p.d, ahead);
  next.want_of_keys(p.grad_v, p.e, ahead);
}

/// What R behind a stretch is multiplied with, to be in units of M_out, to which the stretch's own positions lead. It comes in
/// units of the M of joined stretches, where the next one begins; the two differ by roundings.
template <typename T>
T to_own_units(const Problem& p, const Sizes<T>& n, const Stretch& s, const T* slots, T M_out) {
  if (!p.weighted || s.last) return T(1);
  return exp_one<T>(finite(M_out) - finite(slots[s.slot * n.state() + n.f * n.e + n.f]));
}

/// Chunk k of the segment that starts at `begin`, of one head in the bundle. made: features of its keys are there,
/// from when the state behind it was made.
template <typename T>
void reverse_chunk(const Problem& p, const Sizes<T>& n, const Bundle& bundle, Index i, Index begin, Index k, bool made,
                   const T* slots, BackwardScratch<T>& at) {
  const Stretch& s = bundle[i];
  const Head<T>& own = at.heads[i];
  const Transposed<T>& R = own.R;
  Keys<T>& keys = at.keys;
  const Index time = begin + k * n.c;
  load_keys(p, n, s, time, smaller(n.c, s.end - time), own.M[k], keys, &at.ahead, at.memo(n, bundle, i, k, made));
  const Index rows = keys.rows;
  if (time + rows == s.end) R.scale(to_own_units(p, n, s, slots, keys.weights.M_out), n);
  want_before(p, bundle, i, 0, time, k == 0, at.ahead);
  transpose(keys.v, keys.ldv, rows, n.e, at.v_t, n.ldc);
  if (!p.channels) transpose(keys.phi, n.ldf, rows, n.f, keys.phi_t, n.ldc);
  if (!keys.weights.plain) transpose(keys.weighted, n.ldf, rows, n.f, at.weighted_t, n.ldc);
  if (ends_unread(p, s, time + rows)) {
    clear(at.grad_phi, rows * n.ldf);
    clear(at.grad_v, rows * n.lde);
  } else {
    for (Index j = 0; j < rows; ++j) std::memcpy(at.grad_phi + j * n.ldf, R.z, static_cast<std::size_t>(n.ldf) * sizeof(T));
    matmul(rows, n.f, n.e, {keys.v, keys.ldv, 1}, R.S, n.ldf, at.grad_phi, n.ldf, true, &at.ahead);
    if (!keys.weights.plain) weigh_rows(keys.weights, keys.weights.key, n, rows, at.grad_phi, at.grad_phi);
    matmul(n.e, rows, n.f, {R.S, n.ldf, 1}, keys.weights.plain ? keys.phi_t : at.weighted_t, n.ldc, at.grad_v_t, n.ldc, false,
           &at.ahead);
    transpose(at.grad_v_t, n.ldc, n.e, rows, at.grad_v, n.lde);
  }
  if (p.grad_log_decay) {
    const Index channels = p.channels ? n.ldf : 1;
    keep_entered(p, n, own.S[k], R, at);
    clear(at.flow, rows * channels);
    clear(at.read, rows * channels);
  }
  R.decay(keys.weights, n);
  for (Index r = 0; r < p.r; ++r) {
    if (r > 0) want_before(p, bundle, i, r, time, k == 0, at.ahead);
    add_query_head(p, n, s, r, time, own.S[k], own, at);
  }
  if (p.grad_log_decay) store_decay_gradients(p, n, s, time, at);
  store_key_gradients(p, n, s, time, keys, at.grad_phi, at.grad_v, at.x, at.queries.grad_x, own.grad_omega, at.shared, &at.ahead);
}

/// The states before all of a segment's chunks, from the one before the first of them.
template <typename T>
void segment_states(const Problem& p, const Sizes<T>& n, const Bundle& bundle, Index begin, Index chunks,
                    BackwardScratch<T>& at) {
  for (Index k = 0; k + 1 < chunks; ++k)
    for (Index i = 0; i < bundle.heads; ++i) {
      const Index time = begin + k * n.c;
      const Head<T>& own = at.heads[i];
      const Onward next(p, bundle, i, p.r - 1, time, time + n.c);
      load_keys(p, n, bundle[i], time, n.c, own.M[k], at.keys, &at.ahead, at.memo(n, bundle, i, k, false));
      at.ahead.clear();
      want_keys(p, next, at.ahead);
      if (k + 2 == chunks) want_queries(p, next, at.ahead);  // there the way back begins
      const bool empty = begins_empty(p, bundle[i], time);
      if (empty) clear(own.S[k + 1].z, n.ldf);
      else own.S[k].copy_to(own.S[k + 1], n);
      own.S[k + 1].absorb(at.keys, n, &at.ahead, empty);
      own.M[k + 1] = at.keys.weights.M_out;
    }
}

/// All gradients of a bundle, segment by segment; R is that behind it, then that before it. slots: states between stretches.
template <typename T, typename At>
void reverse_sweep(const Problem& p, const Sizes<T>& n, const Bundle& bundle, const T* slots, At& at) {
  const Index first = bundle[0].begin, end = bundle[0].end;
  for (Index begin = first + (end - first - 1) / p.segment * p.segment; begin >= first && begin < end; begin -= p.segment) {
    const Index chunks = (smaller(p.segment, end - begin) + n.c - 1) / n.c;
    for (Index i = 0; i < bundle.heads; ++i) {
      const T* kept = kept_state<T>(p, bundle[i], begin);
      if (kept) read_state(kept, n, at.square);
      else state_before(p, n, bundle[i], slots, at.square);
      if (!begins_empty(p, bundle[i], begin)) at.heads[i].S->from(at.square, n);
      else if (p.grad_log_decay) at.heads[i].S->clear(n);
      *at.heads[i].M = at.square.M;
    }
    segment_states(p, n, bundle, begin, chunks, at);
    for (Index k = chunks; k-- > 0;)
      for (Index i = 0; i < bundle.heads; ++i) reverse_chunk(p, n, bundle, i, begin, k, k + 1 < chunks, slots, at);
  }
}

}  // namespace TARNN_ISA
}  // namespace tarnn
