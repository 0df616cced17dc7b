// Causal attention, backward: a forward sweep for the queries, which runs the state S once more, and a reverse sweep for
// keys and values, which runs R, the gradient of the state. Nothing of the first sweep is kept for the second.
//
//     A = (G Vᵀ + G_z 1ᵀ) ⊙ pair, lower triangle                    P = (φ(Q) φ(K)ᵀ) ⊙ pair, lower triangle
//     dφ(Q) = A φ(K) + query ⊙ (G Sᵀ + G_z zᵀ)                      S ← keep·S + (key ⊙ φ(K))ᵀ V
//     dφ(K) = Aᵀ φ(Q) + key ⊙ (V Rᵀ + 1 R_zᵀ)    dV = Pᵀ G + (key ⊙ φ(K)) R
//                                                R ← keep·R + (query ⊙ φ(Q))ᵀ G,   R_z likewise with G_z
//
// (eq. 13–15 of Katharopoulos et al. 2020, arXiv 2006.16236, by chunks). S and R are kept transposed, (e × f), since that
// is how they are read.
//
// The gradient of a decay at l is what flows from keys before l to queries from l on:
//
//     Σ_{j<l≤i} A_ij φ(q_i)·φ(k_j) + Σ_{i≥l} y_i + Σ_{j<l} x_j + ⟨keep·S_in, R_out⟩
//     y_i = φ(q_i)·(query ⊙ (…))_i     x_j = φ(k_j)·(key ⊙ (…))_j
//
// term by term, as no difference of larger sums. It needs the state before each chunk in the reverse sweep; only for it
// the first sweep keeps the state before every eighth chunk, from which the seven others are made once more.
#pragma once

#include "attention/causal.h"
#include "attention/gradients.h"

namespace tarnn {
namespace TARNN_ISA {

constexpr Index chunks_a_checkpoint = 8;

template <typename T>
struct BackwardScratch {
  Keys<T> keys;
  Queries<T> queries;
  T *S, *z;        // transposed, (e × f), (f)
  T *R, *R_z;      // transposed
  T *R_own, *R_z_own, *reach;  // of a stretch's own queries; by how much its beginning reaches the present chunk
  T *weighted_t, *v_t, *A, *P, *grad_phi, *grad_v, *grad_v_t, *x;
  T *flow, *entered, *states, *terms, *square;
  T* grad_omega = nullptr;  // of the stretch, (f × d) and (f), where wanted
  Ahead ahead;
  BackwardScratch(Scratch& scratch, const Problem& p, const Sizes<T>& n) : keys(take_keys(scratch, p, n)) {
    const bool plain = keys.weights.plain;
    queries = take_queries(scratch, p, n, plain);
    S = scratch.take<T>(n.e_rows() * n.ldf);
    R = scratch.take<T>(n.e_rows() * n.ldf);
    R_own = scratch.take<T>(n.e_rows() * n.ldf);
    z = scratch.take<T>(n.ldf);
    R_z = scratch.take<T>(n.ldf);
    R_z_own = scratch.take<T>(n.ldf);
    reach = scratch.take<T>(n.ldf);
    weighted_t = plain ? keys.phi_t : scratch.take<T>(n.f_rows() * n.ldc);
    v_t = scratch.take<T>(n.e_rows() * n.ldc);
    A = scratch.take<T>(n.rows() * n.ldc);
    P = scratch.take<T>(n.rows() * n.ldc);
    grad_phi = scratch.take<T>(n.rows() * n.ldf);
    grad_v = scratch.take<T>(n.rows() * n.lde);
    grad_v_t = scratch.take<T>(n.e_rows() * n.ldc);
    x = p.map == Map::squared_relu && !n.projected ? scratch.take<T>(n.rows() * n.ldf) : nullptr;
    square = scratch.take<T>(n.f_rows() * n.lde);
    if (!p.grad_log_decay) return;
    const Index channels = p.channels ? n.ldf : 1;
    flow = scratch.take<T>(n.rows() * channels);
    entered = scratch.take<T>((n.rows() + 1) * channels);
    terms = scratch.take<T>(n.rows() * width<T>);
    states = scratch.take<T>(chunks_a_checkpoint * (n.e + 1) * n.ldf);
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

/// A transposed state (e × f) and its sums (f) times keep.
template <typename T>
void decay_transposed(const Weights<T>& w, const Sizes<T>& n, T* S, T* z) {
  if (w.plain) return;
  if (w.channels) {
    scale_columns(S, n.ldf, n.e, n.f, w.keep);
    multiply(z, w.keep, n.ldf, 1, n.f, z);
  } else {
    for (Index i = 0; i < n.e; ++i) scale_rows(S + i * n.ldf, n.ldf, 1, n.f, w.keep);
    scale_rows(z, n.ldf, 1, n.f, w.keep);
  }
}

template <typename T>
void absorb_transposed(const Keys<T>& keys, const Sizes<T>& n, T* S, T* z, Ahead* ahead) {
  decay_transposed(keys.weights, n, S, z);
  matmul(n.e, n.f, keys.rows, {keys.v, 1, keys.ldv}, keys.weighted, n.ldf, S, n.ldf, true, ahead);
  for (Index j = 0; j < n.f; j += width<T>) {
    Vec<T> total = load(z + j);
    for (Index i = 0; i < keys.rows; ++i) total += load(keys.weighted + i * n.ldf + j);
    store(z + j, total);
  }
}

// --- the forward sweep: queries

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

/// Zeros where the gradient of a chunk's decays will be, for `keep_flow` to add to.
template <typename T>
void clear_flow(const Problem& p, const Sizes<T>& n, const Stretch& s, Index time, Index rows) {
  T* to = static_cast<T*>(p.grad_log_decay.data) + offset(p.grad_log_decay, s.row, s.head, time);
  for (Index i = 0; i < rows; ++i, to += p.grad_log_decay.stride[2]) std::fill_n(to, p.channels ? n.f : 1, T(0));
}

/// y_i of one query head, added to those of the others where the reverse sweep will look for them.
template <typename T>
void keep_flow(const Problem& p, const Sizes<T>& n, const Stretch& s, Index time, Index rows, const Queries<T>& q) {
  T* to = static_cast<T*>(p.grad_log_decay.data) + offset(p.grad_log_decay, s.row, s.head, time);
  for (Index i = 0; i < rows; ++i, to += p.grad_log_decay.stride[2]) {
    const T *phi = q.phi + i * n.ldf, *grad = q.grad_phi + i * n.ldf;
    if (!p.channels) {
      to[0] += dot(phi, grad, n.f);
      continue;
    }
    for (Index j = 0; j < n.f; ++j) to[j] += phi[j] * grad[j];
  }
}

/// Asks for the queries that come next, with the gradients of their outputs, and for their keys if those are new.
inline void want_queries(const Problem& p, const Stretch& s, const Onward& next, Ahead& ahead) {
  if (next.new_chunk) want_keys(p, s, next.time, ahead);
  ahead.want(p.q, s.row, next.head, next.time, next.rows, p.d);
  ahead.want(p.grad_o, s.row, next.head, next.time, next.rows, p.e);
  if (p.normalize) ahead.want(p.o, s.row, next.head, next.time, next.rows, p.e);
}

template <typename T>
void query_gradients(const Problem& p, const Sizes<T>& n, const Stretch& s, Index r, Index time, BackwardScratch<T>& at) {
  const Keys<T>& keys = at.keys;
  const Index rows = keys.rows, head = s.head * p.r + r;
  Queries<T>& q = at.queries;
  load_queries(p, n, s, head, time, rows, keys.weights.plain ? nullptr : keys.weights.M, T(0), q, &at.ahead);
  pair_gradients(keys, n, q, at.v_t, at.A, &at.ahead);
  weigh_pairs(keys, n, at.A);
  matmul(rows, n.f, n.e, {q.G, n.lde, 1}, at.S, n.ldf, q.grad_phi, n.ldf, false, &at.ahead);
  add_outer(q.grad_phi, q.G_z, at.z, n.ldf, rows, n.f);
  weigh_rows(keys.weights, keys.weights.query, n, rows, q.grad_phi);
  if (p.grad_log_decay) keep_flow(p, n, s, time, rows, q);
  if (keys.weights.channels) channel_query_gradients(keys, n, at.A, keys.phi_t, q.grad_phi);
  else matmul<Part::lower_left>(rows, n.f, rows, {at.A, n.ldc, 1}, keys.phi, n.ldf, q.grad_phi, n.ldf, true, &at.ahead);
  store_feature_gradients(p, n, s, p.q, p.grad_q, head, time, rows, q.phi, q.grad_phi, q.x, q.grad_x, at.grad_omega,
                          &at.ahead);
}

/// R of the stretch's own queries alone, as its beginning sees it: added chunk by chunk, forward.
template <typename T>
void add_own_queries(const Sizes<T>& n, BackwardScratch<T>& at) {
  const Keys<T>& keys = at.keys;
  Queries<T>& q = at.queries;
  weighted_queries(keys, n, q.phi, keys.rows, q.weighted);
  if (!keys.weights.plain) scale_columns(q.weighted, n.ldf, keys.rows, n.f, at.reach);
  matmul(n.e, n.f, keys.rows, {q.G, 1, n.lde}, q.weighted, n.ldf, at.R_own, n.ldf, true);
  add_rows(at.R_z_own, q.G_z, q.weighted, n.ldf, keys.rows, n.f);
}

/// Gradients of the queries of a stretch. M: of each chunk, its maximum before it. checkpoints: states, or null.
/// own: where R of the stretch's own queries goes (a block of transposed R, R_z and reach), or null.
template <typename T>
void query_sweep(const Problem& p, const Sizes<T>& n, const Stretch& s, T M, T* chunk_M, T* checkpoints, T* own,
                 BackwardScratch<T>& at) {
  const Index block = (n.e + 1) * n.ldf;
  if (own) {
    clear(at.R_own, n.e * n.ldf);
    clear(at.R_z_own, n.ldf);
    for (Index j = 0; j < n.ldf; ++j) at.reach[j] = 1;
  }
  Index chunk = 0;
  for (Index time = s.begin; time < s.end; time += n.c, ++chunk) {
    if (chunk_M) chunk_M[chunk] = M;
    if (checkpoints && chunk % chunks_a_checkpoint == 0) {
      T* to = checkpoints + chunk / chunks_a_checkpoint * block;
      std::memcpy(to, at.S, static_cast<std::size_t>(n.e * n.ldf) * sizeof(T));
      std::memcpy(to + n.e * n.ldf, at.z, static_cast<std::size_t>(n.ldf) * sizeof(T));
    }
    load_keys(p, n, s, time, smaller(n.c, s.end - time), M, at.keys, &at.ahead);
    transpose(at.keys.v, at.keys.ldv, at.keys.rows, n.e, at.v_t, n.ldc);
    if (p.grad_log_decay) clear_flow(p, n, s, time, at.keys.rows);
    for (Index r = 0; r < p.r; ++r) {
      const Onward next(p, s, r, time, time + n.c);
      at.ahead.clear();
      want_queries(p, s, next, at.ahead);
      at.ahead.want(p.grad_q, s.row, next.head, next.time, next.rows, p.d);
      query_gradients(p, n, s, r, time, at);
      if (own) add_own_queries(n, at);
    }
    if (own && !at.keys.weights.plain)
      for (Index j = 0; j < n.f; ++j) at.reach[j] *= at.keys.weights.keep[p.channels ? j : 0];
    absorb_transposed(at.keys, n, at.S, at.z, &at.ahead);
    M = at.keys.weights.M_out;
  }
  if (!own) return;
  std::memcpy(own, at.R_own, static_cast<std::size_t>(n.e * n.ldf) * sizeof(T));
  std::memcpy(own + n.e * n.ldf, at.R_z_own, static_cast<std::size_t>(n.ldf) * sizeof(T));
  std::memcpy(own + block, at.reach, static_cast<std::size_t>(n.ldf) * sizeof(T));
}

// --- the reverse sweep: keys and values

/// Adds to flow_l what flows from keys before l to queries from l on within the chunk, Σ_{j<l≤i} A_ij P_ij.
template <typename T>
void add_pair_flow(const Sizes<T>& n, Index rows, const T* A, const T* P, T* flow) {
  for (Index i = 1; i < rows; ++i) {
    T from_before = 0;
    for (Index j = 0; j < i; ++j) {
      from_before += A[i * n.ldc + j] * P[i * n.ldc + j];
      flow[j + 1] += from_before;
    }
  }
}

/// The same where the decay has channels, a vector of them at a time. terms: one vector per key.
template <typename T>
void add_channel_flow(const Keys<T>& keys, const Sizes<T>& n, const T* A, const T* phi_q, T* terms, T* flow) {
  constexpr Index w = width<T>;
  for (Index x = 0; x < n.f; x += w)
    for (Index i = 1; i < keys.rows; ++i) {
      Vec<T> decay = load(phi_q + i * n.ldf + x), from_before{};
      for (Index j = i; j-- > 0;) {
        decay *= load(keys.weights.a + (j + 1) * n.ldf + x);
        store(terms + j * w, decay * (keys.weights.u[j] * A[i * n.ldc + j]) * load(keys.phi + j * n.ldf + x));
      }
      for (Index j = 0; j < i; ++j) {
        from_before += load(terms + j * w);
        T* to = flow + (j + 1) * n.ldf + x;
        store(to, load(to) + from_before);
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

/// What one query head adds to the gradients of the chunk's keys and values, and to R.
template <typename T>
void add_query_head(const Problem& p, const Sizes<T>& n, const Stretch& s, Index r, Index time, BackwardScratch<T>& at) {
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
  const T* phi = weighted_queries(keys, n, q.phi, rows, q.weighted);
  matmul(n.e, n.f, rows, {q.G, 1, n.lde}, phi, n.ldf, at.R, n.ldf, true, &at.ahead);
  add_rows(at.R_z, q.G_z, phi, n.ldf, rows, n.f);
}

/// Before R passes the chunk: x_j of each key, and, in the last row, ⟨keep·S_in, R_out⟩.
template <typename T>
void keep_entered(const Problem& p, const Sizes<T>& n, const T* S, const T* z, BackwardScratch<T>& at) {
  const Index rows = at.keys.rows;
  if (!p.channels) {
    for (Index j = 0; j < rows; ++j) at.entered[j] = dot(at.keys.phi + j * n.ldf, at.grad_phi + j * n.ldf, n.f);
    T across = dot(z, at.R_z, n.f);
    for (Index i = 0; i < n.e; ++i) across += dot(S + i * n.ldf, at.R + i * n.ldf, n.f);
    at.entered[rows] = across * at.keys.weights.keep[0];
    return;
  }
  multiply(at.keys.phi, at.grad_phi, n.ldf, rows, n.f, at.entered);
  for (Index x = 0; x < n.f; x += width<T>) {
    Vec<T> across = load(z + x) * load(at.R_z + x);
    for (Index i = 0; i < n.e; ++i) across += load(S + i * n.ldf + x) * load(at.R + i * n.ldf + x);
    store(at.entered + rows * n.ldf + x, across * load(at.keys.weights.keep + x));
  }
}

/// The gradient of a chunk's log-decays: flow within, Σ_{i≥l} y_i (found where it will be stored), Σ_{j<l} x_j, and across.
/// Sums only grow: none is a difference of larger ones.
template <typename T>
void store_decay_gradients(const Problem& p, const Sizes<T>& n, const Stretch& s, Index time, const BackwardScratch<T>& at) {
  const Index rows = at.keys.rows, width = p.channels ? n.f : 1, ld = p.channels ? n.ldf : 1;
  const View& to = p.grad_log_decay;
  T* grad = static_cast<T*>(to.data) + offset(to, s.row, s.head, time);
  for (Index x = 0; x < width; ++x) {
    T entered = at.entered[rows * ld + x], read = 0;
    for (Index l = 0; l < rows; ++l) {
      at.flow[l * ld + x] += entered;
      entered += at.entered[l * ld + x];
    }
    for (Index l = rows; l-- > 0;) {
      T* here = grad + l * to.stride[2] + x;
      read += *here;
      *here = is_masked(p, s.row, time + l) ? T(0) : at.flow[l * ld + x] + read;
    }
  }
}

template <typename T>
void key_gradients(const Problem& p, const Sizes<T>& n, const Stretch& s, Index time, T M, const T* state,
                   BackwardScratch<T>& at) {
  Keys<T>& keys = at.keys;
  load_keys(p, n, s, time, smaller(n.c, s.end - time), M, keys, &at.ahead);
  const Index rows = keys.rows, before = time - n.c;
  at.ahead.clear();
  want_queries(p, s, Onward(p, s, 0, time, before), at.ahead);
  if (before >= s.begin) {
    at.ahead.want(p.grad_k, s.row, s.head, before, n.c, p.d);
    at.ahead.want(p.grad_v, s.row, s.head, before, n.c, n.e);
  }
  transpose(keys.v, keys.ldv, rows, n.e, at.v_t, n.ldc);
  if (!p.channels) transpose(keys.phi, n.ldf, rows, n.f, keys.phi_t, n.ldc);
  if (!keys.weights.plain) transpose(keys.weighted, n.ldf, rows, n.f, at.weighted_t, n.ldc);
  for (Index i = 0; i < rows; ++i) std::memcpy(at.grad_phi + i * n.ldf, at.R_z, static_cast<std::size_t>(n.ldf) * sizeof(T));
  matmul(rows, n.f, n.e, {keys.v, keys.ldv, 1}, at.R, n.ldf, at.grad_phi, n.ldf, true, &at.ahead);
  weigh_rows(keys.weights, keys.weights.key, n, rows, at.grad_phi);
  matmul(n.e, rows, n.f, {at.R, n.ldf, 1}, at.weighted_t, n.ldc, at.grad_v_t, n.ldc, false, &at.ahead);
  if (p.grad_log_decay) {
    keep_entered(p, n, state, state + n.e * n.ldf, at);
    clear(at.flow, rows * (p.channels ? n.ldf : 1));
  }
  decay_transposed(keys.weights, n, at.R, at.R_z);
  for (Index r = 0; r < p.r; ++r) {
    if (r > 0) {
      at.ahead.clear();
      want_queries(p, s, Onward(p, s, r, time, before), at.ahead);
    }
    add_query_head(p, n, s, r, time, at);
  }
  if (p.grad_log_decay) store_decay_gradients(p, n, s, time, at);
  transpose(at.grad_v_t, n.ldc, n.e, rows, at.grad_v, n.lde);
  store_key_gradients(p, n, s, time, keys, at.grad_phi, at.grad_v, at.x, at.queries.grad_x, at.grad_omega, &at.ahead);
}

/// The states before chunks `from` … `to` − 1, from the one before the first of them.
template <typename T>
void states_of(const Problem& p, const Sizes<T>& n, const Stretch& s, Index from, Index to, const T* chunk_M,
               const T* checkpoint, BackwardScratch<T>& at) {
  const Index block = (n.e + 1) * n.ldf;
  std::memcpy(at.states, checkpoint, static_cast<std::size_t>(block) * sizeof(T));
  for (Index chunk = from; chunk + 1 < to; ++chunk) {
    T* next = at.states + (chunk - from + 1) * block;
    std::memcpy(next, next - block, static_cast<std::size_t>(block) * sizeof(T));
    load_keys(p, n, s, s.begin + chunk * n.c, n.c, chunk_M ? chunk_M[chunk] : T(0), at.keys);
    absorb_transposed(at.keys, n, next, next + n.e * n.ldf, nullptr);
  }
}

/// Gradients of a stretch's keys and values, from its last chunk to its first; R is that behind it, then that before it.
template <typename T>
void key_sweep(const Problem& p, const Sizes<T>& n, const Stretch& s, const T* chunk_M, const T* checkpoints,
               BackwardScratch<T>& at) {
  const Index block = (n.e + 1) * n.ldf, chunks = (s.end - s.begin + n.c - 1) / n.c;
  Index made_to = chunks;  // the states before chunks from a checkpoint up to this one are there
  for (Index chunk = chunks; chunk-- > 0;) {
    const Index first = chunk / chunks_a_checkpoint * chunks_a_checkpoint;
    if (checkpoints && (chunk + 1 == chunks || chunk + 1 == made_to)) {
      states_of(p, n, s, first, chunk + 1, chunk_M, checkpoints + first / chunks_a_checkpoint * block, at);
      made_to = first;
    }
    const T* state = checkpoints ? at.states + (chunk - first) * block : nullptr;
    key_gradients(p, n, s, s.begin + chunk * n.c, chunk_M ? chunk_M[chunk] : T(0), state, at);
  }
}

/// The gradient of the state behind a sequence, transposed: that given, or zero.
template <typename T>
void given_gradient(const Problem& p, const Sizes<T>& n, const Stretch& s, T* square, T* R, T* R_z) {
  const Index at = place(p, s);
  clear(R, n.e * n.ldf);
  clear(R_z, n.ldf);
  if (p.grad_after.S) {
    read_rows(static_cast<const T*>(p.grad_after.S) + at * n.f * n.e, n.f, n.e, square, n.lde);
    transpose_state(n, square, R);
  }
  if (p.grad_after.z) read_rows(static_cast<const T*>(p.grad_after.z) + at * n.f, 1, n.f, R_z, n.ldf);
}

/// R, transposed, as the gradient of the state before a sequence.
template <typename T>
void put_gradient(const Problem& p, const Sizes<T>& n, const Stretch& s, const T* R, const T* R_z, T* square) {
  transpose(R, n.ldf, n.e, n.f, square, n.lde);
  put_state(p, n, s, State<T>{square, const_cast<T*>(R_z), 0}, p.grad_before);
}

template <typename T>
void causal_backward(const Problem& p) {
  const Sizes<T> n(p);
  const Index count = p.keys.count, block = (n.e + 1) * n.ldf, own_block = block + n.ldf;
  Owned<Index> first_chunk(count + 1), first_checkpoint(count + 1);
  first_chunk.get()[0] = first_checkpoint.get()[0] = 0;
  for (Index i = 0; i < count; ++i) {
    const Index chunks = (p.keys.at[i].end - p.keys.at[i].begin + n.c - 1) / n.c;
    first_chunk.get()[i + 1] = first_chunk.get()[i] + chunks;
    first_checkpoint.get()[i + 1] = first_checkpoint.get()[i] + (chunks + chunks_a_checkpoint - 1) / chunks_a_checkpoint;
  }
  Owned<T> slots(p.keys.slots * n.state()), own(p.keys.slots * own_block);
  Owned<T> chunk_M(p.weighted ? first_chunk.get()[count] : 0);
  Owned<T> checkpoints(p.grad_log_decay ? first_checkpoint.get()[count] * block : 0);
  const auto M_of = [&](Index i) { return p.weighted ? chunk_M.get() + first_chunk.get()[i] : nullptr; };
  const auto checkpoints_of = [&](Index i) {
    return p.grad_log_decay ? checkpoints.get() + first_checkpoint.get()[i] * block : nullptr;
  };
  const std::size_t bytes = bytes_of<BackwardScratch<T>>(p, n);
  OmegaGradients<T> of_omega(p, n, p.keys);
  states_behind(p, n, p.keys, slots.get());
  parallel(p, count, bytes, [&](Index i, void* memory) {
    Scratch scratch(memory);
    BackwardScratch<T> at(scratch, p, n);
    at.grad_omega = of_omega.at(i);
    State<T> state{at.square, at.z, 0};
    state_before(p, n, p.keys, i, slots.get(), state);
    transpose_state(n, at.square, at.S);
    T* to = p.keys.at[i].first ? nullptr : own.get() + p.keys.at[i - 1].slot * own_block;
    query_sweep(p, n, p.keys.at[i], state.M, M_of(i), checkpoints_of(i), to, at);
  });
  // R behind each stretch: that of its successor's own queries, and what comes from behind those
  Owned<T> square(n.f_rows() * n.lde), R(n.e_rows() * n.ldf), R_z(n.ldf);
  for (Index i = count; i-- > 1;) {
    if (p.keys.at[i].last && !p.keys.at[i].first) given_gradient(p, n, p.keys.at[i], square.get(), R.get(), R_z.get());
    if (p.keys.at[i].first) continue;
    T *behind = own.get() + p.keys.at[i - 1].slot * own_block, *reach = behind + block;
    for (Index row = 0; row <= n.e; ++row)
      for (Index j = 0; j < n.f; ++j) {
        const T later = row < n.e ? R.get()[row * n.ldf + j] : R_z.get()[j];
        behind[row * n.ldf + j] += reach[j] * later;
      }
    std::copy_n(behind, n.e * n.ldf, R.get());
    std::copy_n(behind + n.e * n.ldf, n.ldf, R_z.get());
  }
  parallel(p, count, bytes, [&](Index i, void* memory) {
    Scratch scratch(memory);
    BackwardScratch<T> at(scratch, p, n);
    at.grad_omega = of_omega.at(i);
    const Stretch& s = p.keys.at[i];
    if (s.last) {
      given_gradient(p, n, s, at.square, at.R, at.R_z);
    } else {
      const T* behind = own.get() + s.slot * own_block;
      std::memcpy(at.R, behind, static_cast<std::size_t>(n.e * n.ldf) * sizeof(T));
      std::memcpy(at.R_z, behind + n.e * n.ldf, static_cast<std::size_t>(n.ldf) * sizeof(T));
    }
    key_sweep(p, n, s, M_of(i), checkpoints_of(i), at);
    if (s.first) put_gradient(p, n, s, at.R, at.R_z, at.square);
  });
  of_omega.put();
}

}  // namespace TARNN_ISA
}  // namespace tarnn
