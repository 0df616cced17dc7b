// y = W x + bias for a few rows of x, with W in panels (model_step/stack.h). Each output is summed over the inputs in their order,
// by one chain of multiplications and additions: the result does not depend on how rows or panels are shared out.
#pragma once

#include "model_step/stack.h"
#include "simd/tiles.h"

namespace tarnn {
namespace TARNN_ISA {

using Bytes = std::uint8_t __attribute__((vector_size(TARNN_VECTOR_BYTES)));

/// Rows of activations. For int8 weights they are bytes: x ≈ step·level + least, with a step and a least of each row.
struct Rows {
  Index count, ld;
  const float* x;
  const std::uint8_t* levels;
  Index ld_levels;
  const float *step, *least;
  Rows part(Index i, Index n) const {
    return {n, ld, x + i * ld, levels + i * ld_levels, ld_levels, step + i, least + i};
  }
};

// --- what each format does with one input (of bytes: four inputs) and a vector of outputs

struct Float32Weights {
  using Stored = float;
  using Sum = Vec<float>;
  static constexpr Index group = 1;
  static Index steps(Index inputs) { return inputs; }
  static TARNN_INLINE Vec<float> load(const Stored* w) { return TARNN_ISA::load(w); }
  static TARNN_INLINE float input(const Rows& in, Index row, Index i) { return in.x[row * in.ld + i]; }
  static TARNN_INLINE void add(Sum& sum, Vec<float> w, float x) { sum += w * x; }
};

struct Bfloat16Weights : Float32Weights {
  using Stored = std::uint16_t;
  static TARNN_INLINE Vec<float> load(const Stored* w) { return Bfloat16::load(w); }
};

/// Four products of bytes a lane, by plain arithmetic.
struct Int8Weights {
  using Stored = std::int8_t;
  using Sum = Integers<float>;
  static constexpr Index group = 4;
  static Index steps(Index inputs) { return (inputs + 3) / 4; }
  static TARNN_INLINE Integers<float> load(const Stored* w) {
    Integers<float> x;
    std::memcpy(&x, w, sizeof x);
    return x;
  }
  static TARNN_INLINE std::int32_t input(const Rows& in, Index row, Index i) {
    std::int32_t x;
    std::memcpy(&x, in.levels + row * in.ld_levels + 4 * i, sizeof x);
    return x;
  }
  static TARNN_INLINE void add(Sum& sum, Integers<float> w, std::int32_t x) {
    sum += ((w << 24) >> 24) * (x & 255) + ((w << 16) >> 24) * ((x >> 8) & 255) + ((w << 8) >> 24) * ((x >> 16) & 255) +
           (w >> 24) * ((x >> 24) & 255);
  }
};

#if defined(__AVX512F__)
/// The same numbers by the one instruction for it, which the processor may lack: so it is not left to the compiler.
struct Int8DotProducts : Int8Weights {
  static TARNN_INLINE void add(Sum& sum, Integers<float> w, std::int32_t x) {
    const Integers<float> four = x - Integers<float>{};
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(four), "v"(w));
  }
};
#endif

// --- tiles of R rows and N vectors of outputs

// few rows: as many vectors as a panel has, so that weights, which cost most, are read in their order; many rows: tiles
// that need fewer loads a multiplication, from a panel that is in cache
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int few_rows = 6, few_vectors = 4, many_rows = 12, many_vectors = 2;
#else
constexpr int few_rows = 3, few_vectors = 4, many_rows = 6, many_vectors = 2;
#endif

constexpr Index ahead = 4096;  // bytes by which weights are asked for before they are wanted

template <typename W, int R, int N>
TARNN_INLINE void product_tile(const Matrix& of, const typename W::Stored* w, const Rows& in, Index column, float* out,
                               Index ldo) {
  typename W::Sum sums[R * N];
  unrolled<R * N>([&](auto i) TARNN_LAMBDA { sums[i] = typename W::Sum{}; });
  for (Index k = 0, steps = W::steps(of.inputs); k < steps; ++k, w += panel * W::group) {
    unrolled<N>([&](auto j) TARNN_LAMBDA {
      __builtin_prefetch(reinterpret_cast<const char*>(w) + ahead + j * TARNN_VECTOR_BYTES);
    });
    decltype(W::load(w)) right[N];
    unrolled<N>([&](auto j) TARNN_LAMBDA { right[j] = W::load(w + j * width<float> * W::group); });
    unrolled<R>([&](auto i) TARNN_LAMBDA {
      const auto left = W::input(in, i, k);
      unrolled<N>([&](auto j) TARNN_LAMBDA { W::add(sums[i * N + j], right[j], left); });
    });
  }
  unrolled<R>([&](auto i) TARNN_LAMBDA {
    unrolled<N>([&](auto j) TARNN_LAMBDA {
      const Index at = column + j * width<float>;
      Vec<float> y;
      if constexpr (W::group == 1) y = sums[i * N + j];
      else y = __builtin_convertvector(sums[i * N + j], Vec<float>) * in.step[i] * load(of.scale + at) + in.least[i] * load(of.sums + at);
      store(out + i * ldo + j * width<float>, y + load(of.bias + at));
    });
  });
}

template <typename W, int R, int N>
void product_tile_of(Index rows, const Matrix& of, const typename W::Stored* w, const Rows& in, Index column, float* out,
                     Index ldo) {
  if (rows == R) return product_tile<W, R, N>(of, w, in, column, out, ldo);
  if constexpr (R > 1) product_tile_of<W, R - 1, N>(rows, of, w, in, column, out, ldo);
}

template <typename W>
void product_by(const Matrix& of, const Rows& in, Index index, float* out, Index ldo) {
  const auto w = static_cast<const typename W::Stored*>(of.at) + index * W::steps(of.inputs) * W::group * panel;
  const bool few = in.count <= few_rows;
  const Index wide = (few ? few_vectors : many_vectors) * width<float>, high = few ? few_rows : many_rows;
  for (Index j = 0; j < panel; j += wide) {
    Index left = (in.count + high - 1) / high;  // tiles to go, as even as they come
    for (Index i = 0, rows; i < in.count; i += rows, --left) {
      rows = (in.count - i + left - 1) / left;
      const Rows part = in.part(i, rows);
      float* to = out + i * ldo + j;
      if (few) product_tile_of<W, few_rows, few_vectors>(rows, of, w + j * W::group, part, index * panel + j, to, ldo);
      else product_tile_of<W, many_rows, many_vectors>(rows, of, w + j * W::group, part, index * panel + j, to, ldo);
    }
  }
}

/// One panel of outputs of all rows, to out (rows ldo apart, 64 of each).
inline void product(const Matrix& of, bool dot_products, const Rows& in, Index index, float* out, Index ldo) {
  switch (of.format) {
    case Format::float32: return product_by<Float32Weights>(of, in, index, out, ldo);
    case Format::bfloat16: return product_by<Bfloat16Weights>(of, in, index, out, ldo);
    case Format::int8:
#if defined(__AVX512F__)
      if (dot_products) return product_by<Int8DotProducts>(of, in, index, out, ldo);
#endif
      (void)dot_products;
      return product_by<Int8Weights>(of, in, index, out, ldo);
  }
}

}  // namespace TARNN_ISA
}  // namespace tarnn
