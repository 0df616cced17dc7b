// Causal attention, forward, in bfloat16: the formulas of causal.h, with products of rounded numbers and float32 sums.
//
//     P = (φ(Q) φ(K)ᵀ) ⊙ pair, lower triangle; its rows are summed for the denominators, then it is rounded
//     o = (query ⊙ (φ(Q) S) + P V) · factor        S is rounded for this product alone
#pragma once

#include "linear/bfloat16/keys.h"
#include "linear/causal.h"

namespace tarnn {
namespace TARNN_ISA {

struct RoundedCausalScratch : RoundedKeyScratch {
  float *q, *scale, *o, *lanes, *den, *factor;
  Word *q_rows, *P;
  RoundedCausalScratch(Scratch& scratch, const Problem& p, const Sizes<float>& n, Index heads)
      : RoundedKeyScratch(scratch, p, n, heads) {
    q = scratch.take<float>(n.rows() * n.ldf);
    scale = scratch.take<float>(n.ldc);
    o = scratch.take<float>(n.rows() * n.lde);
    lanes = scratch.take<float>(n.rows() * 16);
    den = scratch.take<float>(n.ldc);
    factor = scratch.take<float>(n.ldc);
    q_rows = scratch.take<Word>(n.rows() * word_row(n.f));
    P = scratch.take<Word>(n.rows() * word_row(n.c));
  }
};

/// f(i, j, R, N, sums) for the tiles of φ(Q) φ(K)ᵀ in which the lower triangle lies, which is zero above the diagonal then, and
/// weighted.
template <typename Done>
TARNN_INLINE void rounded_pairs(const Weights<float>& w, const KeyWords& words, const Sizes<float>& n, const Word* q_rows, Ahead& ahead, Done done) {
  const Index ldw = word_row(n.f);
  const Integers<float> lane = iota<float>();
  for (Index block = 0; block < words.all; block += 16) {
    product(16, block + 16, TARNN_ISA::words(n.f), {q_rows + block * ldw, ldw, 1}, words.turned, n.ldc, ahead,
            [&](Index row, Index j, auto R, auto N, auto& sums) TARNN_LAMBDA {
              const Index i = block + row;
              if (j + N * 16 > block)
                unrolled<R>([&](auto r) TARNN_LAMBDA {
                  auto& last = sums[r * N + N - 1];
                  last = lane <= static_cast<int>(row + r) ? last : Vec<float>{};
                });
              if (!w.plain)
                unrolled<R>([&](auto r) TARNN_LAMBDA {
                  unrolled<N>([&](auto x) TARNN_LAMBDA { sums[r * N + x] *= load(w.pair + (i + r) * n.ldc + j + x * 16); });
                });
              done(i, j, R, N, sums);
            });
  }
}

/// Σ of each row's lanes + query·(q·z).
inline void add_up_denominators(const Weights<float>& w, const Sizes<float>& n, Index rows, const float* lanes, const float* q,
                                const float* z, float* den) {
  float of_rows[16 * 16], turned[16 * 16];
  for (Index i = 0; i < rows; i += 16) {
    for (Index l = 0; l < 16; ++l) {
      Vec<float> total = load(lanes + (i + l) * 16);
      if (i + l < rows) {
        const Vec<float> before = dot_lanes(q + (i + l) * n.ldf, z, n.f);
        total += w.plain ? before : before * w.query[i + l];
      }
      store(of_rows + l * 16, total);
    }
    transpose_square(of_rows, 16, turned, 16);
    Vec<float> total{};
    for (Index l = 0; l < 16; ++l) total += load(turned + l * 16);
    store(den + i, total);
  }
}

/// A row's N vectors, rounded, to where n of them lie side by side.
template <int N>
TARNN_INLINE void store_rounded(std::uint16_t* to, const Vec<float>* x) {
  unrolled<N / 2>([&](auto j) TARNN_LAMBDA {
    const Words y = round_row(x[2 * j], x[2 * j + 1]);
    std::memcpy(to + j * 32, &y, sizeof y);
  });
  if constexpr (N % 2) {
    const Words y = round_row(x[N - 1], x[N - 1]);
    std::memcpy(to + (N - 1) * 16, &y, 32);
  }
}

/// The outputs of one query head in the chunk that `at.keys` holds, which `state` has not seen yet.
inline void rounded_outputs(const Problem& p, const Sizes<float>& n, const Stretch& s, Index head, Index time,
                            const RoundedState& state, RoundedCausalScratch& at) {
  const KeyWords& keys = at.words;
  const Weights<float>& w = at.keys.weights;
  const Index rows = at.keys.rows, ldw = word_row(n.f), ldp = word_row(n.c);
  make_features(p, n, s, p.q, head, time, rows, at.keys.x_tile, at.q, at.scale, &at.ahead);
  round_rows(at.q, n.ldf, rows, keys.all, n.f, at.q_rows, ldw);
  rounded_pairs(w, keys, n, at.q_rows, at.ahead, [&](Index i, Index j, auto R, auto N, auto& sums) TARNN_LAMBDA {
    unrolled<R>([&](auto r) TARNN_LAMBDA {
      Vec<float> total = j ? load(at.lanes + (i + r) * 16) : Vec<float>{};
      unrolled<N>([&](auto x) TARNN_LAMBDA { total += sums[r * N + x]; });
      store(at.lanes + (i + r) * 16, total);
      store_rounded<N>(reinterpret_cast<std::uint16_t*>(at.P + (i + r) * ldp) + j, sums + r * N);
    });
  });
  add_up_denominators(w, n, rows, at.lanes, at.q, state.z, at.den);
  for (Index i = 0; i < rows; ++i)
    at.factor[i] = output_factor(p, at.den[i], w.none ? 0.f : w.M[i], p.map == Map::exp ? at.scale[i] : 0.f);
  const bool direct = p.o.stride[3] == 1 && n.e % 16 == 0;
  auto* o = static_cast<std::uint16_t*>(p.o.data) + offset(p.o, s.row, head, time);
  const Index terms = begins_empty(p, s, time) ? 0 : words(n.f);
  over_panels(n.e, [&](Index j, auto N) TARNN_LAMBDA {
    constexpr int R = word_rows<N>;
    for (Index i = 0; i < rows; i += R) {
      Vec<float> sums[R * N];
      unrolled<R * N>([&](auto x) TARNN_LAMBDA { sums[x] = Vec<float>{}; });
      accumulate<R, N>(terms, {at.q_rows + i * ldw, ldw, 1}, state.words + j, n.lde, sums, at.ahead);
      if (!w.plain)
        unrolled<R>([&](auto r) TARNN_LAMBDA {
          unrolled<N>([&](auto x) TARNN_LAMBDA { sums[r * N + x] *= w.query[i + r]; });
        });
      accumulate<R, N>(i / 2, {at.P + i * ldp, ldp, 1}, keys.v_pairs + j, n.lde, sums, at.ahead);
      accumulate_triangle<R, N>({at.P + i * ldp + i / 2, ldp, 1}, keys.v_pairs + i / 2 * n.lde + j, n.lde, sums);
      unrolled<R>([&](auto r) TARNN_LAMBDA {
        unrolled<N>([&](auto x) TARNN_LAMBDA { sums[r * N + x] *= at.factor[i + r]; });
        if (direct && i + r < rows) store_rounded<N>(o + (i + r) * p.o.stride[2] + j, sums + r * N);
        if (!direct) unrolled<N>([&](auto x) TARNN_LAMBDA { store(at.o + (i + r) * n.lde + j + x * 16, sums[r * N + x]); });
      });
    }
  });
  if (!direct) store_tile(at.o, n.lde, p.o, s.row, head, time, rows, n.e);
  store_denominators(p, s.row, head, time, rows, at.den);
}

inline void rounded_sweep(const Problem& p, const Sizes<float>& n, const Bundle& bundle, RoundedCausalScratch& at) {
  for (Index time = bundle[0].begin; time < bundle[0].end; time += n.c)
    for (Index i = 0; i < bundle.heads; ++i) {
      const Stretch& s = bundle[i];
      RoundedState& state = at.states[i];
      if (float* to = kept_state<float>(p, s, time)) write_state<float>(state, n, to);
      load_rounded_keys(p, n, s, time, smaller(n.c, s.end - time), state.M, true, at.keys, at.words, &at.ahead);
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
