// Weights on their way into the fused step's block: what the library hands to the kernel.
#pragma once

#include "products/matrix.h"

namespace tarnn {

/// A matrix to be packed: for each output of its panels where its weights lie, null for none; and where it goes, as `Matrix` says.
/// stored: the type of all its weights, float32, bfloat16 or float16.
struct Packing {
  Format format;
  Type stored;
  Index inputs;
  const void* const* rows;
  char* at;
  float *scale, *sums;
};

struct PackKernel {
  std::size_t (*room)(Index inputs);
  void (*pack)(const Packing&, Index panel, void* scratch);
};

}  // namespace tarnn
