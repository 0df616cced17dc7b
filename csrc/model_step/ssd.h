// Mamba-2's mixing of tokens, as a plan describes it (Dao and Gu 2024, arXiv 2405.21060). Of each head, with Δ = softplus(dt + bias):
//
//     S ← e^(Δ·A) S + Δ·B xᵀ      y = Sᵀ C + D·x
//
// and then the RMSNorm of y ⊙ silu(z) over the heads of each group.
#pragma once

#include "kernels.h"

namespace tarnn {

/// The product `qkv` makes x (heads·p), B and C (groups·n each), which are filtered, then z (heads·p) and dt (heads).
struct Ssd {
  Index heads, groups, p, n;
  const float *bias, *A, *D;  // (heads)
  const float* gain;          // of the norm, (heads·p)
  float eps;
  float* S;                   // (b, heads, n, p)
  Index inner() const { return heads * p; }
  Index filtered() const { return inner() + 2 * groups * n; }
};

}  // namespace tarnn
