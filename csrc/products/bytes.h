// Sums of products of bytes: levels of activations (0 to 255) times whole numbers of weights (−128 to 127), four at a time for each
// output. The sums are exact, so every way to compute them gives the same numbers:
//
//     PlainBytes   shifts and multiplications of any compiler's vectors
//     PairsOfBytes x86: bytes become sixteen bits, two products an instruction (pmaddwd)
//     LongBytes    NEON: the same, by smlal, into twice as many sums
//     ShortSums    for weights from −8 to 7: sums of sixteen bits, which hold 32 products of an output
//
// and by one instruction for all four, where the processor has it (dots.h):
//
//     DotProducts  x86: vpdpbusd, of AVX-512 VNNI or of AVX-VNNI
//     MixedDots    NEON: usdot
//     SignedDots   NEON: sdot, whose levels are signed too
#pragma once

#include "products/dots.h"
#include "simd/vector.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace tarnn {
namespace TARNN_ISA {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr bool many_registers = true;
#else
constexpr bool many_registers = false;
#endif

typedef std::int16_t Shorts __attribute__((vector_size(TARNN_VECTOR_BYTES)));

typedef std::int8_t Chars __attribute__((vector_size(TARNN_VECTOR_BYTES)));

TARNN_INLINE Integers<float> load_bytes(const void* at) {
  Integers<float> x;
  std::memcpy(&x, at, sizeof x);
  return x;
}

/// Half a byte each, 0 to 15, as numbers from −8 to 7.
TARNN_INLINE Integers<float> less_eight(Integers<float> x) {
  return bit_cast<Integers<float>>(bit_cast<Chars>(x & 0x0F0F0F0F) - static_cast<std::int8_t>(8));
}

/// Four levels, of one row.
TARNN_INLINE std::int32_t four_levels(const std::uint8_t* at) {
  std::int32_t x;
  std::memcpy(&x, at, sizeof x);
  return x;
}

/// Bytes as numbers of sixteen bits: those at even and those at odd places.
struct Halves {
  Shorts even, odd;
};

TARNN_INLINE Halves signed_halves(Integers<float> w) {
  const Shorts x = bit_cast<Shorts>(w);
  return {(x << 8) >> 8, x >> 8};
}

TARNN_INLINE Halves level_halves(std::int32_t x) {
  const Integers<float> all = x - Integers<float>{};
  return {bit_cast<Shorts>(all & 0x00FF00FF), bit_cast<Shorts>((all >> 8) & 0x00FF00FF)};
}

struct PlainBytes {
  static constexpr const char* name = "shifts";
  static constexpr int tile = many_registers ? 24 : 8;  // sums that fit the registers
  using Weights = Integers<float>;
  using Levels = std::int32_t;
  using Sum = Integers<float>;
  static TARNN_INLINE Weights weights(Integers<float> w) { return w; }
  static TARNN_INLINE Levels levels(std::int32_t x) { return x; }
  static TARNN_INLINE void add(Sum& sum, Weights w, Levels x) {
    sum += ((w << 24) >> 24) * (x & 255) + ((w << 16) >> 24) * ((x >> 8) & 255) + ((w << 8) >> 24) * ((x >> 16) & 255) +
           (w >> 24) * ((x >> 24) & 255);
  }
  static TARNN_INLINE Integers<float> total(Sum sum) { return sum; }
};

#if defined(__AVX2__)
struct PairsOfBytes {
  static constexpr const char* name = "pmaddwd";
  static constexpr int tile = many_registers ? 20 : 8;
  using Weights = Halves;
  using Levels = Halves;
  using Sum = Integers<float>;
  static TARNN_INLINE Weights weights(Integers<float> w) { return signed_halves(w); }
  static TARNN_INLINE Levels levels(std::int32_t x) { return level_halves(x); }
  static TARNN_INLINE void add(Sum& sum, Weights w, Levels x) { sum += pairs(w.even, x.even) + pairs(w.odd, x.odd); }
  static TARNN_INLINE Integers<float> total(Sum sum) { return sum; }

 private:
  static TARNN_INLINE Integers<float> pairs(Shorts a, Shorts b) {
#if defined(__AVX512BW__)
    return bit_cast<Integers<float>>(_mm512_madd_epi16(bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
#else
    return bit_cast<Integers<float>>(_mm256_madd_epi16(bit_cast<__m256i>(a), bit_cast<__m256i>(b)));
#endif
  }
};
using BytesOfAll = PairsOfBytes;
#elif defined(__aarch64__)
struct LongBytes {
  static constexpr const char* name = "smlal";
  static constexpr int tile = 12;
  using Weights = Halves;
  using Levels = Halves;
  struct Sum {
    int32x4_t low, high;  // two sums an output: of outputs 0 and 1, and of 2 and 3
  };
  static TARNN_INLINE Weights weights(Integers<float> w) { return signed_halves(w); }
  static TARNN_INLINE Levels levels(std::int32_t x) { return level_halves(x); }
  static TARNN_INLINE void add(Sum& sum, Weights w, Levels x) {
    for (const auto& [a, b] : {std::pair(w.even, x.even), std::pair(w.odd, x.odd)}) {
      const auto left = bit_cast<int16x8_t>(a), right = bit_cast<int16x8_t>(b);
      sum.low = vmlal_s16(sum.low, vget_low_s16(left), vget_low_s16(right));
      sum.high = vmlal_high_s16(sum.high, left, right);
    }
  }
  static TARNN_INLINE Integers<float> total(Sum sum) { return bit_cast<Integers<float>>(vpaddq_s32(sum.low, sum.high)); }
};
using BytesOfAll = LongBytes;
#else
using BytesOfAll = PlainBytes;
#endif

/// A product is at most 8·255 in size, and each half of an output has 16 of them: less than 2¹⁵.
struct ShortSums {
  using Sum = Shorts;
#if defined(__AVX2__)
  using Weights = Integers<float>;
  using Levels = Integers<float>;
  static TARNN_INLINE Weights weights(Integers<float> w) { return w; }
  static TARNN_INLINE Levels levels(std::int32_t x) { return x - Integers<float>{}; }
  static TARNN_INLINE void add(Sum& sum, Weights w, Levels x) {
#if defined(__AVX512BW__)
    sum += bit_cast<Shorts>(_mm512_maddubs_epi16(bit_cast<__m512i>(x), bit_cast<__m512i>(w)));
#else
    sum += bit_cast<Shorts>(_mm256_maddubs_epi16(bit_cast<__m256i>(x), bit_cast<__m256i>(w)));
#endif
  }
#else
  using Weights = Halves;
  using Levels = Halves;
  static TARNN_INLINE Weights weights(Integers<float> w) { return signed_halves(w); }
  static TARNN_INLINE Levels levels(std::int32_t x) { return level_halves(x); }
  static TARNN_INLINE void add(Sum& sum, Weights w, Levels x) { sum += w.even * x.even + w.odd * x.odd; }
#endif
  static TARNN_INLINE Integers<float> total(Sum sum) {
    const Integers<float> both = bit_cast<Integers<float>>(sum);
    return ((both << 16) >> 16) + (both >> 16);
  }
};

#if defined(__AVX2__)
// tests try the 256-bit form where there is AVX-512 VNNI, but no AVX-VNNI: "%{evex%} vpdpbusd" (tests/kernels/test_bytes.py)
#if !defined(TARNN_VPDPBUSD) && defined(__AVX512F__)
#define TARNN_VPDPBUSD "vpdpbusd"
#elif !defined(TARNN_VPDPBUSD)
#define TARNN_VPDPBUSD "%{vex%} vpdpbusd"
#endif
struct DotProducts : PlainBytes {
  static constexpr const char* name = "vpdpbusd";
  static constexpr int tile = many_registers ? 24 : 12;
  using Levels = Integers<float>;
  static TARNN_INLINE Levels levels(std::int32_t x) { return x - Integers<float>{}; }
  static TARNN_INLINE void add(Sum& sum, Weights w, Levels x) { asm(TARNN_VPDPBUSD " %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w)); }
};
#elif defined(__aarch64__)
#define TARNN_DOTS ".arch armv8.2-a+dotprod+i8mm\n\t"  // for the assembler
struct MixedDots : PlainBytes {
  static constexpr const char* name = "usdot";
  using Levels = Integers<float>;
  static TARNN_INLINE Levels levels(std::int32_t x) { return x - Integers<float>{}; }
  static TARNN_INLINE void add(Sum& sum, Weights w, Levels x) {
    asm(TARNN_DOTS "usdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(x), "w"(w));
  }
};

/// Levels less 128. One row more, of zeros, then sums what all rows have too little: −128·Σ w.
struct SignedDots : PlainBytes {
  static constexpr const char* name = "sdot";
  static constexpr int tile = 20;
  static constexpr bool row_of_zeros = true;
  using Levels = Integers<float>;
  static TARNN_INLINE Levels levels(std::int32_t x) { return (x ^ static_cast<std::int32_t>(0x80808080)) - Integers<float>{}; }
  static TARNN_INLINE void add(Sum& sum, Weights w, Levels x) {
    asm(TARNN_DOTS "sdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(w), "w"(x));
  }
};
#endif

template <typename Dot>
constexpr int rows_of_zeros = requires { Dot::row_of_zeros; } ? 1 : 0;

/// What a sum of whole numbers stands for.
TARNN_INLINE Vec<float> scaled(Integers<float> sum, float step, Vec<float> scale) {
  return rounded(__builtin_convertvector(sum, Vec<float>) * step * scale);
}

/// f(Dot()), of the best way that this processor has; Plain: for those without an instruction for it.
template <typename Plain, typename F>
TARNN_INLINE auto with_dots([[maybe_unused]] Dots has, F f) {
#if defined(__AVX512F__)
  if (has.vnni) return f(DotProducts());
#elif defined(__AVX2__)
  if (has.avx_vnni) return f(DotProducts());
#elif defined(__aarch64__)
  if (has.usdot) return f(MixedDots());
  if (has.sdot) return f(SignedDots());
#endif
  return f(Plain());
}

}  // namespace TARNN_ISA
}  // namespace tarnn
