// The kernels of AVX512-BF16: those of AVX-512, but for linear attention in bfloat16. Compiled once, for that set alone.
#include "linear/bfloat16/backward.h"

namespace tarnn {
namespace TARNN_ISA {
namespace {

/// What products of rounded numbers are for: decays with channels have none within a chunk.
bool rounded(const Problem& p) { return p.q.type == Type::bfloat16 && p.causal && !p.channels && p.r > 0; }

void forward(const Problem& p) {
  rounded(p) ? rounded_causal_forward(p) : tarnn_kernels_avx512()->linear->of_float.forward(p);
}

void backward(const Problem& p) {
  rounded(p) ? causal_backward<float, RoundedBackwardScratch, RoundedKeyScratch, RoundedKeyScratch>(p)
             : tarnn_kernels_avx512()->linear->of_float.backward(p);
}

}  // namespace
}  // namespace TARNN_ISA
}  // namespace tarnn

const tarnn::Kernels* tarnn_kernels_avx512bf16() {
  using namespace tarnn;
  static const LinearKernels linear = [] {
    LinearKernels kernels = *tarnn_kernels_avx512()->linear;
    kernels.of_float.forward = TARNN_ISA::forward;
    kernels.of_float.backward = TARNN_ISA::backward;
    return kernels;
  }();
  static const Kernels table = [] {
    Kernels kernels = *tarnn_kernels_avx512();
    kernels.isa = "avx512bf16";
    kernels.linear = &linear;
    return kernels;
  }();
  return &table;
}
