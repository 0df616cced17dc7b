// C = A·B or C += A·B for small matrices that lie in cache. B and C have their rows in vectors, with room up to a whole
// vector at the end of each row (what B holds there is computed with and never read); A is read one number at a time,
// so it may as well be the transpose of what lies in memory. Everything in linear attention is computed by that one product.
#pragma once

#include "simd/ahead.h"

namespace tarnn {
namespace TARNN_ISA {

// A tile is as many sums as fit the registers beside one row of B: with 32 registers 24 sums, with 16 registers 12.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int tile_sums = 24, tile_vectors = 4;
#else
constexpr int tile_sums = 12, tile_vectors = 2;
#endif
constexpr int tile_rows(int vectors) { return vectors == 1 ? tile_sums / 2 : tile_sums / vectors; }

/// What is known to be zero, or is not wanted, in a product of m × k and k × n; by whole tiles.
enum class Part {
  all,
  lower_result,   // only C[i][j] with j ≤ i, in blocks of `triangle_rows` rows
  lower_left,     // A[i][k] is 0 for k > i
  upper_left,     // A[i][k] is 0 for k < i
};

template <typename T>
struct Left {
  const T* at;
  Index row, column;  // A[i][k] = at[i·row + k·column]
};

/// sums += R rows of A times N vectors' worth of columns of B.
template <typename T, int R, int N>
TARNN_INLINE void accumulate(Index k, Left<T> a, const T* b, Index ldb, Vec<T> (&sums)[R * N], Ahead* ahead) {
  Ahead none, &lines = ahead ? *ahead : none;
  for (Index l = 0; l < k; ++l, a.at += a.column, b += ldb) {
    Vec<T> right[N];
    unrolled<N>([&](auto j) TARNN_LAMBDA { right[j] = load(b + j * width<T>); });
    unrolled<R>([&](auto i) TARNN_LAMBDA {
      const Vec<T> left = broadcast<T>(a.at[i * a.row]);
      unrolled<N>([&](auto j) TARNN_LAMBDA { sums[i * N + j] += left * right[j]; });
    });
    lines.some();
  }
  lines.passed(k);
}

/// One tile of A·B, R rows of N vectors from row i and column j of the result on. a and b begin where the tile's terms do.
template <typename T, int R, int N, typename Done>
void tile(Index i, Index j, Index k, Left<T> a, const T* b, Index ldb, const Done& done, Ahead* ahead) {
  Vec<T> sums[R * N];
  unrolled<R * N>([&](auto x) TARNN_LAMBDA { sums[x] = Vec<T>{}; });
  accumulate<T, R, N>(k, a, b, ldb, sums, ahead);
  unrolled<R>([&](auto r) TARNN_LAMBDA {
    unrolled<N>([&](auto x) TARNN_LAMBDA { done(i + r, j + x * width<T>, sums[r * N + x]); });
  });
}

/// f(n as a constant), n from 1 to `most`.
template <int most, typename F>
TARNN_INLINE void with_constant(Index n, F f) {
  if constexpr (most > 1)
    if (n < most) return with_constant<most - 1>(n, f);
  f(std::integral_constant<int, most>());
}

/// f(j, N) for n columns in panels of `most` vectors at most, as even as they come: N vectors from column j on, N a constant.
template <typename T, int most, typename F>
TARNN_INLINE void over_panels(Index n, F f) {
  Index vectors = whole<T>(n) / width<T>;
  for (Index j = 0, wide; vectors > 0; j += wide * width<T>, vectors -= wide) {
    const Index panels = (vectors + most - 1) / most;
    wide = (vectors + panels - 1) / panels;
    with_constant<most>(wide, [&](auto N) TARNN_LAMBDA { f(j, N); });
  }
}

/// f(i, j, rows, N) for the tiles of m × n: `rows` rows, tile_rows(N) at most, from row i on, of N vectors from column j on.
template <typename T, typename F>
TARNN_INLINE void over_tiles(Index m, Index n, F f) {
  over_panels<T, tile_vectors>(n, [&](Index j, auto N) TARNN_LAMBDA {
    Index left = (m + tile_rows(N) - 1) / tile_rows(N);  // tiles to go; as even as they come: 32 rows are 6 + 6 + 5 + 5 + 5 + 5
    for (Index i = 0, rows; i < m; i += rows, --left) {
      rows = (m - i + left - 1) / left;
      f(i, j, rows, N);
    }
  });
}

/// done(i, j, sum) for each vector of A·B: its row and its first column. `Done` is a type with a name, so that there is one
/// function for each size of tile, whoever calls it.
template <Part part = Part::all, typename T, typename Done>
void product(Index m, Index n, Index k, Left<T> a, const T* b, Index ldb, const Done& done, Ahead* ahead) {
  over_tiles<T>(m, n, [&](Index i, Index j, Index rows, auto N) TARNN_LAMBDA {
    const Index from = part == Part::upper_left ? i : 0;
    const Index to = part == Part::lower_left && i + rows < k ? i + rows : k;
    const Left<T> left = {a.at + i * a.row + from * a.column, a.row, a.column};
    with_constant<tile_rows(N)>(rows, [&](auto R) TARNN_LAMBDA {
      tile<T, R, N>(i, j, to - from, left, b + from * ldb + j, ldb, done, ahead);
    });
  });
}

// --- C = A·B or C += A·B

template <typename T>
struct Stored {
  T* c;
  Index ldc;
  bool add;
  TARNN_INLINE void operator()(Index i, Index j, Vec<T> sum) const {
    T* at = c + i * ldc + j;
    store(at, add ? load(at) + sum : sum);
  }
};

constexpr Index triangle_rows = 16;

template <Part part = Part::all, typename T>
void matmul(Index m, Index n, Index k, Left<T> a, const T* b, Index ldb, T* c, Index ldc, bool add, Ahead* ahead = nullptr) {
  if constexpr (part != Part::lower_result) return product<part>(m, n, k, a, b, ldb, Stored<T>{c, ldc, add}, ahead);
  for (Index i = 0; i < m; i += triangle_rows) {
    const Index rows = m - i < triangle_rows ? m - i : triangle_rows;
    product(rows, n < i + rows ? n : i + rows, k, {a.at + i * a.row, a.row, a.column}, b, ldb, Stored<T>{c + i * ldc, ldc, add}, ahead);
  }
}

// --- C = diag(factor) A·B

template <typename T>
struct Scaled {
  T* c;
  Index ldc;
  const T* factor;
  TARNN_INLINE void operator()(Index i, Index j, Vec<T> sum) const { store(c + i * ldc + j, sum * factor[i]); }
};

// --- C = diag(factor) from + A·B; from and C, whose rows are as far apart, may be the same

template <typename T>
struct Decayed {
  const T* from;
  T* c;
  Index ldc;
  const T* factor;
  TARNN_INLINE void operator()(Index i, Index j, Vec<T> sum) const {
    const Index at = i * ldc + j;
    store(c + at, load(from + at) * factor[i] + sum);
  }
};

}  // namespace TARNN_ISA
}  // namespace tarnn
