// Causal attention token by token, backward: three times the forward pass's loop, with other tensors in the roles of k, v and q.
//
//     dφ(q_i) = S_i g_i + z_i g_z,i         S_iᵀ = S_{i−1}ᵀ + v_i φ(k_i)ᵀ     forward in time; k, v, q are v, φ(k), g
//     dφ(k_j) = R_j v_j + R_z,j             R_jᵀ = R_{j+1}ᵀ + g_j φ(q_j)ᵀ     backward in time; g, φ(q), v
//     dv_j = R_jᵀφ(k_j)                     R_j = R_{j+1} + φ(q_j) g_jᵀ       the same; φ(q), g, φ(k)
//
// with g_i = grad_o_i · factor_i, g_z,i = −g_i·o_i and R_z,j = Σ_{i≥j} φ(q_i) g_z,i (eq. 13–15 of Katharopoulos et al. 2020, arXiv
// 2006.16236). No state is kept for it, and none is read twice.
#pragma once

#include "linear/causal_backward.h"

namespace tarnn {
namespace TARNN_ISA {

/// Of one head in the bundle: what passes from block to block.
template <typename T>
struct StreamHead {
  Transposed<T> S, R_t;  // (e × f)
  State<T> R;            // (f × e); its z is R_t's
  T* grad_omega;
};

template <typename T>
struct StreamBackwardScratch {
  Block<T> block;
  Queries<T> queries;
  StreamHead<T>* heads;
  T *grad_phi, *grad_v, *x;
  State<T> square;
  Ahead ahead;
  StreamBackwardScratch(Scratch& scratch, const Problem& p, const Sizes<T>& n, Index count)
      : block(take_block(scratch, p, n)), queries(take_queries(scratch, p, n, true)), heads(scratch.take<StreamHead<T>>(count)) {
    for (Index i = 0; i < count; ++i) {
      const StreamHead<T> head = {Transposed<T>::take(scratch, n), Transposed<T>::take(scratch, n), take_state(scratch, n), nullptr};
      if (heads) heads[i] = head;
    }
    grad_phi = scratch.take<T>(n.rows() * n.ldf);
    grad_v = scratch.take<T>(n.rows() * n.lde);
    x = p.map == Map::squared_relu && !n.projected ? scratch.take<T>(n.rows() * n.ldf) : nullptr;
    square = take_state(scratch, n);
  }
};

/// The first of some tokens, or, backward in time, the last.
template <typename T>
Tokens<T> reversed(T* at, Index next, Index rows) {
  return {at + (rows - 1) * next, -next};
}

/// grad_i += g_z,i · z_i, while z goes from token to token.
template <typename T>
void add_normaliser(const Block<T>& block, const Sizes<T>& n, const T* G_z, T* z, T* grad) {
  for (Index j = 0; j < n.f; j += width<T>) {
    Vec<T> sum = load(z + j);
    for (Index i = 0; i < block.rows; ++i) {
      const Index at = i * n.ldf + j;
      sum += load(block.k + at);
      store(grad + at, load(grad + at) + sum * G_z[i]);
    }
    store(z + j, sum);
  }
}

/// grad_j += R_z,j, while R_z goes from the last token to the first.
template <typename T>
void add_normaliser_gradient(Index rows, const Sizes<T>& n, const T* G_z, const T* phi, T* R_z, T* grad) {
  for (Index j = 0; j < n.f; j += width<T>) {
    Vec<T> sum = load(R_z + j);
    for (Index i = rows - 1; i >= 0; --i) {
      const Index at = i * n.ldf + j;
      sum += load(phi + at) * G_z[i];
      store(grad + at, load(grad + at) + sum);
    }
    store(R_z + j, sum);
  }
}

/// The keys, values and queries of a block, and `next` is asked for, with the place of what is made of it.
template <typename T>
void load_both(const Problem& p, const Sizes<T>& n, const Bundle& bundle, Index i, Index time, Index next, StreamBackwardScratch<T>& at) {
  const Stretch& s = bundle[i];
  const Index rows = smaller(n.c, s.end - time);
  T M = 0;
  load_block(p, n, s, time, rows, M, at.block, at.ahead);
  load_queries(p, n, s, s.head, time, rows, static_cast<const T*>(nullptr), T(0), at.queries, &at.ahead);
  const NextBlock ahead(p, bundle, i, next);
  at.ahead.clear();
  ahead.want_keys(p.k, p.d, at.ahead);
  ahead.want_keys(p.v, p.e, at.ahead);
  ahead.want_queries(p, p.q, p.d, at.ahead);
  ahead.want_queries(p, p.grad_o, p.e, at.ahead);
  if (p.normalize) ahead.want_queries(p, p.o, p.e, at.ahead);
  if (next > time) return ahead.want_queries(p, p.grad_q, p.d, at.ahead);
  ahead.want_keys(p.grad_k, p.d, at.ahead);
  ahead.want_keys(p.grad_v, p.e, at.ahead);
}

/// The gradients of a block's queries; S becomes the state behind it.
template <typename T>
void stream_query_gradients(const Problem& p, const Sizes<T>& n, const Bundle& bundle, Index i, Index time, StreamBackwardScratch<T>& at) {
  load_both(p, n, bundle, i, time, time + n.c, at);
  const Block<T>& block = at.block;
  const Queries<T>& q = at.queries;
  StreamHead<T>& own = at.heads[i];
  pass_all<1, T>(Keep::all, {own.S.S, n.e, n.f, n.ldf, block.v, {block.k, n.ldf}, {q.G, n.lde}, {}, {}, {q.grad_phi, n.ldf}}, block.rows,
                 at.ahead);
  if (p.normalize) add_normaliser(block, n, q.G_z, own.S.z, q.grad_phi);
  store_feature_gradients(p, n, bundle[i], p.q, p.grad_q, bundle[i].head, time, block.rows, q.phi, q.grad_phi, q.from, q.x, q.grad_x,
                          own.grad_omega, q.shared, &at.ahead);
}

/// The gradients of a block's keys and values; R becomes the gradient of the state before it.
template <typename T>
void stream_key_gradients(const Problem& p, const Sizes<T>& n, const Bundle& bundle, Index i, Index time, StreamBackwardScratch<T>& at) {
  load_both(p, n, bundle, i, time, time - n.c, at);
  const Block<T>& block = at.block;
  const Queries<T>& q = at.queries;
  StreamHead<T>& own = at.heads[i];
  const Index rows = block.rows;
  const Tokens<const T> G = reversed<const T>(q.G, n.lde, rows), phi_q = reversed<const T>(q.phi, n.ldf, rows);
  const Tokens<const T> v = reversed(block.v.at, block.v.next, rows), phi_k = reversed<const T>(block.k, n.ldf, rows);
  pass_all<1, T>(Keep::all, {own.R_t.S, n.e, n.f, n.ldf, G, phi_q, v, {}, {}, reversed(at.grad_phi, n.ldf, rows)}, rows, at.ahead);
  pass_all<1, T>(Keep::all, {own.R.S, n.f, n.e, n.lde, phi_q, G, phi_k, {}, {}, reversed(at.grad_v, n.lde, rows)}, rows, at.ahead);
  add_normaliser_gradient(rows, n, q.G_z, q.phi, own.R_t.z, at.grad_phi);
  Keys<T> keys{};
  keys.phi = block.k;
  keys.rows = rows;
  keys.x = block.from;
  store_key_gradients(p, n, bundle[i], time, keys, at.grad_phi, at.grad_v, at.x, q.grad_x, own.grad_omega, static_cast<T*>(nullptr), &at.ahead);
}

/// S before a stretch, and R behind it. slots, gradients: those between stretches.
template <typename T>
void begin_streams(const Problem& p, const Sizes<T>& n, const Stretch& s, const T* slots, T* gradients, StreamHead<T>& own,
                   State<T>& square) {
  stream_from(p, n, s, slots, square);
  own.S.from(square, n);
  if (s.last) given_gradient(p, n, s, square, own.R_t);
  else Own<T>(n, (&s)[1], gradients).R.copy_to(own.R_t, n);
  transpose(own.R_t.S, n.ldf, n.e, n.f, own.R.S, n.lde);
}

template <typename T>
void streamed_backward(const Problem& call) {
  const Problem p = by_blocks(call);
  const Sizes<T> n(p);
  const Bundles bundles(p, p.keys, 3 * Transposed<T>::block(n) * static_cast<Index>(sizeof(T)));
  Owned<T> slots(p.keys.slots * n.state()), gradients(p.keys.slots * Own<T>::size(n));
  OmegaGradients<T> of_omega(p, n, p.keys);
  if (p.keys.slots) {
    const Sizes<T> by_chunks(call);
    states_behind(call, by_chunks, p.keys, slots.get());
    gradients_behind(call, by_chunks, slots.get(), gradients.get());
  }
  parallel_with<StreamBackwardScratch<T>>(p, bundles.count(), [&](Index task, StreamBackwardScratch<T>& at) {
    const Bundle& bundle = bundles[task];
    const Index begin = bundle[0].begin, end = bundle[0].end;
    for (Index i = 0; i < bundle.heads; ++i) {
      begin_streams(p, n, bundle[i], slots.get(), gradients.get(), at.heads[i], at.square);
      at.heads[i].grad_omega = of_omega.at(bundle[i]);
    }
    for (Index time = begin; time < end; time += n.c)
      for (Index i = 0; i < bundle.heads; ++i) stream_query_gradients(p, n, bundle, i, time, at);
    for (Index time = begin + (end - begin - 1) / n.c * n.c; time >= begin && time < end; time -= n.c)
      for (Index i = 0; i < bundle.heads; ++i) stream_key_gradients(p, n, bundle, i, time, at);
    for (Index i = 0; i < bundle.heads; ++i)
      if (bundle[i].first) put_gradient(p, n, bundle[i], at.heads[i].R_t, at.square);
  }, p, n, bundles.heads());
  of_omega.put();
}

}  // namespace TARNN_ISA
}  // namespace tarnn
