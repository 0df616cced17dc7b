// The kernels of AVX512-BF16: those of AVX-512, but for linear attention in bfloat16. Compiled once, for that set alone.
#include "linear/bfloat16/full.h"

namespace tarnn {
namespace TARNN_ISA {
namespace {

/// Whether products of rounded numbers compute a call: by its dtype and options. Decays with channels have none within a chunk;
/// without values, z is all there is, and it is never rounded.
bool rounded(const Problem& p) {
  return p.q.type == Type::bfloat16 && !p.channels && p.r > 0 && p.e > 0 && p.q.share == 1 && !p.at_least_one;
}

void forward(const Problem& p) {
  if (!rounded(p)) tarnn_kernels_avx512()->linear->of_float.forward(p);
  else if (p.causal) rounded_causal_forward(p);
  else full_forward<float, RoundedCausalScratch, RoundedKeyScratch>(p);
}

void backward(const Problem& p) {
  if (!rounded(p)) tarnn_kernels_avx512()->linear->of_float.backward(p);
  else if (p.causal) causal_backward<float, RoundedBackwardScratch, RoundedKeyScratch, RoundedKeyScratch>(p);
  else full_backward<float, RoundedBackwardScratch, RoundedBackwardScratch>(p);
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
