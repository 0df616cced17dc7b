// The delta rule. Compiled once for each instruction set: see ../kernels_of_isa.cpp.
#include "delta/backward.h"
#include "delta/forward.h"
#include "delta/low_rank_backward.h"
#include "delta/step.h"

namespace tarnn {
namespace TARNN_ISA {

extern const DeltaKernels delta_kernels;
const DeltaKernels delta_kernels = {{delta_forward<float>, delta_backward<float>, delta_step<float>},
                                    {delta_forward<double>, delta_backward<double>, delta_step<double>}};

extern const LowRankKernels low_rank_kernels;
const LowRankKernels low_rank_kernels = {{low_rank_forward<float>, low_rank_backward<float>},
                                         {low_rank_forward<double>, low_rank_backward<double>}};

}  // namespace TARNN_ISA
}  // namespace tarnn
