// Short convolution. Compiled once for each instruction set: see ../kernels_of_isa.cpp.
#include "convolution/backward.h"

namespace tarnn {
namespace TARNN_ISA {

template <typename T>
constexpr ConvolutionOf<T> convolution = {convolution_forward<T>, convolution_backward<T>, convolution_step<T>};

extern const ConvolutionKernels convolution_kernels;
const ConvolutionKernels convolution_kernels = {OF_TYPES(convolution)};

}  // namespace TARNN_ISA
}  // namespace tarnn
