// Elementwise layers of a model that plain PyTorch makes of many passes: RMSNorm, and silu(gate) ⊙ up of SwiGLU, forward and
// backward. Rows lie one after the other; every function works on some of them, so that threads can share the work.
#pragma once

#include "kernels.h"

namespace tarnn {

template <typename T>
struct ElementwiseOf {
  /// y = x·scale·weight, scale = 1 / √(mean x² + eps), a row of n at a time.
  void (*rms_norm)(Index rows, Index n, T eps, const T* x, const T* weight, T* y, T* scale);
  /// grad_x of these rows; grad_weight (n) is their sum, not added to what was there.
  void (*rms_norm_backward)(Index rows, Index n, const T* grad, const T* x, const T* weight, const T* scale, T* grad_x,
                            T* grad_weight);
  /// y = silu(gate)·up.
  void (*swiglu)(Index n, const T* gate, const T* up, T* y);
  void (*swiglu_backward)(Index n, const T* grad, const T* gate, const T* up, T* grad_gate, T* grad_up);
};

struct ElementwiseKernels : OfTypes<ElementwiseOf> {};

}  // namespace tarnn
