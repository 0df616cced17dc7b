// Causal attention, forward: one sweep over a stretch, chunk by chunk.
//
//     P  = (φ(Q) φ(K)ᵀ) ⊙ pair, lower triangle      o = (P V + query ⊙ φ(Q) S) · factor
//     S ← keep·S + (key ⊙ φ(K))ᵀ V                  z likewise; den = P 1 + query ⊙ φ(Q) z
//
// (eq. 9–12 of Katharopoulos et al. 2020, arXiv 2006.16236, by chunks). `weights.h` has the factors.
#pragma once

#include "linear/stretches.h"

namespace tarnn {
namespace TARNN_ISA {

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

/// P, masked and weighted. (Where the decay has channels, φ(K)ᵀ is not formed, and its place is used for one key.)
template <typename T>
void pairs(const Keys<T>& keys, const Sizes<T>& n, const T* phi_q, T* P, Ahead* ahead) {
  if (keys.weights.channels) return channel_pairs(keys, n, phi_q, P, keys.phi_t);
  matmul<Part::lower_result>(keys.rows, keys.rows, n.f, {phi_q, n.ldf, 1}, keys.phi_t, n.ldc, P, n.ldc, false, ahead);
  mask_pairs(keys, n, P);
}

/// Σ_j P_ij + q_i·z, for all rows: lanes first, then, in squares, the sums of the lanes.
template <typename T>
void denominators(const Sizes<T>& n, Index rows, const T* P, const T* q, const T* z, T* den) {
  constexpr Index w = width<T>;
  T lanes[w * w], turned[w * w];
  for (Index i = 0; i < rows; i += w) {
    for (Index l = 0; l < w; ++l) {
      Vec<T> total{};
      if (i + l < rows) {
        total = dot_lanes(q + (i + l) * n.ldf, z, n.f);
        for (Index j = 0; j <= i + l; j += w) total += load(P + (i + l) * n.ldc + j);
      }
      store(lanes + l * w, total);
    }
    transpose_square(lanes, w, turned, w);
    Vec<T> total{};
    for (Index l = 0; l < w; ++l) total += load(turned + l * w);
    store(den + i, total);
  }
}

template <typename T>
struct CausalScratch {
  Keys<T> keys;
  State<T>* states;  // of each head in the bundle
  T *q, *scale, *q_weighted, *P, *o, *den, *factor;
  Ahead ahead;
  CausalScratch(Scratch& scratch, const Problem& p, const Sizes<T>& n, Index heads)
      : keys(take_keys(scratch, p, n)), states(take_states(scratch, n, heads)) {
    q = scratch.take<T>(n.rows() * n.ldf);
    scale = scratch.take<T>(n.ldc);
    q_weighted = keys.weights.none ? q : scratch.take<T>(n.rows() * n.ldf);
    P = scratch.take<T>(n.rows() * n.ldc);
    o = scratch.take<T>(n.rows() * n.lde);
    den = scratch.take<T>(n.ldc);
    factor = scratch.take<T>(n.ldc);
  }
};

template <typename T>
void store_denominators(const Problem& p, Index row, Index head, Index time, Index rows, const T* den) {
  if (!p.den) return;
  std::memcpy(static_cast<T*>(p.den.data) + offset(p.den, row, head, time), den, static_cast<std::size_t>(rows) * sizeof(T));
}

/// The outputs of one query head in the chunk that `at.keys` holds, which `state` has not seen yet.
template <typename T>
void causal_outputs(const Problem& p, const Sizes<T>& n, const Stretch& s, Index head, Index time, const State<T>& state,
                    CausalScratch<T>& at) {
  const Index rows = at.keys.rows;
  make_features(p, n, s, p.q, head, time, rows, at.keys.x_tile, at.q, at.scale, &at.ahead);
  pairs(at.keys, n, at.q, at.P, &at.ahead);
  const T* q = weighted_queries(at.keys, n, at.q, rows, at.q_weighted);
  denominators(n, rows, at.P, q, state.z, at.den);
  for (Index i = 0; i < rows; ++i)
    at.factor[i] = output_factor(p, at.den[i], at.keys.weights.none ? T(0) : at.keys.weights.M[i],
                                 p.map == Map::exp ? at.scale[i] : T(0));
  const bool direct = lies_well<T>(p.o, n.e);
  T* o = direct ? static_cast<T*>(p.o.data) + offset(p.o, s.row, head, time) : at.o;
  const Index terms = begins_empty(p, s, time) ? 0 : n.f;
  sum_of_products<T>(rows, n.e, {rows, {at.P, n.ldc, 1}, at.keys.v, at.keys.ldv}, {terms, {q, n.ldf, 1}, state.S, n.lde},
                     at.factor, o, direct ? n.e : n.lde, &at.ahead);
  if (!direct) store_tile(at.o, n.lde, p.o, s.row, head, time, rows, n.e);
  store_denominators(p, s.row, head, time, rows, at.den);
}

template <typename T>
void causal_sweep(const Problem& p, const Sizes<T>& n, const Bundle& bundle, CausalScratch<T>& at) {
  for (Index time = bundle[0].begin; time < bundle[0].end; time += n.c)
    for (Index i = 0; i < bundle.heads; ++i) {
      const Stretch& s = bundle[i];
      State<T>& state = at.states[i];
      if (T* to = kept_state<T>(p, s, time)) write_state(state, n, to);
      load_keys_to_absorb(p, n, s, time, smaller(n.c, s.end - time), state.M, true, at.keys, &at.ahead);
      for (Index r = 0; r < p.r; ++r) {
        const Onward next(p, bundle, i, r, time, time + n.c);
        at.ahead.clear();
        want_keys(p, next, at.ahead);
        next.want_of_queries(p.q, p.d, at.ahead);
        next.want_of_queries(p.o, p.e, at.ahead);
        causal_outputs(p, n, s, s.head * p.r + r, time, state, at);
      }
      const bool wanted = time + n.c < s.end || (s.last && p.after.M);
      if (wanted) absorb(at.keys, n, state, &at.ahead, begins_empty(p, s, time));
    }
  for (Index i = 0; i < bundle.heads; ++i)
    if (bundle[i].last) put_state(p, n, bundle[i], at.states[i], p.after);
}

template <typename T>
void causal_forward(const Problem& p) {
  const Sizes<T> n(p);
  Owned<T> slots(p.keys.slots * n.state());
  const Bundles bundles(p, p.keys, n.f_rows() * n.lde * static_cast<Index>(sizeof(T)));
  states_behind(p, n, p.keys, slots.get());
  parallel_with<CausalScratch<T>>(p, bundles.count(), [&](Index i, CausalScratch<T>& at) {
    for (Index head = 0; head < bundles[i].heads; ++head) state_before(p, n, bundles[i][head], slots.get(), at.states[head]);
    causal_sweep(p, n, bundles[i], at);
  }, p, n, bundles.heads());
}

}  // namespace TARNN_ISA
}  // namespace tarnn
