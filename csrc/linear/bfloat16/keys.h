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

/// Whether features are a function of one number, whose tile in float32 nobody needs.
inline bool by_number(const Problem& p, const Sizes<float>& n, bool no_weights) { return no_weights && !n.projected && p.map != Map::exp; }

/// 16 numbers of a row of n, mapped; zeros behind them. whole: all are there, side by side.
template <bool whole, typename F>
TARNN_INLINE Vec<float> mapped(const std::uint16_t* from, Index step, Index n, Index j, F map) {
  if (whole) return map(Bfloat16::load(from + j));
  const Index there = n - j < 16 ? n - j : 16;
  if (there <= 0) return Vec<float>{};
  const Vec<float> x = map(load_some<Bfloat16>(from + j * step, step, there));
  return iota<float>() < static_cast<int>(there) ? x : Vec<float>{};
}

/// Rows of features, in words; of each the product with z, in lanes.
template <bool whole, typename F>
void map_queries(const std::uint16_t* from, Index stride, Index step, Index rows, Index all, Index n, const float* z, Word* to,
                 Index ldt, float* lanes, F map) {
  for (Index i = 0; i < rows; ++i, from += stride, to += ldt) {
    Vec<float> total{};
    for (Index j = 0; j < n; j += 32) {
      const Vec<float> x = mapped<whole>(from, step, n, j, map), y = mapped<whole>(from, step, n, j + 16, map);
      total += x * load(z + j);
      if (whole || j + 16 < n) total += y * load(z + j + 16);
      store_words(to + j / 2, round_row(x, y));
    }
    store(lanes + i * 16, total);
  }
  std::fill_n(to, (all - rows) * ldt, 0);
  clear(lanes + rows * 16, (all - rows) * 16);
}

/// Rows of features, in words, alone and in pairs; sums (n) gets their sum; tile: in float32 too, where it is there.
template <bool whole, typename F>
void map_keys(const std::uint16_t* from, Index stride, Index step, Index rows, Index all, Index n, Word* to, Index ldt, Word* pairs,
              Index ldp, float* sums, float* tile, F map) {
  for (Index j = 0; j < n; j += 32) {
    Vec<float> first{}, second{};
    for (Index i = 0; i < all; i += 2) {
      Words row[2] = {};
      unrolled<2>([&](auto r) TARNN_LAMBDA {
        if (whole || i + r < rows) {
          const auto* at = from + (i + r) * stride;
          const Vec<float> x = mapped<whole>(at, step, n, j, map), y = mapped<whole>(at, step, n, j + 16, map);
          first += x, second += y;
          row[r] = round_row(x, y);
          if (tile) store(tile + (i + r) * ldp + j, x);
          if (tile && (whole || j + 16 < n)) store(tile + (i + r) * ldp + j + 16, y);
        }
        store_words(to + (i + r) * ldt + j / 2, row[r]);
      });
      store_words(pairs + i / 2 * ldp + j, interleaved<0>(row[0], row[1]));
      if (whole || j + 16 < n) store_words(pairs + i / 2 * ldp + j + 16, interleaved<16>(row[0], row[1]));
    }
    store(sums + j, first);
    if (whole || j + 16 < n) store(sums + j + 16, second);
  }
}

/// f(true or false, as a constant): whether rows of n numbers are whole vectors of words, side by side.
template <typename F>
TARNN_INLINE void if_whole(bool whole, F f) {
  whole ? f(std::true_type()) : f(std::false_type());
}

/// Rows of a chunk's queries or keys: as `map_keys`, of any map of numbers and any layout.
inline void load_rounded_rows(const Problem& p, const Sizes<float>& n, const View& x, const Stretch& s, Index head, Index time,
                              Index rows, Index all, Word* to, Word* pairs, float* sums, float* tile) {
  const auto* from = static_cast<const std::uint16_t*>(x.data) + offset(x, s.row, head, time);
  with_map(p.map, [&](auto map) {
    if_whole(rows == all && x.stride[3] == 1 && n.f % 32 == 0, [&](auto whole) {
      map_keys<whole>(from, x.stride[2], x.stride[3], rows, all, n.f, to, word_row(n.f), pairs, n.ldf, sums, tile, map);
    });
  });
}

/// Loads values in words, in pairs; alone: too.
inline void load_rounded_values(const Problem& p, const Sizes<float>& n, const Stretch& s, Index time, Index rows, bool alone,
                                KeyWords& words) {
  const Index ld = word_row(n.e);
  if (p.mask || p.v.stride[3] != 1 || n.e % 32 != 0 || rows != words.all) {
    copy_rows(p, p.v, s, s.head, time, rows, words.all, n.e, words.v_rows, ld, true);
    return interleave_rows(words.v_rows, ld, words.all, n.e, words.v_pairs, n.lde);
  }
  const auto* from = static_cast<const std::uint16_t*>(p.v.data) + offset(p.v, s.row, s.head, time);
  const Index stride = p.v.stride[2];
  for (Index i = 0; i < rows; i += 2, from += 2 * stride)
    for (Index j = 0; j < n.e; j += 32) {
      Words x, y;
      std::memcpy(&x, from + j, sizeof x);
      std::memcpy(&y, from + stride + j, sizeof y);
      store_words(words.v_pairs + i / 2 * n.lde + j, interleaved<0>(x, y));
      store_words(words.v_pairs + i / 2 * n.lde + j + 16, interleaved<16>(x, y));
      if (alone) store_words(words.v_rows + i * ld + j / 2, x), store_words(words.v_rows + (i + 1) * ld + j / 2, y);
    }
}

/// Loads keys time … time + rows − 1 and their values. for_pairs: and φ(K)ᵀ; tile: features are wanted in float32, too.
inline void load_rounded_keys(const Problem& p, const Sizes<float>& n, const Stretch& s, Index time, Index rows, float M,
                              bool for_pairs, bool tile, Keys<float>& keys, KeyWords& words, Ahead* ahead, Memo<float> memo = {}) {
  const Index all = words.all = whole<float>(rows), ldw = word_row(n.f);
  if (by_number(p, n, keys.weights.none)) {
    keys.rows = rows;
    keys.weights.M_out = M;
    load_rounded_rows(p, n, p.k, s, s.head, time, rows, all, words.rows, words.pairs, keys.sums, tile ? keys.phi : nullptr);
  } else {
    load_key_features(p, n, s, time, rows, M, keys, ahead, memo);
    round_rows(keys.phi, n.ldf, rows, all, n.f, words.rows, ldw);
    interleave_rows(words.rows, ldw, all, n.f, words.pairs, n.ldf);
    if (!keys.weights.none) round_row_pairs(keys.weighted, n.ldf, rows, all, n.f, words.weighted_pairs, n.ldf);
    clear(keys.sums, n.ldf);
    sum_rows(keys.weighted, n.ldf, rows, n.f, keys.sums);
  }
  if (for_pairs) transpose_words(words.rows, ldw, all, TARNN_ISA::words(n.f), words.turned, n.ldc);
  load_rounded_values(p, n, s, time, rows, tile, words);
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
  const bool plain = w.plain;
  const float keep = plain ? 1.f : w.keep[0];
  float* const S = state.S;
  Word* const to = state.words;
  const Index lde = n.lde;
  product(n.f, n.e, words.all / 2, {words.weighted_pairs, 1, n.ldf}, words.v_pairs, lde, ahead,
          [=](Index i, Index j, auto R, auto N, auto& sums) TARNN_LAMBDA {
            if (!empty) add_tile<R, N>(S + i * lde + j, lde, plain, keep, sums);
            store_tile_sums<R, N>(S + i * lde + j, lde, sums);
            store_row_pairs<R, N>(to + i / 2 * lde + j, lde, sums);
          });
  for (Index j = 0; j < n.f; j += 16) store(state.z + j, load(state.z + j) * keep + load(keys.sums + j));
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
  load_rounded_keys(p, n, s, time, rows, state.M, false, false, at.keys, at.words, &at.ahead);
  at.ahead.clear();
  want_keys(p, next, at.ahead);
  absorb(at.keys, at.words, n, state, at.ahead, empty);
}

}  // namespace TARNN_ISA
}  // namespace tarnn
