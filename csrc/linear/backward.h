// What the backward passes work with: scratch memory, the pairs within a chunk and their gradient, and R, the gradient of the
// state.
#pragma once

#include "linear/gradients.h"

namespace tarnn {
namespace TARNN_ISA {

// --- the pairs of a chunk of causal attention, P = (φ(Q) φ(K)ᵀ) ⊙ pair, lower triangle; `weights.h` has the factors

/// P (rows × rows) for a decay with channels: key j, multiplied up position by position, meets query after query.
template <typename T>
void channel_pairs(const Keys<T>& keys, const Sizes<T>& n, const T* phi_q, T* P, T* key) {
  for (Index i = 0; i < keys.rows; ++i) clear(P + i * n.ldc, n.ldc);
  for (Index j = 0; j < keys.rows; ++j) {
    for (Index x = 0; x < n.f; x += width<T>) store(key + x, load(keys.phi + j * n.ldf + x) * keys.weights.u[j]);
    for (Index i = j; i < keys.rows; ++i) {
      if (i > j) multiply(key, keys.weights.a + i * n.ldf, n.ldf, 1, n.f, key);
      P[i * n.ldc + j] = dot(phi_q + i * n.ldf, key, n.f);
    }
  }
}

/// Zero above the diagonal, and times `pair`.
template <typename T>
void mask_pairs(const Keys<T>& keys, const Sizes<T>& n, T* P) {
  const Integers<T> lane = iota<T>();
  const bool weigh = !keys.weights.plain && !keys.weights.channels;
  for (Index i = 0; i < keys.rows; ++i)
    for (Index j = 0; j < keys.rows; j += width<T>) {
      T* at = P + i * n.ldc + j;
      Vec<T> x = lane <= static_cast<int>(i - j) ? load(at) : Vec<T>{};
      store(at, weigh && j <= i ? x * load(keys.weights.pair + i * n.ldc + j) : x);
    }
}

/// φ(Q) φ(K)ᵀ, of which the lower triangle counts.
template <typename T>
void pair_products(const Keys<T>& keys, const Sizes<T>& n, const T* phi_q, T* to, Ahead* ahead) {
  matmul<Part::lower_result>(keys.rows, keys.rows, n.f, {phi_q, n.ldf, 1}, keys.phi_t, n.ldc, to, n.ldc, false, ahead);
}

/// P, masked and weighted. (Where the decay has channels, φ(K)ᵀ is not formed, and its place is used for one key.)
template <typename T>
void pairs(const Keys<T>& keys, const Sizes<T>& n, const T* phi_q, T* P, Ahead* ahead) {
  if (keys.weights.channels) return channel_pairs(keys, n, phi_q, P, keys.phi_t);
  pair_products(keys, n, phi_q, P, ahead);
  mask_pairs(keys, n, P);
}

// --- scratch memory

/// What a sweep keeps from chunk to chunk, of one head in the bundle.
template <typename T>
struct Head {
  Transposed<T>* S;  // the state: where causal, before each chunk of a segment
  T* M;              // its maximum, likewise
  Transposed<T> R;   // the gradient of the state
  T* reach;          // (f) by how much the stretch's beginning reaches the present chunk
  T* grad_omega;     // of the stretch, (f × d) and (f), where wanted
};

/// Chunks in the longest segment.
template <typename T>
Index most_chunks(const Problem& p, const Sizes<T>& n) {
  return p.causal ? (smaller(n.longest, p.segment) + n.c - 1) / n.c : 1;
}

template <typename T>
struct BackwardScratch {
  Keys<T> keys;
  Queries<T> queries;
  Head<T>* heads;
  T* shared;        // the gradient's sum over heads that share these keys
  T *products, *A_sum;  // (c × c) of such heads: φ(Q) φ(K)ᵀ, and the sum of their A, weighted
  T *weighted_t, *v_t, *A, *P, *grad_phi, *grad_v, *grad_v_t, *x;
  T *flow, *entered, *read, *terms;
  T* memos;         // random features of the keys of a segment, chunk by chunk, each with its scales
  State<T> square;  // for a state on its way to be transposed
  Ahead ahead;
  BackwardScratch(Scratch& scratch, const Problem& p, const Sizes<T>& n, Index count) : keys(take_keys(scratch, p, n)) {
    const bool none = keys.weights.none;
    const Index states = most_chunks(p, n);
    queries = take_queries(scratch, p, n, none);
    shared = take_shared(scratch, p, n);
    products = p.together > 1 ? scratch.take<T>(n.rows() * n.ldc) : nullptr;
    A_sum = p.together > 1 ? scratch.take<T>(n.rows() * n.ldc) : nullptr;
    heads = scratch.take<Head<T>>(count);
    for (Index i = 0; i < count; ++i) {
      Head<T> head = {scratch.take<Transposed<T>>(states), scratch.take<T>(states), Transposed<T>::take(scratch, n),
                      scratch.take<T>(n.ldf), nullptr};
      for (Index k = 0; k < states; ++k) {
        const Transposed<T> S = Transposed<T>::take(scratch, n);
        if (heads) head.S[k] = S;
      }
      if (heads) heads[i] = head;
    }
    weighted_t = none ? keys.phi_t : scratch.take<T>(n.f_rows() * n.ldc);
    v_t = scratch.take<T>(n.e_rows() * n.ldc);
    A = scratch.take<T>(n.rows() * n.ldc);
    P = scratch.take<T>(n.rows() * n.ldc);
    grad_phi = scratch.take<T>(n.rows() * n.ldf);
    grad_v = scratch.take<T>(n.rows() * n.lde);
    grad_v_t = scratch.take<T>(n.e_rows() * n.ldc);
    x = p.map == Map::squared_relu && !n.projected ? scratch.take<T>(n.rows() * n.ldf) : nullptr;
    square = take_state(scratch, n);
    memos = n.projected && p.causal ? scratch.take<T>(count * states * n.tile()) : nullptr;
    if (!p.grad_log_decay) return;
    const Index channels = p.channels ? n.ldf : 1;
    flow = scratch.take<T>(n.rows() * channels);
    read = scratch.take<T>(n.rows() * channels);
    entered = scratch.take<T>((n.rows() + 1) * channels);
    terms = scratch.take<T>(n.rows() * width<T>);
  }

  /// Of head i's keys in chunk k of a segment; there: made before.
  Memo<T> memo(const Sizes<T>& n, const Bundle& bundle, Index i, Index k, bool there) const {
    return {memos ? memos + (k * bundle.heads + i) * n.tile() : nullptr, memos && there};
  }
};

/// Whether heads that share queries and keys have the same features too, so that products of pairs with these are made once for all
/// heads of a task. (A log-weight's gradient is a product with each head's own.)
template <typename T>
bool shares_products(const Problem& p, const Sizes<T>& n) {
  return p.together > 1 && !p.channels && p.map != Map::exp && !n.projected && !p.grad_key_log_weight;
}

/// Bytes of what a sweep goes through for each chunk and head, by which bundles are made: S and R.
template <typename T>
Index bytes_of_head(const Sizes<T>& n) {
  return 2 * Transposed<T>::block(n) * static_cast<Index>(sizeof(T));
}

/// A, not yet times `pair`.
template <typename T>
void pair_gradients(const Keys<T>& keys, const Sizes<T>& n, const Queries<T>& q, const T* v_t, T* A, Ahead* ahead) {
  matmul<Part::lower_result>(keys.rows, keys.rows, n.e, {q.G, n.lde, 1}, v_t, n.ldc, A, n.ldc, false, ahead);
  const Integers<T> lane = iota<T>();
  for (Index i = 0; i < keys.rows; ++i)
    for (Index j = 0; j < keys.rows; j += width<T>) {
      T* at = A + i * n.ldc + j;
      store(at, lane <= static_cast<int>(i - j) ? load(at) + q.G_z[i] : Vec<T>{});
    }
}

template <typename T>
void weigh_pairs(const Keys<T>& keys, const Sizes<T>& n, T* A) {
  if (keys.weights.plain || keys.weights.channels) return;
  for (Index i = 0; i < keys.rows; ++i) multiply(A + i * n.ldc, keys.weights.pair + i * n.ldc, n.ldc, 1, i + 1, A + i * n.ldc);
}

/// Asks for the queries that come next, with the gradients of their outputs.
inline void want_queries(const Problem& p, const Onward& next, Ahead& ahead) {
  next.want_of_queries(p.q, p.d, ahead);
  next.want_of_queries(p.grad_o, p.e, ahead);
  if (p.normalize) next.want_of_queries(p.o, p.e, ahead);
}

/// Whether nothing reads the state behind these positions: its gradient is zero, and products with it are left out.
inline bool ends_unread(const Problem& p, const Stretch& s, Index end) {
  return s.last && end == s.end && !p.grad_after.S && !p.grad_after.z;
}

/// The gradient of the state behind a sequence, transposed: that given, or zero.
template <typename T>
void given_gradient(const Problem& p, const Sizes<T>& n, const Stretch& s, State<T>& square, const Transposed<T>& R) {
  if (!p.grad_after.S && !p.grad_after.z) return R.clear(n);
  get_state(p, n, s, p.grad_after, square);
  R.from(square, n);
}

/// R as the gradient of the state before a sequence, where somebody wants it.
template <typename T>
void put_gradient(const Problem& p, const Sizes<T>& n, const Stretch& s, const Transposed<T>& R, const State<T>& square) {
  if (!p.grad_before.z) return;
  transpose(R.S, n.ldf, n.e, n.f, square.S, n.lde);
  put_state(p, n, s, State<T>{square.S, R.z, 0}, p.grad_before);
}

}  // namespace TARNN_ISA
}  // namespace tarnn
