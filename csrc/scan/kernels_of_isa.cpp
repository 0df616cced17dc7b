// The scans. Compiled once for each instruction set: see ../kernels_of_isa.cpp.
#include "scan/diagonal.h"
#include "scan/selective_backward.h"

namespace tarnn {
namespace TARNN_ISA {

template <typename T>
constexpr ScanKernelsOf<T> scan = {diagonal_forward<T>, diagonal_backward<T>, selective_forward<T>, selective_backward<T>};

extern const ScanKernels scan_kernels;
const ScanKernels scan_kernels = {OF_TYPES(scan)};

}  // namespace TARNN_ISA
}  // namespace tarnn
