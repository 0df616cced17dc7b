// Instructions for products of bytes that a processor may have beyond its instruction set's.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace tarnn {

/// vnni: AVX-512's; avx_vnni: the same in AVX's encoding, for processors without AVX-512; sdot, usdot: NEON's.
struct Dots {
  bool vnni = false, avx_vnni = false, sdot = false, usdot = false;
};

inline Dots dots_of_processor() {
  Dots has;
#if defined(__x86_64__)
  has.vnni = __builtin_cpu_supports("avx512vnni");
#ifndef TARNN_NO_AVX_VNNI  // an assembler that doesn't know it
  unsigned a = 0, b = 0, c = 0, d = 0;
  has.avx_vnni = __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
#endif
#elif defined(__aarch64__) && defined(__linux__)
  has.sdot = getauxval(AT_HWCAP) & HWCAP_ASIMDDP, has.usdot = getauxval(AT_HWCAP2) & HWCAP2_I8MM;
#elif defined(__aarch64__) && defined(__APPLE__)
  const auto flag = [](const char* name) {
    int x = 0;
    std::size_t size = sizeof x;
    return sysctlbyname(name, &x, &size, nullptr, 0) == 0 && x != 0;
  };
  has.sdot = flag("hw.optional.arm.FEAT_DotProd"), has.usdot = flag("hw.optional.arm.FEAT_I8MM");
#endif
  return has;
}

}  // namespace tarnn
