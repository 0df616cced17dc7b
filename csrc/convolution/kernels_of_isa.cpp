// Short convolution. Compiled once for each instruction set: see ../kernels_of_isa.cpp.
#include "convolution/backward.h"

namespace tarnn {
namespace TARNN_ISA {

extern const ConvolutionKernels convolution_kernels;
const ConvolutionKernels convolution_kernels = {
    {convolution_forward<float>, convolution_backward<float>, convolution_step<float>},
    {convolution_forward<double>, convolution_backward<double>, convolution_step<double>},
};

}  // namespace TARNN_ISA
}  // namespace tarnn
