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
  Word *R_pairs, *R_rows, *R_turned;                // (e/2 × f), (e × f/2), (f/2 × e) of each head
  Word* S;                                          // (e/2 × f) of each head and chunk
  float *R_z, *sums;                                // (f) z of R, as the chunk's keys see it; (f)
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
    R_pairs = scratch.take<Word>(count * (n.e_rows() / 2 * n.ldf));
    R_rows = scratch.take<Word>(count * (n.e_rows() * word_row(n.f)));
    R_z = scratch.take<float>(n.ldf);
    sums = scratch.take<float>(n.ldf);
    R_turned = scratch.take<Word>(count * (word_row(n.f) * n.lde));
    S = scratch.take<Word>(count * states * (n.e_rows() / 2 * n.ldf));
  }
  Word* S_of(const Sizes<float>& n, Index head, Index chunk) const { return S + (head * states + chunk) * (n.e_rows() / 2 * n.ldf); }
  Word* R_pairs_of(const Sizes<float>& n, Index head) const { return R_pairs + head * (n.e_rows() / 2 * n.ldf); }
  Word* R_rows_of(const Sizes<float>& n, Index head) const { return R_rows + head * (n.e_rows() * word_row(n.f)); }
  Word* R_turned_of(const Sizes<float>& n, Index head) const { return R_turned + head * (word_row(n.f) * n.lde); }
};

/// Whether gradients go from the products' sums to where they are wanted, by a factor for each number.
inline bool straight(const Problem& p, const Sizes<float>& n, const Keys<float>& keys) {
  return by_number(p, n, keys.weights.none) && p.map != Map::squared_relu && !p.grad_key_log_weight && !p.grad_log_decay;
}

/// sums times the derivative of the map, as features_backward.
template <int R, int N>
TARNN_INLINE void times_slope(Map map, const float* phi, Index ld, Vec<float> (&sums)[R * N]) {
  if (map == Map::identity) return;
  unrolled<R>([&](auto r) TARNN_LAMBDA {
    unrolled<N>([&](auto x) TARNN_LAMBDA {
      auto& sum = sums[r * N + x];
      const Vec<float> y = load(phi + r * ld + x * 16);
      if (map == Map::elu) sum *= y > 1 ? Vec<float>{} + 1.f : y;
      else sum = y > 0 ? sum : Vec<float>{};
    });
  });
}

/// The gradients of one head's queries.
inline void rounded_query_gradients(const Problem& p, const Sizes<float>& n, const Stretch& s, Index head, Index time, const Word* S,
                                    const float* z, float* grad_omega, RoundedBackwardScratch& at) {
  Queries<float>& q = at.queries;
  const Weights<float>& w = at.keys.weights;
  const Index rows = at.keys.rows, lde = word_row(n.e), ldp = word_row(n.c), ldf = n.ldf;
  const Index terms = begins_empty(p, s, time) ? 0 : words(n.e);
  const bool plain = w.plain, flow = static_cast<bool>(p.grad_log_decay), finish = straight(p, n, at.keys);
  const Word *const G_rows = at.G_rows, *const A_rows = at.A_rows, *const K = at.words.pairs;
  float *const G_z = q.G_z, *const query = w.query, *const grad = q.grad_phi, *const phi = q.phi;
  const RowsOut out(p.grad_q, s, head, time, rows, n.f, grad, ldf);
  const Map map = p.map;
  over_word_tiles(rows, n.f, [&](Index i, Index j, auto R, auto N, auto& sums) TARNN_LAMBDA {
    if (terms) {
      accumulate<R, N>(terms, {G_rows + i * lde, lde, 1}, S + j, ldf, sums, at.ahead);
      unrolled<N>([&](auto x) TARNN_LAMBDA {
        const Vec<float> of_z = load(z + j + x * 16);
        unrolled<R>([&](auto r) TARNN_LAMBDA { sums[r * N + x] += of_z * G_z[i + r]; });
      });
      if (!plain) scale_tile<R, N>(query + i, sums);
    }
    if (!flow) accumulate<R, N>((i + R) / 2, {A_rows + i * ldp, ldp, 1}, K + j, ldf, sums, at.ahead);
    if (finish) {
      times_slope<R, N>(map, phi + i * ldf + j, ldf, sums);
      out.put<R, N>(i, j, sums);
    } else {
      store_tile_sums<R, N>(grad + i * ldf + j, ldf, sums);
    }
  });
  if (finish) return out.finish(p.grad_q, s, head, time, n.f);
  if (flow) {
    add_read_flow(n, false, rows, q, at.read);
    product_to<Zeros::above>(rows, n.f, at.words.all / 2, {A_rows, ldp, 1}, K, ldf, q.grad_phi, ldf, true, at.ahead);
  }
  store_feature_gradients(p, n, s, p.q, p.grad_q, head, time, rows, q.phi, q.grad_phi, q.from, q.x, q.grad_x, grad_omega, q.shared, &at.ahead);
}

/// G and G_z of rows that are whole vectors of words: as load_output_gradients, rounded.
inline void round_output_gradients(const Problem& p, const Sizes<float>& n, const Stretch& s, Index head, Index time, Index rows,
                                   RoundedBackwardScratch& at) {
  const auto* grad = static_cast<const std::uint16_t*>(p.grad_o.data) + offset(p.grad_o, s.row, head, time);
  const auto* out = static_cast<const std::uint16_t*>(p.o.data) + offset(p.o, s.row, head, time);
  const Index ld = word_row(n.e), lde = n.lde, e = n.e;
  for (Index i = 0; i < rows; i += 2, grad += 2 * p.grad_o.stride[2], out += 2 * p.o.stride[2]) {
    Vec<float> total[2] = {};
    for (Index j = 0; j < e; j += 32) {
      Words row[2];
      unrolled<2>([&](auto r) TARNN_LAMBDA {
        const auto *g = grad + r * p.grad_o.stride[2] + j, *o = out + r * p.o.stride[2] + j;
        const float factor = at.queries.factor[i + r];
        const Vec<float> x = Bfloat16::load(g) * factor, y = Bfloat16::load(g + 16) * factor;
        if (p.normalize) total[r] += x * Bfloat16::load(o), total[r] += y * Bfloat16::load(o + 16);
        store_words(at.G_rows + (i + r) * ld + j / 2, row[r] = round_row(x, y));
      });
      store_words(at.G_pairs + i / 2 * lde + j, interleaved<0>(row[0], row[1]));
      store_words(at.G_pairs + i / 2 * lde + j + 16, interleaved<16>(row[0], row[1]));
    }
    unrolled<2>([&](auto r) TARNN_LAMBDA { at.queries.G_z[i + r] = -sum<float>(total[r]); });
  }
}

/// A head's queries, and the gradients of their outputs. M: the units of each row's sums.
inline void load_rounded_queries(const Problem& p, const Sizes<float>& n, const Stretch& s, Index head, Index time,
                                 const float* M, RoundedBackwardScratch& at) {
  const Index rows = at.keys.rows, all = at.words.all, ldf = word_row(n.f), lde = word_row(n.e);
  Queries<float>& q = at.queries;
  if (by_number(p, n, at.keys.weights.none)) {
    load_rounded_rows(p, n, p.q, s, head, time, rows, all, at.q_rows, at.q_pairs, at.sums, q.phi);
  } else {
    q.from = make_features(p, n, s, p.q, head, time, rows, q.x, q.phi, q.scale, &at.ahead);
    round_rows(q.phi, n.ldf, rows, all, n.f, at.q_rows, ldf);
    interleave_rows(at.q_rows, ldf, all, n.f, at.q_pairs, n.ldf);
  }
  load_output_factors(p, s, head, time, rows, M, 0.f, q);
  if (rows == all && p.grad_o.stride[3] == 1 && p.o.stride[3] == 1 && n.e % 32 == 0)
    return round_output_gradients(p, n, s, head, time, rows, at);
  load_output_gradients(p, n, s.row, head, time, rows, q);
  round_rows(q.G, n.lde, rows, all, n.e, at.G_rows, lde);
  interleave_rows(at.G_rows, lde, all, n.e, at.G_pairs, n.lde);
  for (Index i = rows; i < all; ++i) q.G_z[i] = 0;
}

/// A and P of a head's queries, rounded.
inline void rounded_pair_gradients(const Problem& p, const Sizes<float>& n, RoundedBackwardScratch& at) {
  const Weights<float>& w = at.keys.weights;
  const bool flow = static_cast<bool>(p.grad_log_decay), plain = w.plain;
  const Index ldc = n.ldc, ldp = word_row(n.c), rows = at.keys.rows;
  float *const A = at.A, *const P = at.P, *const G_z = at.queries.G_z, *const pair = w.pair;
  Word *const A_rows = at.A_rows, *const A_pairs = at.A_pairs, *const P_pairs = at.P_pairs;
  rounded_pairs(at.keys, at.words, n, at.q_rows, at.ahead, [=](Index i, Index j, auto R, auto N, auto& sums) TARNN_LAMBDA {
    if (flow) store_tile_sums<R, N>(P + i * ldc + j, ldc, sums);
    store_row_pairs<R, N>(P_pairs + i / 2 * ldc + j, ldc, sums);
  });
  triangle(at.words.all, words(n.e), at.G_rows, word_row(n.e), at.v_turned, ldc, at.ahead,
           [=](Index i, Index j, auto R, auto N, auto& sums) TARNN_LAMBDA {
             unrolled<R>([&](auto r) TARNN_LAMBDA {
               unrolled<N>([&](auto x) TARNN_LAMBDA { sums[r * N + x] += G_z[i + r]; });
             });
             mask_tile<R, N>(i, j, sums);
             if (flow) store_tile_sums<R, N>(A + i * ldc + j, ldc, sums);
             if (!plain) weigh_tile<R, N>(pair, ldc, rows, i, j, sums);
             unrolled<R>([&](auto r) TARNN_LAMBDA {
               store_rounded<N>(reinterpret_cast<std::uint16_t*>(A_rows + (i + r) * ldp) + j, sums + r * N);
             });
             store_row_pairs<R, N>(A_pairs + i / 2 * ldc + j, ldc, sums);
           });
}

/// What one product of a chunk's keys, x · y, and then, of each query head, a (c × c, below its diagonal, read by columns) · b add up
/// to: in `tile`, until the last head has been added. done(i, j, R, N, sums) then. k: words of x · y, 0 for none.
template <typename First, typename Done>
TARNN_INLINE void key_products(Index rows, Index all, Index n, Index k, LeftWords x, const Word* y, const Word* a, Index lda, const Word* b,
                               Index ld, bool first, bool last, float* tile, Ahead& ahead, First after_first, Done done) {
  over_word_tiles(rows, n, [&](Index i, Index j, auto R, auto N, auto& sums) TARNN_LAMBDA {
    if (!first) add_tile<R, N>(tile + i * ld + j, ld, true, 1, sums);
    if (first && k) {
      accumulate<R, N>(k, {x.at + i * x.row, x.row, x.column}, y + j, ld, sums, ahead);
      after_first(j, R, N, sums);
    }
    const Index from = i / 2;
    accumulate<R, N>(all / 2 - from, {a + from * lda + i, 1, lda}, b + from * ld + j, ld, sums, ahead);
    if (last) done(i, j, R, N, sums);
    else store_tile_sums<R, N>(tile + i * ld + j, ld, sums);
  });
}

/// One query head in the chunk that `at` holds: its gradients, and what it adds to those of keys and values, and to R. i: of the keys,
/// in the bundle; ends: nothing reads the state behind the chunk, R is zero.
inline void add_rounded_query_head(const Problem& p, const Sizes<float>& n, const Stretch& s, Index i, Index r, Index time, const Word* S,
                                   const float* z, const Head<float>& own, bool ends, RoundedBackwardScratch& at) {
  const Keys<float>& keys = at.keys;
  const Weights<float>& w = keys.weights;
  const KeyWords& words = at.words;
  const Index rows = keys.rows, all = words.all, head = s.head * p.r + r, ldf = n.ldf, lde = n.lde;
  Queries<float>& q = at.queries;
  load_rounded_queries(p, n, s, head, time, w.M, at);
  rounded_pair_gradients(p, n, at);
  if (p.grad_log_decay) add_pair_flow(n, rows, at.A, at.P, at.flow);
  if (straight(p, n, keys)) {
    const bool first = r == 0, last = r + 1 == p.r;
    const RowsOut k_out(p.grad_k, s, s.head, time, rows, n.f, at.grad_phi, ldf), v_out(p.grad_v, s, s.head, time, rows, n.e, at.grad_v, lde);
    key_products(rows, all, n.f, ends ? 0 : TARNN_ISA::words(n.e), {words.v_rows, word_row(n.e), 1}, at.R_pairs_of(n, i), at.A_pairs, n.ldc,
                 at.q_pairs, ldf, first, last, at.grad_phi, at.ahead,
                 [z = at.R_z](Index j, auto R, auto N, auto& sums) TARNN_LAMBDA {
                   unrolled<N>([&](auto x) TARNN_LAMBDA {
                     const Vec<float> of_z = load(z + j + x * 16);
                     unrolled<R>([&](auto r) TARNN_LAMBDA { sums[r * N + x] += of_z; });
                   });
                 },
                 [=, map = p.map, phi = keys.phi](Index i, Index j, auto R, auto N, auto& sums) TARNN_LAMBDA {
                   times_slope<R, N>(map, phi + i * ldf + j, ldf, sums);
                   k_out.put<R, N>(i, j, sums);
                 });
    key_products(rows, all, n.e, ends ? 0 : TARNN_ISA::words(n.f), {words.rows, word_row(n.f), 1}, at.R_turned_of(n, i), at.P_pairs, n.ldc,
                 at.G_pairs, lde, first, last, at.grad_v, at.ahead, [](Index, auto, auto, auto&) TARNN_LAMBDA {},
                 [=](Index i, Index j, auto R, auto N, auto& sums) TARNN_LAMBDA { v_out.put<R, N>(i, j, sums); });
    if (last) k_out.finish(p.grad_k, s, s.head, time, n.f), v_out.finish(p.grad_v, s, s.head, time, n.e);
  } else {
    product_to<Zeros::below>(rows, n.f, all / 2, {at.A_pairs, 1, n.ldc}, at.q_pairs, ldf, at.grad_phi, ldf, true, at.ahead);
    product_to<Zeros::below>(rows, n.e, all / 2, {at.P_pairs, 1, n.ldc}, at.G_pairs, lde, at.grad_v, lde, true, at.ahead);
  }
  if (time > s.begin || (s.first && p.grad_before.z)) {  // somebody reads R
    const float* phi = weighted_queries(keys, n, q.phi, rows, q.weighted);
    const Word* pairs = at.q_pairs;
    if (!w.plain) round_row_pairs(phi, ldf, rows, all, n.f, at.q_weighted, ldf), pairs = at.q_weighted;
    product(n.e, n.f, all / 2, {at.G_pairs, 1, lde}, pairs, ldf, at.ahead,
            [=, R_S = own.R.S, to_pairs = at.R_pairs_of(n, i), to_rows = at.R_rows_of(n, i), ldw = word_row(n.f)](
                Index i, Index j, auto R, auto N, auto& sums) TARNN_LAMBDA {
              add_tile<R, N>(R_S + i * ldf + j, ldf, true, 1, sums);
              store_tile_sums<R, N>(R_S + i * ldf + j, ldf, sums);
              store_row_pairs<R, N>(to_pairs + i / 2 * ldf + j, ldf, sums);
              unrolled<R>([&](auto r) TARNN_LAMBDA {
                store_rounded<N>(reinterpret_cast<std::uint16_t*>(to_rows + (i + r) * ldw) + j, sums + r * N);
              });
            });
    add_rows(own.R.z, q.G_z, phi, ldf, rows, n.f);
  }
  rounded_query_gradients(p, n, s, head, time, S, z, own.grad_omega, at);
}

/// The words of R of head i, from its numbers.
inline void round_gradient(const Sizes<float>& n, Index i, RoundedBackwardScratch& at) {
  const Transposed<float>& R = at.heads[i].R;
  clear(R.S + n.e * n.ldf, (n.e_rows() - n.e) * n.ldf);
  round_rows(R.S, n.ldf, n.e, n.e_rows(), n.f, at.R_rows_of(n, i), word_row(n.f));
  interleave_rows(at.R_rows_of(n, i), word_row(n.f), n.e_rows(), n.f, at.R_pairs_of(n, i), n.ldf);
}

/// The words of Sᵀ of head i, from its numbers.
inline void round_state(const Sizes<float>& n, Index i, RoundedBackwardScratch& at) {
  float* const S = at.heads[i].S->S;
  clear(S + n.e * n.ldf, (n.e_rows() - n.e) * n.ldf);
  round_row_pairs(S, n.ldf, n.e, n.e_rows(), n.f, at.S_of(n, i, 0), n.ldf);
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
  const bool ends = ends_unread(p, s, time + rows);
  Word *const R_pairs = at.R_pairs_of(n, i), *const R_rows = at.R_rows_of(n, i);
  if (time + rows == s.end) {  // from here on, the words follow R
    R.scale(to_own_units(p, n, s, slots, keys.weights.M_out), n);
    round_gradient(n, i, at);
  }
  want_before(p, bundle, i, 0, time, k == 0, at.ahead);
  if (!ends) transpose_words(R_rows, ldf, n.e_rows(), TARNN_ISA::words(n.f), at.R_turned_of(n, i), n.lde);
  if (straight(p, n, keys)) {
    std::memcpy(at.R_z, R.z, static_cast<std::size_t>(n.ldf) * sizeof(float));
  } else if (ends) {
    clear(at.grad_phi, rows * n.ldf);
    clear(at.grad_v, rows * n.lde);
  } else {
    for (Index j = 0; j < rows; ++j) std::memcpy(at.grad_phi + j * n.ldf, R.z, static_cast<std::size_t>(n.ldf) * sizeof(float));
    product_to(rows, n.f, TARNN_ISA::words(n.e), {words.v_rows, lde, 1}, R_pairs, n.ldf, at.grad_phi, n.ldf, true, at.ahead);
    if (!keys.weights.plain) weigh_rows(keys.weights, keys.weights.key, n, rows, at.grad_phi, at.grad_phi);
    product_to(rows, n.e, TARNN_ISA::words(n.f), {at.weighted_rows, ldf, 1}, at.R_turned_of(n, i), n.lde, at.grad_v, n.lde, false, at.ahead);
  }
  if (p.grad_log_decay) {
    keep_entered(p, n, own.S[k], R, at);
    clear(at.flow, rows);
    clear(at.read, rows);
  }
  R.decay(keys.weights, n);
  for (Index r = 0; r < p.r; ++r) {
    if (r > 0) want_before(p, bundle, i, r, time, k == 0, at.ahead);
    add_rounded_query_head(p, n, s, i, r, time, at.S_of(n, i, k), own.S[k].z, own, ends, at);
  }
  if (p.grad_log_decay) store_decay_gradients(p, n, s, time, at);
  if (straight(p, n, keys)) return;
  store_key_gradients(p, n, s, time, keys, at.grad_phi, at.grad_v, at.x, at.queries.grad_x, own.grad_omega, at.shared, &at.ahead);
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
    if (!begins_empty(p, bundle[i], begin)) round_state(n, i, at);
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
