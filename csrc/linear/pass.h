// One pass over a few columns of S for a token or two: the one loop of streamed attention.
//
//     S ← keep_c ⊙ S + k_c v_cᵀ      o_c = Sᵀ q_c · factor_c      for token c after token c
//
// A row of S is loaded once, takes in the tokens, is read by their queries in between, and is stored: 4·f·e operations per
// token and nothing else, in the order of steps, so with the bits of steps.
#pragma once

#include "simd/ahead.h"
#include "simd/tiles.h"

namespace tarnn {
namespace TARNN_ISA {

/// What S is multiplied with before it takes in a token: nothing, one number, or a number for each row.
enum class Keep { all, token, row };

/// Numbers of some tokens: those of token c begin at `at + c · next`, which is negative where time runs backward; those of its r-th
/// query head lie r · head further.
template <typename T>
struct Tokens {
  T* at = nullptr;
  Index next = 0, head = 0;
  T* of(Index token) const { return at + token * next; }
};

/// S (rows × columns, ld apart) and the tokens that pass over it. v and o have columns in whole vectors; factor may be null.
template <typename T>
struct Passing {
  T* S;
  Index rows, columns, ld;
  Tokens<const T> k, v, q, keep, factor;
  Tokens<T> o;
};

/// C tokens pass over N vectors' columns from column j on, and R query heads (none, if it is 0) read along.
template <int C, int N, int R, Keep decay, typename T>
TARNN_INLINE void pass(const Passing<T>& p, Index token, Index j, Ahead& ahead) {
  Vec<T> v[C * N], o[R * C * N + 1];
  [[maybe_unused]] const T *k[C], *q[C], *keep[C];
  [[maybe_unused]] T factor[C];
  unrolled<C>([&](auto c) TARNN_LAMBDA {
    k[c] = p.k.of(token + c);
    if constexpr (R > 0) q[c] = p.q.of(token + c);
    if constexpr (decay != Keep::all) keep[c] = p.keep.of(token + c);
    if constexpr (decay == Keep::token) factor[c] = *keep[c];
    unrolled<N>([&](auto n) TARNN_LAMBDA { v[c * N + n] = load(p.v.of(token + c) + j + n * width<T>); });
  });
  unrolled<R * C * N>([&](auto i) TARNN_LAMBDA { o[i] = Vec<T>{}; });
  ahead.some();
  ahead.passed(1);
  [[maybe_unused]] const Index rows = p.rows, ld = p.ld, head = p.q.head;
  T* S = p.S + j;
  const auto row = [&](Index i) TARNN_LAMBDA {
    Vec<T> s[N];
    unrolled<N>([&](auto n) TARNN_LAMBDA { s[n] = load(S + n * width<T>); });
    unrolled<C>([&](auto c) TARNN_LAMBDA {
      const Vec<T> a = broadcast<T>(k[c][i]);
      unrolled<N>([&](auto n) TARNN_LAMBDA {
        if constexpr (decay == Keep::all) s[n] = v[c * N + n] * a + s[n];
        if constexpr (decay == Keep::token) s[n] = v[c * N + n] * a + s[n] * factor[c];
        if constexpr (decay == Keep::row) s[n] = v[c * N + n] * a + s[n] * keep[c][i];
      });
      unrolled<R>([&](auto r) TARNN_LAMBDA {
        const Vec<T> x = broadcast<T>(q[c][r * head + i]);
        unrolled<N>([&](auto n) TARNN_LAMBDA { o[(r * C + c) * N + n] += s[n] * x; });
      });
    });
    unrolled<N>([&](auto n) TARNN_LAMBDA { store(S + n * width<T>, s[n]); });
    S += ld;
  };
  Index i = 0;
  for (; i + 4 <= rows; i += 4) row(i), row(i + 1), row(i + 2), row(i + 3);
  for (; i < rows; ++i) row(i);
  unrolled<C>([&](auto c) TARNN_LAMBDA {
    unrolled<R>([&](auto r) TARNN_LAMBDA {
      const T by = p.factor.at ? p.factor.of(token + c)[r * p.factor.head] : T(1);
      T* to = p.o.of(token + c) + r * p.o.head + j;
      unrolled<N>([&](auto n) TARNN_LAMBDA { store(to + n * width<T>, o[(r * C + c) * N + n] * by); });
    });
  });
}

/// A token or two pass over N vectors' columns; a factor of 1 is not multiplied with, which would change no bit.
template <int C, int N, int R, typename T>
void pass_by(Keep decay, const Passing<T>& p, Index token, Index j, Ahead& ahead) {
  if (decay == Keep::row) return pass<C, N, R, Keep::row>(p, token, j, ahead);
  bool decays = false;
  for (int c = 0; c < C; ++c) decays = decays || (decay == Keep::token && *p.keep.of(token + c) != 1);
  if (decays) return pass<C, N, R, Keep::token>(p, token, j, ahead);
  pass<C, N, R, Keep::all>(p, token, j, ahead);
}

/// Tokens 0 … tokens − 1 in pairs, over two vectors' columns after the other, which stay in the first-level cache.
template <int R, typename T>
void pass_all(Keep decay, const Passing<T>& p, Index tokens, Ahead& ahead) {
  const auto columns = [&]<int N>(std::integral_constant<int, N>, Index j) {
    Index token = 0;
    for (; token + 2 <= tokens; token += 2) pass_by<2, N, R>(decay, p, token, j, ahead);
    if (token < tokens) pass_by<1, N, R>(decay, p, token, j, ahead);
  };
  Index j = 0;
  for (; j + width<T> < p.columns; j += 2 * width<T>) columns(std::integral_constant<int, 2>(), j);
  if (j < p.columns) columns(std::integral_constant<int, 1>(), j);
}

}  // namespace TARNN_ISA
}  // namespace tarnn
