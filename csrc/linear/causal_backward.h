// Causal attention, backward: one reverse sweep over each stretch.
//
//     A = (G Vᵀ + G_z 1ᵀ) ⊙ pair, lower triangle                    P = (φ(Q) φ(K)ᵀ) ⊙ pair, lower triangle
//     dφ(Q) = A φ(K) + query ⊙ (G Sᵀ + G_z zᵀ)                      S ← keep·S + (key ⊙ φ(K))ᵀ V, forward
//     dφ(K) = Aᵀ φ(Q) + key ⊙ (V Rᵀ + 1 R_zᵀ)    dV = Pᵀ G + (key ⊙ φ(K)) R
//                                                R ← keep·R + (query ⊙ φ(Q))ᵀ G,   R_z likewise with G_z
//
// (eq. 13–15 of Katharopoulos et al. 2020, arXiv 2006.16236, by chunks). S and R are kept transposed, (e × f), since that
// is how they are read.
#pragma once

#include "linear/reverse_sweep.h"
#include "linear/streamed.h"

namespace tarnn {
namespace TARNN_ISA {

/// How many states are to be kept now, for each row and head, as the forward pass has kept none.
inline Index states_to_keep(const Problem& p) {
  Index length = 1;
  for (Index i = 0; i < p.keys.count; ++i) length = std::max(length, p.keys.at[i].end);
  return p.kept ? 0 : (length - 1) / p.segment;
}

/// What the forward pass would have kept. slots: the states between stretches.
template <typename T, typename At>
void keep_states(const Problem& p, const Sizes<T>& n, const T* slots) {
  const Bundles bundles(p, p.keys, n.f_rows() * n.lde * static_cast<Index>(sizeof(T)));
  parallel_with<At>(p, bundles.count(), [&](Index task, At& at) {
    const Bundle& bundle = bundles[task];
    for (Index i = 0; i < bundle.heads; ++i) state_before(p, n, bundle[i], slots, at.states[i]);
    for (Index time = bundle[0].begin + p.segment; time < bundle[0].end; time += p.segment) {
      absorb_keys(p, n, bundle, time - p.segment, time, at);
      for (Index i = 0; i < bundle.heads; ++i) write_state(at.states[i], n, kept_state<T>(p, bundle[i], time));
    }
  }, p, n, bundles.heads());
}

/// R of a stretch's own queries, as its beginning sees it, and how far its beginning reaches across it.
template <typename T>
struct Own {
  Transposed<T> R;
  T* reach;  // (f)
  /// Of a stretch that is not the first of its sequence.
  Own(const Sizes<T>& n, const Stretch& s, T* blocks)
      : R(blocks + (&s)[-1].slot * size(n), n), reach(blocks + (&s)[-1].slot * size(n) + Transposed<T>::block(n)) {}
  static Index size(const Sizes<T>& n) { return Transposed<T>::block(n) + n.ldf; }
};

/// The queries of a chunk, added to R of the stretch's own.
template <typename T>
void add_own_queries(const Problem& p, const Sizes<T>& n, const Bundle& bundle, Index i, Index time, const Head<T>& own,
                     BackwardScratch<T>& at) {
  const Stretch& s = bundle[i];
  Keys<T>& keys = at.keys;
  Queries<T>& q = at.queries;
  keys.rows = smaller(n.c, s.end - time);
  if (!keys.weights.none) load_keys(p, n, s, time, keys.rows, *own.M, keys, &at.ahead);
  for (Index r = 0; r < p.r; ++r) {
    load_queries(p, n, s, s.head * p.r + r, time, keys.rows, keys.weights.M, T(0), q, &at.ahead);
    at.ahead.clear();
    want_queries(p, Onward(p, bundle, i, r, time, time + n.c), at.ahead);
    const T* weighted = weighted_queries(keys, n, q.phi, keys.rows, q.weighted);
    if (weighted != q.weighted) std::memcpy(q.weighted, weighted, static_cast<std::size_t>(keys.rows * n.ldf) * sizeof(T));
    if (!keys.weights.none) scale_columns(q.weighted, n.ldf, keys.rows, n.f, own.reach);
    matmul(n.e, n.f, keys.rows, {q.G, 1, n.lde}, q.weighted, n.ldf, own.R.S, n.ldf, true, &at.ahead);
    add_rows(own.R.z, q.G_z, q.weighted, n.ldf, keys.rows, n.f);
  }
  if (keys.weights.none) return;
  for (Index j = 0; j < n.f; ++j) own.reach[j] *= keys.weights.keep[p.channels ? j : 0];
  *own.M = keys.weights.M_out;
}

/// R of each stretch's own queries, from zero.
template <typename T>
void own_gradients(const Problem& p, const Sizes<T>& n, const Bundle& bundle, const T* slots, T* blocks, BackwardScratch<T>& at) {
  for (Index i = 0; i < bundle.heads; ++i) {
    state_before(p, n, bundle[i], slots, at.square);
    *at.heads[i].M = at.square.M;
    at.heads[i].R.clear(n);
    std::fill_n(at.heads[i].reach, n.ldf, T(1));
  }
  for (Index time = bundle[0].begin; time < bundle[0].end; time += n.c)
    for (Index i = 0; i < bundle.heads; ++i) add_own_queries(p, n, bundle, i, time, at.heads[i], at);
  for (Index i = 0; i < bundle.heads; ++i) {
    const Own<T> to(n, bundle[i], blocks);
    const T units = to_own_units(p, n, bundle[i], slots, *at.heads[i].M);
    at.heads[i].R.copy_to(to.R, n);
    for (Index j = 0; j < n.ldf; ++j) to.reach[j] = at.heads[i].reach[j] * units;
  }
}

/// What joining the gradients of a sequence's stretches takes.
template <typename T>
struct JoinScratch {
  State<T> square;
  Transposed<T> R;
  JoinScratch(Scratch& scratch, const Sizes<T>& n)
      : square(take_state(scratch, n)), R(Transposed<T>::take(scratch, n)) {}
};

/// R of each stretch's own queries becomes R behind the stretch before it: with what comes from behind those queries.
template <typename T>
void join_gradients(const Problem& p, const Sizes<T>& n, T* blocks) {
  for_each_cut<JoinScratch<T>>(p, p.keys, [&](Index first, JoinScratch<T>& at) {
    const Stretch* s = p.keys.at + first;
    while (!s->last) ++s;
    given_gradient(p, n, *s, at.square, at.R);
    for (Transposed<T> behind = at.R; !s->first; --s) {
      const Own<T> own(n, *s, blocks);
      own.R.add(behind, own.reach, n);
      behind = own.R;
    }
  }, n);
}

/// R behind all stretches but the last of each sequence, where sequences are cut.
template <typename T, typename At = BackwardScratch<T>>
void gradients_behind(const Problem& p, const Sizes<T>& n, const T* slots, T* blocks) {
  if (p.keys.slots == 0) return;
  const Bundles bundles(p, p.keys, bytes_of_head(n));
  parallel_with<At>(p, bundles.count(), [&](Index i, At& at) {
    if (!bundles[i][0].first) own_gradients(p, n, bundles[i], slots, blocks, at);
  }, p, n, bundles.heads());
  join_gradients(p, n, blocks);
}

/// KeyAt: for the sums of a stretch's keys; KeptAt: for states as the forward pass makes them.
template <typename T, typename At = BackwardScratch<T>, typename KeyAt = KeyScratch<T>, typename KeptAt = BlockScratch<T>>
void causal_backward(Problem p) {
  const Sizes<T> n(p);
  const Bundles bundles(p, p.keys, bytes_of_head(n));
  const Index size = n.f * n.e + n.f + 1, count = states_to_keep(p);
  Index rows = 0;
  for (Index i = 0; i < p.keys.count; ++i) rows = std::max(rows, p.keys.at[i].row + 1);
  Owned<T> slots(p.keys.slots * n.state()), own(p.keys.slots * Own<T>::size(n)), kept(rows * p.g * count * size);
  OmegaGradients<T> of_omega(p, n, p.keys);
  states_behind<T, KeyAt>(p, n, p.keys, slots.get());
  if (kept.get()) {
    p.kept = {kept.get(), Type(), {p.g * count * size, count * size, size, 1}};
    keep_states<T, KeptAt>(p, n, slots.get());
  }
  gradients_behind<T, At>(p, n, slots.get(), own.get());
  parallel_with<At>(p, bundles.count(), [&](Index task, At& at) {
    const Bundle& bundle = bundles[task];
    for (Index x = 0; x < bundle.heads; ++x) {
      const Stretch& s = bundle[x];
      if (s.last) given_gradient(p, n, s, at.square, at.heads[x].R);
      else Own<T>(n, (&s)[1], own.get()).R.copy_to(at.heads[x].R, n);
      at.heads[x].grad_omega = of_omega.at(s);
    }
    reverse_sweep(p, n, bundle, slots.get(), at);
    for (Index x = 0; x < bundle.heads; ++x)
      if (bundle[x].first) put_gradient(p, n, bundle[x], at.heads[x].R, at.square);
  }, p, n, bundles.heads());
  of_omega.put();
}

}  // namespace TARNN_ISA
}  // namespace tarnn
