// Portable vectors: as many lanes as the instruction set that this file is compiled for has, by the compiler's own
// vector types (GCC, Clang). Loads and stores take any address. One text for AVX-512, AVX2 and NEON, without intrinsics but
// for `widened`.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef TARNN_ISA
#define TARNN_ISA baseline
#endif

#if defined(__AVX512F__)
#define TARNN_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define TARNN_VECTOR_BYTES 32
#else
#define TARNN_VECTOR_BYTES 16
#endif

#define TARNN_INLINE inline __attribute__((always_inline))

namespace tarnn {
namespace TARNN_ISA {

using Index = std::int64_t;

template <typename T>
struct Lanes;
template <>
struct Lanes<float> {
  typedef float Vector __attribute__((vector_size(TARNN_VECTOR_BYTES)));
  typedef std::uint32_t Bits __attribute__((vector_size(TARNN_VECTOR_BYTES)));
  typedef std::int32_t Integers __attribute__((vector_size(TARNN_VECTOR_BYTES)));
  typedef std::uint16_t Half __attribute__((vector_size(TARNN_VECTOR_BYTES / 2)));
};
template <>
struct Lanes<double> {
  typedef double Vector __attribute__((vector_size(TARNN_VECTOR_BYTES)));
  typedef std::uint64_t Bits __attribute__((vector_size(TARNN_VECTOR_BYTES)));
  typedef std::int64_t Integers __attribute__((vector_size(TARNN_VECTOR_BYTES)));
};

template <typename T>
using Vec = typename Lanes<T>::Vector;
template <typename T>
using Bits = typename Lanes<T>::Bits;
template <typename T>
using Integers = typename Lanes<T>::Integers;
template <typename T>
constexpr Index width = TARNN_VECTOR_BYTES / sizeof(T);

/// n rounded up to whole vectors.
template <typename T>
constexpr Index whole(Index n) {
  return (n + width<T> - 1) / width<T> * width<T>;
}

template <typename F, int... I>
TARNN_INLINE void unroll([[maybe_unused]] F f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>()), ...);
}

/// f(0), f(1), … f(n − 1), written out, so that an array indexed by them becomes registers.
template <int n, typename F>
TARNN_INLINE void unrolled(F f) {
  unroll(f, std::make_integer_sequence<int, n>());
}

#define TARNN_LAMBDA __attribute__((always_inline))

template <typename T>
TARNN_INLINE Vec<T> load(const T* p) {
  Vec<T> x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

template <typename T>
TARNN_INLINE void store(T* p, Vec<T> x) {
  std::memcpy(p, &x, sizeof x);
}

template <typename T>
TARNN_INLINE Vec<T> broadcast(T x) {
  return x - Vec<T>{};  // less zero, which leaves even −0 as it is, and which the compiler leaves out
}

/// x, which the compiler does not fuse with what is added to it: code in two places gives the same bits.
template <typename V>
TARNN_INLINE V rounded(V x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

template <typename To, typename From>
TARNN_INLINE To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

/// Sixteen bits of each lane as 32, with zeros. GCC makes five instructions of the plain conversion, where x86 has one.
TARNN_INLINE Bits<float> widened(Lanes<float>::Half x) {
#if defined(__AVX512F__)
  return bit_cast<Bits<float>>(_mm512_maskz_cvtepu16_epi32(0xffff, bit_cast<__m256i>(x)));
#elif defined(__AVX2__)
  return bit_cast<Bits<float>>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(x)));
#else
  return __builtin_convertvector(x, Bits<float>);
#endif
}

/// 0, 1, 2, … in the lanes.
template <typename T>
TARNN_INLINE Integers<T> iota() {
  Integers<T> x{};
  for (Index i = 0; i < width<T>; ++i) x[i] = i;
  return x;
}

/// Lanes of x and y, counted through both.
template <typename T, int... lane>
TARNN_INLINE Vec<T> shuffled(Vec<T> x, Vec<T> y) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(x, y, lane...);
#else
  return __builtin_shuffle(x, y, Integers<T>{lane...});
#endif
}

/// x with each lane i in the place of lane i ^ half.
template <typename T, int half, int... I>
TARNN_INLINE Vec<T> swapped(Vec<T> x, std::integer_sequence<int, I...>) {
  return shuffled<T, (I ^ half)...>(x, x);
}

/// All lanes combined by f, always in the same order: halves onto halves.
template <typename T, typename F>
TARNN_INLINE T across(Vec<T> x, F f) {
  constexpr int n = width<T>;
  using Lane = std::make_integer_sequence<int, n>;
  if constexpr (n > 8) x = f(x, swapped<T, 8>(x, Lane()));
  if constexpr (n > 4) x = f(x, swapped<T, 4>(x, Lane()));
  if constexpr (n > 2) x = f(x, swapped<T, 2>(x, Lane()));
  return f(x, swapped<T, 1>(x, Lane()))[0];
}

template <typename T>
TARNN_INLINE T sum(Vec<T> x) {
  return across<T>(x, [](Vec<T> a, Vec<T> b) TARNN_LAMBDA { return a + b; });
}

/// Of vectors made of groups of 2·half lanes: the lanes that lie in the lower half of each (upper: `from` = half), of x and then of y.
template <typename T, int half, int from, int... I>
TARNN_INLINE Vec<T> halves(Vec<T> x, Vec<T> y, std::integer_sequence<int, I...>) {
  return shuffled<T, (I / half * 2 * half + I % half + from)...>(x, y);
}

/// `sum` of each of width<T> vectors, in the lanes of one: the same additions, of several vectors at once.
template <typename T, int n>
TARNN_INLINE Vec<T> sums(const Vec<T> (&x)[n]) {
  if constexpr (n == 1) return x[0];
  else {
    using Lane = std::make_integer_sequence<int, width<T>>;
    constexpr int half = n / 2;
    Vec<T> y[half];
    unrolled<half>([&](auto i) TARNN_LAMBDA {
      const Vec<T> a = x[2 * i], b = x[2 * i + 1];
      y[i] = halves<T, half, 0>(a, b, Lane()) + halves<T, half, half>(a, b, Lane());
    });
    return sums<T, half>(y);
  }
}

/// The sums of width<T> vectors that lie one after the other.
template <typename T>
TARNN_INLINE Vec<T> sums_at(const T* lanes) {
  Vec<T> x[width<T>];
  unrolled<width<T>>([&](auto l) TARNN_LAMBDA { x[l] = load(lanes + l * width<T>); });
  return sums<T>(x);
}

template <typename T>
TARNN_INLINE T largest(Vec<T> x) {
  return across<T>(x, [](Vec<T> a, Vec<T> b) TARNN_LAMBDA { return a > b ? a : b; });
}

/// eˣ for x ≤ 0 (a NaN, of any bits, stays one; for x > 0 anything): eˣ = 2ⁿ·eʳ with |r| ≤ ln 2 / 2, eʳ by the polynomial of
/// degree 5 whose relative error is least, 9e-8. 2ⁿ is a factor, not added to the exponent's bits: a NaN would become a number.
/// 0 where the result would be below the smallest normal number, 1.2e-38.
#ifdef __AVX512BF16__
TARNN_INLINE Vec<float> exp_nonpositive(Vec<float> x);  // simd/bfloat16.h: by a table
#else
TARNN_INLINE Vec<float> exp_nonpositive(Vec<float> x) {
  const float magic = 12582912.f + 127;  // 1.5·2²³: adding it rounds to an integer, in the lowest bits, with an exponent's bias
  Vec<float> shifted = x * 1.44269504088896341f + magic;
  Vec<float> n = shifted - magic;
#if defined(__FMA__) || defined(__aarch64__)
  Vec<float> r = x - n * 0.693147181f;  // fused: n·ln 2 is not rounded
#else
  Vec<float> r = x - n * 0.693145752f - n * 1.42860677e-6f;  // the first has so few bits that n of them are not rounded
#endif
  Vec<float> p = r * 0.00829027188f + 0.0418981597f;
  p = p * r + 0.166676381f;
  p = p * r + 0.499991478f;
  p = p * r + 0.999999706f;
  p = p * r + 1.f;
  Vec<float> y = p * bit_cast<Vec<float>>(bit_cast<Bits<float>>(shifted) << 23);
  return x < -87.33654f ? Vec<float>{} : y;
}
#endif

/// The same in float64: degree 13, within 2e-16; 0 below 2.2e-308.
TARNN_INLINE Vec<double> exp_nonpositive(Vec<double> x) {
  const double magic = 6755399441055744.0 + 1023;  // 1.5·2⁵²
  Vec<double> shifted = x * 1.4426950408889634 + magic;
  Vec<double> n = shifted - magic;
  Vec<double> r = x - n * 6.93147180369123816490e-01;
  r = r - n * 1.90821492927058770002e-10;
  const double c[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
                      1.0 / 720,       1.0 / 120,      1.0 / 24,      1.0 / 6,      0.5};
  Vec<double> p = r * (1.0 / 6227020800) + c[0];
  for (int i = 1; i < 11; ++i) p = p * r + c[i];
  p = p * (r * r) + (r + 1.0);
  Vec<double> y = p * bit_cast<Vec<double>>(bit_cast<Bits<double>>(shifted) << 52);
  return x < -708.3964185322641 ? Vec<double>{} : y;
}

/// eˣ of one number, any x: by the same polynomial where x ≤ 0.
template <typename T>
TARNN_INLINE T exp_one(T x) {
  if (x > T(0)) return T(1) / exp_nonpositive(broadcast<T>(-x))[0];
  return exp_nonpositive(broadcast<T>(x))[0];
}

/// 1 / (1 + e⁻ˣ), without overflow on either side.
template <typename T>
TARNN_INLINE Vec<T> sigmoid(Vec<T> x) {
  const Vec<T> e = exp_nonpositive(x < 0 ? x : -x);
  return (x < 0 ? e : e * 0 + T(1)) / (e + T(1));
}

/// Transposes a square of width × width in registers: log₂(width) rounds, each of which interleaves row i with row
/// i + width/2.
template <typename T>
TARNN_INLINE void transpose_lanes(Vec<T> (&a)[width<T>]) {
  constexpr int n = width<T>, rounds = n == 16 ? 4 : n == 8 ? 3 : n == 4 ? 2 : 1;
  unrolled<rounds>([&](auto) TARNN_LAMBDA {
    Vec<T> b[n];
    unrolled<n / 2>([&](auto i) TARNN_LAMBDA {
      const Vec<T> x = a[i], y = a[i + n / 2];
      if constexpr (n == 16) {
        b[2 * i] = shuffled<T, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(x, y);
        b[2 * i + 1] = shuffled<T, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(x, y);
      } else if constexpr (n == 8) {
        b[2 * i] = shuffled<T, 0, 8, 1, 9, 2, 10, 3, 11>(x, y);
        b[2 * i + 1] = shuffled<T, 4, 12, 5, 13, 6, 14, 7, 15>(x, y);
      } else if constexpr (n == 4) {
        b[2 * i] = shuffled<T, 0, 4, 1, 5>(x, y);
        b[2 * i + 1] = shuffled<T, 2, 6, 3, 7>(x, y);
      } else {
        b[2 * i] = shuffled<T, 0, 2>(x, y);
        b[2 * i + 1] = shuffled<T, 1, 3>(x, y);
      }
    });
    unrolled<n>([&](auto i) TARNN_LAMBDA { a[i] = b[i]; });
  });
}

/// The same from rows `from` apart in x to rows `to` apart in y.
template <typename T>
TARNN_INLINE void transpose_square(const T* x, Index from, T* y, Index to) {
  Vec<T> a[width<T>];
  unrolled<width<T>>([&](auto i) TARNN_LAMBDA { a[i] = load(x + i * from); });
  transpose_lanes<T>(a);
  unrolled<width<T>>([&](auto i) TARNN_LAMBDA { store(y + i * to, a[i]); });
}

}  // namespace TARNN_ISA
}  // namespace tarnn
