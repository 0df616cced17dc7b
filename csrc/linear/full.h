// Attention that sees everything: one state of all keys, which all queries read; forward and backward.
//
//     S = Σ_j e^(w_j − M) φ(k_j) v_jᵀ,  M the largest w_j          o = φ(Q) S · factor
//     dφ(Q) = G Sᵀ + G_z zᵀ      R = φ(Q)ᵀ G      dφ(K) = key ⊙ (V Rᵀ + 1 R_zᵀ)      dV = (key ⊙ φ(K)) R
#pragma once

#include "linear/causal_backward.h"

namespace tarnn {
namespace TARNN_ISA {

/// Where the queries go from a chunk of head r: on in time, once all keys of the bundle had this one; then to the next r.
struct NextQueries {
  Index head, time, rows;
  NextQueries(const Problem& p, const Bundle& bundle, Index i, Index r, Index now) {
    const bool together = i + 1 < bundle.heads, on = now + p.chunk < bundle[0].end;
    const Stretch& s = bundle[together ? i + 1 : 0];
    const Index next_r = together || on ? r : r + 1;
    head = s.head * p.r + next_r;
    time = together ? now : on ? now + p.chunk : s.begin;
    rows = next_r < p.r ? smaller(p.chunk, s.end - time) : 0;
  }
};

template <typename T>
struct FullScratch {
  State<T>* states;  // of each head in the bundle
  T *x, *q, *scale, *o, *den, *factor;
  Ahead ahead;
  FullScratch(Scratch& scratch, const Problem&, const Sizes<T>& n, Index heads) : states(take_states(scratch, n, heads)) {
    x = scratch.take<T>(n.inputs());
    q = scratch.take<T>(n.rows() * n.ldf);
    scale = scratch.take<T>(n.ldc);
    o = scratch.take<T>(n.rows() * n.lde);
    den = scratch.take<T>(n.ldc);
    factor = scratch.take<T>(n.ldc);
  }
};

/// As BackwardScratch, and R of each head once more, as values read it.
template <typename T>
struct FullKeyScratch : BackwardScratch<T> {
  State<T>* R;
  FullKeyScratch(Scratch& scratch, const Problem& p, const Sizes<T>& n, Index heads)
      : BackwardScratch<T>(scratch, p, n, heads), R(take_states(scratch, n, heads)) {}
};

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

/// A chunk of a query head. i: of its keys, in the bundle.
template <typename T>
void full_outputs(const Problem& p, const Sizes<T>& n, const Bundle& bundle, Index i, Index r, Index time, FullScratch<T>& at) {
  const Stretch& s = bundle[i];
  const State<T>& state = at.states[i];
  const Index rows = smaller(n.c, s.end - time), head = s.head * p.r + r;
  make_features(p, n, s, p.q, head, time, rows, at.x, at.q, at.scale, &at.ahead);
  for (Index j = 0; j < rows; ++j) {
    at.den[j] = dot(at.q + j * n.ldf, state.z, n.f);
    at.factor[j] = output_factor(p, at.den[j], finite(state.M), p.map == Map::exp ? at.scale[j] : T(0));
  }
  store_denominators(p, s.row, head, time, rows, at.den);
  const bool direct = lies_well<T>(p.o, n.e);
  T* o = direct ? static_cast<T*>(p.o.data) + offset(p.o, s.row, head, time) : at.o;
  const NextQueries next(p, bundle, i, r, time);
  at.ahead.clear();
  at.ahead.want(p.q, s.row, next.head, next.time, next.rows, p.d);
  at.ahead.want(p.o, s.row, next.head, next.time, next.rows, n.e);
  product(rows, n.e, n.f, Left<T>{at.q, n.ldf, 1}, state.S, n.lde, Scaled<T>{o, direct ? n.e : n.lde, at.factor}, &at.ahead);
  if (!direct) store_tile(at.o, n.lde, p.o, s.row, head, time, rows, n.e);
}

template <typename T>
void full_forward(const Problem& p) {
  const Sizes<T> n(p);
  Owned<T> slots(p.keys.slots * n.state());
  Owned<Index> last_slot(p.keys.count);
  find_last(p, last_slot.get());
  states_behind(p, n, p.keys, slots.get());
  const Bundles bundles(p, p.queries, n.f_rows() * n.lde * static_cast<Index>(sizeof(T)));
  parallel_with<FullScratch<T>>(p, bundles.count(), [&](Index task, FullScratch<T>& at) {
    const Bundle& bundle = bundles[task];
    for (Index i = 0; i < bundle.heads; ++i) {
      read_state<T>(whole_state(p, n, slots.get(), last_slot.get(), bundle[i]), n, at.states[i]);
      if (bundle[i].first) put_state<T>(p, n, bundle[i], at.states[i], p.after);
    }
    for (Index r = 0; r < p.r; ++r)
      for (Index time = bundle[0].begin; time < bundle[0].end; time += n.c)
        for (Index i = 0; i < bundle.heads; ++i) full_outputs(p, n, bundle, i, r, time, at);
  }, p, n, bundles.heads());
}

/// Gradients of a bundle's queries; R gets that of them alone, transposed.
template <typename T>
void full_query_chunk(const Problem& p, const Sizes<T>& n, const Bundle& bundle, Index i, Index r, Index time,
                      BackwardScratch<T>& at) {
  const Stretch& s = bundle[i];
  const Head<T>& own = at.heads[i];
  Queries<T>& q = at.queries;
  const Index rows = smaller(n.c, s.end - time), head = s.head * p.r + r;
  load_queries(p, n, s, head, time, rows, static_cast<const T*>(nullptr), finite(*own.M), q, &at.ahead);
  const NextQueries next(p, bundle, i, r, time);
  at.ahead.clear();
  at.ahead.want(p.q, s.row, next.head, next.time, next.rows, p.d);
  at.ahead.want(p.grad_o, s.row, next.head, next.time, next.rows, n.e);
  if (p.normalize) at.ahead.want(p.o, s.row, next.head, next.time, next.rows, n.e);
  at.ahead.want(p.grad_q, s.row, next.head, next.time, next.rows, p.d);
  matmul(rows, n.f, n.e, {q.G, n.lde, 1}, own.S->S, n.ldf, q.grad_phi, n.ldf, false, &at.ahead);
  add_outer(q.grad_phi, q.G_z, own.S->z, n.ldf, rows, n.f);
  matmul(n.e, n.f, rows, {q.G, 1, n.lde}, q.phi, n.ldf, own.R.S, n.ldf, true, &at.ahead);
  add_rows(own.R.z, q.G_z, q.phi, n.ldf, rows, n.f);
  store_feature_gradients(p, n, s, p.q, p.grad_q, head, time, rows, q.phi, q.grad_phi, q.from, q.x, q.grad_x, own.grad_omega, q.shared,
                          &at.ahead);
}

/// A chunk's gradients, times the weights of its keys: in units of the whole's maximum, not of the chunk's.
template <typename T>
void weigh_full_keys(const Problem& p, const Sizes<T>& n, const Stretch& s, Index time, const Head<T>& own, BackwardScratch<T>& at) {
  if (!p.weighted) return;
  Keys<T>& keys = at.keys;
  for (Index j = 0; j < keys.rows; ++j) {
    const T scale = p.map == Map::exp ? keys.scale[j] : T(0);
    keys.scale[j] = exp_one<T>(log_weight(p, s, time + j, scale, is_masked(p, s.row, time + j)) - finite(*own.M));
  }
  scale_rows(at.grad_phi, n.ldf, keys.rows, n.f, keys.scale);
  scale_rows(at.grad_v, n.lde, keys.rows, n.e, keys.scale);
}

template <typename T>
void full_key_chunk(const Problem& p, const Sizes<T>& n, const Bundle& bundle, Index i, Index time, FullKeyScratch<T>& at) {
  const Stretch& s = bundle[i];
  const State<T>& R = at.R[i];
  const Head<T>& own = at.heads[i];
  Keys<T>& keys = at.keys;
  load_plain_keys(p, n, s, time, smaller(n.c, s.end - time), keys, &at.ahead);
  const Index rows = keys.rows;
  const Onward next(p, bundle, i, p.r - 1, time, time + n.c);
  at.ahead.clear();
  want_keys(p, next, at.ahead);
  next.want_of_keys(p.grad_k, p.d, at.ahead);
  next.want_of_keys(p.grad_v, p.e, at.ahead);
  for (Index j = 0; j < rows; ++j) std::memcpy(at.grad_phi + j * n.ldf, own.R.z, static_cast<std::size_t>(n.ldf) * sizeof(T));
  matmul(rows, n.f, n.e, {keys.v, keys.ldv, 1}, own.R.S, n.ldf, at.grad_phi, n.ldf, true, &at.ahead);
  matmul(rows, n.e, n.f, {keys.phi, n.ldf, 1}, R.S, n.lde, at.grad_v, n.lde, false, &at.ahead);
  weigh_full_keys(p, n, s, time, own, at);
  store_key_gradients(p, n, s, time, keys, at.grad_phi, at.grad_v, at.x, at.queries.grad_x, own.grad_omega, at.shared, &at.ahead);
}

/// R of all queries of each sequence and head, where that of its first stretch was: their sum, and the gradient given.
template <typename T>
void sum_gradients(const Problem& p, const Sizes<T>& n, T* own, Index* first_of) {
  const Index block = Transposed<T>::block(n);
  for (Index i = 0; i < p.queries.count; ++i)
    if (p.queries.at[i].first) first_of[place(p, p.queries.at[i])] = i;
  parallel_with<JoinScratch<T>>(p, p.queries.count, [&](Index i, JoinScratch<T>& at) {
    if (!p.queries.at[i].first) return;
    given_gradient(p, n, p.queries.at[i], at.square, at.R);
    T *total = own + i * block, *z = total + n.e * n.ldf;
    for (Index j = 0; j < n.e * n.ldf; ++j) total[j] += at.R.S[j];
    for (Index j = 0; j < n.ldf; ++j) z[j] += at.R.z[j];
    for (Index k = i; !p.queries.at[k].last; ++k)
      for (Index j = 0; j < block; ++j) total[j] += own[(k + 1) * block + j];
  }, n);
}

template <typename T>
void full_backward(const Problem& p) {
  const Sizes<T> n(p);
  const Index block = Transposed<T>::block(n);
  Owned<T> own(p.queries.count * block);
  Owned<Index> first_of(p.keys.count);
  OmegaGradients<T> of_queries(p, n, p.queries), of_keys(p, n, p.keys);
  const Bundles queries(p, p.queries, bytes_of_head(n)), keys(p, p.keys, bytes_of_head(n));
  parallel_with<BackwardScratch<T>>(p, queries.count(), [&](Index task, BackwardScratch<T>& at) {
    const Bundle& bundle = queries[task];
    for (Index i = 0; i < bundle.heads; ++i) {
      get_state(p, n, bundle[i], p.after, at.square);
      at.heads[i].S->from(at.square, n);
      at.heads[i].R.clear(n);
      *at.heads[i].M = at.square.M;
      at.heads[i].grad_omega = of_queries.at(bundle[i]);
    }
    for (Index r = 0; r < p.r; ++r)
      for (Index time = bundle[0].begin; time < bundle[0].end; time += n.c)
        for (Index i = 0; i < bundle.heads; ++i) full_query_chunk(p, n, bundle, i, r, time, at);
    for (Index i = 0; i < bundle.heads; ++i)
      at.heads[i].R.copy_to(Transposed<T>(own.get() + (&bundle[i] - p.queries.at) * block, n), n);
  }, p, n, queries.heads());
  sum_gradients(p, n, own.get(), first_of.get());
  parallel_with<FullKeyScratch<T>>(p, keys.count(), [&](Index task, FullKeyScratch<T>& at) {
    const Bundle& bundle = keys[task];
    for (Index i = 0; i < bundle.heads; ++i) {
      const Head<T>& head = at.heads[i];
      Transposed<T>(own.get() + first_of.get()[place(p, bundle[i])] * block, n).copy_to(head.R, n);
      transpose(head.R.S, n.ldf, n.e, n.f, at.R[i].S, n.lde);
      *at.heads[i].M = static_cast<const T*>(p.after.M)[place(p, bundle[i])];
      at.heads[i].grad_omega = of_keys.at(bundle[i]);
    }
    for (Index time = bundle[0].begin; time < bundle[0].end; time += n.c)
      for (Index i = 0; i < bundle.heads; ++i) full_key_chunk(p, n, bundle, i, time, at);
    for (Index i = 0; i < bundle.heads; ++i) {
      if (!bundle[i].first) continue;
      const Transposed<T>& R = at.heads[i].R;
      State<T>& before = at.square;
      given_state(p, n, bundle[i], before);
      const T keep = p.weighted ? exp_one<T>(before.M - finite(*at.heads[i].M)) : T(1);
      R.scale(keep, n);
      put_gradient(p, n, bundle[i], R, at.square);
    }
  }, p, n, keys.heads());
  of_queries.put();
  of_keys.put();
}

}  // namespace TARNN_ISA
}  // namespace tarnn
