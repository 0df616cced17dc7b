// Elementwise layers of a model that plain PyTorch makes of many passes: RMSNorm, with a gate or without, and silu(gate) ⊙ up of
// SwiGLU, forward and backward. Rows lie one after the other; every function works on some of them, so that threads can share
// the work. Tensors are of type `stored`: T, or sixteen bits, which are computed in float32; weights and sums are T always.
#pragma once

#include "kernels.h"

namespace tarnn {

/// Numbers of type `stored`, or nullptr.
struct Rows {
  void* at = nullptr;
  Rows from(Index i, Type stored) const { return {at ? static_cast<char*>(at) + i * bytes_of(stored) : nullptr}; }
};

template <typename T>
struct ElementwiseOf {
  /// y = x·scale·weight, scale = 1 / √(mean x² + eps), a row of n at a time; with a gate y·silu(gate).
  void (*rms_norm)(Type stored, Index rows, Index n, T eps, Rows x, Rows gate, const T* weight, Rows y, T* scale);
  /// grad_x and grad_gate of these rows; grad_weight (n) is their sum, not added to what was there.
  void (*rms_norm_backward)(Type stored, Index rows, Index n, Rows grad, Rows x, Rows gate, const T* weight, const T* scale,
                            Rows grad_x, Rows grad_gate, T* grad_weight);
  /// y = silu(gate)·up.
  void (*swiglu)(Type stored, Index n, Rows gate, Rows up, Rows y);
  void (*swiglu_backward)(Type stored, Index n, Rows grad, Rows gate, Rows up, Rows grad_gate, Rows grad_up);
};

struct ElementwiseKernels : OfTypes<ElementwiseOf> {};

}  // namespace tarnn
