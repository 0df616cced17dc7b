// Rows of tensors to and from tiles. A tile is a small matrix in scratch memory, in the wide type, with room up to a whole
// vector at the end of each row; that room holds zeros after a load.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "simd/vector.h"

namespace tarnn {
namespace TARNN_ISA {

// Sixteen-bit numbers, by their bits: float32 keeps every value of both formats.

TARNN_INLINE Vec<float> from_bfloat16(Lanes<float>::Half x) {
  return bit_cast<Vec<float>>(widened(x) << 16);
}

#ifdef __AVX512BF16__
TARNN_INLINE Lanes<float>::Half to_bfloat16(Vec<float> x);  // simd/bfloat16.h: one instruction
#else
TARNN_INLINE Lanes<float>::Half to_bfloat16(Vec<float> x) {
  Bits<float> bits = bit_cast<Bits<float>>(x);
  Bits<float> rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to the nearest, ties to even
  return __builtin_convertvector(x == x ? rounded : Bits<float>{} + 0x7fc0, Lanes<float>::Half);
}
#endif

TARNN_INLINE Vec<float> from_float16(Lanes<float>::Half x) {
  Bits<float> bits = widened(x), exponent = bits & 0x7c00;
  Bits<float> normal = ((bits & 0x7fff) << 13) + (112 << 23);  // its exponent counts from 15, ours from 127
  Bits<float> small = bit_cast<Bits<float>>(__builtin_convertvector(bit_cast<Integers<float>>(bits & 0x3ff), Vec<float>) * 0x1p-24f);
  Bits<float> y = exponent == 0 ? small : exponent == 0x7c00 ? normal | 0x7f800000 : normal;
  return bit_cast<Vec<float>>(y | ((bits & 0x8000) << 16));
}

TARNN_INLINE Lanes<float>::Half to_float16(Vec<float> x) {
  Bits<float> bits = bit_cast<Bits<float>>(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  Vec<float> size = bit_cast<Vec<float>>(magnitude);
  Bits<float> normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112 << 23)) >> 13;
  // below 2⁻¹⁴ the last bit counts 2⁻²⁴: adding 0.5 leaves that many bits
  Bits<float> small = bit_cast<Bits<float>>(size + 0.5f) - bit_cast<Bits<float>>(Vec<float>{} + 0.5f);
  Bits<float> half = size < 0x1p-14f ? small : normal;
  half = size >= 65520.f ? Bits<float>{} + 0x7c00 : half;
  half = x == x ? half : Bits<float>{} + 0x7e00;
  return __builtin_convertvector(half | sign, Lanes<float>::Half);
}

/// How n numbers of a type lie in memory, and how they become vectors of T.
template <typename T>
struct Same {
  using Stored = T;
  using Wide = T;
  static TARNN_INLINE Vec<T> load(const T* p) { return TARNN_ISA::load(p); }
  static TARNN_INLINE void store(T* p, Vec<T> x) { TARNN_ISA::store(p, x); }
};

template <Vec<float> from(Lanes<float>::Half), Lanes<float>::Half to(Vec<float>)>
struct Sixteen {
  using Stored = std::uint16_t;
  using Wide = float;
  static TARNN_INLINE Vec<float> load(const Stored* p) {
    Lanes<float>::Half x;
    std::memcpy(&x, p, sizeof x);
    return from(x);
  }
  static TARNN_INLINE void store(Stored* p, Vec<float> x) {
    Lanes<float>::Half y = to(x);
    std::memcpy(p, &y, sizeof y);
  }
};
using Bfloat16 = Sixteen<from_bfloat16, to_bfloat16>;
using Float16 = Sixteen<from_float16, to_float16>;

/// What is done to each vector on its way: nothing.
struct AsItIs {
  template <typename V>
  TARNN_INLINE V operator()(V x) const {
    return x;
  }
};

/// The last lanes of a row: those that are there, and zeros.
template <typename Format>
TARNN_INLINE auto load_some(const typename Format::Stored* from, Index step, Index there) {
  typename Format::Stored lanes[sizeof(Format::load(from)) / sizeof(typename Format::Wide)] = {};
  for (Index l = 0; l < there; ++l) lanes[l] = from[l * step];
  return Format::load(lanes);
}

template <typename Format, typename T, typename F>
void load_rows(const typename Format::Stored* from, Index stride, Index step, Index rows, Index n, T* to, Index ld, F f) {
  constexpr Index w = width<T>;
  const Index full = step == 1 ? n / w * w : 0;
  const Integers<T> lane = iota<T>();
  for (Index i = 0; i < rows; ++i, from += stride, to += ld) {
    for (Index j = 0; j < full; j += w) store(to + j, f(Format::load(from + j)));
    for (Index j = full; j < n; j += w) {
      const Index there = n - j < w ? n - j : w;
      const Vec<T> x = f(load_some<Format>(from + j * step, step, there));
      store(to + j, lane < static_cast<int>(there) ? x : Vec<T>{});
    }
  }
}

template <typename Format, typename T>
void store_rows(const T* from, Index ld, Index rows, Index n, typename Format::Stored* to, Index stride, Index step) {
  constexpr Index w = width<T>;
  const Index full = step == 1 ? n / w * w : 0;
  for (Index i = 0; i < rows; ++i, from += ld, to += stride) {
    for (Index j = 0; j < full; j += w) Format::store(to + j, load(from + j));
    for (Index j = full; j < n; j += w) {
      typename Format::Stored lanes[w];
      const Index left = n - j < w ? n - j : w;
      Format::store(lanes, load(from + j));
      for (Index l = 0; l < left; ++l) to[(j + l) * step] = lanes[l];
    }
  }
}

TARNN_INLINE Index offset(const View& x, Index row, Index head, Index time) {
  return row * x.stride[0] + (x.share == 1 ? head : head / x.share) * x.stride[1] + time * x.stride[2];
}

/// A number of the wide type, where each position has one.
template <typename T>
TARNN_INLINE T& element(const View& x, Index row, Index head, Index time) {
  return static_cast<T*>(x.data)[offset(x, row, head, time)];
}

/// Calls f with the format of what x holds and the address of a position: f(Format(), const Format::Stored*).
template <typename T, typename F>
TARNN_INLINE void at_position(const View& x, Index row, Index head, Index time, F f) {
  const Index at = offset(x, row, head, time);
  if constexpr (sizeof(T) == 4) {
    const auto half = static_cast<const std::uint16_t*>(x.data) + at;
    if (x.type == Type::bfloat16) return f(Bfloat16(), half);
    if (x.type == Type::float16) return f(Float16(), half);
  }
  f(Same<T>(), static_cast<const T*>(x.data) + at);
}

/// Positions time … time + rows − 1 of one row and head, n channels, as a tile; `map` is done to each vector.
template <typename T, typename F = AsItIs>
void load_tile(const View& x, Index row, Index head, Index time, Index rows, Index n, T* to, Index ld, F map = {}) {
  at_position<T>(x, row, head, time, [&](auto format, auto from) {
    load_rows<decltype(format)>(from, x.stride[2], x.stride[3], rows, n, to, ld, map);
  });
}

/// A square of positions × channels, mapped, transposed, from `at` to `to`; its rows' sum is added to `total`.
template <typename Format, typename T, typename F>
TARNN_INLINE void transpose_mapped(const typename Format::Stored* at, Index stride, T* to, Index ld, Vec<T>& total, F map) {
  Vec<T> a[width<T>];
  unrolled<width<T>>([&](auto l) TARNN_LAMBDA {
    a[l] = map(Format::load(at + l * stride));
    total += a[l];
  });
  transpose_lanes<T>(a);
  unrolled<width<T>>([&](auto l) TARNN_LAMBDA { store(to + l * ld, a[l]); });
}

/// The same, transposed: n rows of up to a whole vector of positions, zeros for those beyond. sums (n) += Σ over positions.
template <typename T, typename F = AsItIs>
void load_transposed(const View& x, Index row, Index head, Index time, Index rows, Index n, T* to, Index ld, T* sums,
                     F map = {}) {
  constexpr Index w = width<T>;
  at_position<T>(x, row, head, time, [&](auto format, auto from) {
    using Format = decltype(format);
    const Index stride = x.stride[2], step = x.stride[3];
    for (Index i = 0; i < rows; i += w)
      for (Index j = 0; j < n; j += w) {
        Vec<T> total = load(sums + j);
        if (step == 1 && i + w <= rows && j + w <= n) {
          transpose_mapped<Format>(from + i * stride + j, stride, to + j * ld + i, ld, total, map);
        } else {  // what is not there counts as zero
          T square[w * w] = {};
          const Index there = n - j < w ? n - j : w, left = rows - i < w ? rows - i : w;
          load_rows<Format>(from + i * stride + j * step, stride, step, left, there, square, w, map);
          transpose_mapped<Same<T>>(square, w, to + j * ld + i, ld, total, AsItIs());
        }
        store(sums + j, total);
      }
  });
}

template <typename T>
void store_tile(const T* from, Index ld, const View& x, Index row, Index head, Index time, Index rows, Index n) {
  const Index at = offset(x, row, head, time);
  if constexpr (sizeof(T) == 4) {
    const auto half = static_cast<std::uint16_t*>(x.data) + at;
    if (x.type == Type::bfloat16) return store_rows<Bfloat16>(from, ld, rows, n, half, x.stride[2], x.stride[3]);
    if (x.type == Type::float16) return store_rows<Float16>(from, ld, rows, n, half, x.stride[2], x.stride[3]);
  }
  store_rows<Same<T>>(from, ld, rows, n, static_cast<T*>(x.data) + at, x.stride[2], x.stride[3]);
}

/// y (n × m) = xᵀ, x (m × n), both tiles: in squares, so rows up to a whole vector are read of x and written of y.
template <typename T>
void transpose(const T* x, Index ldx, Index m, Index n, T* y, Index ldy) {
  for (Index i = 0; i < m; i += width<T>)
    for (Index j = 0; j < n; j += width<T>) transpose_square(x + i * ldx + j, ldx, y + j * ldy + i, ldy);
}

template <typename T>
TARNN_INLINE void clear(T* x, Index n) {
  std::fill_n(x, n, T(0));
}

/// y_i = factor_i · x_i, row by row; y may be x. The factors of a row are one number …
template <typename T>
void scaled_rows(const T* x, Index ld, Index rows, Index n, const T* factor, T* y) {
  for (Index i = 0; i < rows; ++i)
    for (Index j = 0; j < n; j += width<T>) store(y + i * ld + j, load(x + i * ld + j) * factor[i]);
}

template <typename T>
void scale_rows(T* x, Index ld, Index rows, Index n, const T* factor) {
  scaled_rows(x, ld, rows, n, factor, x);
}

/// … or the same vector for all …
template <typename T>
void scale_columns(T* x, Index ld, Index rows, Index n, const T* factor) {
  for (Index i = 0; i < rows; ++i)
    for (Index j = 0; j < n; j += width<T>) store(x + i * ld + j, load(x + i * ld + j) * load(factor + j));
}

/// … or a tile. y = x ⊙ factor.
template <typename T>
void multiply(const T* x, const T* factor, Index ld, Index rows, Index n, T* y) {
  for (Index i = 0; i < rows; ++i)
    for (Index j = 0; j < n; j += width<T>)
      store(y + i * ld + j, load(x + i * ld + j) * load(factor + i * ld + j));
}

/// The same factor for n numbers in a row, in whole vectors.
template <typename T>
TARNN_INLINE void scale(T* x, Index n, T factor) {
  for (Index j = 0; j < n; j += width<T>) store(x + j, load(x + j) * factor);
}

/// y (n) += the sum of rows of x.
template <typename T>
void sum_rows(const T* x, Index ld, Index rows, Index n, T* y) {
  for (Index j = 0; j < n; j += width<T>) {
    Vec<T> total{};
    for (Index i = 0; i < rows; ++i) total += load(x + i * ld + j);
    store(y + j, load(y + j) + total);
  }
}

/// rows of x += a_i · y (f).
template <typename T>
void add_outer(T* x, const T* a, const T* y, Index ld, Index rows, Index n) {
  for (Index i = 0; i < rows; ++i)
    for (Index j = 0; j < n; j += width<T>) store(x + i * ld + j, load(x + i * ld + j) + a[i] * load(y + j));
}

/// y (f) += Σ_i a_i · row i of x.
template <typename T>
void add_rows(T* y, const T* a, const T* x, Index ld, Index rows, Index n) {
  for (Index j = 0; j < n; j += width<T>) {
    Vec<T> total = load(y + j);
    for (Index i = 0; i < rows; ++i) total += a[i] * load(x + i * ld + j);
    store(y + j, total);
  }
}

// --- rows without gaps to tiles, and back

template <typename T>
void read_rows(const T* from, Index rows, Index n, T* to, Index ld) {
  for (Index i = 0; i < rows; ++i) {
    if (n) std::memcpy(to + i * ld, from + i * n, static_cast<std::size_t>(n) * sizeof(T));
    clear(to + i * ld + n, ld - n);
  }
}

template <typename T>
void write_rows(const T* from, Index ld, Index rows, Index n, T* to) {
  for (Index i = 0; n && i < rows; ++i) std::memcpy(to + i * n, from + i * ld, static_cast<std::size_t>(n) * sizeof(T));
}

/// sum_i += Σ_j x_ij y_ij, n padded with zeros.
template <typename T>
TARNN_INLINE Vec<T> dot_lanes(const T* x, const T* y, Index n) {
  Vec<T> total{};
  for (Index j = 0; j < n; j += width<T>) total += load(x + j) * load(y + j);
  return total;
}

template <typename T>
TARNN_INLINE T dot(const T* x, const T* y, Index n) {
  return sum<T>(dot_lanes(x, y, n));
}

/// Whether rows are whole vectors of the wide type, which a pass reads and writes where they lie.
template <typename T>
bool passes_directly(const View& x, Index n) {
  return x.type == (sizeof(T) == 4 ? Type::float32 : Type::float64) && x.stride[3] == 1 && n % width<T> == 0;
}

}  // namespace TARNN_ISA
}  // namespace tarnn
