// One token and one state, whatever the features: S ← keep·S + k vᵀ and o = Sᵀq, in one pass over S.
#pragma once

#include "simd/tiles.h"

namespace tarnn {
namespace TARNN_ISA {

/// A vector from or to a row of which only `there` more numbers are there.
template <typename T>
TARNN_INLINE Vec<T> read(const T* p, Index there) {
  return there < width<T> ? load_some<Same<T>>(p, 1, there) : load(p);
}

template <typename T>
TARNN_INLINE void write(T* p, Vec<T> x, Index there) {
  if (there >= width<T>) return store(p, x);
  T lanes[width<T>];
  store(lanes, x);
  for (Index i = 0; i < there; ++i) p[i] = lanes[i];
}

/// N vectors of columns: all rows of S pass once; the first query head reads along. left: columns that are there.
template <int N, typename T>
TARNN_INLINE void update_columns(Index f, Index e, const T* keep, const T* k, const T* v, const T* q, const T* from, T* to,
                                 Index left, T* o) {
  Vec<T> value[N], total[N];
  unrolled<N>([&](auto j) TARNN_LAMBDA { value[j] = load(v + j * width<T>), total[j] = Vec<T>{}; });
  for (Index i = 0; i < f; ++i, from += e, to += e)
    unrolled<N>([&](auto j) TARNN_LAMBDA {
      const Index at = j * width<T>, there = N == 1 ? left : width<T>;
      const Vec<T> row = value[j] * k[i] + read(from + at, there) * keep[i];  // the first is not rounded by itself
      write(to + at, row, there);
      total[j] += row * q[i];
    });
  unrolled<N>([&](auto j) TARNN_LAMBDA { store(o + j * width<T>, total[j]); });
}

/// S ← keep·S + k vᵀ from `from` to `to` (f × e, without gaps; they may be the same), and o = Sᵀq.
template <typename T>
void update_state(Index f, Index e, const T* keep, const T* k, const T* v, const T* q, const T* from, T* to, T* o) {
  for (Index j = 0; j < e;) {
    const Index left = e - j;
    if (left >= 4 * width<T>) {
      update_columns<4>(f, e, keep, k, v + j, q, from + j, to + j, left, o + j);
      j += 4 * width<T>;
    } else if (left >= 2 * width<T>) {
      update_columns<2>(f, e, keep, k, v + j, q, from + j, to + j, left, o + j);
      j += 2 * width<T>;
    } else {
      update_columns<1>(f, e, keep, k, v + j, q, from + j, to + j, left, o + j);
      j += width<T>;
    }
  }
}

/// o = Sᵀq.
template <typename T>
void read_columns(Index f, Index e, const T* S, const T* q, T* o) {
  for (Index j = 0; j < e; j += width<T>) {
    Vec<T> total{};
    for (Index i = 0; i < f; ++i) total += read(S + i * e + j, e - j) * q[i];
    store(o + j, total);
  }
}

}  // namespace TARNN_ISA
}  // namespace tarnn
