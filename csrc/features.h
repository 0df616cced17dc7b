// The feature maps that the kernels compute themselves: on a tile of queries or keys, in place, and their derivatives.
#pragma once

#include "tiles.h"

namespace tarnn {
namespace TARNN_ISA {

/// φ(x) of one vector; exp gets x less the largest entry of its row.
template <Map map, typename T>
TARNN_INLINE Vec<T> feature(Vec<T> x) {
  if constexpr (map == Map::elu) return (x > 0 ? x : Vec<T>{}) + exp_nonpositive(x > 0 ? Vec<T>{} : x);
  if constexpr (map == Map::relu) return x < 0 ? Vec<T>{} : x;
  if constexpr (map == Map::squared_relu) return x < 0 ? Vec<T>{} : x * x;
  if constexpr (map == Map::exp) return exp_nonpositive(x);
  return x;
}

template <Map map, typename T>
void map_tile(T* x, Index ld, Index rows, Index n, T* scale) {
  constexpr Index w = width<T>;
  const Index full = n / w * w;
  const Bits<T> lane = iota<T>();
  for (Index i = 0; i < rows; ++i, x += ld) {
    T most = 0;
    if constexpr (map == Map::exp) {
      most = x[0];
      for (Index j = 1; j < n; ++j) most = x[j] > most ? x[j] : most;
      scale[i] = most;
    }
    for (Index j = 0; j < full; j += w) store(x + j, feature<map, T>(load(x + j) - most));
    if (full < n) {
      Vec<T> y = feature<map, T>(load(x + full) - most);
      store(x + full, lane < static_cast<int>(n - full) ? y : Vec<T>{});
    }
  }
}

/// The tile of x (rows × n) becomes that of φ(x); of exp, `scale` gets each row's maximum: φ = tile · e^scale.
template <typename T>
void features(Map map, T* x, Index ld, Index rows, Index n, T* scale) {
  switch (map) {
    case Map::identity: return;
    case Map::elu: return map_tile<Map::elu>(x, ld, rows, n, scale);
    case Map::relu: return map_tile<Map::relu>(x, ld, rows, n, scale);
    case Map::squared_relu: return map_tile<Map::squared_relu>(x, ld, rows, n, scale);
    case Map::exp: return map_tile<Map::exp>(x, ld, rows, n, scale);
  }
}

/// The gradient of x from that of φ(x), in place: elu: φ' = min(φ, 1); relu: φ > 0; relu²: 2·relu(x), for which x is
/// loaded once more; exp: φ.
template <typename T>
void features_backward(Map map, T* grad, const T* phi, const T* x, Index ld, Index rows, Index n) {
  if (map == Map::identity) return;
  for (Index i = 0; i < rows * ld; i += ld)
    for (Index j = i; j < i + n; j += width<T>) {
      Vec<T> g = load(grad + j), y = load(phi + j);
      if (map == Map::elu) g *= y > 1 ? Vec<T>{} + T(1) : y;
      if (map == Map::relu) g = y > 0 ? g : Vec<T>{};
      if (map == Map::squared_relu) g *= load(x + j) > 0 ? 2 * load(x + j) : Vec<T>{};
      if (map == Map::exp) g *= y;
      store(grad + j, g);
    }
}

}  // namespace TARNN_ISA
}  // namespace tarnn
