// Linear attention. Compiled once for each instruction set: see ../kernels_of_isa.cpp.
#include "linear/full.h"
#include "linear/step.h"
#include "linear/streamed_backward.h"

namespace tarnn {
namespace TARNN_ISA {

template <typename T>
void forward(const Problem& p) {
  p.causal ? streamed_forward<T>(p) : full_forward<T>(p);
}

template <typename T>
void backward(const Problem& p) {
  if (p.streamed) return streamed_backward<T>(p);
  p.causal ? causal_backward<T>(p) : full_backward<T>(p);
}

template <typename T>
constexpr LinearKernelsOf<T> linear = {forward<T>, backward<T>, step<T>};

extern const LinearKernels linear_kernels;
const LinearKernels linear_kernels = {OF_TYPES(linear)};

}  // namespace TARNN_ISA
}  // namespace tarnn
