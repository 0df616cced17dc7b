// Registers the kernels with torch (stable ABI) and picks the instruction set.
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

#include <torch/csrc/stable/library.h>

#include "kernels.h"

namespace {

const tarnn::Kernels* table_of(std::string_view isa) {
#ifdef __x86_64__
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && (isa.empty() || isa == "avx512")) return tarnn_kernels_avx512();
  if (avx2 && (isa.empty() || isa == "avx2")) return tarnn_kernels_avx2();
#endif
  if (isa.empty() || isa == "baseline") return tarnn_kernels_baseline();
  return nullptr;
}

const tarnn::Kernels& kernels() {
  static const tarnn::Kernels* table = [] {
    const char* wish = std::getenv("TARNN_ISA");
    const tarnn::Kernels* found = table_of(wish ? wish : "");
    if (!found) throw std::runtime_error("TARNN_ISA=" + std::string(wish) + " is not an instruction set of this processor.");
    return found;
  }();
  return *table;
}

std::string isa() { return kernels().isa; }

}  // namespace

STABLE_TORCH_LIBRARY(tarnn_cpu, m) { m.def("isa() -> str"); }
STABLE_TORCH_LIBRARY_IMPL(tarnn_cpu, CompositeExplicitAutograd, m) { m.impl("isa", TORCH_BOX(&isa)); }
