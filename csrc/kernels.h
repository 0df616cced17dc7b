// The table of kernels that csrc/isa.cpp fills once for each instruction set.
#pragma once

namespace tarnn {

struct Kernels {
  const char* isa;
};

}  // namespace tarnn

const tarnn::Kernels* tarnn_kernels_baseline();
#ifdef __x86_64__
const tarnn::Kernels* tarnn_kernels_avx2();
const tarnn::Kernels* tarnn_kernels_avx512();
#endif
