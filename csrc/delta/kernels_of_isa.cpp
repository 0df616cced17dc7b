// The delta rule. Compiled once for each instruction set: see ../kernels_of_isa.cpp.
#include "delta/backward.h"
#include "delta/forward.h"
#include "delta/step.h"

namespace tarnn {
namespace TARNN_ISA {

extern const DeltaKernels delta_kernels;
const DeltaKernels delta_kernels = {{delta_forward<float>, delta_backward<float>, delta_step<float>},
                                    {delta_forward<double>, delta_backward<double>, delta_step<double>}};

}  // namespace TARNN_ISA
}  // namespace tarnn
