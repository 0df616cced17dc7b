// The kernels of one instruction set, TARNN_ISA: what is compiled after this has the flags that stand before it.
#include "convolution/kernels_of_isa.cpp"
#include "delta/kernels_of_isa.cpp"
#include "kernels.h"
#include "scan/kernels_of_isa.cpp"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

namespace tarnn::TARNN_ISA {

constexpr Kernels table = {.isa = TEXT(TARNN_ISA), .linear = nullptr, .hybrid = nullptr, .delta = &delta_kernels,
                           .low_rank = &low_rank_kernels, .pack = nullptr, .runtime = nullptr, .elementwise = nullptr,
                           .convolution = &convolution_kernels, .scan = &scan_kernels, .draws = nullptr};

}  // namespace tarnn::TARNN_ISA

const tarnn::Kernels* JOIN(tarnn_kernels_, TARNN_ISA)() { return &tarnn::TARNN_ISA::table; }
