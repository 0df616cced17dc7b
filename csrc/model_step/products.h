// y = W x + bias for a few rows of x, with W in panels (model_step/stack.h). Each output is summed over the inputs in their order,
// by one chain of multiplications and additions: the result does not depend on how rows or panels are shared out.
#pragma once

#include "model_step/bytes.h"
#include "model_step/stack.h"
#include "simd/tiles.h"

namespace tarnn {
namespace TARNN_ISA {

/// Rows of activations. For weights of whole numbers they are bytes: x ≈ step·level + least, with a step and a least of each row.
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

constexpr Index ahead = 4096;  // bytes by which weights are asked for before they are wanted

template <int N>
TARNN_INLINE void ask_ahead(const char* w) {
  unrolled<N>([&](auto j) TARNN_LAMBDA { __builtin_prefetch(w + ahead + j * TARNN_VECTOR_BYTES); });
}

// --- what each format does: a tile of R rows and N vectors of outputs from `column` on, whose panel lies at w
//
// few rows: as many vectors as a panel has, so that weights, which cost most, are read in their order; many rows: tiles
// that need fewer loads a multiplication, from a panel that is in cache

struct Float {
  static constexpr Index bytes = sizeof(float);
  static TARNN_INLINE Vec<float> load(const char* w) { return TARNN_ISA::load(reinterpret_cast<const float*>(w)); }
};

struct Bfloat {
  static constexpr Index bytes = sizeof(std::uint16_t);
  static TARNN_INLINE Vec<float> load(const char* w) { return Bfloat16::load(reinterpret_cast<const std::uint16_t*>(w)); }
};

template <typename Stored>
struct FloatWeights {
  static constexpr int few_rows = many_registers ? 6 : 3, few_vectors = 4, many_rows = 2 * few_rows, many_vectors = 2;
  static Index panel_bytes(Index inputs) { return inputs * panel * Stored::bytes; }

  template <int R, int N>
  static TARNN_INLINE void sum(const Matrix& of, const char* w, Index column, const Rows& in, Vec<float> (&sums)[R * N]) {
    w += column % panel * Stored::bytes;
    for (Index k = 0; k < of.inputs; ++k, w += panel * Stored::bytes) {
      ask_ahead<N>(w);
      Vec<float> right[N];
      unrolled<N>([&](auto n) TARNN_LAMBDA { right[n] = Stored::load(w + n * width<float> * Stored::bytes); });
      unrolled<R>([&](auto i) TARNN_LAMBDA {
        const float left = in.x[i * in.ld + k];
        unrolled<N>([&](auto n) TARNN_LAMBDA { sums[i * N + n] += right[n] * left; });
      });
    }
  }
};

/// sums[i, n] += weights(n) · levels(i), of both whichever are fewer kept in registers.
template <typename Dot, int R, int N, typename F, typename G>
TARNN_INLINE void add_dots(typename Dot::Sum (&sums)[R * N], F weights, G levels) {
  if constexpr (R < N) {
    typename Dot::Levels left[R];
    unrolled<R>([&](auto i) TARNN_LAMBDA { left[i] = Dot::levels(four_levels(levels(i))); });
    unrolled<N>([&](auto n) TARNN_LAMBDA {
      const auto right = Dot::weights(weights(n));
      unrolled<R>([&](auto i) TARNN_LAMBDA { Dot::add(sums[i * N + n], right, left[i]); });
    });
  } else {
    typename Dot::Weights right[N];
    unrolled<N>([&](auto n) TARNN_LAMBDA { right[n] = Dot::weights(weights(n)); });
    unrolled<R>([&](auto i) TARNN_LAMBDA {
      const auto left = Dot::levels(four_levels(levels(i)));
      unrolled<N>([&](auto n) TARNN_LAMBDA { Dot::add(sums[i * N + n], right[n], left); });
    });
  }
}

/// Tiles of `sums` sums, as many as fit the registers beside what is added to them.
template <int sums>
struct ByteTiles {
  static constexpr int few_rows = sums / 4, few_vectors = 4, many_rows = sums / 2, many_vectors = 2;
};

/// Whole numbers, four inputs at a time; the factor of an output is multiplied with its sum.
template <typename Dot, int tile = Dot::tile>
struct Int8Weights : ByteTiles<tile> {
  static Index panel_bytes(Index inputs) { return (inputs + 3) / 4 * 4 * panel; }

  template <int R, int N>
  static TARNN_INLINE void sum(const Matrix& of, const char* w, Index column, const Rows& in, Vec<float> (&sums)[R * N]) {
    typename Dot::Sum dots[R * N]{};
    w += column % panel * 4;
    for (Index k = 0; k < of.inputs; k += 4, w += 4 * panel) {
      ask_ahead<N>(w);
      add_dots<Dot, R, N>(dots, [&](auto n) TARNN_LAMBDA { return load_bytes(w + n * TARNN_VECTOR_BYTES); },
                          [&](auto i) TARNN_LAMBDA { return in.levels + i * in.ld_levels + k; });
    }
    unrolled<N>([&](auto n) TARNN_LAMBDA {
      const Vec<float> scale = load(of.scale + column + n * width<float>);
      unrolled<R>([&](auto i) TARNN_LAMBDA {
        sums[i * N + n] = __builtin_convertvector(Dot::total(dots[i * N + n]), Vec<float>) * in.step[i] * scale;
      });
    });
  }
};

/// Whole numbers from −8 to 7 in groups of 32 inputs: of each group 64 factors (bfloat16), then eight inputs at a time: four in
/// the low halves of an output's bytes and four in the high ones.
template <typename Dot>
struct Int4Weights : ByteTiles<many_registers ? 12 : 8> {
  static constexpr Index group = 32, factors = 2 * panel, group_bytes = factors + group * panel / 2;
  static Index panel_bytes(Index inputs) { return (inputs + group - 1) / group * group_bytes; }

  template <int R, int N>
  static TARNN_INLINE void sum(const Matrix& of, const char* w, Index column, const Rows& in, Vec<float> (&sums)[R * N]) {
    const Index j = column % panel;
    for (Index k = 0; k < of.inputs; k += group, w += group_bytes) {
      typename Dot::Sum dots[R * N]{};
      const char* at = w + factors + 4 * j;
      for (Index part = k; part < k + group; part += 8, at += 4 * panel) {
        ask_ahead<N>(at);
        const std::uint8_t* levels = in.levels + part;
        add_dots<Dot, R, N>(dots, [&](auto n) TARNN_LAMBDA { return less_eight(load_bytes(at + n * TARNN_VECTOR_BYTES)); },
                            [&](auto i) TARNN_LAMBDA { return levels + i * in.ld_levels; });
        add_dots<Dot, R, N>(dots, [&](auto n) TARNN_LAMBDA { return less_eight(load_bytes(at + n * TARNN_VECTOR_BYTES) >> 4); },
                            [&](auto i) TARNN_LAMBDA { return levels + i * in.ld_levels + 4; });
      }
      unrolled<N>([&](auto n) TARNN_LAMBDA {
        const Vec<float> scale = Bfloat16::load(reinterpret_cast<const std::uint16_t*>(w) + j + n * width<float>);
        unrolled<R>([&](auto i) TARNN_LAMBDA { sums[i * N + n] += __builtin_convertvector(Dot::total(dots[i * N + n]), Vec<float>) * scale; });
      });
    }
    unrolled<R * N>([&](auto i) TARNN_LAMBDA { sums[i] *= in.step[i / N]; });
  }
};

// --- tiles

template <typename W, int R, int N>
TARNN_INLINE void product_tile(const Matrix& of, const char* w, Index column, const Rows& in, float* out, Index ldo) {
  Vec<float> sums[R * N]{};
  W::template sum<R, N>(of, w, column, in, sums);
  unrolled<R>([&](auto i) TARNN_LAMBDA {
    unrolled<N>([&](auto n) TARNN_LAMBDA {
      const Index at = column + n * width<float>;
      Vec<float> y = sums[i * N + n];
      if (of.sums) y += in.least[i] * load(of.sums + at);
      store(out + i * ldo + n * width<float>, y + load(of.bias + at));
    });
  });
}

template <typename W, int R, int N>
void product_tile_of(Index rows, const Matrix& of, const char* w, Index column, const Rows& in, float* out, Index ldo) {
  if (rows == R) return product_tile<W, R, N>(of, w, column, in, out, ldo);
  if constexpr (R > 1) product_tile_of<W, R - 1, N>(rows, of, w, column, in, out, ldo);
}

template <typename W>
void product_by(const Matrix& of, const Rows& in, Index index, float* out, Index ldo) {
  const char* w = static_cast<const char*>(of.at) + index * W::panel_bytes(of.inputs);
  const bool few = in.count <= W::few_rows;
  const Index wide = (few ? W::few_vectors : W::many_vectors) * width<float>, high = few ? W::few_rows : W::many_rows;
  for (Index j = 0; j < panel; j += wide) {
    Index left = (in.count + high - 1) / high;  // tiles to go, as even as they come
    for (Index i = 0, rows; i < in.count; i += rows, --left) {
      rows = (in.count - i + left - 1) / left;
      const Rows part = in.part(i, rows);
      float* to = out + i * ldo + j;
      if (few) product_tile_of<W, W::few_rows, W::few_vectors>(rows, of, w, index * panel + j, part, to, ldo);
      else product_tile_of<W, W::many_rows, W::many_vectors>(rows, of, w, index * panel + j, part, to, ldo);
    }
  }
}

/// One panel of outputs of all rows, to out (rows ldo apart, 64 of each).
inline void product(const Matrix& of, bool dot_products, const Rows& in, Index index, float* out, Index ldo) {
  switch (of.format) {
    case Format::float32: return product_by<FloatWeights<Float>>(of, in, index, out, ldo);
    case Format::bfloat16: return product_by<FloatWeights<Bfloat>>(of, in, index, out, ldo);
    case Format::int8:
#if defined(__AVX512F__)
      if (dot_products) return product_by<Int8Weights<DotProducts>>(of, in, index, out, ldo);
      #endif
      return product_by<Int8Weights<BytesOfAll>>(of, in, index, out, ldo);
    case Format::int4:
#if defined(__AVX512F__)
      if (dot_products) return product_by<Int4Weights<DotProducts>>(of, in, index, out, ldo);
#endif
      (void)dot_products;
      return product_by<Int4Weights<ShortSums>>(of, in, index, out, ldo);
  }
}

}  // namespace TARNN_ISA
}  // namespace tarnn
