// A feature map, as a program describes it; features.h computes it.
#pragma once

#include "products/matrix.h"

namespace tarnn {

/// What features are made by (features.h); the first five are those of `Map`.
enum class Function { identity, elu, relu, squared_relu, exp, abs, sigmoid, gelu, cos, plain_exp, waves, halves, dpfp, pairs, cosformer, log_softmax };

/// How φ's arguments are moved first: (x − centre)·stretch, with weight·x + constant as their log-weight. None: centre is null.
struct Move {
  Index heads;  // 1: the same for all
  const float *centre, *stretch, *weight, *constant;
};

/// A map whose features are not those of a `Map` alone; see features.h.
struct FeatureMap {
  Function function;
  Index heads, m;    // Ω has m rows; of each of g heads, or 1: of all; 0: there is none
  Matrix omega;      // of several heads, each begins a panel
  float square, offset, gain, shift;
  double number;
  const float* parts;
  Move queries, keys;
  Index omega_panels() const { return (m + panel - 1) / panel; }
};

}  // namespace tarnn
