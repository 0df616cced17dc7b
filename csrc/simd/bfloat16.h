// Products of bfloat16 numbers with float32 sums: AVX512-BF16's dot product of pairs, for which the compilers' vector types have no
// operation. It is compiled for that instruction set alone.
//
// A word is two neighbours along what a product sums over, 32 bits, the first one in the lower half. An instruction does
//
//     sum_j ← fma(a₀, b₀j, fma(a₁, b₁j, sum_j))        for 16 words (b₀j, b₁j)
//
// with numbers below the smallest normal one counted as zero, whatever the processor's flags say, and each of the two additions
// rounded to nearest even. (So it does on Zen 4, to the bit; Intel's manual leaves the rounding between them open.)
#pragma once

#include <immintrin.h>

#include "simd/matmul.h"
#include "simd/tiles.h"

namespace tarnn {
namespace TARNN_ISA {

using Word = std::uint32_t;
using Words = Bits<float>;  // 16 of them

/// Words that n numbers in a row take.
constexpr Index words(Index n) { return (n + 1) / 2; }

/// The length of rows of n numbers as words, whole vectors.
constexpr Index word_row(Index n) { return whole<float>(words(n)); }

TARNN_INLINE Words load_words(const Word* p) {
  Words x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

TARNN_INLINE void store_words(Word* p, Words x) { std::memcpy(p, &x, sizeof x); }

TARNN_INLINE Vec<float> add_dot(Vec<float> sum, Words a, Words b) {
  return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

/// 32 numbers that follow one another, rounded: words of neighbours.
TARNN_INLINE Words round_row(Vec<float> first, Vec<float> second) {
  return (Words)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}

/// Where lane after lane comes from: from + i and second + i in turn.
template <int from, int second>
struct InTurn {
  alignas(64) std::uint16_t lanes[32];
  constexpr InTurn() : lanes() {
    for (int i = 0; i < 16; ++i) lanes[2 * i] = from + i, lanes[2 * i + 1] = second + i;
  }
};
template <int from, int second>
inline constexpr InTurn<from, second> in_turn;

/// Of two vectors of 32 sixteen-bit numbers those from `from` to `from` + 15, lane by lane: words of x and y.
template <int from>
TARNN_INLINE Words interleaved(Words x, Words y) {
  return (Words)_mm512_permutex2var_epi16((__m512i)x, _mm512_load_si512(in_turn<from, 32 + from>.lanes), (__m512i)y);
}

/// Words of two vectors of numbers, lane by lane.
TARNN_INLINE Words round_pairs(Vec<float> first, Vec<float> second) {
  return (Words)_mm512_permutexvar_epi16(_mm512_load_si512(in_turn<0, 16>.lanes), (__m512i)round_row(first, second));
}

TARNN_INLINE Lanes<float>::Half to_bfloat16(Vec<float> x) { return (Lanes<float>::Half)_mm512_cvtneps_pbh((__m512)x); }

/// 2^(i/32), the bits of i at place 18 taken off: what adding i << 18 to the bits makes of it again.
struct Powers {
  alignas(64) std::uint32_t bits[32];
  constexpr Powers() : bits() {
    constexpr float powers[32] = {
        1.f,         1.02189715f, 1.04427378f, 1.0671404f,  1.09050773f, 1.11438674f, 1.13878863f, 1.16372486f,
        1.18920712f, 1.21524736f, 1.24185781f, 1.26905096f, 1.29683955f, 1.32523664f, 1.35425555f, 1.38390988f,
        1.41421356f, 1.44518081f, 1.47682615f, 1.50916443f, 1.54221083f, 1.57598085f, 1.61049033f, 1.64575548f,
        1.68179283f, 1.7186193f,  1.75625216f, 1.79470908f, 1.83400809f, 1.87416763f, 1.91520656f, 1.95714412f};
    for (std::uint32_t i = 0; i < 32; ++i) bits[i] = __builtin_bit_cast(std::uint32_t, powers[i]) - (i << 18);
  }
};
inline constexpr Powers powers;

/// As the polynomial of vector.h, in half of the time: eˣ = 2ᵃ · 2^(i/32) · eʳ with |r| ≤ ln 2 / 64, eʳ by 1 + c·r + r²/2,
/// c such that the relative error is least, 6e-8. 1 for 0, exactly.
TARNN_INLINE Vec<float> exp_nonpositive(Vec<float> x) {
  const float magic = 393216.f;  // 1.5·2¹⁸: adding it rounds to 32nds, of which the lowest five bits count i, and the next ones a
  const Vec<float> shifted = x * 1.44269504088896341f + magic, r = x - (shifted - magic) * 0.693147181f;
  const Vec<float> p = (r * 0.5f + 1.00001466f) * r + 1.f;
  const Words number = bit_cast<Words>(shifted);
  const Words power = (Words)_mm512_permutex2var_epi32(_mm512_load_si512(powers.bits), (__m512i)number, _mm512_load_si512(powers.bits + 16));
  const Vec<float> y = p * bit_cast<Vec<float>>(power + (number << 18));
  return x < -87.33654f ? Vec<float>{} : y;
}

// --- tiles of words

/// Rows of a tile, rounded, as words of neighbours; zeros in rows from `rows` to `all`.
inline void round_rows(const float* x, Index ld, Index rows, Index all, Index n, Word* to, Index ldt) {
  for (Index i = 0; i < rows; ++i)
    for (Index j = 0; j < n; j += 32)
      store_words(to + i * ldt + j / 2, round_row(load(x + i * ld + j), j + 16 < n ? load(x + i * ld + j + 16) : Vec<float>{}));
  if (all > rows) std::fill_n(to + rows * ldt, (all - rows) * ldt, 0);
}

/// From rows of words of neighbours to words of rows 2i and 2i + 1, one for each column.
inline void interleave_rows(const Word* x, Index ld, Index rows, Index n, Word* to, Index ldt) {
  for (Index i = 0; i < rows; i += 2, x += 2 * ld, to += ldt)
    for (Index j = 0; j < n; j += 32) {
      const Words first = load_words(x + j / 2), second = load_words(x + ld + j / 2);
      store_words(to + j, interleaved<0>(first, second));
      if (j + 16 < n) store_words(to + j + 16, interleaved<16>(first, second));
    }
}

/// The same from a tile of numbers.
inline void round_row_pairs(const float* x, Index ld, Index rows, Index all, Index n, Word* to, Index ldt) {
  for (Index i = 0; i < all; i += 2, x += 2 * ld, to += ldt)
    for (Index j = 0; j < n; j += 16)
      store_words(to + j, round_pairs(i < rows ? load(x + j) : Vec<float>{}, i + 1 < rows ? load(x + ld + j) : Vec<float>{}));
}

/// The transpose of a tile of words: of `rows` rows of n words, in squares.
inline void transpose_words(const Word* x, Index ld, Index rows, Index n, Word* to, Index ldt) {
  transpose(reinterpret_cast<const float*>(x), ld, rows, n, reinterpret_cast<float*>(to), ldt);
}

// --- one product

struct LeftWords {
  const Word* at;
  Index row, column;  // A[i][k] = at[i·row + k·column]
};


/// sums += R rows of A times N vectors of columns of B; k words.
template <int R, int N>
TARNN_INLINE void accumulate(Index k, LeftWords a, const Word* b, Index ldb, Vec<float> (&sums)[R * N], Ahead& ahead) {
  for (Index l = 0; l < k; ++l, a.at += a.column, b += ldb) {
    Words right[N];
    unrolled<N>([&](auto j) TARNN_LAMBDA { right[j] = load_words(b + j * 16); });
    unrolled<R>([&](auto i) TARNN_LAMBDA {
      const Words left = Words{} + a.at[i * a.row];
      unrolled<N>([&](auto j) TARNN_LAMBDA { sums[i * N + j] = add_dot(sums[i * N + j], right[j], left); });
    });
    ahead.some();
  }
  ahead.passed(k);
}

/// sums += the square in which a lower triangle of A ends: its row i has i + 1 terms. Of the pair on the diagonal an even row has
/// one: the other number of B becomes zero, so that a NaN in a row of B reaches no row of C before it.
template <int R, int N>
TARNN_INLINE void accumulate_triangle(LeftWords a, const Word* b, Index ldb, Vec<float> (&sums)[R * N]) {
  unrolled<R / 2>([&](auto l) TARNN_LAMBDA {
    constexpr int first = 2 * decltype(l)::value;
    Words right[N];
    unrolled<N>([&](auto j) TARNN_LAMBDA { right[j] = load_words(b + l * ldb + j * 16); });
    unrolled<R>([&](auto i) TARNN_LAMBDA {
      if constexpr (decltype(i)::value >= first) {
        const Words left = Words{} + a.at[i * a.row + l * a.column];
        unrolled<N>([&](auto j) TARNN_LAMBDA {
          sums[i * N + j] = add_dot(sums[i * N + j], decltype(i)::value == first ? right[j] & 0xffff : right[j], left);
        });
      }
    });
  });
}

/// Rows of a tile of N vectors: 16 sums, or as near to it as keeps the pipeline full.
template <int N>
constexpr int word_rows = N >= 3 ? 4 : 8;

/// f(i, j, R, N, sums) for each tile of m × n: R rows from row i on of N vectors from column j on, and zeros to add to.
template <typename F>
TARNN_INLINE void over_word_tiles(Index m, Index n, F f) {
  over_panels<float, 4>(n, [&](Index j, auto N) TARNN_LAMBDA {
    constexpr std::integral_constant<int, word_rows<N>> R;
    for (Index i = 0; i < m; i += R) {
      Vec<float> sums[R * N];
      unrolled<R * N>([&](auto x) TARNN_LAMBDA { sums[x] = Vec<float>{}; });
      f(i, j, R, N, sums);
    }
  });
}

/// What is known to be zero in A, of which k counts words: nothing, A[i][k] for 2k > i + 1, or for 2k + 1 < i.
enum class Zeros { none, above, below };

/// done(i, j, R, N, sums) for each tile of A·B, from row i and column j on. Rows of A up to whole tiles are read, 16 rows at most.
template <Zeros zeros = Zeros::none, typename Done>
TARNN_INLINE void product(Index m, Index n, Index k, LeftWords a, const Word* b, Index ldb, Ahead& ahead, Done done) {
  over_word_tiles(m, n, [&](Index i, Index j, auto R, auto N, auto& sums) TARNN_LAMBDA {
    const Index from = zeros == Zeros::below ? i / 2 : 0;
    const Index to = zeros == Zeros::above && (i + R) / 2 < k ? (i + R) / 2 : k;
    accumulate<R, N>(to - from, {a.at + i * a.row + from * a.column, a.row, a.column}, b + from * ldb + j, ldb, sums, ahead);
    done(i, j, R, N, sums);
  });
}

// --- what is done with a tile of sums: R rows of N vectors, whose place in memory starts at `at`, rows ld apart

template <int R, int N>
TARNN_INLINE void add_tile(const float* at, Index ld, bool plain, float factor, Vec<float> (&sums)[R * N]) {
  unrolled<R>([&](auto r) TARNN_LAMBDA {
    unrolled<N>([&](auto x) TARNN_LAMBDA {
      const Vec<float> before = load(at + r * ld + x * 16);
      sums[r * N + x] += plain ? before : before * factor;
    });
  });
}

/// Each row times its factor.
template <int R, int N>
TARNN_INLINE void scale_tile(const float* factor, Vec<float> (&sums)[R * N]) {
  unrolled<R>([&](auto r) TARNN_LAMBDA {
    unrolled<N>([&](auto x) TARNN_LAMBDA { sums[r * N + x] *= factor[r]; });
  });
}

template <int R, int N>
TARNN_INLINE void store_tile_sums(float* to, Index ld, const Vec<float> (&sums)[R * N]) {
  unrolled<R>([&](auto r) TARNN_LAMBDA {
    unrolled<N>([&](auto x) TARNN_LAMBDA { store(to + r * ld + x * 16, sums[r * N + x]); });
  });
}

/// Rounded, rows in pairs.
template <int R, int N>
TARNN_INLINE void store_row_pairs(Word* to, Index ld, const Vec<float> (&sums)[R * N]) {
  unrolled<R / 2>([&](auto r) TARNN_LAMBDA {
    unrolled<N>([&](auto x) TARNN_LAMBDA {
      store_words(to + r * ld + x * 16, round_pairs(sums[2 * r * N + x], sums[(2 * r + 1) * N + x]));
    });
  });
}

/// A row's N vectors, rounded, side by side.
template <int N>
TARNN_INLINE void store_rounded(std::uint16_t* to, const Vec<float>* x) {
  if constexpr (N > 1)
    unrolled<N / 2>([&](auto j) TARNN_LAMBDA {
      const Words y = round_row(x[2 * j], x[2 * j + 1]);
      std::memcpy(to + j * 32, &y, sizeof y);
    });
  if constexpr (N % 2) {
    const Words y = round_row(x[N - 1], x[N - 1]);
    std::memcpy(to + (N - 1) * 16, &y, 32);
  }
}

/// C = A·B, or C += A·B; C has room for whole tiles.
template <Zeros zeros = Zeros::none>
void product_to(Index m, Index n, Index k, LeftWords a, const Word* b, Index ldb, float* c, Index ldc, bool add, Ahead& ahead) {
  product<zeros>(m, n, k, a, b, ldb, ahead, [=](Index i, Index j, auto R, auto N, auto& sums) TARNN_LAMBDA {
    if (add) add_tile<R, N>(c + i * ldc + j, ldc, true, 1, sums);
    store_tile_sums<R, N>(c + i * ldc + j, ldc, sums);
  });
}

}  // namespace TARNN_ISA
}  // namespace tarnn
