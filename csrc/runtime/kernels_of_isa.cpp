// The table of one instruction set for the library that has nothing but the runtime. Compiled once for each, as ../kernels_of_isa.cpp is for the other one.
#include "kernels.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

namespace tarnn::TARNN_ISA {

extern const RuntimeKernel runtime_kernel;  // sweep.cpp
extern const DrawKernels draw_kernels;      // draws/kernels_of_isa.cpp

constexpr Kernels table = {.isa = TEXT(TARNN_ISA), .linear = nullptr, .hybrid = nullptr, .delta = nullptr, .low_rank = nullptr, .pack = nullptr,
                           .runtime = &runtime_kernel, .elementwise = nullptr, .convolution = nullptr, .scan = nullptr, .draws = &draw_kernels};

}  // namespace tarnn::TARNN_ISA

const tarnn::Kernels* JOIN(tarnn_kernels_, TARNN_ISA)() { return &tarnn::TARNN_ISA::table; }
