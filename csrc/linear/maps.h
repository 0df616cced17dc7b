// The feature maps that the kernels compute themselves, while queries and keys are loaded, and their derivatives.
#pragma once

#include <type_traits>

#include "linear/problem.h"
#include "simd/tiles.h"

namespace tarnn {
namespace TARNN_ISA {

/// φ(x) of one vector; exp gets x less the largest entry of its row.
template <Map map, typename T>
TARNN_INLINE Vec<T> feature(Vec<T> x) {
  if constexpr (map == Map::elu) {
    const Vec<T> below = exp_nonpositive(x);
    return x > 0 ? x + T(1) : below;
  }
  if constexpr (map == Map::relu) return x < 0 ? Vec<T>{} : x;
  if constexpr (map == Map::squared_relu) return x < 0 ? Vec<T>{} : x * x;
  if constexpr (map == Map::exp) return exp_nonpositive(x);
  return x;
}

template <Map map>
struct Feature {
  template <typename V>
  TARNN_INLINE V operator()(V x) const {
    return feature<map, std::remove_reference_t<decltype(x[0])>>(x);
  }
};

/// Calls f with the map, as a function of vectors. exp is not one, for it needs the maximum of the row.
template <typename F>
TARNN_INLINE void with_map(Map map, F f) {
  switch (map) {
    case Map::elu: return f(Feature<Map::elu>());
    case Map::relu: return f(Feature<Map::relu>());
    case Map::squared_relu: return f(Feature<Map::squared_relu>());
    default: return f(AsItIs());
  }
}

/// The tile of x becomes that of e^(x − its row's maximum); scale: those maxima.
template <typename T>
void exp_tile(T* x, Index ld, Index rows, Index n, T* scale) {
  constexpr Index w = width<T>;
  const Integers<T> lane = iota<T>();
  for (Index i = 0; i < rows; ++i, x += ld) {
    Vec<T> seen = broadcast<T>(n ? x[0] : -T(__builtin_inf()));
    for (Index j = 0; j < n; j += w) {
      const Vec<T> y = load(x + j);
      seen = (lane < static_cast<int>(n - j < w ? n - j : w)) & (y > seen) ? y : seen;
    }
    const T most = scale[i] = largest<T>(seen);
    for (Index j = 0; j < n; j += w) {
      const Vec<T> y = exp_nonpositive(load(x + j) - most);
      store(x + j, lane < static_cast<int>(n - j < w ? n - j : w) ? y : Vec<T>{});
    }
  }
}

/// φ of positions time … time + rows − 1 as a tile; of exp, `scale` gets each row's maximum: φ = tile · e^scale.
template <typename T>
void load_features(Map map, const View& x, Index row, Index head, Index time, Index rows, Index n, T* to, Index ld, T* scale) {
  with_map(map, [&](auto f) { load_tile(x, row, head, time, rows, n, to, ld, f); });
  if (map == Map::exp) exp_tile(to, ld, rows, n, scale);
}

/// The gradient of x from that of φ(x), in place: elu: φ' = min(φ, 1); relu: φ > 0; relu²: 2·relu(x), for which x is
/// loaded once more; exp: φ. shift: what was added to φ.
template <typename T>
void features_backward(Map map, T* grad, const T* phi, const T* x, Index ld, Index rows, Index n, T shift = 0) {
  if (map == Map::identity) return;
  for (Index i = 0; i < rows * ld; i += ld)
    for (Index j = i; j < i + n; j += width<T>) {
      Vec<T> g = load(grad + j), y = load(phi + j) - shift;
      if (map == Map::elu) g *= y > 1 ? Vec<T>{} + T(1) : y;
      if (map == Map::relu) g = y > 0 ? g : Vec<T>{};
      if (map == Map::squared_relu) g *= load(x + j) > 0 ? 2 * load(x + j) : Vec<T>{};
      if (map == Map::exp) g *= y;
      store(grad + j, g);
    }
}

}  // namespace TARNN_ISA
}  // namespace tarnn
