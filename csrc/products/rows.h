// Rows of activations, as products read them.
#pragma once

#include "simd/tiles.h"

namespace tarnn {
namespace TARNN_ISA {

/// For weights of whole numbers rows are rounded to bytes: x ≈ step·level + least, with a step and a least of each row. For bfloat16 weights they
/// may be rounded to bfloat16 numbers, whole vectors of pairs with zeros behind the last; then `levels` has these. ld_levels counts bytes.
struct Rows {
  Index count, ld;
  const float* x;
  const std::uint8_t* levels;
  Index ld_levels;
  const float *step, *least;
  Rows part(Index i, Index n) const {
    return {n, ld, x + i * ld, levels ? levels + i * ld_levels : nullptr, ld_levels, step + i, least + i};
  }
};

}  // namespace TARNN_ISA
}  // namespace tarnn
