// Products by AMX: a processor's unit for tiles of 16 rows of 64 bytes, bytes or bfloat16 numbers, with sums of 32 bits.
//
// Four bytes, or two bfloat16 numbers, are a word. An instruction does, of a tile of rows (16 × 16 words) and one of weights
// (16 words of inputs × 16 outputs),
//
//     sums[i][j] += Σ_k rows[i][k] · weights[k][j]
//
// of bytes exactly, of bfloat16 numbers by two chains of multiplications and additions, of the first and of the second ones,
// whose sums are added; numbers below the smallest normal one count as zero. What becomes of a row does not depend on the others.
//
// A panel (matrix.h) is four tiles of weights side by side, so a step of 16 words reads 4,096 bytes of it.
#pragma once

#include "common/memory.h"
#include "products/bytes.h"
#include "products/matrix.h"
#include "products/rows.h"

#if defined(__AVX512F__) && !defined(TARNN_NO_AMX)

namespace tarnn {
namespace TARNN_ISA {
namespace amx {

constexpr Index tile = 16, tile_row = 64;          // rows of a tile, and bytes of one
constexpr Index panel_row = 4 * panel;             // bytes from one word of inputs of a panel to the next
constexpr Index step_bytes = tile * panel_row;     // of a panel
constexpr int asked = 4;                           // lines of the next panel that a step asks for

/// Tiles 0 to 3 hold sums, 4 and 5 rows, 6 and 7 weights. The first row of sums and the first rows have `first` rows, the others `second`.
struct alignas(64) Shape {
  std::uint8_t palette = 1, start = 0, reserved[14]{};
  std::uint16_t bytes[16]{};
  std::uint8_t rows[16]{};
  Shape(Index first, Index second) {
    const Index of[8] = {first, first, second ? second : first, second ? second : first, first, second ? second : tile, tile, tile};
    for (int i = 0; i < 8; ++i) bytes[i] = tile_row, rows[i] = static_cast<std::uint8_t>(of[i]);
  }
};

TARNN_INLINE void begin(const Shape& shape) { asm volatile("ldtilecfg %0" : : "m"(shape) : "memory"); }
TARNN_INLINE void end() { asm volatile("tilerelease" : : : "memory"); }

// tile t is one of the processor's, to or from rows in memory `ld` bytes apart
template <int t>
TARNN_INLINE void load_tile(const void* at, Index ld) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(t), "r"(at), "r"(ld) : "memory");
}
template <int t>
TARNN_INLINE void store_tile(void* at, Index ld) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(t), "r"(at), "r"(ld) : "memory");
}
template <int t>
TARNN_INLINE void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(t) : "memory");
}

/// sums += rows · weights, of tiles.
struct OfBytes {
  static constexpr bool whole_numbers = true;
  template <int sums, int rows, int weights>
  static TARNN_INLINE void add() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(rows), "i"(weights) : "memory");
  }
};
struct OfPairs {
  static constexpr bool whole_numbers = false;
  template <int sums, int rows, int weights>
  static TARNN_INLINE void add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(rows), "i"(weights) : "memory");
  }
};

/// Up to 16 rows: sums of a whole panel, in the order in which its weights lie.
template <typename Of>
TARNN_INLINE void few(const char* w, Index steps, const std::uint8_t* rows, Index ld, float* out, Index ldo) {
  unrolled<4>([&](auto j) TARNN_LAMBDA { clear_tile<j>(); });
  for (; steps > 0; --steps, w += step_bytes, rows += tile_row) {
    unrolled<step_bytes / 64>([&](auto i) TARNN_LAMBDA { __builtin_prefetch(w + 2 * step_bytes + i * 64); });
    load_tile<4>(rows, ld);
    unrolled<4>([&](auto j) TARNN_LAMBDA {
      constexpr int weights = 6 + j % 2;
      load_tile<weights>(w + j * tile_row, panel_row);
      Of::template add<j, 4, weights>();
    });
  }
  unrolled<4>([&](auto j) TARNN_LAMBDA { store_tile<j>(out + j * tile, 4 * ldo); });
}

/// 17 to 32 rows: sums of half a panel. next: what is wanted later.
template <typename Of>
TARNN_INLINE void many(const char* w, Index steps, const std::uint8_t* rows, Index ld, float* out, Index ldo, const char*& next) {
  unrolled<4>([&](auto j) TARNN_LAMBDA { clear_tile<j>(); });
  for (; steps > 0; --steps, w += step_bytes, rows += tile_row, next += asked * 64) {
    unrolled<asked>([&](auto i) TARNN_LAMBDA { __builtin_prefetch(next + i * 64, 0, 2); });
    load_tile<4>(rows, ld), load_tile<6>(w, panel_row);
    Of::template add<0, 4, 6>();
    load_tile<7>(w + tile_row, panel_row);
    Of::template add<1, 4, 7>();
    load_tile<5>(rows + tile * ld, ld);
    Of::template add<2, 5, 6>();
    Of::template add<3, 5, 7>();
  }
  unrolled<4>([&](auto j) TARNN_LAMBDA { store_tile<j>(out + j / 2 * tile * ldo + j % 2 * tile, 4 * ldo); });
}

/// What a row's sums become: y = sum + bias, of bytes y = step·scale·sum + least·Σ W + bias.
template <typename Of>
TARNN_INLINE void finish(const Matrix& of, Index column, const Rows& in, float* out, Index ldo) {
  for (Index j = 0; j < panel; j += width<float>) {
    const Vec<float> bias = load(of.bias + column + j);
    Vec<float> scale{}, sums{};
    if constexpr (Of::whole_numbers) scale = load(of.scale + column + j), sums = load(of.sums + column + j);
    for (Index i = 0; i < in.count; ++i) {
      float* at = out + i * ldo + j;
      Vec<float> y = load(at);
      if constexpr (Of::whole_numbers) {
        y = scaled(bit_cast<Integers<float>>(y), in.step[i], scale);
        y += in.least[i] * sums;
      }
      store(at, y + bias);
    }
  }
}

/// One panel of outputs of all rows, from rounded rows, as `product` of products.h.
template <typename Of>
void product(const Matrix& of, const Rows& in, Index index, float* out, Index ldo) {
  const Index bytes = bytes_of_panel(of.format, of.inputs), steps = bytes / step_bytes;
  const char *w = static_cast<const char*>(of.at) + index * bytes, *next = w + bytes;
  for (Index i = 0, n, before = 0; i < in.count; i += n) {
    n = smaller(in.count - i, 2 * tile);
    if (n != before) begin(Shape(smaller(n, tile), n > tile ? n - tile : 0)), before = n;
    const std::uint8_t* rows = in.levels + i * in.ld_levels;
    float* to = out + i * ldo;
    if (n <= tile) few<Of>(w, steps, rows, in.ld_levels, to, ldo);
    else
      for (Index half = 0; half < 2; ++half) many<Of>(w + half * 2 * tile_row, steps, rows, in.ld_levels, to + half * 32, ldo, next);
  }
  end();
  finish<Of>(of, index * panel, in, out, ldo);
}

}  // namespace amx
}  // namespace TARNN_ISA
}  // namespace tarnn

#endif
