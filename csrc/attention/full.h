// Attention that sees everything: one state of all keys, which all queries read; forward and backward.
//
//     S = Σ_j e^(w_j − M) φ(k_j) v_jᵀ,  M the largest w_j          o = φ(Q) S · factor
//     dφ(Q) = G Sᵀ + G_z zᵀ      R = φ(Q)ᵀ G      dφ(K) = key ⊙ (V Rᵀ + 1 R_zᵀ)      dV = (key ⊙ φ(K)) R
#pragma once

#include "attention/causal_backward.h"

namespace tarnn {
namespace TARNN_ISA {

/// The state that query stretch s reads: behind the last stretch of its keys.
template <typename T>
const T* whole_state(const Problem& p, const Sizes<T>& n, const T* slots, const Index* last_slot, const Stretch& s) {
  return slots + last_slot[place(p, s)] * n.state();
}

/// Of each sequence and head, the slot of its last stretch of keys.
inline void find_last(const Problem& p, Index* last_slot) {
  for (Index i = 0; i < p.keys.count; ++i)
    if (p.keys.at[i].last) last_slot[place(p, p.keys.at[i])] = p.keys.at[i].slot;
}

template <typename T>
void full_outputs(const Problem& p, const Sizes<T>& n, const Stretch& s, Index head, Index time, CausalScratch<T>& at) {
  const Index rows = smaller(n.c, s.end - time);
  make_features(p, n, s, p.q, head, time, rows, at.keys.x, at.q, at.scale);
  for (Index i = 0; i < rows; ++i) {
    at.den[i] = dot(at.q + i * n.ldf, at.state.z, n.f);
    at.factor[i] = output_factor(p, at.den[i], finite(at.state.M), p.map == Map::exp ? at.scale[i] : T(0));
  }
  store_denominators(p, s.row, head, time, rows, at.den);
  const bool direct = lies_well<T>(p.o, n.e);
  T* o = direct ? static_cast<T*>(p.o.data) + offset(p.o, s.row, head, time) : at.o;
  at.ahead.clear();
  at.ahead.want(p.q, s.row, head, time + n.c, smaller(n.c, s.end - time - n.c), p.d);
  at.ahead.want(p.o, s.row, head, time + n.c, smaller(n.c, s.end - time - n.c), n.e);
  sum_of_products<T>(rows, n.e, {0, {at.q, n.ldf, 1}, at.state.S, n.lde}, {n.f, {at.q, n.ldf, 1}, at.state.S, n.lde},
                     at.factor, o, direct ? n.e : n.lde, &at.ahead);
  if (!direct) store_tile(at.o, n.lde, p.o, s.row, head, time, rows, n.e);
}

template <typename T>
void full_forward(const Problem& p) {
  const Sizes<T> n(p);
  Owned<T> slots(p.keys.slots * n.state());
  Owned<Index> last_slot(p.keys.count);
  find_last(p, last_slot.get());
  states_behind(p, n, p.keys, slots.get());
  parallel(p, p.queries.count, bytes_of<CausalScratch<T>>(p, n), [&](Index i, void* memory) {
    Scratch scratch(memory);
    CausalScratch<T> at(scratch, p, n);
    const Stretch& s = p.queries.at[i];
    read_state(whole_state(p, n, slots.get(), last_slot.get(), s), n, at.state);
    if (s.first) put_state(p, n, s, at.state, p.after);
    for (Index r = 0; r < p.r; ++r)
      for (Index time = s.begin; time < s.end; time += n.c) full_outputs(p, n, s, s.head * p.r + r, time, at);
  });
}

/// Gradients of a stretch's queries; `own` gets R of them alone, transposed.
template <typename T>
void full_query_sweep(const Problem& p, const Sizes<T>& n, const Stretch& s, T M, T* own, BackwardScratch<T>& at) {
  Queries<T>& q = at.queries;
  clear(at.R, n.e * n.ldf);
  clear(at.R_z, n.ldf);
  for (Index r = 0; r < p.r; ++r) {
    const Index head = s.head * p.r + r;
    for (Index time = s.begin; time < s.end; time += n.c) {
      const Index rows = smaller(n.c, s.end - time), next = time + n.c, left = smaller(n.c, s.end - next);
      load_queries(p, n, s, head, time, rows, static_cast<const T*>(nullptr), finite(M), q, &at.ahead);
      at.ahead.clear();
      at.ahead.want(p.q, s.row, head, next, left, p.d);
      at.ahead.want(p.grad_o, s.row, head, next, left, n.e);
      if (p.normalize) at.ahead.want(p.o, s.row, head, next, left, n.e);
      at.ahead.want(p.grad_q, s.row, head, next, left, p.d);
      matmul(rows, n.f, n.e, {q.G, n.lde, 1}, at.S, n.ldf, q.grad_phi, n.ldf, false, &at.ahead);
      add_outer(q.grad_phi, q.G_z, at.z, n.ldf, rows, n.f);
      matmul(n.e, n.f, rows, {q.G, 1, n.lde}, q.phi, n.ldf, at.R, n.ldf, true, &at.ahead);
      add_rows(at.R_z, q.G_z, q.phi, n.ldf, rows, n.f);
      store_feature_gradients(p, n, s, p.q, p.grad_q, head, time, rows, q.phi, q.grad_phi, q.x, q.grad_x, at.grad_omega,
                              &at.ahead);
    }
  }
  std::memcpy(own, at.R, static_cast<std::size_t>(n.e * n.ldf) * sizeof(T));
  std::memcpy(own + n.e * n.ldf, at.R_z, static_cast<std::size_t>(n.ldf) * sizeof(T));
}

template <typename T>
void full_key_sweep(const Problem& p, const Sizes<T>& n, const Stretch& s, T M, BackwardScratch<T>& at) {
  Keys<T>& keys = at.keys;
  for (Index time = s.begin; time < s.end; time += n.c) {
    load_plain_keys(p, n, s, time, smaller(n.c, s.end - time), keys, &at.ahead);
    const Index rows = keys.rows, next = time + n.c, left = smaller(n.c, s.end - next);
    at.ahead.clear();
    want_keys(p, s, next, at.ahead);
    at.ahead.want(p.grad_k, s.row, s.head, next, left, p.d);
    at.ahead.want(p.grad_v, s.row, s.head, next, left, n.e);
    for (Index i = 0; i < rows; ++i) std::memcpy(at.grad_phi + i * n.ldf, at.R_z, static_cast<std::size_t>(n.ldf) * sizeof(T));
    matmul(rows, n.f, n.e, {keys.v, keys.ldv, 1}, at.R, n.ldf, at.grad_phi, n.ldf, true, &at.ahead);
    matmul(rows, n.e, n.f, {keys.phi, n.ldf, 1}, at.square, n.lde, at.grad_v, n.lde, false, &at.ahead);
    if (p.weighted) {  // in units of the whole's maximum, not of the chunk's
      for (Index i = 0; i < rows; ++i)
        keys.scale[i] = exp_one<T>(log_weight(p, s, time + i, p.map == Map::exp ? keys.scale[i] : T(0), is_masked(p, s.row, time + i)) - finite(M));
      scale_rows(at.grad_phi, n.ldf, rows, n.f, keys.scale);
      scale_rows(at.grad_v, n.lde, rows, n.e, keys.scale);
    }
    store_key_gradients(p, n, s, time, keys, at.grad_phi, at.grad_v, at.x, at.queries.grad_x, at.grad_omega, &at.ahead);
  }
}

/// The state that all queries of a sequence and head read, as forward left it.
template <typename T>
void state_behind(const Problem& p, const Sizes<T>& n, const Stretch& s, State<T>& to) {
  const Index at = place(p, s);
  read_rows(static_cast<const T*>(p.after.S) + at * n.f * n.e, n.f, n.e, to.S, n.lde);
  read_rows(static_cast<const T*>(p.after.z) + at * n.f, 1, n.f, to.z, n.ldf);
  to.M = static_cast<const T*>(p.after.M)[at];
}

template <typename T>
void full_backward(const Problem& p) {
  const Sizes<T> n(p);
  const Index block = (n.e + 1) * n.ldf;
  const std::size_t bytes = bytes_of<BackwardScratch<T>>(p, n);
  Owned<T> own(p.queries.count * block);
  Owned<Index> queries_of(p.keys.count);
  OmegaGradients<T> of_queries(p, n, p.queries), of_keys(p, n, p.keys);
  parallel(p, p.queries.count, bytes, [&](Index i, void* memory) {
    Scratch scratch(memory);
    BackwardScratch<T> at(scratch, p, n);
    at.grad_omega = of_queries.at(i);
    State<T> state{at.square, at.z, 0};
    state_behind(p, n, p.queries.at[i], state);
    transpose_state(n, at.square, at.S);
    full_query_sweep(p, n, p.queries.at[i], state.M, own.get() + i * block, at);
  });
  Owned<T> square(n.f_rows() * n.lde), given(n.e_rows() * n.ldf + n.ldf);
  T* given_z = given.get() + n.e_rows() * n.ldf;
  for (Index i = 0, first = 0; i < p.queries.count; ++i) {  // R of all queries, where that of the first stretch was
    const Stretch& s = p.queries.at[i];
    if (s.first) {
      queries_of.get()[place(p, s)] = first = i;
      given_gradient(p, n, s, square.get(), given.get(), given_z);
    }
    T *total = own.get() + first * block, *here = own.get() + i * block;
    for (Index j = 0; j < block; ++j) {
      if (s.first) total[j] += j < n.e * n.ldf ? given.get()[j] : given_z[j - n.e * n.ldf];
      else total[j] += here[j];
    }
  }
  parallel(p, p.keys.count, bytes, [&](Index i, void* memory) {
    Scratch scratch(memory);
    BackwardScratch<T> at(scratch, p, n);
    at.grad_omega = of_keys.at(i);
    const Stretch& s = p.keys.at[i];
    const T* R = own.get() + queries_of.get()[place(p, s)] * block;
    std::memcpy(at.R, R, static_cast<std::size_t>(n.e * n.ldf) * sizeof(T));
    std::memcpy(at.R_z, R + n.e * n.ldf, static_cast<std::size_t>(n.ldf) * sizeof(T));
    transpose(at.R, n.ldf, n.e, n.f, at.square, n.lde);
    const T M = static_cast<const T*>(p.after.M)[place(p, s)];
    full_key_sweep(p, n, s, M, at);
    if (!s.first) return;
    State<T> before{at.square, at.z, 0};
    given_state(p, n, s, before);
    const T keep = p.weighted ? exp_one<T>(before.M - finite(M)) : T(1);
    for (Index j = 0; j < n.e * n.ldf; ++j) at.R[j] *= keep;
    for (Index j = 0; j < n.ldf; ++j) at.R_z[j] *= keep;
    put_gradient(p, n, s, at.R, at.R_z, at.square);
  });
  of_queries.put();
  of_keys.put();
}

}  // namespace TARNN_ISA
}  // namespace tarnn
