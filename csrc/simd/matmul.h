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

/// One tile of C: R rows, N vectors.
template <typename T, int R, int N>
TARNN_INLINE void tile(Index k, Left<T> a, const T* b, Index ldb, T* c, Index ldc, bool add, Ahead* ahead) {
  Vec<T> sums[R * N];
  unrolled<R * N>([&](auto x) TARNN_LAMBDA { sums[x] = Vec<T>{}; });
  accumulate<T, R, N>(k, a, b, ldb, sums, ahead);
  unrolled<R>([&](auto i) TARNN_LAMBDA {
    T* row = c + i * ldc;
    unrolled<N>([&](auto j) TARNN_LAMBDA {
      const Vec<T> sum = sums[i * N + j];
      store(row + j * width<T>, add ? load(row + j * width<T>) + sum : sum);
    });
  });
}

template <typename T, int N, int R = tile_rows(N)>
void tile_of(int rows, Index k, Left<T> a, const T* b, Index ldb, T* c, Index ldc, bool add, Ahead* ahead) {
  if (rows == R) return tile<T, R, N>(k, a, b, ldb, c, ldc, add, ahead);
  if constexpr (R > 1) tile_of<T, N, R - 1>(rows, k, a, b, ldb, c, ldc, add, ahead);
}

/// N vectors' worth of columns, from column j on.
template <Part part, int N, typename T>
void columns(Index j, Index m, Index k, Left<T> a, const T* b, Index ldb, T* c, Index ldc, bool add, Ahead* ahead) {
  Index left = (m + tile_rows(N) - 1) / tile_rows(N);  // tiles to go; as even as they come: 32 rows are 6 + 6 + 5 + 5 + 5 + 5
  for (Index i = 0, rows; i < m; i += rows, --left) {
    rows = (m - i + left - 1) / left;
    const Index from = part == Part::upper_left ? i : 0;
    const Index to = part == Part::lower_left && i + rows < k ? i + rows : k;
    tile_of<T, N>(static_cast<int>(rows), to - from, {a.at + i * a.row + from * a.column, a.row, a.column},
                  b + from * ldb + j, ldb, c + i * ldc + j, ldc, add, ahead);
  }
}

constexpr Index triangle_rows = 16;

template <Part part, typename T>
void panels(Index m, Index n, Index k, Left<T> a, const T* b, Index ldb, T* c, Index ldc, bool add, Ahead* ahead) {
  Index vectors = whole<T>(n) / width<T>;
  for (Index j = 0, wide; vectors > 0; j += wide * width<T>, vectors -= wide) {
    const Index panels = (vectors + tile_vectors - 1) / tile_vectors;
    wide = (vectors + panels - 1) / panels;
    if (wide == 1) columns<part, 1>(j, m, k, a, b, ldb, c, ldc, add, ahead);
    if (wide == 2) columns<part, 2>(j, m, k, a, b, ldb, c, ldc, add, ahead);
    if constexpr (tile_vectors > 2) {
      if (wide == 3) columns<part, 3>(j, m, k, a, b, ldb, c, ldc, add, ahead);
      if (wide == 4) columns<part, 4>(j, m, k, a, b, ldb, c, ldc, add, ahead);
    }
  }
}

template <Part part = Part::all, typename T>
void matmul(Index m, Index n, Index k, Left<T> a, const T* b, Index ldb, T* c, Index ldc, bool add, Ahead* ahead = nullptr) {
  if constexpr (part != Part::lower_result) return panels<part>(m, n, k, a, b, ldb, c, ldc, add, ahead);
  for (Index i = 0; i < m; i += triangle_rows) {
    const Index rows = m - i < triangle_rows ? m - i : triangle_rows;
    panels<Part::all>(rows, n < i + rows ? n : i + rows, k, {a.at + i * a.row, a.row, a.column}, b, ldb, c + i * ldc, ldc, add,
                      ahead);
  }
}

// --- a product and a factor per row: C = diag(factor) A·B

template <typename T, int N, int R = tile_rows(N)>
void scaled_tile(int rows, Index k, Left<T> a, const T* b, Index ldb, const T* factor, T* c, Index ldc, Ahead* ahead) {
  if (rows == R) {
    Vec<T> sums[R * N];
    unrolled<R * N>([&](auto n) TARNN_LAMBDA { sums[n] = Vec<T>{}; });
    accumulate<T, R, N>(k, a, b, ldb, sums, ahead);
    unrolled<R>([&](auto i) TARNN_LAMBDA {
      unrolled<N>([&](auto j) TARNN_LAMBDA { store(c + i * ldc + j * width<T>, sums[i * N + j] * factor[i]); });
    });
    return;
  }
  if constexpr (R > 1) scaled_tile<T, N, R - 1>(rows, k, a, b, ldb, factor, c, ldc, ahead);
}

template <int N, typename T>
void scaled_columns(Index m, Index k, Left<T> a, const T* b, Index ldb, const T* factor, T* c, Index ldc, Ahead* ahead) {
  Index left = (m + tile_rows(N) - 1) / tile_rows(N);
  for (Index i = 0, rows; i < m; i += rows, --left) {
    rows = (m - i + left - 1) / left;
    scaled_tile<T, N>(static_cast<int>(rows), k, {a.at + i * a.row, a.row, a.column}, b, ldb, factor + i, c + i * ldc, ldc, ahead);
  }
}

template <typename T>
void scaled_product(Index m, Index n, Index k, Left<T> a, const T* b, Index ldb, const T* factor, T* c, Index ldc, Ahead* ahead) {
  Index vectors = whole<T>(n) / width<T>;
  for (Index j = 0, wide; vectors > 0; j += wide * width<T>, vectors -= wide) {
    const Index panels = (vectors + tile_vectors - 1) / tile_vectors;
    wide = (vectors + panels - 1) / panels;
    if (wide == 1) scaled_columns<1>(m, k, a, b + j, ldb, factor, c + j, ldc, ahead);
    if (wide == 2) scaled_columns<2>(m, k, a, b + j, ldb, factor, c + j, ldc, ahead);
    if constexpr (tile_vectors > 2) {
      if (wide == 3) scaled_columns<3>(m, k, a, b + j, ldb, factor, c + j, ldc, ahead);
      if (wide == 4) scaled_columns<4>(m, k, a, b + j, ldb, factor, c + j, ldc, ahead);
    }
  }
}

}  // namespace TARNN_ISA
}  // namespace tarnn
