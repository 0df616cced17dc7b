// Instructions for products of bytes and of bfloat16 numbers that a processor may have beyond its instruction set's.
#pragma once

#include <cstdlib>
#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace tarnn {

/// vnni: AVX-512's; avx_vnni: the same in AVX's encoding, for processors without AVX-512; bfloat16: AVX512-BF16's pairs; amx: tiles
/// of bytes and of bfloat16 numbers; sdot, usdot: NEON's.
struct Dots {
  bool vnni = false, avx_vnni = false, bfloat16 = false, amx = false, sdot = false, usdot = false;
};

/// TARNN_DOTS, with commas: only these of what the processor has; "none" for no such instruction.
inline bool dots_wanted(std::string_view name) {
  const char* text = std::getenv("TARNN_DOTS");
  if (!text || !*text) return true;
  for (std::string_view left = text;;) {
    const std::size_t comma = left.find(',');
    if (left.substr(0, comma) == name) return true;
    if (comma == left.npos) return false;
    left.remove_prefix(comma + 1);
  }
}

#if defined(__x86_64__) && defined(__linux__) && !defined(TARNN_NO_AMX)
/// Linux keeps room for the tiles of a process that asks for it.
inline bool tiles_allowed() {
  constexpr long ask_for_state = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, ask_for_state, tile_data) == 0;
}
#endif

inline Dots dots_of_processor() {
  Dots has;
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  has.vnni = __builtin_cpu_supports("avx512vnni") && dots_wanted("vnni");
  const bool more = __get_cpuid_count(7, 1, &a, &b, &c, &d);
#ifndef TARNN_NO_AVX_VNNI  // an assembler that doesn't know it
  has.avx_vnni = more && (a >> 4 & 1) && dots_wanted("avx_vnni");
#endif
#ifndef TARNN_NO_AMX
  has.bfloat16 = more && (a >> 5 & 1) && __builtin_cpu_supports("avx512f") && dots_wanted("bfloat16");
#if defined(__linux__)
  constexpr unsigned tiles = 1u << 22 | 1u << 24 | 1u << 25;  // of bfloat16, at all, of bytes
  has.amx = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & tiles) == tiles && dots_wanted("amx") && tiles_allowed();
#endif
#endif
#elif defined(__aarch64__) && defined(__linux__)
  has.sdot = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) && dots_wanted("sdot"), has.usdot = (getauxval(AT_HWCAP2) & HWCAP2_I8MM) && dots_wanted("usdot");
#elif defined(__aarch64__) && defined(__APPLE__)
  const auto flag = [](const char* name) {
    int x = 0;
    std::size_t size = sizeof x;
    return sysctlbyname(name, &x, &size, nullptr, 0) == 0 && x != 0;
  };
  has.sdot = flag("hw.optional.arm.FEAT_DotProd") && dots_wanted("sdot"), has.usdot = flag("hw.optional.arm.FEAT_I8MM") && dots_wanted("usdot");
#endif
  return has;
}

}  // namespace tarnn
