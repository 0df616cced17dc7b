// Causal attention, backward: a forward sweep for the queries, which runs the state S once more, and a reverse sweep for
// keys and values, which runs R, the gradient of the state. But for decays, nothing of the first is kept for the second.
//
//     A = (G Vᵀ + G_z 1ᵀ) ⊙ pair, lower triangle                    P = (φ(Q) φ(K)ᵀ) ⊙ pair, lower triangle
//     dφ(Q) = A φ(K) + query ⊙ (G Sᵀ + G_z zᵀ)                      S ← keep·S + (key ⊙ φ(K))ᵀ V
//     dφ(K) = Aᵀ φ(Q) + key ⊙ (V Rᵀ + 1 R_zᵀ)    dV = Pᵀ G + (key ⊙ φ(K)) R
//                                                R ← keep·R + (query ⊙ φ(Q))ᵀ G,   R_z likewise with G_z
//
// (eq. 13–15 of Katharopoulos et al. 2020, arXiv 2006.16236, by chunks). S and R are kept transposed, (e × f), since that
// is how they are read.
#pragma once

#include "attention/key_sweep.h"
#include "attention/query_sweep.h"

namespace tarnn {
namespace TARNN_ISA {

/// What joining the gradients of a sequence's stretches takes.
template <typename T>
struct JoinScratch {
  State<T> square;
  Transposed<T> R;
  JoinScratch(Scratch& scratch, const Problem&, const Sizes<T>& n, Index)
      : square(take_state(scratch, n)), R(Transposed<T>::take(scratch, n)) {}
};

/// R of each stretch's own queries becomes R behind the stretch before it: with what comes from behind those queries.
template <typename T>
void join_gradients(const Problem& p, const Sizes<T>& n, Kept<T>& kept) {
  for_each_cut(p, p.keys, bytes_of<JoinScratch<T>>(p, n, 1), [&](Index first, void* memory) {
    Scratch scratch(memory);
    JoinScratch<T> at(scratch, p, n, 1);
    const Stretch* s = p.keys.at + first;
    while (!s->last) ++s;
    given_gradient(p, n, *s, at.square, at.R);
    for (Transposed<T> behind = at.R; !s->first; --s) {
      const typename Kept<T>::Own own = kept.own(*s);
      own.R.add(behind, own.reach, n);
      behind = own.R;
    }
  });
}

template <typename T>
void causal_backward(const Problem& p) {
  const Sizes<T> n(p);
  const Bundles bundles(p, p.keys, bytes_of_head(p, n));
  const std::size_t bytes = bytes_of<BackwardScratch<T>>(p, n, bundles.heads());
  Kept<T> kept(p, n);
  Owned<T> slots(p.keys.slots * n.state());
  OmegaGradients<T> of_omega(p, n, p.keys);
  states_behind(p, n, p.keys, slots.get());
  parallel(p, bundles.count(), bytes, [&](Index i, void* memory) {
    Scratch scratch(memory);
    BackwardScratch<T> at(scratch, p, n, bundles.heads());
    for (Index x = 0; x < bundles[i].heads; ++x) {
      state_before(p, n, bundles[i][x], slots.get(), at.square);
      if (!begins_empty(p, bundles[i][x], bundles[i][x].begin)) at.heads[x].S.from(at.square, n);
      else if (p.grad_log_decay) at.heads[x].S.clear(n);  // it is a checkpoint
      else clear(at.heads[x].S.z, n.ldf);
      at.heads[x].M = at.square.M;
      at.heads[x].grad_omega = of_omega.at(bundles[i][x]);
    }
    query_sweep(p, n, bundles[i], kept, at);
  });
  join_gradients(p, n, kept);
  parallel(p, bundles.count(), bytes, [&](Index i, void* memory) {
    Scratch scratch(memory);
    BackwardScratch<T> at(scratch, p, n, bundles.heads());
    for (Index x = 0; x < bundles[i].heads; ++x) {
      const Stretch& s = bundles[i][x];
      if (s.last) given_gradient(p, n, s, at.square, at.heads[x].R);
      else kept.own((&s)[1]).R.copy_to(at.heads[x].R, n);
      at.heads[x].grad_omega = of_omega.at(s);
    }
    key_sweep(p, n, bundles[i], kept, at);
    for (Index x = 0; x < bundles[i].heads; ++x)
      if (bundles[i][x].first) put_gradient(p, n, bundles[i][x], at.heads[x].R, at.square);
  });
  of_omega.put();
}

}  // namespace TARNN_ISA
}  // namespace tarnn
