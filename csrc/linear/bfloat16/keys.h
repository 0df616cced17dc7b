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

/// A chunk's keys and values as words; beside them are the features in float32, and the weights: Keys<float>, without values.
struct KeyWords {
  Word* rows;            // (c × f/2) φ(K)
  Word* turned;          // (f/2 × c) its transpose
  Word* pairs;           // (c/2 × f) φ(K), rows in pairs
  Word* weighted_pairs;  // the same of key ⊙ φ(K)
  Word* v_rows;          // (c × e/2) V
  Word* v_pairs;         // (c/2 × e) its rows in pairs
  Index all;             // rows, up to whole vectors: zeros behind those of the chunk
};

inline KeyWords take_key_words(Scratch& scratch, const Sizes<float>& n, bool no_weights) {
  KeyWords words{};
  words.rows = scratch.take<Word>(n.rows() * word_row(n.f));
  words.turned = scratch.take<Word>(word_row(n.f) * n.ldc);
  words.pairs = scratch.take<Word>(n.rows() / 2 * n.ldf);
  words.weighted_pairs = no_weights ? words.pairs : scratch.take<Word>(n.rows() / 2 * n.ldf);
  words.v_rows = scratch.take<Word>(n.rows() * word_row(n.e));
  words.v_pairs = scratch.take<Word>(n.rows() / 2 * n.lde);
  return words;
}

/// Loads keys time … time + rows − 1 and their values. for_pairs: and φ(K)ᵀ.
inline void load_rounded_keys(const Problem& p, const Sizes<float>& n, const Stretch& s, Index time, Index rows, float M,
                              bool for_pairs, Keys<float>& keys, KeyWords& words, Ahead* ahead, Memo<float> memo = {}) {
  const Index all = words.all = whole<float>(rows), ldw = word_row(n.f), lde = word_row(n.e);
  load_key_features(p, n, s, time, rows, M, keys, ahead, memo);
  round_rows(keys.phi, n.ldf, rows, all, n.f, words.rows, ldw);
  interleave_rows(words.rows, ldw, all, n.f, words.pairs, n.ldf);
  if (for_pairs) transpose_words(words.rows, ldw, all, TARNN_ISA::words(n.f), words.turned, n.ldc);
  if (!keys.weights.none) round_row_pairs(keys.weighted, n.ldf, rows, all, n.f, words.weighted_pairs, n.ldf);
  copy_rows(p, p.v, s, s.head, time, rows, all, n.e, words.v_rows, lde, true);
  interleave_rows(words.v_rows, lde, all, n.e, words.v_pairs, n.lde);
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
inline void absorb(const Keys<float>& keys, const KeyWords& words, const Sizes<float>& n, RoundedState& state, Ahead& ahead,
                   bool empty) {
  const Weights<float>& w = keys.weights;
  const float keep = w.plain ? 1.f : w.keep[0];
  const LeftWords left{words.weighted_pairs, 1, n.ldf};
  product(n.f, n.e, words.all / 2, left, words.v_pairs, n.lde, ahead, [&](Index i, Index j, auto R, auto N, auto& sums) TARNN_LAMBDA {
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
  for (Index j = 0; keep != 1 && j < n.f; j += 16) store(state.z + j, load(state.z + j) * keep);
  sum_rows(keys.weighted, n.ldf, keys.rows, n.f, state.z);
  state.M = w.M_out;
}

/// As KeyScratch.
struct RoundedKeyScratch {
  Keys<float> keys;
  KeyWords words;
  RoundedState* states;
  Ahead ahead;
  RoundedKeyScratch(Scratch& scratch, const Problem& p, const Sizes<float>& n, Index heads)
      : keys(take_keys(scratch, p, n)), words(take_key_words(scratch, n, keys.weights.none)),
        states(take_rounded_states(scratch, n, heads)) {}
};

inline void load_and_absorb(const Problem& p, const Sizes<float>& n, const Stretch& s, Index time, Index rows, RoundedKeyScratch& at,
                            RoundedState& state, const Onward& next, bool empty) {
  load_rounded_keys(p, n, s, time, rows, state.M, false, at.keys, at.words, &at.ahead);
  at.ahead.clear();
  want_keys(p, next, at.ahead);
  absorb(at.keys, at.words, n, state, at.ahead, empty);
}

}  // namespace TARNN_ISA
}  // namespace tarnn
