// Keys and values of one sequence, kept for softmax.
#pragma once

#include "kernels.h"

namespace tarnn {

/// (g, capacity, d) each, float32 or bfloat16, with `length` of them there. v null: values are the first channels of the keys.
struct Cache {
  void *k, *v;
  Type type;
  Index capacity, length;
};

}  // namespace tarnn
