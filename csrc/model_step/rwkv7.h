// RWKV-7's mixing of tokens, as a plan describes it (Peng et al. 2025, section 4, arXiv 2503.14456). r, w, k, v, a, g are each made of
// a mixture x + (before − x)·μ of a token's input and the one before. Of each head, with κ̂ the key k ⊙ k_k of length 1, α = σ(a),
// k′ = k ⊙ (1 + (α − 1) ⊙ k_a), and v mixed by σ(v′) with that of the first layer:
//
//     S ← (Diag(e^(−0.607 σ(w))) − (κ̂ ⊙ α) κ̂ᵀ) S + k′ vᵀ      y = g ⊙ (norm(Sᵀr) + (Σ r ⊙ k′ ⊙ r_k) v)
#pragma once

#include "products/matrix.h"

namespace tarnn {

struct Rwkv7 {
  enum Low { w, a, g, v, num_low };  // made by products of low rank, the last only where values are mixed
  Index heads, d;
  const float* mixtures;  // of r, w, k, v, a, g, whole panels each
  Matrix made[3];         // r, k, v
  Matrix down[num_low];   // of rank 0: there is none
  Matrix up[num_low];     // each head begins a panel
  const float *k_k, *k_a, *r_k, *gain, *bias;  // (heads·d)
  float eps;
  float *S, *last;        // (b, heads, d, d), (b, hidden)

  Index width() const { return heads * d; }
  /// Where in a row of products each begins.
  Index at(Index i) const { return i * whole_panels(width()); }
  Index at_low(Index low) const {
    Index at = 3 * whole_panels(width());
    for (Index i = 0; i < low; ++i) at += whole_panels(down[i].outputs);
    return at;
  }
};

}  // namespace tarnn
