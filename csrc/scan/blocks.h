// Tiles of tokens × channels, whichever of both runs fastest in memory; states; the tokens of a sequence. In tiles channels run
// fastest, so that they are the lanes of vectors.
#pragma once

#include "common/memory.h"
#include "scan/problem.h"
#include "simd/tiles.h"

namespace tarnn {
namespace TARNN_ISA {

/// Tokens first … last − 1 of a row of the batch, and where its states stand among the kept ones.
struct Sequence {
  Index row, first, last, kept;
  Index segments(Index tokens) const { return (last - first + tokens - 1) / tokens; }
};

TARNN_INLINE Sequence sequence_of(const ScanProblem& p, Index i) {
  const auto kept_by = [&](Index length) { return length ? (length - 1) / p.segment : 0; };
  if (!p.cuts) return {i, 0, p.t, i * kept_by(p.t)};
  Index kept = 0;
  for (Index j = 0; j < i; ++j) kept += kept_by(p.cuts[j + 1] - p.cuts[j]);
  return {0, p.cuts[i], p.cuts[i + 1], kept};
}

/// A square of width × width numbers in memory, whose rows are `stride` apart, transposed.
template <typename Format, typename T>
TARNN_INLINE void transpose_from(const typename Format::Stored* from, Index stride, T* to, Index ld) {
  Vec<T> a[width<T>];
  unrolled<width<T>>([&](auto l) TARNN_LAMBDA { a[l] = Format::load(from + l * stride); });
  transpose_lanes<T>(a);
  unrolled<width<T>>([&](auto l) TARNN_LAMBDA { store(to + l * ld, a[l]); });
}

template <typename Format, typename T>
TARNN_INLINE void transpose_to(const T* from, Index ld, typename Format::Stored* to, Index stride) {
  Vec<T> a[width<T>];
  unrolled<width<T>>([&](auto l) TARNN_LAMBDA { a[l] = load(from + l * ld); });
  transpose_lanes<T>(a);
  unrolled<width<T>>([&](auto l) TARNN_LAMBDA { Format::store(to + l * stride, a[l]); });
}

/// Tokens time … time + rows − 1 and n channels from `channel` on, as a tile, with zeros up to whole vectors.
template <typename T>
void load_block(const View& x, Index row, Index time, Index channel, Index rows, Index n, T* to, Index ld) {
  constexpr Index w = width<T>;
  at_position<T>(x, row, time, channel, [&](auto format, auto from) {
    using Format = decltype(format);
    const Index stride = x.stride[1], step = x.stride[2];
    if (step == 1 || stride != 1) return load_rows<Format>(from, stride, step, rows, n, to, ld, AsItIs());
    for (Index j = 0; j < n; j += w)
      for (Index i = 0; i < rows; i += w) {
        if (i + w <= rows && j + w <= n) transpose_from<Format>(from + j * step + i, step, to + i * ld + j, ld);
        else load_rows<Format>(from + j * step + i, 1, step, smaller(w, rows - i), smaller(w, n - j), to + i * ld + j, ld, AsItIs());
      }
  });
}

/// The way back.
template <typename T>
void store_block(const T* from, Index ld, const View& x, Index row, Index time, Index channel, Index rows, Index n) {
  constexpr Index w = width<T>;
  at_position<T>(x, row, time, channel, [&](auto format, auto at) {
    using Format = decltype(format);
    auto* to = const_cast<typename Format::Stored*>(at);
    const Index stride = x.stride[1], step = x.stride[2];
    if (step == 1 || stride != 1) return store_rows<Format>(from, ld, rows, n, to, stride, step);
    for (Index j = 0; j < n; j += w)
      for (Index i = 0; i < rows; i += w) {
        if (i + w <= rows && j + w <= n) transpose_to<Format>(from + i * ld + j, ld, to + j * step + i, step);
        else store_rows<Format>(from + i * ld + j, ld, smaller(w, rows - i), smaller(w, n - j), to + j * step + i, 1, step);
      }
  });
}

/// Which tokens from `time` on are there, or null: all.
TARNN_INLINE const bool* there(const ScanProblem& p, Index row, Index time) {
  return p.mask ? p.mask + row * p.t + time : nullptr;
}

/// Zeros in the rows of tokens that are masked.
template <typename T>
void clear_absent(const bool* there, Index rows, T* x, Index ld) {
  for (Index i = 0; there && i < rows; ++i)
    if (!there[i]) clear(x + i * ld, ld);
}

/// Channels × n numbers in memory, where n run fastest, to n rows of `ld` channels, and back. Where there are fewer channels, or
/// `from` is null: zeros. `rows`: n, rounded up.
template <typename T>
void load_numbers(const T* from, Index channels, Index n, T* to, Index ld, Index rows) {
  constexpr Index w = width<T>;
  if (!from) return clear(to, rows * ld);
  for (Index j = 0; j < ld; j += w)
    for (Index i = 0; i < rows; i += w) {
      if (j + w <= channels && i + w <= n) {
        transpose_from<Same<T>>(from + j * n + i, n, to + i * ld + j, ld);
        continue;
      }
      for (Index k = i; k < smaller(i + w, rows); ++k)
        for (Index l = j; l < j + w; ++l) to[k * ld + l] = k < n && l < channels ? from[l * n + k] : T(0);
    }
}

template <typename T>
void store_numbers(const T* from, Index ld, Index channels, Index n, T* to) {
  constexpr Index w = width<T>;
  for (Index j = 0; j < channels; j += w)
    for (Index i = 0; i < n; i += w) {
      if (j + w <= channels && i + w <= n) {
        transpose_to<Same<T>>(from + i * ld + j, ld, to + j * n + i, n);
        continue;
      }
      for (Index l = j; l < smaller(j + w, channels); ++l)
        for (Index k = i; k < smaller(i + w, n); ++k) to[l * n + k] = from[k * ld + l];
    }
}

// --- e^(dt A) as 2^(dt A'), A' = A log₂ e: fewer multiplications than e^x takes

template <typename T>
constexpr T rate_unit = sizeof(T) == 4 ? T(1.44269504088896341) : T(1);

/// 2^x for x ≤ 0, 0 below 2⁻¹²⁶; by the polynomial of degree 6 whose relative error is least, 2e-9, and exact at 0: errors of
/// one degree less, 9e-8 of the same sign for a token after the other, would add up. A NaN stays one.
TARNN_INLINE Vec<float> decay_of(Vec<float> x) {
  const float magic = 12582912.f + 127;  // 1.5·2²³: adding it rounds to an integer, in the lowest bits, with an exponent's bias
  x = x < -127.f ? Vec<float>{} - 127.f : x;  // whose exponent's bits are zeros
  const Vec<float> shifted = x + magic, r = x - (shifted - magic);
  Vec<float> p = r * 0.000153533620f + 0.00133988750f;
  p = p * r + 0.00961843692f;
  p = p * r + 0.0555033237f;
  p = p * r + 0.240226477f;
  p = p * r + 0.693147182f;
  p = p * r + 1.f;
  return p * bit_cast<Vec<float>>(bit_cast<Bits<float>>(shifted) << 23);
}

TARNN_INLINE Vec<double> decay_of(Vec<double> x) { return exp_nonpositive(x); }

}  // namespace TARNN_ISA
}  // namespace tarnn
