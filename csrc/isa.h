// Which instruction set's kernels run: the richest that this build has and the processor can do.
#pragma once

#include <string_view>

#include "kernels.h"

namespace tarnn {

/// The table of the instruction set `wish`, or of the richest one where it is empty; null where there is none: `wish` is not one
/// of this processor and build, or the processor is an x86-64 without AVX2.
inline const Kernels* table_of([[maybe_unused]] std::string_view wish) {
  [[maybe_unused]] const auto wanted = [&](std::string_view name) { return wish.empty() || wish == name; };
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

}  // namespace tarnn
