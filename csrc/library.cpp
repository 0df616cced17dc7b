// Names the library, and picks the instruction set. Operators are registered in the folder of each op (operators.cpp); torch.h
// makes one binary for every Python and every torch from 2.10 on.
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

#include "kernels.h"
#include "torch.h"

namespace {

const tarnn::Kernels* table_of(std::string_view isa) {
  const auto wanted = [&](std::string_view name) { return isa.empty() || isa == name; };
#ifdef __x86_64__
  __builtin_cpu_init();
  [[maybe_unused]] const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
#ifdef TARNN_HAS_avx512
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#ifdef TARNN_HAS_avx512bf16
  if (avx512 && __builtin_cpu_supports("avx512bf16") && wanted("avx512bf16")) return tarnn_kernels_avx512bf16();
#endif
  if (avx512 && wanted("avx512")) return tarnn_kernels_avx512();
#endif
#ifdef TARNN_HAS_avx2
  if (avx2 && wanted("avx2")) return tarnn_kernels_avx2();
#endif
#ifdef TARNN_HAS_baseline
  if (wanted("baseline")) return tarnn_kernels_baseline();
#endif
  return nullptr;
}

}  // namespace

const tarnn::Kernels& tarnn::kernels() {
  static const tarnn::Kernels* table = [] {
    const char* wish = std::getenv("TARNN_ISA");
    const tarnn::Kernels* best = table_of(wish ? wish : "");
    if (!best)
      throw std::runtime_error(wish ? "TARNN_ISA=" + std::string(wish) + " is not an instruction set of this processor and build."
                                    : "tarnn's kernels were compiled for other instruction sets than this processor's.");
    return best;
  }();
  return *table;
}

namespace {

std::string isa() { return tarnn::kernels().isa; }

}  // namespace

STABLE_TORCH_LIBRARY(tarnn_cpu, m) { m.def("isa() -> str"); }

STABLE_TORCH_LIBRARY_IMPL(tarnn_cpu, CompositeExplicitAutograd, m) { m.impl("isa", TORCH_BOX(&isa)); }
