// Sums in units of a running maximum, so that no exponential overflows: of exact keys (softmax, Milakov and Gimelshein 2018, arXiv
// 1805.02867) and of features with log-weights. Where the maximum grows, what was summed is multiplied with a factor of at most 1.
#pragma once

#include "simd/tiles.h"

namespace tarnn {
namespace TARNN_ISA {

template <typename T>
constexpr T minus_infinity = -__builtin_inf();

/// M with 0 for −∞, so that −∞ − M is −∞ and not NaN.
template <typename T>
TARNN_INLINE T finite(T M) {
  return M == minus_infinity<T> ? T(0) : M;
}

/// What x + y loses when it is rounded (Knuth's sum of two); 0 where it is infinite.
template <typename T>
TARNN_INLINE T rounded_off(T x, T y) {
  const T sum = x + y, of_y = sum - x, lost = (x - (sum - of_y)) + (y - of_y);
  return lost == lost ? lost : T(0);
}

/// The logarithm of what sums in units of e^M_before are multiplied with in those of e^M, when they decay by d. M_before + d is
/// rounded, by a unit in the last place of a large M; what that loses comes back here, so M may be any size.
template <typename T>
TARNN_INLINE T log_keep(T d, T M_before, T M) {
  return ((d + M_before) - finite(M)) + rounded_off(M_before, d);
}

/// M becomes `next`, the larger of itself and what enters; what sums in units of e^M are multiplied with in those of the new one.
template <typename T>
TARNN_INLINE T raise_maximum(T& M, T next) {
  const T keep = exp_one<T>(M - finite(next));
  M = next;
  return keep;
}

/// n logarithms, in whole vectors, become e^(x − unit); returns their sum.
template <typename T>
TARNN_INLINE T exp_in_units(T* x, Index n, T unit) {
  Vec<T> total{};
  for (Index j = 0; j < n; j += width<T>) {
    const Vec<T> y = exp_nonpositive(load(x + j) - unit);
    store(x + j, y);
    total += y;
  }
  return sum<T>(total);
}

}  // namespace TARNN_ISA
}  // namespace tarnn
