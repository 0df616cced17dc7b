// The delta rule. Compiled once for each instruction set: see ../kernels_of_isa.cpp.
#include "delta/backward.h"
#include "delta/forward.h"
#include "delta/low_rank_backward.h"
#include "delta/step.h"

namespace tarnn {
namespace TARNN_ISA {

template <typename T>
constexpr DeltaKernelsOf<T> delta = {delta_forward<T>, delta_backward<T>, delta_step<T>};

extern const DeltaKernels delta_kernels;
const DeltaKernels delta_kernels = {OF_TYPES(delta)};

template <typename T>
constexpr LowRankKernelsOf<T> low_rank = {low_rank_forward<T>, low_rank_backward<T>};

extern const LowRankKernels low_rank_kernels;
const LowRankKernels low_rank_kernels = {OF_TYPES(low_rank)};

}  // namespace TARNN_ISA
}  // namespace tarnn
