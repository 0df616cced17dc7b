// The kernels of AVX512-BF16: those of AVX-512, but for causal linear attention in bfloat16. Compiled once, for that set alone.
#include "linear/bfloat16/backward.h"

namespace tarnn {
namespace TARNN_ISA {
namespace {

/// Whether products of rounded numbers compute a call: by its dtype and options. Decays with channels have none within a chunk;
/// without values, z is all there is, and it is never rounded. What is not causal has float32 products, of numbers that are
/// widened as they are loaded.
bool rounded(const Problem& p) {
  return p.q.type == Type::bfloat16 && p.causal && !p.channels && p.r > 0 && p.e > 0 && p.q.share == 1 && !p.at_least_one;
}

void forward(const Problem& p) {
  rounded(p) ? rounded_causal_forward(p) : tarnn_kernels_avx512()->linear->of_float.forward(p);
}

void backward(const Problem& p) {
  if (!rounded(p)) return tarnn_kernels_avx512()->linear->of_float.backward(p);
  causal_backward<float, RoundedBackwardScratch, RoundedKeyScratch, RoundedKeyScratch>(p);
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
