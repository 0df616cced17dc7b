// The kernels of one instruction set. As the other files of this name, products/packing.cpp and runtime/sweep.cpp, it is compiled once for
// each, with -DTARNN_ISA=<its name> and the flags that allow it.
#include "kernels.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

namespace tarnn {
namespace TARNN_ISA {

extern const LinearKernels linear_kernels;            // linear/kernels_of_isa.cpp
extern const HybridKernels hybrid_kernels;            // hybrid/kernels_of_isa.cpp
extern const DeltaKernels delta_kernels;              // delta/kernels_of_isa.cpp
extern const LowRankKernels low_rank_kernels;         // delta/kernels_of_isa.cpp
extern const PackKernel pack_kernel;                  // products/packing.cpp
extern const RuntimeKernel runtime_kernel;            // runtime/sweep.cpp
extern const ElementwiseKernels elementwise_kernels;  // elementwise/kernels_of_isa.cpp
extern const ConvolutionKernels convolution_kernels;  // convolution/kernels_of_isa.cpp
extern const ScanKernels scan_kernels;                // scan/kernels_of_isa.cpp
extern const DrawKernels draw_kernels;                // draws/kernels_of_isa.cpp

const Kernels table = {TEXT(TARNN_ISA),   &linear_kernels, &hybrid_kernels,      &delta_kernels,       &low_rank_kernels,
                       &pack_kernel,       &runtime_kernel, &elementwise_kernels, &convolution_kernels, &scan_kernels,
                       &draw_kernels};

}  // namespace TARNN_ISA
}  // namespace tarnn

const tarnn::Kernels* JOIN(tarnn_kernels_, TARNN_ISA)() { return &tarnn::TARNN_ISA::table; }
