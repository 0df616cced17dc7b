// Attention that sees everything, in bfloat16: the formulas of full.h, with products of rounded numbers and float32 sums.
#pragma once

#include "linear/bfloat16/backward.h"
#include "linear/full.h"

namespace tarnn {
namespace TARNN_ISA {

inline void state_is_read(const Sizes<float>& n, RoundedState& state) { round_state(n, state); }
inline void state_is_read(const Sizes<float>& n, Index i, RoundedBackwardScratch& at) { round_state(n, i, at); }
inline void gradient_is_read(const Sizes<float>& n, Index i, RoundedBackwardScratch& at) {
  round_gradient(n, i, at);
  transpose_words(at.R_rows_of(n, i), word_row(n.f), n.e_rows(), words(n.f), at.R_turned_of(n, i), n.lde);
}

/// As full_outputs of FullScratch.
inline void full_outputs(const Problem& p, const Sizes<float>& n, const Bundle& bundle, Index i, Index r, Index time,
                         RoundedCausalScratch& at) {
  const Stretch& s = bundle[i];
  const RoundedState& state = at.states[i];
  const Index rows = at.keys.rows = smaller(n.c, s.end - time), all = at.words.all = whole<float>(rows), head = s.head * p.r + r;
  load_rounded_queries(p, n, s, head, time, state.z, at);
  add_up_denominators(nullptr, all, nullptr, at.of_state, at.den);
  for (Index j = 0; j < rows; ++j)
    at.factor[j] = output_factor(p, at.den[j], finite(state.M), p.map == Map::exp ? at.scale[j] : 0.f);
  store_denominators(p, s.row, head, time, rows, at.den);
  const NextQueries next(p, bundle, i, r, time);
  at.ahead.clear();
  at.ahead.want(p.q, s.row, next.head, next.time, next.rows, p.d);
  at.ahead.want(p.o, s.row, next.head, next.time, next.rows, n.e);
  const RowsOut out(p.o, s, head, time, rows, n.e, at.o, n.lde);
  product(rows, n.e, words(n.f), {at.q_rows, word_row(n.f), 1}, state.words, n.lde, at.ahead,
          [=, factor = at.factor](Index i, Index j, auto R, auto N, auto& sums) TARNN_LAMBDA {
            unrolled<R>([&](auto r) TARNN_LAMBDA {
              unrolled<N>([&](auto x) TARNN_LAMBDA { sums[r * N + x] *= factor[i + r]; });
            });
            out.put<R, N>(i, j, sums);
          });
  out.finish(p.o, s, head, time, n.e);
}

/// As full_query_chunk of BackwardScratch.
inline void full_query_chunk(const Problem& p, const Sizes<float>& n, const Bundle& bundle, Index i, Index r, Index time,
                             RoundedBackwardScratch& at) {
  const Stretch& s = bundle[i];
  const Head<float>& own = at.heads[i];
  Queries<float>& q = at.queries;
  const Index rows = at.keys.rows = smaller(n.c, s.end - time), all = at.words.all = whole<float>(rows), head = s.head * p.r + r;
  load_rounded_queries(p, n, s, head, time, nullptr, finite(*own.M), at);
  const NextQueries next(p, bundle, i, r, time);
  at.ahead.clear();
  at.ahead.want(p.q, s.row, next.head, next.time, next.rows, p.d);
  at.ahead.want(p.grad_o, s.row, next.head, next.time, next.rows, n.e);
  if (p.normalize) at.ahead.want(p.o, s.row, next.head, next.time, next.rows, n.e);
  at.ahead.want(p.grad_q, s.row, next.head, next.time, next.rows, p.d);
  const bool finish = straight(p, n, at.keys);
  const Index ld = n.ldf;
  const RowsOut out(p.grad_q, s, head, time, rows, n.f, q.grad_phi, ld);
  product(rows, n.f, words(n.e), {at.G_rows, word_row(n.e), 1}, at.S_of(n, i, 0), ld, at.ahead,
          [=, z = own.S->z, G_z = q.G_z, phi = q.phi, grad = q.grad_phi, map = p.map](Index i, Index j, auto R, auto N,
                                                                                      auto& sums) TARNN_LAMBDA {
            unrolled<N>([&](auto x) TARNN_LAMBDA {
              const Vec<float> of_z = load(z + j + x * 16);
              unrolled<R>([&](auto r) TARNN_LAMBDA { sums[r * N + x] += of_z * G_z[i + r]; });
            });
            if (!finish) return store_tile_sums<R, N>(grad + i * ld + j, ld, sums);
            times_slope<R, N>(map, phi + i * ld + j, ld, sums);
            out.put<R, N>(i, j, sums);
          });
  product_to(n.e, n.f, all / 2, {at.G_pairs, 1, n.lde}, at.q_pairs, ld, own.R.S, ld, true, at.ahead);
  add_rows(own.R.z, q.G_z, q.phi, ld, rows, n.f);
  if (finish) return out.finish(p.grad_q, s, head, time, n.f);
  store_feature_gradients(p, n, s, p.q, p.grad_q, head, time, rows, q.phi, q.grad_phi, q.from, q.x, q.grad_x, own.grad_omega, q.shared,
                          &at.ahead);
}

/// As full_key_chunk of FullKeyScratch.
inline void full_key_chunk(const Problem& p, const Sizes<float>& n, const Bundle& bundle, Index i, Index time,
                           RoundedBackwardScratch& at) {
  const Stretch& s = bundle[i];
  const Head<float>& own = at.heads[i];
  Keys<float>& keys = at.keys;
  KeyWords& words = at.words;
  const Index rows = keys.rows = smaller(n.c, s.end - time), all = words.all = whole<float>(rows);
  const Index ldf = word_row(n.f), lde = word_row(n.e);
  if (by_number(p, n, keys.weights.none)) {
    load_rounded_rows(p, n, p.k, s, s.head, time, rows, all, words.rows, words.pairs, keys.sums, keys.phi);
  } else {
    load_plain_key_features(p, n, s, time, rows, keys, &at.ahead, {});
    round_rows(keys.phi, n.ldf, rows, all, n.f, words.rows, ldf);
  }
  load_rounded_values(p, n, s, time, rows, true, words);
  const Onward next(p, bundle, i, p.r - 1, time, time + n.c);
  at.ahead.clear();
  want_keys(p, next, at.ahead);
  next.want_of_keys(p.grad_k, p.d, at.ahead);
  next.want_of_keys(p.grad_v, p.e, at.ahead);
  const bool finish = straight(p, n, keys);
  const RowsOut k_out(p.grad_k, s, s.head, time, rows, n.f, at.grad_phi, n.ldf), v_out(p.grad_v, s, s.head, time, rows, n.e, at.grad_v, n.lde);
  product(rows, n.f, TARNN_ISA::words(n.e), {words.v_rows, lde, 1}, at.R_pairs_of(n, i), n.ldf, at.ahead,
          [=, z = own.R.z, phi = keys.phi, grad = at.grad_phi, ld = n.ldf, map = p.map](Index i, Index j, auto R, auto N,
                                                                                        auto& sums) TARNN_LAMBDA {
            unrolled<N>([&](auto x) TARNN_LAMBDA {
              const Vec<float> of_z = load(z + j + x * 16);
              unrolled<R>([&](auto r) TARNN_LAMBDA { sums[r * N + x] += of_z; });
            });
            if (!finish) return store_tile_sums<R, N>(grad + i * ld + j, ld, sums);
            times_slope<R, N>(map, phi + i * ld + j, ld, sums);
            k_out.put<R, N>(i, j, sums);
          });
  product(rows, n.e, TARNN_ISA::words(n.f), {words.rows, ldf, 1}, at.R_turned_of(n, i), n.lde, at.ahead,
          [=, grad = at.grad_v, ld = n.lde](Index i, Index j, auto R, auto N, auto& sums) TARNN_LAMBDA {
            if (!finish) return store_tile_sums<R, N>(grad + i * ld + j, ld, sums);
            v_out.put<R, N>(i, j, sums);
          });
  if (finish) return k_out.finish(p.grad_k, s, s.head, time, n.f), v_out.finish(p.grad_v, s, s.head, time, n.e);
  weigh_full_keys(p, n, s, time, own, at);
  store_key_gradients(p, n, s, time, keys, at.grad_phi, at.grad_v, at.x, at.queries.grad_x, own.grad_omega, at.shared, &at.ahead);
}

}  // namespace TARNN_ISA
}  // namespace tarnn
