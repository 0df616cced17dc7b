// Causal attention, backward, in bfloat16: the formulas of causal_backward.h, with products of rounded numbers and float32 sums. Of
// what the products make, A and P are rounded; S and R go on in float32 and are rounded for their products alone.
#pragma once

#include "linear/bfloat16/forward.h"
#include "linear/causal_backward.h"

namespace tarnn {
namespace TARNN_ISA {

/// As BackwardScratch, and its tiles as words. Each state of a segment, before chunk k, has its words, rows in pairs.
struct RoundedBackwardScratch : BackwardScratch<float> {
  KeyWords words;
  Word *weighted_rows, *v_turned;                   // (c × f/2) key ⊙ φ(K), (e/2 × c) Vᵀ
  Word *q_rows, *q_pairs, *q_weighted;              // (c × f/2) φ(Q), (c/2 × f) its rows in pairs, the same of query ⊙ φ(Q)
  Word *G_rows, *G_pairs;                           // (c × e/2), (c/2 × e)
  Word *A_rows, *A_pairs, *P_pairs;                 // (c × c/2), (c/2 × c)
  Word *R_pairs, *R_rows, *R_turned;                // (e/2 × f), (e × f/2), (f/2 × e)
  Word* S;                                          // (e/2 × f) of each head and chunk
  Index states;

  RoundedBackwardScratch(Scratch& scratch, const Problem& p, const Sizes<float>& n, Index count)
      : BackwardScratch<float>(scratch, p, n, count), words(take_key_words(scratch, n, keys.weights.none)),
        states(most_chunks(p, n)) {
    const bool none = keys.weights.none;
    const Index pairs = n.rows() / 2;
    weighted_rows = none ? words.rows : scratch.take<Word>(n.rows() * word_row(n.f));
    v_turned = scratch.take<Word>(word_row(n.e) * n.ldc);
    q_rows = scratch.take<Word>(n.rows() * word_row(n.f));
    q_pairs = scratch.take<Word>(pairs * n.ldf);
    q_weighted = none ? q_pairs : scratch.take<Word>(pairs * n.ldf);
    G_rows = scratch.take<Word>(n.rows() * word_row(n.e));
    G_pairs = scratch.take<Word>(pairs * n.lde);
    A_rows = scratch.take<Word>(n.rows() * word_row(n.c));
    A_pairs = scratch.take<Word>(pairs * n.ldc);
    P_pairs = scratch.take<Word>(pairs * n.ldc);
    R_pairs = scratch.take<Word>(n.e_rows() / 2 * n.ldf);
    R_rows = scratch.take<Word>(n.e_rows() * word_row(n.f));
    R_turned = scratch.take<Word>(word_row(n.f) * n.lde);
    S = scratch.take<Word>(count * states * (n.e_rows() / 2 * n.ldf));
  }
  Word* S_of(const Sizes<float>& n, Index head, Index chunk) const { return S + (head * states + chunk) * (n.e_rows() / 2 * n.ldf); }
};

/// The gradients of one head's queries.
inline void rounded_query_gradients(const Problem& p, const Sizes<float>& n, const Stretch& s, Index head, Index time, const Word* S,
                                    const float* z, float* grad_omega, RoundedBackwardScratch& at) {
  Queries<float>& q = at.queries;
  const Weights<float>& w = at.keys.weights;
  const Index rows = at.keys.rows, lde = word_row(n.e), ldp = word_row(n.c);
  const Index terms = begins_empty(p, s, time) ? 0 : words(n.e);
  const LeftWords A{at.A_rows, ldp, 1};
  over_panels(n.f, [&](Index j, auto N) TARNN_LAMBDA {
    constexpr int R = word_rows<N>;
    for (Index i = 0; i < rows; i += R) {
      Vec<float> sums[R * N];
      unrolled<R * N>([&](auto x) TARNN_LAMBDA { sums[x] = Vec<float>{}; });
      if (terms) {
        accumulate<R, N>(terms, {at.G_rows + i * lde, lde, 1}, S + j, n.ldf, sums, at.ahead);
        unrolled<N>([&](auto x) TARNN_LAMBDA {
          const Vec<float> of_z = load(z + j + x * 16);
          unrolled<R>([&](auto r) TARNN_LAMBDA { sums[r * N + x] += of_z * q.G_z[i + r]; });
        });
        if (!w.plain)
          unrolled<R>([&](auto r) TARNN_LAMBDA {
            unrolled<N>([&](auto x) TARNN_LAMBDA { sums[r * N + x] *= w.query[i + r]; });
          });
      }
      if (!p.grad_log_decay)
        accumulate<R, N>((i + R) / 2, {at.A_rows + i * ldp, ldp, 1}, at.words.pairs + j, n.ldf, sums, at.ahead);
      store_tile_sums<R, N>(q.grad_phi + i * n.ldf + j, n.ldf, sums);
    }
  });
  if (p.grad_log_decay) {
    add_read_flow(n, false, rows, q, at.read);
    product_to<Zeros::above>(rows, n.f, at.words.all / 2, A, at.words.pairs, n.ldf, q.grad_phi, n.ldf, true, at.ahead);
  }
  store_feature_gradients(p, n, s, p.q, p.grad_q, head, time, rows, q.phi, q.grad_phi, q.from, q.x, q.grad_x, grad_omega, &at.ahead);
}

/// One query head in the chunk that `at` holds: its gradients, and what it adds to those of keys and values, and to R.
inline void add_rounded_query_head(const Problem& p, const Sizes<float>& n, const Stretch& s, Index r, Index time, const Word* S,
                                   const float* z, const Head<float>& own, RoundedBackwardScratch& at) {
  const Keys<float>& keys = at.keys;
  const Weights<float>& w = keys.weights;
  const KeyWords& words = at.words;
  const Index rows = keys.rows, all = words.all, head = s.head * p.r + r;
  const Index ldf = word_row(n.f), lde = word_row(n.e), ldp = word_row(n.c);
  Queries<float>& q = at.queries;
  load_queries(p, n, s, head, time, rows, w.M, 0.f, q, &at.ahead);
  round_rows(q.phi, n.ldf, rows, all, n.f, at.q_rows, ldf);
  interleave_rows(at.q_rows, ldf, all, n.f, at.q_pairs, n.ldf);
  round_rows(q.G, n.lde, rows, all, n.e, at.G_rows, lde);
  interleave_rows(at.G_rows, lde, all, n.e, at.G_pairs, n.lde);
  for (Index i = rows; i < all; ++i) q.G_z[i] = 0;
  const bool flow = static_cast<bool>(p.grad_log_decay), plain = w.plain;
  const Index ldc = n.ldc;
  float *const A = at.A, *const P = at.P, *const G_z = q.G_z, *const pair = w.pair;
  Word *const A_rows = at.A_rows, *const A_pairs = at.A_pairs, *const P_pairs = at.P_pairs;
  rounded_pairs(w, words, n, at.q_rows, at.ahead, [=](Index i, Index j, auto R, auto N, auto& sums) TARNN_LAMBDA {
    if (flow) store_tile_sums<R, N>(P + i * ldc + j, ldc, sums);
    store_row_pairs<R, N>(P_pairs + i / 2 * ldc + j, ldc, sums);
  });
  triangle(all, TARNN_ISA::words(n.e), at.G_rows, lde, at.v_turned, ldc, at.ahead,
           [=](Index i, Index j, auto R, auto N, auto& sums) TARNN_LAMBDA {
             unrolled<R>([&](auto r) TARNN_LAMBDA {
               unrolled<N>([&](auto x) TARNN_LAMBDA { sums[r * N + x] += G_z[i + r]; });
             });
             mask_tile<R, N>(i, j, sums);
             if (flow) store_tile_sums<R, N>(A + i * ldc + j, ldc, sums);
             if (!plain) weigh_tile<R, N>(pair, ldc, i, j, sums);
             unrolled<R>([&](auto r) TARNN_LAMBDA {
               store_rounded<N>(reinterpret_cast<std::uint16_t*>(A_rows + (i + r) * ldp) + j, sums + r * N);
             });
             store_row_pairs<R, N>(A_pairs + i / 2 * ldc + j, ldc, sums);
           });
  if (p.grad_log_decay) add_pair_flow(n, rows, at.A, at.P, at.flow);
  product_to<Zeros::below>(rows, n.f, all / 2, {at.A_pairs, 1, n.ldc}, at.q_pairs, n.ldf, at.grad_phi, n.ldf, true, at.ahead);
  product_to<Zeros::below>(rows, n.e, all / 2, {at.P_pairs, 1, n.ldc}, at.G_pairs, n.lde, at.grad_v, n.lde, true, at.ahead);
  if (time > s.begin || (s.first && p.grad_before.z)) {  // somebody reads R
    const float* phi = weighted_queries(keys, n, q.phi, rows, q.weighted);
    const Word* pairs = at.q_pairs;
    if (!w.plain) round_row_pairs(phi, n.ldf, rows, all, n.f, at.q_weighted, n.ldf), pairs = at.q_weighted;
    product_to(n.e, n.f, all / 2, {at.G_pairs, 1, n.lde}, pairs, n.ldf, own.R.S, n.ldf, true, at.ahead);
    add_rows(own.R.z, q.G_z, phi, n.ldf, rows, n.f);
  }
  rounded_query_gradients(p, n, s, head, time, S, z, own.grad_omega, at);
}

/// As reverse_chunk of BackwardScratch.
inline void reverse_chunk(const Problem& p, const Sizes<float>& n, const Bundle& bundle, Index i, Index begin, Index k, bool made,
                          const float* slots, RoundedBackwardScratch& at) {
  const Stretch& s = bundle[i];
  const Head<float>& own = at.heads[i];
  const Transposed<float>& R = own.R;
  Keys<float>& keys = at.keys;
  KeyWords& words = at.words;
  const Index time = begin + k * n.c, rows = smaller(n.c, s.end - time);
  const Index ldf = word_row(n.f), lde = word_row(n.e);
  load_rounded_keys(p, n, s, time, rows, own.M[k], true, true, keys, words, &at.ahead, at.memo(n, bundle, i, k, made));
  if (!keys.weights.none) round_rows(keys.weighted, n.ldf, rows, words.all, n.f, at.weighted_rows, ldf);
  transpose_words(words.v_rows, lde, words.all, TARNN_ISA::words(n.e), at.v_turned, n.ldc);
  if (time + rows == s.end) R.scale(to_own_units(p, n, s, slots, keys.weights.M_out), n);
  want_before(p, bundle, i, 0, time, k == 0, at.ahead);
  if (ends_unread(p, s, time + rows)) {
    clear(at.grad_phi, rows * n.ldf);
    clear(at.grad_v, rows * n.lde);
  } else {
    round_rows(R.S, n.ldf, n.e, n.e_rows(), n.f, at.R_rows, ldf);
    interleave_rows(at.R_rows, ldf, n.e_rows(), n.f, at.R_pairs, n.ldf);
    transpose_words(at.R_rows, ldf, n.e_rows(), TARNN_ISA::words(n.f), at.R_turned, n.lde);
    product(rows, n.f, TARNN_ISA::words(n.e), {words.v_rows, lde, 1}, at.R_pairs, n.ldf, at.ahead,
            [grad_phi = at.grad_phi, ld = n.ldf, z = R.z](Index i, Index j, auto R, auto N, auto& sums) TARNN_LAMBDA {
              unrolled<N>([&](auto x) TARNN_LAMBDA {
                const Vec<float> of_z = load(z + j + x * 16);
                unrolled<R>([&](auto r) TARNN_LAMBDA { sums[r * N + x] += of_z; });
              });
              store_tile_sums<R, N>(grad_phi + i * ld + j, ld, sums);
            });
    weigh_rows(keys.weights, keys.weights.key, n, rows, at.grad_phi);
    product_to(rows, n.e, TARNN_ISA::words(n.f), {at.weighted_rows, ldf, 1}, at.R_turned, n.lde, at.grad_v, n.lde, false, at.ahead);
  }
  if (p.grad_log_decay) {
    keep_entered(p, n, own.S[k], R, at);
    clear(at.flow, rows);
    clear(at.read, rows);
  }
  R.decay(keys.weights, n);
  for (Index r = 0; r < p.r; ++r) {
    if (r > 0) want_before(p, bundle, i, r, time, k == 0, at.ahead);
    add_rounded_query_head(p, n, s, r, time, at.S_of(n, i, k), own.S[k].z, own, at);
  }
  if (p.grad_log_decay) store_decay_gradients(p, n, s, time, at);
  store_key_gradients(p, n, s, time, keys, at.grad_phi, at.grad_v, at.x, at.queries.grad_x, own.grad_omega, &at.ahead);
}

/// Sᵀ before chunk k + 1 from that before chunk k (which may lie at the same place), and its words.
inline void absorb(const Sizes<float>& n, const Transposed<float>& from, const Transposed<float>& to, Word* to_words, bool empty,
                   RoundedBackwardScratch& at) {
  const Weights<float>& w = at.keys.weights;
  const float keep = w.plain ? 1.f : w.keep[0];
  const KeyWords& words = at.words;
  product(n.e, n.f, words.all / 2, {words.v_pairs, 1, n.lde}, words.weighted_pairs, n.ldf, at.ahead,
          [=, plain = w.plain, S_from = from.S, S_to = to.S, ldf = n.ldf](Index i, Index j, auto R, auto N, auto& sums) TARNN_LAMBDA {
            if (!empty) add_tile<R, N>(S_from + i * ldf + j, ldf, plain, keep, sums);
            store_tile_sums<R, N>(S_to + i * ldf + j, ldf, sums);
            store_row_pairs<R, N>(to_words + i / 2 * ldf + j, ldf, sums);
          });
  for (Index j = 0; j < n.f; j += 16) {
    const Vec<float> of_keys = load(at.keys.sums + j);
    store(to.z + j, empty ? of_keys : load(from.z + j) * keep + of_keys);
  }
}

/// As segment_states of BackwardScratch.
inline void segment_states(const Problem& p, const Sizes<float>& n, const Bundle& bundle, Index begin, Index chunks,
                           RoundedBackwardScratch& at) {
  for (Index i = 0; i < bundle.heads; ++i)
    if (!begins_empty(p, bundle[i], begin)) {
      clear(at.heads[i].S->S + n.e * n.ldf, (n.e_rows() - n.e) * n.ldf);
      round_row_pairs(at.heads[i].S->S, n.ldf, n.e, n.e_rows(), n.f, at.S_of(n, i, 0), n.ldf);
    }
  for (Index k = 0; k + 1 < chunks; ++k)
    for (Index i = 0; i < bundle.heads; ++i) {
      const Index time = begin + k * n.c;
      const Head<float>& own = at.heads[i];
      const Onward next(p, bundle, i, p.r - 1, time, time + n.c);
      load_rounded_keys(p, n, bundle[i], time, n.c, own.M[k], false, false, at.keys, at.words, &at.ahead, at.memo(n, bundle, i, k, false));
      at.ahead.clear();
      want_keys(p, next, at.ahead);
      if (k + 2 == chunks) want_queries(p, next, at.ahead);  // there the way back begins
      Transposed<float> from = own.S[k], to = own.S[k + 1];
      if (!p.grad_log_decay) from.S = to.S = own.S->S;  // the words are enough, and leave more of the cache
      absorb(n, from, to, at.S_of(n, i, k + 1), begins_empty(p, bundle[i], time), at);
      own.M[k + 1] = at.keys.weights.M_out;
    }
}

}  // namespace TARNN_ISA
}  // namespace tarnn
