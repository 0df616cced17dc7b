// y = W x + bias for a few rows of x, with W in panels (matrix.h). Each output is summed over the inputs in their order,
// by one chain of multiplications and additions: the result does not depend on how rows or panels are shared out.
#pragma once

#include "common/one_token.h"
#include "products/amx.h"
#include "products/bytes.h"
#include "products/matrix.h"
#include "products/rows.h"

namespace tarnn {
namespace TARNN_ISA {

constexpr Index ahead = 8192;  // bytes by which weights are asked for before they are wanted
constexpr Index line = 64;

/// At each step of a product, asks for some lines of weights so far from what the step reads, which are wanted soon.
template <int lines>
struct AskSoon {
  Index distance;
  TARNN_INLINE void operator()(const char* w) const {
    unrolled<lines>([&](auto j) TARNN_LAMBDA { __builtin_prefetch(w + distance + j * line); });
  }
};

/// The same of one line that other tiles are computed before: in the first level of cache it would be in their way.
struct AskLater {
  Index distance;
  TARNN_INLINE void operator()(const char* w) const { __builtin_prefetch(w + distance, 0, 2); }
};

// --- what each format does: a tile of R rows and N vectors of outputs from `column` on, for inputs k … k + n − 1, whose weights
// begin at w; sums: those of the inputs before
//
// As many vectors as a panel has, so that weights are read in their order; of int4, where taking a weight apart costs most, half
// as many for many rows. Those go by blocks of inputs, whose weights stay in the second level of cache for one tile after the
// other. A step reads `step_bytes` of a panel.

/// The rows of a tile: four addresses that move on, and the distance of every fourth row. The compiler alone adds up a
/// distance for each row of each input, and a processor that begins four operations at once does not keep up.
template <typename T, int R>
struct Walk {
  static constexpr int n = R < 4 ? R : 4;
  const T* at[n];
  Index four;
  TARNN_INLINE Walk(const T* x, Index ld) : four(4 * ld) {
    unrolled<n>([&](auto i) TARNN_LAMBDA {
      at[i] = x + i * ld;
      asm("" : "+r"(at[i]));
    });
  }
  TARNN_INLINE const T* row(int i) const { return at[i % 4] + i / 4 * four; }
  TARNN_INLINE void on(Index inputs) {
    for (const T*& x : at) x += inputs;
  }
};

/// Tiles of floats: R·N sums, N vectors of weights and one number fill the registers.
struct FloatTiles {
  static constexpr int few_rows = many_registers ? 6 : 3, few_vectors = 4;
  static constexpr int many_vectors = many_registers ? 4 : 2, many_rows = few_rows * few_vectors / many_vectors;
  static constexpr Index step_bytes = 4 * panel, block = many_registers ? 768 : 128;

  template <int R, int N>
  static TARNN_INLINE void finish(const Matrix&, Index, const Rows&, Vec<float> (&)[R * N]) {}
};

/// sums[i, n] += weights(n) · left(i).
template <int R, int N, typename F, typename G>
TARNN_INLINE void add_products(F weights, G left, Vec<float> (&sums)[R * N]) {
  Vec<float> right[N];
  unrolled<N>([&](auto n) TARNN_LAMBDA { right[n] = weights(n); });
  unrolled<R>([&](auto i) TARNN_LAMBDA {
    const float x = left(i);
    unrolled<N>([&](auto n) TARNN_LAMBDA { sums[i * N + n] += right[n] * x; });
  });
}

struct FloatWeights : FloatTiles {
  static Index panel_bytes(Index inputs) { return bytes_of_panel(Format::float32, inputs); }

  template <int R, int N, typename Ask>
  static TARNN_INLINE void sum(const char* w, Index column, const Rows& in, Index k, Index n, Ask ask, Vec<float> (&sums)[R * N]) {
    Walk<float, R> x(in.x + k, in.ld);
    for (const char* end = w + n * step_bytes; w < end; w += step_bytes, x.on(1)) {
      ask(w);
      const auto* at = reinterpret_cast<const float*>(w) + column % panel;
      add_products<R, N>([&](auto j) TARNN_LAMBDA { return load(at + j * width<float>); }, [&](auto i) TARNN_LAMBDA { return *x.row(i); }, sums);
    }
  }
};

/// Pairs of bfloat16 numbers, as float32 numbers: those of even inputs, and those of odd ones.
struct PairWeights : FloatTiles {
  static constexpr Index block = FloatTiles::block * 2;
  static Index panel_bytes(Index inputs) { return bytes_of_panel(Format::bfloat16, inputs); }

  template <int R, int N, typename Ask>
  static TARNN_INLINE void sum(const char* w, Index column, const Rows& in, Index k, Index n, Ask ask, Vec<float> (&sums)[R * N]) {
    Walk<float, R> x(in.x + k, in.ld);
    const char* at = w + column % panel * 4;
    const auto even = [&](auto j) TARNN_LAMBDA { return bit_cast<Vec<float>>(load_bytes(at + j * TARNN_VECTOR_BYTES) << 16); };
    const auto odd = [&](auto j) TARNN_LAMBDA { return bit_cast<Vec<float>>(load_bytes(at + j * TARNN_VECTOR_BYTES) & static_cast<std::int32_t>(0xFFFF0000)); };
    for (const char* end = at + n / 2 * step_bytes; at < end; at += step_bytes, x.on(2)) {
      ask(at - column % panel * 4);
      add_products<R, N>(even, [&](auto i) TARNN_LAMBDA { return x.row(i)[0]; }, sums);
      add_products<R, N>(odd, [&](auto i) TARNN_LAMBDA { return x.row(i)[1]; }, sums);
    }
    if (n % 2) add_products<R, N>(even, [&](auto i) TARNN_LAMBDA { return x.row(i)[0]; }, sums);  // what lies behind may be no number
  }
};

#if defined(__AVX512F__) && !defined(TARNN_NO_AMX)
/// The same of rounded rows, by AVX512-BF16: sum ← fma(even, even, fma(odd, odd, sum)).
struct PairDots : FloatTiles {
  static constexpr Index block = FloatTiles::block * 2;
  static Index panel_bytes(Index inputs) { return bytes_of_panel(Format::bfloat16, inputs); }

  template <int R, int N, typename Ask>
  static TARNN_INLINE void sum(const char* w, Index column, const Rows& in, Index k, Index n, Ask ask, Vec<float> (&sums)[R * N]) {
    Walk<std::uint8_t, R> x(in.levels + 2 * k, in.ld_levels);
    for (const char* end = w + (n + 1) / 2 * step_bytes; w < end; w += step_bytes, x.on(4)) {
      ask(w);
      Integers<float> right[N];
      unrolled<N>([&](auto j) TARNN_LAMBDA { right[j] = load_bytes(w + column % panel * 4 + j * TARNN_VECTOR_BYTES); });
      unrolled<R>([&](auto i) TARNN_LAMBDA {
        const Integers<float> left = four_levels(x.row(i)) - Integers<float>{};
        unrolled<N>([&](auto j) TARNN_LAMBDA { asm("vdpbf16ps %2, %1, %0" : "+v"(sums[i * N + j]) : "v"(left), "v"(right[j])); });
      });
    }
  }
};
#endif

/// Sums of R rows and N vectors, and what `Dot` adds to them.
template <typename Dot, int R, int N>
struct DotTile {
  static constexpr int rows = R + rows_of_zeros<Dot>;
  typename Dot::Sum sums[rows * N]{};

  /// sums[i, n] += weights(n) · levels at(i), of both whichever are fewer kept in registers.
  template <typename F, typename G>
  TARNN_INLINE void add(F weights, G at) {
    const auto levels = [&](auto i) TARNN_LAMBDA {
      if constexpr (i < R) return Dot::levels(four_levels(at(i)));
      else return Dot::levels(0);
    };
    if constexpr (R < N) {
      typename Dot::Levels left[rows];
      unrolled<rows>([&](auto i) TARNN_LAMBDA { left[i] = levels(i); });
      unrolled<N>([&](auto n) TARNN_LAMBDA {
        const auto right = Dot::weights(weights(n));
        unrolled<rows>([&](auto i) TARNN_LAMBDA { Dot::add(sums[i * N + n], right, left[i]); });
      });
    } else {
      typename Dot::Weights right[N];
      unrolled<N>([&](auto n) TARNN_LAMBDA { right[n] = Dot::weights(weights(n)); });
      unrolled<rows>([&](auto i) TARNN_LAMBDA {
        const auto left = levels(i);
        unrolled<N>([&](auto n) TARNN_LAMBDA { Dot::add(sums[i * N + n], right[n], left); });
      });
    }
  }

  /// Σ w·level, of sum i of R·N.
  TARNN_INLINE Integers<float> total(int i) const {
    if constexpr (rows > R) return Dot::total(sums[i]) - Dot::total(sums[R * N + i % N]);
    else return Dot::total(sums[i]);
  }
};

/// Tiles of `sums` sums, as many as fit the registers beside what is added to them.
template <int sums, int many>
struct ByteTiles {
  static constexpr int few_rows = sums / 4, few_vectors = 4, many_vectors = many, many_rows = sums / many;
};

/// Whole numbers, four inputs at a time. Sums are whole numbers, too, in the bits of `sums`, until the factor of an output is
/// multiplied with them.
template <typename Dot, int tile = Dot::tile>
struct Int8Weights : ByteTiles<tile, 4> {
  static constexpr Index step_bytes = 4 * panel, block = 768;
  static Index panel_bytes(Index inputs) { return bytes_of_panel(Format::int8, inputs); }

  template <int R, int N, typename Ask>
  static TARNN_INLINE void sum(const char* w, Index column, const Rows& in, Index k, Index n, Ask ask, Vec<float> (&sums)[R * N]) {
    DotTile<Dot, R, N> dots;
    Walk<std::uint8_t, R> levels(in.levels + k, in.ld_levels);
    for (const char* end = w + (n + 3) / 4 * step_bytes; w < end; w += step_bytes, levels.on(4)) {
      ask(w);
      dots.add([&](auto j) TARNN_LAMBDA { return load_bytes(w + column % panel * 4 + j * TARNN_VECTOR_BYTES); },
               [&](auto i) TARNN_LAMBDA { return levels.row(i); });
    }
    unrolled<R * N>([&](auto i) TARNN_LAMBDA {
      sums[i] = bit_cast<Vec<float>>(bit_cast<Integers<float>>(sums[i]) + dots.total(i));
    });
  }

  template <int R, int N>
  static TARNN_INLINE void finish(const Matrix& of, Index column, const Rows& in, Vec<float> (&sums)[R * N]) {
    unrolled<N>([&](auto n) TARNN_LAMBDA {
      const Vec<float> scale = load(of.scale + column + n * width<float>);
      unrolled<R>([&](auto i) TARNN_LAMBDA {
        sums[i * N + n] = scaled(bit_cast<Integers<float>>(sums[i * N + n]), in.step[i], scale);
      });
    });
  }
};

/// Whole numbers from −8 to 7 in groups of 32 inputs: of each group 64 factors (bfloat16), then eight inputs at a time: four in
/// the low halves of an output's bytes and four in the high ones.
template <typename Dot>
struct Int4Weights : ByteTiles<many_registers ? 12 : 8, rows_of_zeros<Dot> ? 4 : 2> {
  static constexpr Index step_bytes = 4 * panel, block = 512;
  static Index panel_bytes(Index inputs) { return bytes_of_panel(Format::int4, inputs); }

  template <int R, int N, typename Ask>
  static TARNN_INLINE void sum(const char* w, Index column, const Rows& in, Index k, Index n, Ask ask, Vec<float> (&sums)[R * N]) {
    const Index j = column % panel, end = k + n;
    for (; k < end; k += group, w += group_bytes) {
      DotTile<Dot, R, N> dots;
      ask(w);  // for factors too, or a ninth of the lines come late
      const char* at = w + factor_bytes;
      for (Index part = k; part < k + group; part += 8, at += step_bytes) {
        ask(at);
        const std::uint8_t* levels = in.levels + part;
        dots.add([&](auto n) TARNN_LAMBDA { return less_eight(load_bytes(at + 4 * j + n * TARNN_VECTOR_BYTES)); },
                 [&](auto i) TARNN_LAMBDA { return levels + i * in.ld_levels; });
        dots.add([&](auto n) TARNN_LAMBDA { return less_eight(load_bytes(at + 4 * j + n * TARNN_VECTOR_BYTES) >> 4); },
                 [&](auto i) TARNN_LAMBDA { return levels + i * in.ld_levels + 4; });
      }
      unrolled<N>([&](auto n) TARNN_LAMBDA {
        const Vec<float> scale = Bfloat16::load(reinterpret_cast<const std::uint16_t*>(w) + j + n * width<float>);
        unrolled<R>([&](auto i) TARNN_LAMBDA { sums[i * N + n] += __builtin_convertvector(dots.total(i * N + n), Vec<float>) * scale; });
      });
    }
  }

  template <int R, int N>
  static TARNN_INLINE void finish(const Matrix&, Index, const Rows& in, Vec<float> (&sums)[R * N]) {
    unrolled<R * N>([&](auto i) TARNN_LAMBDA { sums[i] *= in.step[i / N]; });
  }
};

// --- tiles

/// Inputs k … k + n − 1 of a panel: where their weights begin, whether they are the last, and what to ask for meanwhile.
template <typename Ask>
struct Inputs {
  const char* w;
  Index k, n;
  bool last;
  Ask ask;
};

/// A tile of R rows and N vectors, for some of the inputs: what is not yet whole stays in `out`.
template <typename W, int R, int N, typename Ask>
TARNN_INLINE void product_tile(const Matrix& of, const Inputs<Ask>& x, Index column, const Rows& in, float* out, Index ldo) {
  Vec<float> sums[R * N]{};
  const auto place = [&](auto i) TARNN_LAMBDA { return out + i / N * ldo + i % N * width<float>; };
  if (x.k) unrolled<R * N>([&](auto i) TARNN_LAMBDA { sums[i] = load(place(i)); });
  W::template sum<R, N>(x.w, column, in, x.k, x.n, x.ask, sums);
  if (x.last) {
    W::template finish<R, N>(of, column, in, sums);
    unrolled<R * N>([&](auto i) TARNN_LAMBDA {
      const Index at = column + i % N * width<float>;
      if (of.sums) sums[i] += in.least[i / N] * load(of.sums + at);
      sums[i] += load(of.bias + at);
    });
  }
  unrolled<R * N>([&](auto i) TARNN_LAMBDA { store(place(i), sums[i]); });
}

template <typename W, int R, int N, typename Ask>
void product_tile_of(Index rows, const Matrix& of, const Inputs<Ask>& x, Index column, const Rows& in, float* out, Index ldo) {
  if (rows == R) return product_tile<W, R, N>(of, x, column, in, out, ldo);
  if constexpr (R > 1) product_tile_of<W, R - 1, N>(rows, of, x, column, in, out, ldo);
}

template <typename W>
void product_of_few(const Matrix& of, const char* w, Index begin, const Rows& in, float* out, Index ldo) {
  constexpr Index wide = W::few_vectors * width<float>, lines = W::step_bytes * wide / panel / line;
  for (Index j = 0; j < panel; j += wide) {
    const Inputs<AskSoon<lines ? lines : 1>> all = {w, 0, of.inputs, true, {ahead + W::step_bytes * j / panel}};
    product_tile_of<W, W::few_rows, W::few_vectors>(in.count, of, all, begin + j, in, out + j, ldo);
  }
}

/// Each tile asks for one line per step of the block that comes next, until all are asked for.
template <typename W>
void product_of_many(const Matrix& of, const char* w, Index begin, const Rows& in, float* out, Index ldo) {
  constexpr Index wide = W::many_vectors * width<float>, high = W::many_rows;
  for (Index k = 0; k < of.inputs; k += W::block) {
    const Index rest = of.inputs - k;
    Index asked = 0;
    for (Index j = 0; j < panel; j += wide) {
      Index left = (in.count + high - 1) / high;  // tiles to go, as even as they come
      for (Index i = 0, rows; i < in.count; i += rows, --left) {
        rows = (in.count - i + left - 1) / left;
        const AskLater ask = {asked < W::step_bytes ? W::panel_bytes(W::block) + asked : 0};
        const Inputs<AskLater> some = {w + W::panel_bytes(k), k, rest < W::block ? rest : W::block, rest <= W::block, ask};
        product_tile_of<W, high, W::many_vectors>(rows, of, some, begin + j, in.part(i, rows), out + i * ldo + j, ldo);
        asked += line;
      }
    }
  }
}

template <typename W>
void product_by(const Matrix& of, const Rows& in, Index index, float* out, Index ldo) {
  const char* w = static_cast<const char*>(of.at) + index * W::panel_bytes(of.inputs);
  if (in.count <= W::few_rows) product_of_few<W>(of, w, index * panel, in, out, ldo);
  else product_of_many<W>(of, w, index * panel, in, out, ldo);
}

/// Whether rows are rounded for weights of this format: to bytes, or, where the processor multiplies pairs of them, to bfloat16 numbers.
inline bool rounds_rows(Format format, [[maybe_unused]] Dots has) {
#if defined(__AVX512F__) && !defined(TARNN_NO_AMX)
  if (format == Format::bfloat16) return has.bfloat16 || has.amx;
#endif
  return format == Format::int8 || format == Format::int4;
}

/// A row as bfloat16 numbers, rounded to nearest even, with zeros up to whole steps.
inline void to_halves(const float* x, Index n, std::uint16_t* to) {
  for (Index j = 0; j < whole_steps(n); j += width<float>) Bfloat16::store(to + j, j < n ? read(x + j, n - j) : Vec<float>{});
}

inline void product_of_pairs(const Matrix& of, [[maybe_unused]] Dots has, const Rows& in, Index index, float* out, Index ldo) {
#if defined(__AVX512F__) && !defined(TARNN_NO_AMX)
  if (in.levels && has.amx) return amx::product<amx::OfPairs>(of, in, index, out, ldo);
  if (in.levels && has.bfloat16) return product_by<PairDots>(of, in, index, out, ldo);
#endif
  product_by<PairWeights>(of, in, index, out, ldo);
}

constexpr Index rows_of_tiles = 4;  // of bytes: fewer are multiplied sooner without

/// One panel of outputs of all rows, to out (rows ldo apart, 64 of each).
inline void product(const Matrix& of, Dots has, const Rows& in, Index index, float* out, Index ldo) {
  switch (of.format) {
    case Format::float32: return product_by<FloatWeights>(of, in, index, out, ldo);
    case Format::bfloat16: return product_of_pairs(of, has, in, index, out, ldo);
    case Format::int8:
#if defined(__AVX512F__) && !defined(TARNN_NO_AMX)
      if (has.amx && in.count > rows_of_tiles) return amx::product<amx::OfBytes>(of, in, index, out, ldo);
#endif
      return with_dots<BytesOfAll>(has, [&](auto dot) { product_by<Int8Weights<decltype(dot)>>(of, in, index, out, ldo); });
    case Format::int4: return with_dots<ShortSums>(has, [&](auto dot) { product_by<Int4Weights<decltype(dot)>>(of, in, index, out, ldo); });
  }
}

}  // namespace TARNN_ISA
}  // namespace tarnn
