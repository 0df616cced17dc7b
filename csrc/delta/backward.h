// The delta rule, backward: chunks (chunk.h) as matrix products, from the last to the first. R is the gradient of S behind a chunk.
//
//     D = Pᵀ dO + (K ⊙ out) R       Y = D − Aᵀ dX,  dX = Diag(β) Y       dV = dX       dβ_i = Y_i·U_i
//     dA = −dX V̂ᵀ (j < i)          dP = dO V̂ᵀ (j ≤ i)
//     dQ = Σ_j dP_ij E_ij K_j + in ⊙ (dO Sᵀ)
//     dK = Σ_j dA_ij E_ij K_j + Σ_i E_ij (dA_ij K_i + dP_ij Q_i) − in ⊙ (dX Sᵀ) + out ⊙ (V̂ Rᵀ)
//     R ← total ⊙ R + (Q ⊙ in)ᵀ dO − (K ⊙ in)ᵀ dX
//
// with the output's scale in dO. The gradient of a decay g_l is what flows across it, from keys before l to queries and keys from l on:
//
//     Σ_{j<l≤i} (dA_ij A_ij + dP_ij P_ij) + Σ_{i≥l} (what Q_i and K_i read of S) + Σ_{j<l} (what K_j left in S) + ⟨total ⊙ S, R⟩
//
// term by term, as no difference of larger sums. Saved are the inputs and the state before each segment; U and the states before the
// chunks of a segment are computed again.
#pragma once

#include "delta/pair_gradients.h"

namespace tarnn {
namespace TARNN_ISA {

/// A task's memory: one state per chunk of a segment, and R of each head of the groups that share keys.
template <typename T>
struct DeltaGradients {
  Chunk<T> chunk;
  Index ldg, state;  // of tiles with two chunks' columns; numbers of a state
  T *S, *R, *U, *V;  // (chunks × d × e), (heads × d × e), (segment × e), (c × e)
  T *G, *G_t, *V_t;  // (2c × e): −dX, then dO; (e × 2c); (e × c)
  T *D, *through, *through_t, *left, *within;  // (c × e), (2c × d), (d × 2c), (c × d), (2c × d)
  T *dA, *dP, *dg, *reads, *leaves, *across, *terms, *dbeta;
  T *sum_q, *sum_k, *sum_v, *sum_beta, *sum_decay;  // of a segment, where several heads share them
  Ahead ahead;

  DeltaGradients(Scratch& scratch, const DeltaProblem& p, Index groups) : chunk(scratch, p), ldg(padded<T>(2 * delta_chunk)), state(chunk.d_rows * chunk.lde) {
    constexpr Index c = delta_chunk, w = width<T>;
    const Index d = chunk.d_rows, channels = p.channels ? chunk.ldd : 1, segment = p.segment + w;
    S = scratch.take<T>((p.segment / c) * state);
    R = scratch.take<T>(groups * p.k_share * state);
    U = scratch.take<T>(segment * chunk.lde), V = scratch.take<T>((c + w) * chunk.lde);
    G = scratch.take<T>((2 * c + w) * chunk.lde);
    G_t = scratch.take<T>(chunk.e_rows * ldg), V_t = scratch.take<T>(chunk.e_rows * chunk.ldc);
    D = scratch.take<T>(c * chunk.lde);
    through = scratch.take<T>((2 * c + w) * chunk.ldd), through_t = scratch.take<T>(d * ldg);
    left = scratch.take<T>((c + w) * chunk.ldd);
    within = scratch.take<T>(2 * c * chunk.ldd);
    dA = scratch.take<T>((c + w) * chunk.ldc), dP = scratch.take<T>((c + w) * chunk.ldc);
    dg = scratch.take<T>((c + 1) * channels + w), reads = scratch.take<T>(c * channels + w), leaves = scratch.take<T>(c * channels + w);
    across = scratch.take<T>(chunk.ldd), terms = scratch.take<T>(c * w), dbeta = scratch.take<T>(c + w);
    sum_q = p.q_share > 1 ? scratch.take<T>(segment * chunk.ldd) : nullptr;
    sum_k = p.k_share > 1 ? scratch.take<T>(segment * chunk.ldd) : nullptr;
    sum_v = p.v_share > 1 ? scratch.take<T>(segment * chunk.lde) : nullptr;
    sum_beta = p.v_share > 1 ? scratch.take<T>(segment) : nullptr;
    sum_decay = p.v_share > 1 ? scratch.take<T>(segment * channels) : nullptr;
  }
};

/// X, solved to U and V̂, of a chunk, and the state behind it, if `next` is not null.
template <typename T>
void solve_chunk(const DeltaProblem& p, const DeltaHead& h, Index time, const T* S, T* next, T* U, DeltaGradients<T>& at) {
  Chunk<T>& c = at.chunk;
  const Index rows = c.rows;
  load_tile(p.v, h.row, h.v, time, rows, p.e, U, c.lde);
  clear_masked(p, h, time, rows, U, c.lde, c.lde);
  matmul(rows, p.e, p.d, Left<T>{c.kq_in, c.ldd, 1}, S, c.lde, at.D, c.lde, false, &at.ahead);
  for (Index i = 0; i < rows; ++i)
    for (Index j = 0; j < p.e; j += width<T>) store(U + i * c.lde + j, load(U + i * c.lde + j) - load(at.D + i * c.lde + j) * c.in[i]);
  solve(rows, p.e, {c.A, c.ldc, 1}, c.beta, 1, U, at.V, c.lde);
  if (!next) return;
  scale_rows(at.V, c.lde, rows, p.e, c.out);
  product(p.d, p.e, rows, Left<T>{c.k_out, 1, c.ldd}, at.V, c.lde, Decayed<T>{S, next, c.lde, c.total}, &at.ahead);
}

/// Sums over the heads that share something, in the order of heads: where the sum is once the last has come, or null before.
template <typename T>
const T* gathered(const T* x, Index ld, Index rows, Index n, Index share, Index head, T* sum) {
  if (share == 1) return x;
  for (Index i = 0; i < rows; ++i)
    for (Index j = 0; j < n; ++j) sum[i * ld + j] = head % share ? sum[i * ld + j] + x[i * ld + j] : x[i * ld + j];
  return head % share == share - 1 ? sum : nullptr;
}

/// The gradient of x from that of x̂ = factor·x, in place: factor·(grad − x̂ (x̂·grad)).
template <typename T>
void through_normalizer(const DeltaProblem& p, const T* normal, const T* factor, Index ld, Index rows, T* grad) {
  for (Index i = 0; p.normalize && i < rows; ++i) {
    const T along = dot(normal + i * ld, grad + i * ld, p.d);
    for (Index j = 0; j < p.d; j += width<T>)
      store(grad + i * ld + j, (load(grad + i * ld + j) - load(normal + i * ld + j) * along) * factor[i]);
  }
}

/// The gradients of a chunk's log-decays, from what flows within, into, out of and across it, times one number or d channels.
template <typename T>
void sum_flows(Index rows, Index ld, const DeltaGradients<T>& at) {
  for (Index x = 0; x < ld; ++x) {
    T before = at.across[x], behind = 0;
    for (Index l = 0; l < rows; ++l) {
      at.dg[l * ld + x] += before;
      before += at.leaves[l * ld + x];
    }
    for (Index l = rows; l-- > 0;) {
      behind += at.reads[l * ld + x];
      at.dg[l * ld + x] += behind;
    }
  }
}

/// What flows from a decay's other side: reads, leaves and across; the tiles through and left have their factors already.
template <typename T>
void state_flows(const DeltaProblem& p, const T* S, const T* R, DeltaGradients<T>& at) {
  const Chunk<T>& c = at.chunk;
  const Index rows = c.rows, ld = c.ldd;
  T across = 0;
  for (Index x = 0; x < p.d; ++x) {
    const T flow = dot(S + x * c.lde, R + x * c.lde, p.e) * c.total[x];
    across += flow;
    at.across[x] = flow;
  }
  if (!p.channels) at.across[0] = across;
  for (Index i = 0; i < rows; ++i) {
    const T *k = c.kq + i * ld, *q = c.q() + i * ld, *by_k = at.through + i * ld, *by_q = by_k + rows * ld, *kept = at.left + i * ld;
    if (!p.channels) {
      at.reads[i] = dot(k, by_k, p.d) + dot(q, by_q, p.d);
      at.leaves[i] = dot(k, kept, p.d);
      continue;
    }
    for (Index x = 0; x < p.d; x += width<T>) {
      store(at.reads + i * ld + x, load(k + x) * load(by_k + x) + load(q + x) * load(by_q + x));
      store(at.leaves + i * ld + x, load(k + x) * load(kept + x));
    }
  }
}

/// What is read of S and left in it: dX Sᵀ, dO Sᵀ and V̂ Rᵀ with their factors; then R before the chunk. G has its factors in, V out.
template <typename T>
void state_gradients(const DeltaProblem& p, const T* S, T* R, DeltaGradients<T>& at) {
  Chunk<T>& c = at.chunk;
  const Index rows = c.rows;
  transpose(at.G, c.lde, 2 * rows, p.e, at.G_t, at.ldg);
  matmul(p.d, 2 * rows, p.e, Left<T>{S, c.lde, 1}, at.G_t, at.ldg, at.through_t, at.ldg, false, &at.ahead);
  transpose(at.through_t, at.ldg, p.d, 2 * rows, at.through, c.ldd);
  matmul(p.d, rows, p.e, Left<T>{R, c.lde, 1}, at.V_t, c.ldc, at.through_t, at.ldg, false, &at.ahead);
  transpose(at.through_t, at.ldg, p.d, rows, at.left, c.ldd);
  if (p.channels) {
    multiply(at.through, c.in_tile, c.ldd, rows, p.d, at.through);
    multiply(at.through + rows * c.ldd, c.in_tile, c.ldd, rows, p.d, at.through + rows * c.ldd);
    multiply(at.left, c.out_tile, c.ldd, rows, p.d, at.left);
  }
  if (p.grad_log_decay) state_flows(p, S, R, at);
  product(p.d, p.e, 2 * rows, Left<T>{c.kq_in, 1, c.ldd}, at.G, c.lde, Decayed<T>{R, R, c.lde, c.total}, &at.ahead);
}

/// Y and dX of a chunk, dV and dβ, and G: −dX and dO.
template <typename T>
void value_gradients(const DeltaProblem& p, const DeltaHead& h, Index time, const T* R, const T* U, DeltaGradients<T>& at) {
  Chunk<T>& c = at.chunk;
  const Index rows = c.rows, ld = c.lde;
  T* grad_o = at.G + rows * ld;
  if (p.grad_o) load_tile(p.grad_o, h.row, h.o, time, rows, p.e, grad_o, ld, [&](auto x) TARNN_LAMBDA { return x * static_cast<T>(p.scale); });
  else clear(grad_o, rows * ld);
  matmul(rows, p.e, p.d, Left<T>{c.k_out, c.ldd, 1}, R, ld, at.D, ld, false, &at.ahead);
  scale_rows(at.D, ld, rows, p.e, c.out);
  matmul<Part::upper_left>(rows, p.e, rows, Left<T>{c.P, 1, c.ldc}, grad_o, ld, at.D, ld, true, &at.ahead);
  const Index last = rows - 1;  // from the last row to the first
  solve(rows, p.e, Left<T>{c.A + last * c.ldc + last, -1, -c.ldc}, c.beta + last, -1, at.D + last * ld, at.V + last * ld, -ld);
  for (Index i = 0; i < rows; ++i) at.dbeta[i] = is_masked(p, h, time + i) ? T(0) : dot(at.D + i * ld, U + i * ld, p.e);
  for (Index i = 0; i < rows; ++i)
    for (Index j = 0; j < p.e; j += width<T>) store(at.G + i * ld + j, -load(at.V + i * ld + j));
  clear_masked(p, h, time, rows, at.V, ld, ld);
}

/// A chunk's part of the gradients of q, k, v, β and decays; R becomes that of the state before the chunk. segment: where it begins.
template <typename T>
void chunk_gradients(const DeltaProblem& p, const DeltaHead& h, Index segment, Index time, const T* S, T* R, const T* U, DeltaGradients<T>& at) {
  Chunk<T>& c = at.chunk;
  const Index rows = c.rows, first = time - segment, ldd = c.ldd, lde = c.lde;
  value_gradients(p, h, time, R, U, at);
  if (const T* x = gathered(at.V, lde, rows, p.e, p.v_share, h.o, at.sum_v + first * lde))
    store_tile(x, lde, p.grad_v, h.row, h.v, time, rows, p.e);
  if (const T* x = gathered(at.dbeta, 1, rows, 1, p.v_share, h.o, at.sum_beta + first))
    for (Index i = 0; i < rows; ++i) element<T>(p.grad_beta, h.row, h.v, time + i) = x[i];
  scaled_rows(U, lde, rows, p.e, c.beta, at.V);
  transpose(at.V, lde, rows, p.e, at.V_t, c.ldc);
  matmul<Part::lower_result>(rows, rows, p.e, Left<T>{at.G, lde, 1}, at.V_t, c.ldc, at.dA, c.ldc, false);
  matmul<Part::lower_result>(rows, rows, p.e, Left<T>{at.G + rows * lde, lde, 1}, at.V_t, c.ldc, at.dP, c.ldc, false);
  if (!p.channels) {  // with channels the factors of rows are 1
    scale_rows(at.G, lde, rows, p.e, c.in);
    scale_rows(at.G + rows * lde, lde, rows, p.e, c.in);
    scale_columns(at.V_t, c.ldc, p.e, rows, c.out);
  }
  state_gradients(p, S, R, at);
  const Index channels = p.channels ? ldd : 1;
  if (p.grad_log_decay) clear(at.dg, rows * channels);
  if (p.channels) pair_gradients_by_channels(p, c, at.dA, at.dP, at.within, at.terms, p.grad_log_decay ? at.dg : nullptr);
  else pair_gradients(p, c, at.dA, at.dP, at.within, p.grad_log_decay ? at.dg : nullptr);
  T *grad_k = at.within, *grad_q = at.within + rows * ldd;
  for (Index i = 0; i < rows * ldd; i += width<T>) {
    store(grad_k + i, load(grad_k + i) + (load(at.through + i) + load(at.left + i)));
    store(grad_q + i, load(grad_q + i) + load(at.through + rows * ldd + i));
  }
  through_normalizer(p, c.kq, c.k_factor, ldd, rows, grad_k);
  through_normalizer(p, c.q(), c.q_factor, ldd, rows, grad_q);
  clear_masked(p, h, time, rows, grad_k, ldd, ldd);
  if (const T* x = gathered(grad_k, ldd, rows, p.d, p.k_share, h.o, at.sum_k + first * ldd))
    store_tile(x, ldd, p.grad_k, h.row, h.k, time, rows, p.d);
  if (const T* x = gathered(grad_q, ldd, rows, p.d, p.q_share, h.o, at.sum_q + first * ldd))
    store_tile(x, ldd, p.grad_q, h.row, h.q, time, rows, p.d);
  if (!p.grad_log_decay) return;
  sum_flows(rows, channels, at);
  clear_masked(p, h, time, rows, at.dg, channels, channels);
  if (const T* x = gathered(at.dg, channels, rows, p.channels ? p.d : 1, p.v_share, h.o, at.sum_decay + first * channels))
    store_tile(x, channels, p.grad_log_decay, h.row, h.v, time, rows, p.channels ? p.d : 1);
}

/// Asks for what a chunk is computed again from, and with `gradients` for what its gradients are made of, and their places.
inline void want_chunk(const DeltaProblem& p, const DeltaHead& h, Index time, Index rows, bool again, bool gradients, Ahead& ahead) {
  ahead.want(p.k, h.row, h.k, time, rows, p.d);
  if (again) ahead.want(p.v, h.row, h.v, time, rows, p.e);
  if (!gradients) return;
  ahead.want(p.q, h.row, h.q, time, rows, p.d);
  if (p.grad_o) ahead.want(p.grad_o, h.row, h.o, time, rows, p.e);
  ahead.want(p.grad_q, h.row, h.q, time, rows, p.d);
  ahead.want(p.grad_k, h.row, h.k, time, rows, p.d);
  ahead.want(p.grad_v, h.row, h.v, time, rows, p.e);
}

/// A segment of one head.
struct Segment {
  DeltaHead head;
  Index begin, end;
  Segment(const DeltaProblem& p, Index sequence, Index head, Index number)
      : head(p, sequence, head), begin(this->head.begin + number * p.segment), end(smaller(begin + p.segment, this->head.end)) {}
  Index chunks() const { return (end - begin + delta_chunk - 1) / delta_chunk; }
  Index time(Index chunk) const { return begin + chunk * delta_chunk; }
  Index rows(Index chunk) const { return smaller(delta_chunk, end - time(chunk)); }
};

/// The gradients of a segment; R becomes that of the state before it. next: the segment that comes after, or null.
template <typename T>
void segment_gradients(const DeltaProblem& p, const Segment& s, const Segment* next, T* R, DeltaGradients<T>& at) {
  Chunk<T>& c = at.chunk;
  const DeltaHead& h = s.head;
  const Index last = s.chunks() - 1;
  const T* before = s.begin == h.begin ? state_of<T>(p, h, p.before) : kept_state_of<T>(p, h, s.begin);
  if (before) read_rows(before, p.d, p.e, at.S, c.lde);
  else clear(at.S, p.d * c.lde);
  const auto U = [&](Index i) { return at.U + i * delta_chunk * c.lde; };
  for (Index i = 0; i <= last; ++i) {
    load_chunk(p, h, s.time(i), s.rows(i), i == last, c);
    at.ahead.clear();
    if (i < last) want_chunk(p, h, s.time(i + 1), s.rows(i + 1), true, i + 1 == last, at.ahead);
    solve_chunk(p, h, s.time(i), at.S + i * at.state, i < last ? at.S + (i + 1) * at.state : nullptr, U(i), at);
  }
  for (Index i = last; i >= 0; --i) {
    if (i < last) load_chunk(p, h, s.time(i), s.rows(i), true, c);
    at.ahead.clear();
    if (i > 0) want_chunk(p, h, s.time(i - 1), s.rows(i - 1), false, true, at.ahead);
    else if (next) want_chunk(p, next->head, next->begin, next->rows(0), true, next->chunks() == 1, at.ahead);
    chunk_gradients(p, h, s.begin, s.time(i), at.S + i * at.state, R, U(i), at);
  }
}

/// `count` heads of a sequence from `first` on, all that share their keys with one of them, segment after segment.
template <typename T>
void delta_gradients(const DeltaProblem& p, Index sequence, Index first, Index count, DeltaGradients<T>& at) {
  const Chunk<T>& c = at.chunk;
  clear(at.through_t, c.d_rows * at.ldg);  // its rows behind the d-th are never written, and end in a tile's padding
  for (Index i = 0; i < count; ++i) {
    const DeltaHead h(p, sequence, first + i);
    const T* given = h.writes_state(p) ? state_of<T>(p, h, p.grad_after) : nullptr;
    if (given) read_rows(given, p.d, p.e, at.R + i * at.state, c.lde);
    else clear(at.R + i * at.state, p.d * c.lde);
  }
  const DeltaHead any(p, sequence, first);
  const Index segments = (any.end - any.begin + p.segment - 1) / p.segment;
  for (Index number = segments; number-- > 0;)
    for (Index i = 0; i < count; ++i) {
      const bool same = i + 1 < count;
      const Segment s(p, sequence, first + i, number), next(p, sequence, first + (same ? i + 1 : 0), same ? number : number - 1);
      segment_gradients(p, s, same || number ? &next : nullptr, at.R + i * at.state, at);
    }
  for (Index i = 0; p.grad_before && i < count; ++i) {
    const DeltaHead h(p, sequence, first + i);
    T* to = state_of<T>(p, h, p.grad_before);
    for (Index x = 0; x < p.d; ++x)
      for (Index j = 0; j < p.e; ++j)
        to[x * p.e + j] = at.R[i * at.state + x * c.lde + j] + (h.o % p.v_share ? to[x * p.e + j] : T(0));
  }
}

template <typename T>
void delta_backward(const DeltaProblem& p) {
  const Index groups = p.heads / p.k_share, bytes = p.k_share * p.d * whole<T>(p.e) * static_cast<Index>(sizeof(T));
  const Index most = heads_at_once(p, groups, bytes), tasks = (groups + most - 1) / most;
  parallel_with<DeltaGradients<T>>(p, p.sequences * tasks, [&](Index i, DeltaGradients<T>& at) {
    const Index group = i % tasks * most, count = smaller(most, groups - group);
    delta_gradients(p, i / tasks, group * p.k_share, count * p.k_share, at);
  }, p, most);
}

}  // namespace TARNN_ISA
}  // namespace tarnn
