// Hybrid attention. Compiled once for each instruction set: see ../kernels_of_isa.cpp.
#include "hybrid/backward.h"
#include "hybrid/step.h"

namespace tarnn {
namespace TARNN_ISA {

template <typename T>
constexpr HybridKernelsOf<T> hybrid = {hybrid_forward<T>, hybrid_backward<T>, hybrid_step<T>};

extern const HybridKernels hybrid_kernels;
const HybridKernels hybrid_kernels = {OF_TYPES(hybrid)};

}  // namespace TARNN_ISA
}  // namespace tarnn
