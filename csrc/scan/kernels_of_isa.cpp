// The scans. Compiled once for each instruction set: see ../kernels_of_isa.cpp.
#include "scan/diagonal.h"
#include "scan/selective_backward.h"

namespace tarnn {
namespace TARNN_ISA {

extern const ScanKernels scan_kernels;
const ScanKernels scan_kernels = {
    {diagonal_forward<float>, diagonal_backward<float>, selective_forward<float>, selective_backward<float>},
    {diagonal_forward<double>, diagonal_backward<double>, selective_forward<double>, selective_backward<double>},
};

}  // namespace TARNN_ISA
}  // namespace tarnn
