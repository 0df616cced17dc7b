// Hybrid attention. Compiled once for each instruction set: see ../kernels_of_isa.cpp.
#include "hybrid/backward.h"
#include "hybrid/step.h"

namespace tarnn {
namespace TARNN_ISA {

extern const HybridKernels hybrid_kernels;
const HybridKernels hybrid_kernels = {{hybrid_forward<float>, hybrid_backward<float>, hybrid_step<float>},
                                      {hybrid_forward<double>, hybrid_backward<double>, hybrid_step<double>}};

}  // namespace TARNN_ISA
}  // namespace tarnn
