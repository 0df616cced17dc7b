// What both sweeps of the backward pass work with: scratch memory, the gradient of the pairs within a chunk, R, and what
// the first sweep leaves for the second.
#pragma once

#include "attention/causal.h"
#include "attention/gradients.h"

namespace tarnn {
namespace TARNN_ISA {

constexpr Index chunks_a_checkpoint = 8;

/// What a sweep keeps from chunk to chunk, of one head in the bundle.
template <typename T>
struct Head {
  Transposed<T> S;  // the state so far, in the query sweep
  Transposed<T> R;  // its gradient so far; in the query sweep, R of the stretch's own queries, as its beginning sees it
  T* reach;         // (f) by how much the stretch's beginning reaches the present chunk
  T M;              // the maximum so far
  T* grad_omega;    // of the stretch, (f × d) and (f), where wanted
};

template <typename T>
struct BackwardScratch {
  Keys<T> keys;
  Queries<T> queries;
  Head<T>* heads;
  T *weighted_t, *v_t, *A, *P, *grad_phi, *grad_v, *grad_v_t, *x;
  T *flow, *entered, *states, *terms;
  State<T> square;  // for a state on its way to be transposed
  Ahead ahead;
  BackwardScratch(Scratch& scratch, const Problem& p, const Sizes<T>& n, Index count) : keys(take_keys(scratch, p, n)) {
    const bool plain = keys.weights.plain;
    queries = take_queries(scratch, p, n, plain);
    heads = scratch.take<Head<T>>(count);
    for (Index i = 0; i < count; ++i) {
      const Transposed<T> S = Transposed<T>::take(scratch, n), R = Transposed<T>::take(scratch, n);
      T* reach = scratch.take<T>(n.ldf);
      if (heads) heads[i] = {S, R, reach, 0, nullptr};
    }
    weighted_t = plain ? keys.phi_t : scratch.take<T>(n.f_rows() * n.ldc);
    v_t = scratch.take<T>(n.e_rows() * n.ldc);
    A = scratch.take<T>(n.rows() * n.ldc);
    P = scratch.take<T>(n.rows() * n.ldc);
    grad_phi = scratch.take<T>(n.rows() * n.ldf);
    grad_v = scratch.take<T>(n.rows() * n.lde);
    grad_v_t = scratch.take<T>(n.e_rows() * n.ldc);
    x = p.map == Map::squared_relu && !n.projected ? scratch.take<T>(n.rows() * n.ldf) : nullptr;
    square = take_state(scratch, n);
    if (!p.grad_log_decay) return;
    const Index channels = p.channels ? n.ldf : 1;
    flow = scratch.take<T>(n.rows() * channels);
    entered = scratch.take<T>((n.rows() + 1) * channels);
    terms = scratch.take<T>(n.rows() * width<T>);
    states = scratch.take<T>(chunks_a_checkpoint * Transposed<T>::block(n));
  }
};

/// Bytes of what a sweep keeps per head, by which bundles are made. A decay's gradient needs more: there, heads go alone.
template <typename T>
Index bytes_of_head(const Problem& p, const Sizes<T>& n) {
  return p.grad_log_decay ? Bundles::most_bytes : 2 * Transposed<T>::block(n) * static_cast<Index>(sizeof(T));
}

/// What the query sweep leaves for the key sweep, by stretch.
template <typename T>
class Kept {
 public:
  /// R of a stretch's own queries, and how far its beginning reaches across it.
  struct Own {
    Transposed<T> R;
    T* reach;
  };

  Kept(const Problem& p, const Sizes<T>& n)
      : n_(n), first_(p.keys.at), own_block_(Transposed<T>::block(n) + n.ldf), first_chunk_(p.keys.count + 1),
        first_checkpoint_(p.keys.count + 1), own_(p.keys.slots * own_block_), M_(p.weighted ? chunks_before(p, n) : 0),
        checkpoints_(p.grad_log_decay ? checkpoints_before(p, n) * Transposed<T>::block(n) : 0) {}

  /// The maximum before each chunk; null where there are no log-weights.
  T* M(const Stretch& s) { return M_.get() ? M_.get() + first_chunk_.get()[&s - first_] : nullptr; }
  /// The states before every eighth chunk; null where no decay's gradient is wanted.
  T* checkpoints(const Stretch& s) {
    return checkpoints_.get() ? checkpoints_.get() + first_checkpoint_.get()[&s - first_] * Transposed<T>::block(n_) : nullptr;
  }
  /// Of a stretch that is not the first of its sequence.
  Own own(const Stretch& s) {
    T* at = own_.get() + (&s)[-1].slot * own_block_;
    return {Transposed<T>(at, n_), at + Transposed<T>::block(n_)};
  }

 private:
  const Sizes<T>& n_;
  const Stretch* first_;
  Index own_block_;
  Owned<Index> first_chunk_, first_checkpoint_;
  Owned<T> own_, M_, checkpoints_;

  /// All chunks; of each stretch, those of the stretches before it are noted.
  Index chunks_before(const Problem& p, const Sizes<T>& n) { return count(p, n.c, first_chunk_.get()); }
  Index checkpoints_before(const Problem& p, const Sizes<T>& n) {
    return count(p, n.c * chunks_a_checkpoint, first_checkpoint_.get());
  }
  static Index count(const Problem& p, Index positions, Index* before) {
    Index total = 0;
    for (Index i = 0; i < p.keys.count; ++i) {
      before[i] = total;
      total += (p.keys.at[i].end - p.keys.at[i].begin + positions - 1) / positions;
    }
    return total;
  }
};

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

/// factor ⊙ x for the factors `query` or `key` of a chunk.
template <typename T>
void weigh_rows(const Weights<T>& w, const T* factor, const Sizes<T>& n, Index rows, T* x) {
  if (w.plain) return;
  if (w.channels) multiply(x, factor, n.ldf, rows, n.f, x);
  else scale_rows(x, n.ldf, rows, n.f, factor);
}

/// Asks for the queries that come next, with the gradients of their outputs, and for their keys if those are new.
inline void want_queries(const Problem& p, const Onward& next, Ahead& ahead) {
  want_keys(p, next, ahead);
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
