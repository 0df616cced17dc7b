// One token and one state, whatever the features: S ← keep·S + k vᵀ and o = Sᵀq, in one pass over S.
#pragma once

#include "simd/tiles.h"

namespace tarnn {
namespace TARNN_ISA {

/// A vector from or to a row of which only `there` more numbers are there.
template <typename Format>
TARNN_INLINE Vec<typename Format::Wide> read_as(const typename Format::Stored* p, Index there) {
  return there < width<typename Format::Wide> ? load_some<Format>(p, 1, there) : Format::load(p);
}

template <typename T>
TARNN_INLINE Vec<T> read(const T* p, Index there) {
  return read_as<Same<T>>(p, there);
}

template <typename Format>
TARNN_INLINE void write_as(typename Format::Stored* p, Vec<typename Format::Wide> x, Index there) {
  if (there >= width<typename Format::Wide>) return Format::store(p, x);
  typename Format::Stored lanes[width<typename Format::Wide>];
  Format::store(lanes, x);
  for (Index i = 0; i < there; ++i) p[i] = lanes[i];
}

template <typename T>
TARNN_INLINE void write(T* p, Vec<T> x, Index there) {
  write_as<Same<T>>(p, x, there);
}

/// f(vectors, whether they are a part of one, first column) over e columns, the first two as constants.
template <typename T, typename F>
TARNN_INLINE void over_columns(Index e, F f) {
  Index j = 0;
  for (; e - j >= 4 * width<T>; j += 4 * width<T>) f(std::integral_constant<int, 4>(), std::false_type(), j);
  for (; e - j >= 2 * width<T>; j += 2 * width<T>) f(std::integral_constant<int, 2>(), std::false_type(), j);
  for (; e - j >= width<T>; j += width<T>) f(std::integral_constant<int, 1>(), std::false_type(), j);
  if (j < e) f(std::integral_constant<int, 1>(), std::true_type(), j);
}

/// N vectors of columns, or, in part, the `left` columns of one: all rows of S pass once; the first query head reads along. A row's
/// sum is rounded as in linear/pass.h, the product with k only together with it.
template <int N, bool part, typename T>
TARNN_INLINE void update_columns(Index f, Index e, const T* keep, const T* k, const T* v, const T* q, const T* from, T* to,
                                 Index left, T* o) {
  Vec<T> value[N], total[N];
  unrolled<N>([&](auto j) TARNN_LAMBDA { value[j] = load(v + j * width<T>), total[j] = Vec<T>{}; });
  for (Index i = 0; i < f; ++i, from += e, to += e)
    unrolled<N>([&](auto j) TARNN_LAMBDA {
      const Index at = j * width<T>;
      const Vec<T> before = part ? load_some<Same<T>>(from + at, 1, left) : load(from + at);
      const Vec<T> row = value[j] * k[i] + before * keep[i];
      write(to + at, row, part ? left : width<T>);
      total[j] += row * q[i];
    });
  unrolled<N>([&](auto j) TARNN_LAMBDA { store(o + j * width<T>, total[j]); });
}

/// S ← keep·S + k vᵀ from `from` to `to` (f × e, without gaps; they may be the same), and o = Sᵀq.
template <typename T>
void update_state(Index f, Index e, const T* keep, const T* k, const T* v, const T* q, const T* from, T* to, T* o) {
  over_columns<T>(e, [&](auto n, auto part, Index j) TARNN_LAMBDA {
    update_columns<n, part>(f, e, keep, k, v + j, q, from + j, to + j, e - j, o + j);
  });
}

/// o = Sᵀq.
template <typename T>
void read_columns(Index f, Index e, const T* S, const T* q, T* o) {
  over_columns<T>(e, [&](auto n, auto part, Index j) TARNN_LAMBDA {
    Vec<T> total[n];
    unrolled<n>([&](auto x) TARNN_LAMBDA { total[x] = Vec<T>{}; });
    for (Index i = 0; i < f; ++i)
      unrolled<n>([&](auto x) TARNN_LAMBDA {
        const T* at = S + i * e + j + x * width<T>;
        total[x] += (part ? load_some<Same<T>>(at, 1, e - j) : load(at)) * q[i];
      });
    unrolled<n>([&](auto x) TARNN_LAMBDA { store(o + j + x * width<T>, total[x]); });
  });
}

}  // namespace TARNN_ISA
}  // namespace tarnn
