// The tiles of a chunk in bfloat16, as products read them: words of two neighbours along what is summed over (simd/bfloat16.h).
// Features are made in float32 and rounded once; z and denominators are sums of what was not rounded.
#pragma once

#include "linear/stretches.h"
#include "simd/bfloat16.h"

namespace tarnn {
namespace TARNN_ISA {

/// Rows of a bfloat16 tensor as they are, in words of neighbours: zeros behind n, in masked rows, and from `rows` to `all`.
inline void copy_rows(const Problem& p, const View& x, const Stretch& s, Index head, Index time, Index rows, Index all, Index n,
                      Word* to, Index ldt, bool of_keys) {
  const Index step = x.stride[3];
  const auto* from = static_cast<const std::uint16_t*>(x.data) + offset(x, s.row, head, time);
  for (Index i = 0; i < rows; ++i, from += x.stride[2], to += ldt) {
    if (of_keys && is_masked(p, s.row, time + i)) {
      std::fill_n(to, ldt, 0);
    } else if (step == 1 && n % 32 == 0) {
      for (Index j = 0; j < n; j += 32) {
        Words x;
        std::memcpy(&x, from + j, sizeof x);
        store_words(to + j / 2, x);
      }
    } else {
      std::fill_n(to, ldt, 0);
      auto* bytes = reinterpret_cast<char*>(to);
      for (Index j = 0; j < n; ++j) std::memcpy(bytes + 2 * j, from + j * step, 2);
    }
  }
  std::fill_n(to, (all - rows) * ldt, 0);
}

/// A chunk's keys and values. `tiles` has φ(K) in float32, and the weights; its values are not there.
struct RoundedKeys {
  Keys<float> tiles;
  Word* rows;    // (c × f/2) φ(K)
  Word* turned;  // (f/2 × c) its transpose
  Word* pairs;   // (c/2 × f) key ⊙ φ(K), rows in pairs
  Word* v_rows;  // (c × e/2) V
  Word* v;       // (c/2 × e) its rows in pairs
  Index all;     // rows, up to whole vectors: zeros from tiles.rows on
};

inline RoundedKeys take_rounded_keys(Scratch& scratch, const Problem& p, const Sizes<float>& n) {
  RoundedKeys keys{};
  keys.tiles = take_keys(scratch, p, n);
  keys.rows = scratch.take<Word>(n.rows() * word_row(n.f));
  keys.turned = scratch.take<Word>(word_row(n.f) * n.ldc);
  keys.pairs = scratch.take<Word>(n.rows() / 2 * n.ldf);
  keys.v_rows = scratch.take<Word>(n.rows() * word_row(n.e));
  keys.v = scratch.take<Word>(n.rows() / 2 * n.lde);
  return keys;
}

/// Loads keys time … time + rows − 1 and their values. for_pairs: and φ(K)ᵀ.
inline void load_rounded_keys(const Problem& p, const Sizes<float>& n, const Stretch& s, Index time, Index rows, float M,
                              bool for_pairs, RoundedKeys& keys, Ahead* ahead) {
  Keys<float>& tiles = keys.tiles;
  const Index all = keys.all = whole<float>(rows), ldw = word_row(n.f), lde = word_row(n.e);
  load_key_features(p, n, s, time, rows, M, tiles, ahead);
  clear(tiles.sums, n.ldf);
  sum_rows(tiles.weighted, n.ldf, rows, n.f, tiles.sums);
  if (for_pairs || tiles.weights.plain) round_rows(tiles.phi, n.ldf, rows, all, n.f, keys.rows, ldw);
  if (for_pairs) transpose_words(keys.rows, ldw, all, words(n.f), keys.turned, n.ldc);
  if (tiles.weights.plain) interleave_rows(keys.rows, ldw, all, n.f, keys.pairs, n.ldf);
  else round_row_pairs(tiles.weighted, n.ldf, rows, all, n.f, keys.pairs, n.ldf);
  copy_rows(p, p.v, s, s.head, time, rows, all, n.e, keys.v_rows, lde, true);
  interleave_rows(keys.v_rows, lde, all, n.e, keys.v, n.lde);
}

/// A state, in float32, and S as the products read it: rounded, rows in pairs.
struct RoundedState : State<float> {
  Word* words;
};

inline RoundedState take_rounded_state(Scratch& scratch, const Sizes<float>& n) {
  return {take_state(scratch, n), scratch.take<Word>(n.f_rows() / 2 * n.lde)};
}

inline RoundedState* take_rounded_states(Scratch& scratch, const Sizes<float>& n, Index heads) {
  const auto states = scratch.take<RoundedState>(heads);
  for (Index i = 0; i < heads; ++i) {
    const RoundedState state = take_rounded_state(scratch, n);
    if (states) states[i] = state;
  }
  return states;
}

inline void round_state(const Sizes<float>& n, RoundedState& state) {
  clear(state.S + n.f * n.lde, (n.f_rows() - n.f) * n.lde);
  round_row_pairs(state.S, n.lde, n.f, n.f_rows(), n.e, state.words, n.lde);
}

/// S ← keep·S + (key ⊙ φ(K))ᵀ V, and z, M. empty: S is not there yet.
inline void absorb(const RoundedKeys& keys, const Sizes<float>& n, RoundedState& state, Ahead& ahead, bool empty) {
  const Weights<float>& w = keys.tiles.weights;
  const float keep = w.plain ? 1.f : w.keep[0];
  const LeftWords left{keys.pairs, 1, n.ldf};
  product(n.f, n.e, keys.all / 2, left, keys.v, n.lde, ahead, [&](Index i, Index j, auto R, auto N, auto& sums) TARNN_LAMBDA {
    unrolled<R>([&](auto r) TARNN_LAMBDA {
      float* row = state.S + (i + r) * n.lde + j;
      unrolled<N>([&](auto x) TARNN_LAMBDA {
        auto& sum = sums[r * N + x];
        if (!empty) sum += w.plain ? load(row + x * 16) : load(row + x * 16) * keep;
        store(row + x * 16, sum);
        if constexpr (r % 2) store_words(state.words + (i + r) / 2 * n.lde + j + x * 16, round_pairs(sums[(r - 1) * N + x], sum));
      });
    });
  });
  for (Index j = 0; j < n.f; j += 16) store(state.z + j, load(state.z + j) * keep + load(keys.tiles.sums + j));
  state.M = w.M_out;
}

/// For `states_behind`: as KeyScratch.
struct RoundedKeyScratch {
  RoundedKeys keys;
  RoundedState* states;
  Ahead ahead;
  RoundedKeyScratch(Scratch& scratch, const Problem& p, const Sizes<float>& n, Index heads)
      : keys(take_rounded_keys(scratch, p, n)), states(take_rounded_states(scratch, n, heads)) {}
};

inline void load_and_absorb(const Problem& p, const Sizes<float>& n, const Stretch& s, Index time, Index rows, RoundedKeyScratch& at,
                            RoundedState& state, const Onward& next, bool empty) {
  load_rounded_keys(p, n, s, time, rows, state.M, false, at.keys, &at.ahead);
  at.ahead.clear();
  want_keys(p, next, at.ahead);
  absorb(at.keys, n, state, at.ahead, empty);
}

}  // namespace TARNN_ISA
}  // namespace tarnn
