// Causal attention, forward, in bfloat16: causal attention as in pairs (linear/backward.h), with products of rounded numbers and float32 sums.
//
//     P = (φ(Q) φ(K)ᵀ) ⊙ pair, lower triangle; its rows are summed for the denominators, then it is rounded
//     o = (query ⊙ (φ(Q) S) + P V) · factor        S is rounded for this product alone
#pragma once

#include "linear/bfloat16/keys.h"

namespace tarnn {
namespace TARNN_ISA {

struct RoundedCausalScratch : RoundedKeyScratch {
  float *q, *scale, *o, *of_pairs, *of_state, *den, *factor;  // of_: each row's terms of its denominator, in lanes
  Word *q_rows, *P;
  RoundedCausalScratch(Scratch& scratch, const Problem& p, const Sizes<float>& n, Index heads)
      : RoundedKeyScratch(scratch, p, n, heads) {
    q = scratch.take<float>(n.rows() * n.ldf);
    scale = scratch.take<float>(n.ldc);
    o = scratch.take<float>(n.rows() * n.lde);
    of_pairs = scratch.take<float>(n.rows() * 16);
    of_state = scratch.take<float>(n.rows() * 16);
    den = scratch.take<float>(n.ldc);
    factor = scratch.take<float>(n.ldc);
    q_rows = scratch.take<Word>(n.rows() * word_row(n.f));
    P = scratch.take<Word>(n.rows() * word_row(n.c));
  }
};

/// done(i, j, R, N, sums) for the tiles of rows · right in which its lower triangle lies: 16 rows after another, each as wide as
/// its last row.
template <typename Done>
TARNN_INLINE void triangle(Index all, Index k, const Word* rows, Index ld, const Word* right, Index ldr, Ahead& ahead, Done done) {
  for (Index block = 0; block < all; block += 16)
    product(16, block + 16, k, {rows + block * ld, ld, 1}, right, ldr, ahead,
            [=](Index row, Index j, auto R, auto N, auto& sums) TARNN_LAMBDA { done(block + row, j, R, N, sums); });
}

/// Zeros above the diagonal, in a tile's last vector; what is before it has none above, and what is behind it was not made.
template <int R, int N>
TARNN_INLINE void mask_tile(Index i, Index j, Vec<float> (&sums)[R * N]) {
  const Integers<float> lane = iota<float>();
  unrolled<R>([&](auto r) TARNN_LAMBDA {
    auto& last = sums[r * N + N - 1];
    last = lane <= static_cast<int>(i + r - j - (N - 1) * 16) ? last : Vec<float>{};
  });
}

/// Times `pair`, which has numbers on and below the diagonal of its rows; 0 elsewhere.
template <int R, int N>
TARNN_INLINE void weigh_tile(const float* pair, Index ld, Index rows, Index i, Index j, Vec<float> (&sums)[R * N]) {
  const Integers<float> lane = iota<float>();
  unrolled<R>([&](auto r) TARNN_LAMBDA {
    unrolled<N>([&](auto x) TARNN_LAMBDA {
      auto& sum = sums[r * N + x];
      const int last = i + r < rows ? static_cast<int>(i + r - j - x * 16) : -1;
      sum = lane <= last ? sum * load(pair + (i + r) * ld + j + x * 16) : Vec<float>{};
    });
  });
}

/// P, masked and weighted: done(i, j, R, N, sums) as in `triangle`.
template <typename Done>
TARNN_INLINE void rounded_pairs(const Keys<float>& keys, const KeyWords& words, const Sizes<float>& n, const Word* q_rows, Ahead& ahead,
                                Done done) {
  const bool plain = keys.weights.plain;
  const float* pair = keys.weights.pair;
  const Index ldc = n.ldc, rows = keys.rows;
  triangle(words.all, TARNN_ISA::words(n.f), q_rows, word_row(n.f), words.turned, ldc, ahead,
           [=](Index i, Index j, auto R, auto N, auto& sums) TARNN_LAMBDA {
             mask_tile<R, N>(i, j, sums);
             if (!plain) weigh_tile<R, N>(pair, ldc, rows, i, j, sums);
             done(i, j, R, N, sums);
           });
}

/// den_i = the sum of row i's lanes, of P and of φ(q)·z, that times query (null: 1).
inline void add_up_denominators(const float* query, Index all, const float* of_pairs, const float* of_state, float* den) {
  float lanes[16 * 16], turned[16 * 16];
  for (Index i = 0; i < all; i += 16) {
    for (Index l = 0; l < 16; ++l) {
      const Vec<float> before = load(of_state + (i + l) * 16);
      store(lanes + l * 16, load(of_pairs + (i + l) * 16) + (query ? before * query[i + l] : before));
    }
    transpose_square(lanes, 16, turned, 16);
    Vec<float> total{};
    for (Index l = 0; l < 16; ++l) total += load(turned + l * 16);
    store(den + i, total);
  }
}

/// φ(Q), and φ(Q) z in lanes.
inline void load_rounded_queries(const Problem& p, const Sizes<float>& n, const Stretch& s, Index head, Index time, const float* z,
                                 RoundedCausalScratch& at) {
  const Index rows = at.keys.rows, all = at.words.all, ldw = word_row(n.f);
  if (by_number(p, n, at.keys.weights.none)) {
    const auto* from = static_cast<const std::uint16_t*>(p.q.data) + offset(p.q, s.row, head, time);
    return with_map(p.map, [&](auto map) {
      if_whole(p.q.stride[3] == 1 && n.f % 32 == 0, [&](auto whole) {
        map_queries<whole>(from, p.q.stride[2], p.q.stride[3], rows, all, n.f, z, at.q_rows, ldw, at.of_state, map);
      });
    });
  }
  make_features(p, n, s, p.q, head, time, rows, at.keys.x_tile, at.q, at.scale, &at.ahead);
  round_rows(at.q, n.ldf, rows, all, n.f, at.q_rows, ldw);
  for (Index i = 0; i < all; ++i) store(at.of_state + i * 16, i < rows ? dot_lanes(at.q + i * n.ldf, z, n.f) : Vec<float>{});
}

/// Rows of sums, rounded, to a tensor; `tile` is a place on the way where its rows are not vectors.
struct RowsOut {
  std::uint16_t* at;
  Index stride, rows;
  bool direct;
  float* tile;
  Index ld;
  RowsOut(const View& to, const Stretch& s, Index head, Index time, Index rows, Index n, float* tile, Index ld)
      : at(static_cast<std::uint16_t*>(to.data) + offset(to, s.row, head, time)), stride(to.stride[2]), rows(rows),
        direct(to.stride[3] == 1 && n % 16 == 0), tile(tile), ld(ld) {}

  template <int R, int N>
  TARNN_INLINE void put(Index i, Index j, Vec<float> (&sums)[R * N]) const {
    if (!direct) return store_tile_sums<R, N>(tile + i * ld + j, ld, sums);
    unrolled<R>([&](auto r) TARNN_LAMBDA {
      if (i + r < rows) store_rounded<N>(at + (i + r) * stride + j, sums + r * N);
    });
  }
  void finish(const View& to, const Stretch& s, Index head, Index time, Index n) const {
    if (!direct) store_tile(tile, ld, to, s.row, head, time, rows, n);
  }
};

/// The outputs of one query head in the chunk that `at.keys` holds, which `state` has not seen yet.
inline void rounded_outputs(const Problem& p, const Sizes<float>& n, const Stretch& s, Index head, Index time,
                            const RoundedState& state, RoundedCausalScratch& at) {
  const KeyWords& keys = at.words;
  const Weights<float>& w = at.keys.weights;
  const Index rows = at.keys.rows, ldw = word_row(n.f), ldp = word_row(n.c), lde = n.lde;
  load_rounded_queries(p, n, s, head, time, state.z, at);
  float* const lanes = at.of_pairs;
  Word *const P = at.P, *const q_rows = at.q_rows;
  rounded_pairs(at.keys, keys, n, q_rows, at.ahead, [=](Index i, Index j, auto R, auto N, auto& sums) TARNN_LAMBDA {
    unrolled<R>([&](auto r) TARNN_LAMBDA {
      Vec<float> total = j ? load(lanes + (i + r) * 16) : Vec<float>{};
      unrolled<N>([&](auto x) TARNN_LAMBDA { total += sums[r * N + x]; });
      store(lanes + (i + r) * 16, total);
      store_rounded<N>(reinterpret_cast<std::uint16_t*>(P + (i + r) * ldp) + j, sums + r * N);
    });
  });
  add_up_denominators(w.plain ? nullptr : w.query, keys.all, lanes, at.of_state, at.den);
  for (Index i = 0; i < rows; ++i)
    at.factor[i] = output_factor(p, at.den[i], w.none ? 0.f : w.M[i], p.map == Map::exp ? at.scale[i] : 0.f);
  const bool plain = w.plain;
  const Index terms = begins_empty(p, s, time) ? 0 : words(n.f);
  const RowsOut out(p.o, s, head, time, rows, n.e, at.o, lde);
  float *const factor = at.factor, *const query = w.query;
  const Word *const S = state.words, *const V = keys.v_pairs;
  over_word_tiles(rows, n.e, [&](Index i, Index j, auto R, auto N, auto& sums) TARNN_LAMBDA {
    accumulate<R, N>(terms, {q_rows + i * ldw, ldw, 1}, S + j, lde, sums, at.ahead);
    if (!plain) scale_tile<R, N>(query + i, sums);
    accumulate<R, N>(i / 2, {P + i * ldp, ldp, 1}, V + j, lde, sums, at.ahead);
    accumulate_triangle<R, N>({P + i * ldp + i / 2, ldp, 1}, V + i / 2 * lde + j, lde, sums);
    scale_tile<R, N>(factor + i, sums);
    out.put<R, N>(i, j, sums);
  });
  out.finish(p.o, s, head, time, n.e);
  store_denominators(p, s.row, head, time, rows, at.den);
}

inline void rounded_sweep(const Problem& p, const Sizes<float>& n, const Bundle& bundle, RoundedCausalScratch& at) {
  for (Index time = bundle[0].begin; time < bundle[0].end; time += n.c)
    for (Index i = 0; i < bundle.heads; ++i) {
      const Stretch& s = bundle[i];
      RoundedState& state = at.states[i];
      if (float* to = kept_state<float>(p, s, time)) write_state<float>(state, n, to);
      load_rounded_keys(p, n, s, time, smaller(n.c, s.end - time), state.M, true, false, at.keys, at.words, &at.ahead);
      for (Index r = 0; r < p.r; ++r) {
        const Onward next(p, bundle, i, r, time, time + n.c);
        at.ahead.clear();
        want_keys(p, next, at.ahead);
        next.want_of_queries(p.q, p.d, at.ahead);
        next.want_of_queries(p.o, p.e, at.ahead);
        rounded_outputs(p, n, s, s.head * p.r + r, time, state, at);
      }
      const bool wanted = time + n.c < s.end || (s.last && p.after.M);
      if (wanted) absorb(at.keys, at.words, n, state, at.ahead, begins_empty(p, s, time));
    }
  for (Index i = 0; i < bundle.heads; ++i)
    if (bundle[i].last) put_state<float>(p, n, bundle[i], at.states[i], p.after);
}

inline void rounded_causal_forward(const Problem& p) {
  const Sizes<float> n(p);
  Owned<float> slots(p.keys.slots * n.state());
  const Bundles bundles(p, p.keys, n.f_rows() * n.lde * static_cast<Index>(sizeof(float)));
  states_behind<float, RoundedKeyScratch>(p, n, p.keys, slots.get());
  parallel_with<RoundedCausalScratch>(p, bundles.count(), [&](Index i, RoundedCausalScratch& at) {
    for (Index head = 0; head < bundles[i].heads; ++head) {
      state_before<float>(p, n, bundles[i][head], slots.get(), at.states[head]);
      round_state(n, at.states[head]);
    }
    rounded_sweep(p, n, bundles[i], at);
  }, p, n, bundles.heads());
}

}  // namespace TARNN_ISA
}  // namespace tarnn
