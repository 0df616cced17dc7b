// A chunk of tokens for the backward pass: its tiles, its decays as factors, and its triangular system.
//
//     A_ij = Σ_d K_id K_jd E_ijd (j < i)      P_ij = Σ_d Q_id K_jd E_ijd (j ≤ i)      E_ij = e^(g_{j+1} + … + g_i)
//     U = X − A V̂,  V̂ = Diag(β) U              X = V − (K ⊙ in) S                      in_i = E_i0 e^(g_0),  out_j = E_cj
//     S ← total ⊙ S + (K ⊙ out)ᵀ V̂            total = in_c, of the last token
//
// All factors are products of e^g ≤ 1, none a quotient or a difference of sums: they are right for g = −5 a token and for −∞.
// The system is solved by substitution: the inverse as a product of powers loses every digit where keys repeat.
#pragma once

#include "delta/tokens.h"
#include "simd/matmul.h"

namespace tarnn {
namespace TARNN_ISA {

constexpr Index delta_chunk = 32;

/// The tiles of a chunk. With one decay per token, k_in, q_in and k_out are k, q and k themselves, and in and out are numbers of rows;
/// with channels they are k ⊙ in, q ⊙ in and k ⊙ out, and the numbers of rows are 1.
template <typename T>
struct Chunk {
  Index ldd, lde, ldc, d_rows, e_rows, rows = 0;
  T *kq, *k_t;                      // (2c × d): k, then q behind its last row; (d × c)
  T *kq_in, *k_out;
  T *k_factor, *q_factor, *beta, *in, *out, *total;  // total: (d)
  T *decay, *in_tile, *out_tile;    // e^g, and, with channels, in and out
  T *E, *A, *P;                     // (c × c), zeros above the diagonal
  T* lanes;

  Chunk(Scratch& scratch, const DeltaProblem& p)
      : ldd(padded<T>(p.d)), lde(padded<T>(p.e)), ldc(padded<T>(delta_chunk)), d_rows(whole<T>(p.d)), e_rows(whole<T>(p.e)) {
    constexpr Index c = delta_chunk, several = c + width<T>;
    kq = scratch.take<T>((2 * c + width<T>) * ldd);
    k_t = scratch.take<T>(d_rows * ldc);
    kq_in = p.channels ? scratch.take<T>(2 * c * ldd) : kq;
    k_out = p.channels ? scratch.take<T>(c * ldd) : kq;
    k_factor = scratch.take<T>(several), q_factor = scratch.take<T>(several), beta = scratch.take<T>(several);
    in = scratch.take<T>(several), out = scratch.take<T>(ldc), total = scratch.take<T>(ldd);
    decay = scratch.take<T>(p.channels ? c * ldd : several);
    in_tile = p.channels ? scratch.take<T>(c * ldd) : nullptr;
    out_tile = p.channels ? scratch.take<T>(c * ldd) : nullptr;
    E = scratch.take<T>(several * ldc), A = scratch.take<T>(several * ldc), P = scratch.take<T>(several * ldc);
    lanes = p.channels ? scratch.take<T>(2 * several * width<T>) : nullptr;
  }
  T* q() const { return kq + rows * ldd; }
};

/// E, in, out and total of one decay per token.
template <typename T>
void weigh_chunk(const DeltaProblem& p, Chunk<T>& at) {
  T in = 1;
  for (Index i = 0; i < at.rows; ++i) {
    T* row = at.E + i * at.ldc;
    if (i) for (Index j = 0; j < at.ldc; j += width<T>) store(row + j, load(row - at.ldc + j) * at.decay[i]);
    else clear(row, at.ldc);
    row[i] = 1;
    at.in[i] = in *= at.decay[i];
  }
  std::copy_n(at.E + (at.rows - 1) * at.ldc, at.ldc, at.out);
  std::fill_n(at.total, whole<T>(p.d), in);
}

/// The same of a decay per channel, and what is multiplied with it.
template <typename T>
void weigh_channels(const DeltaProblem& p, bool queries, Chunk<T>& at) {
  const Index ld = at.ldd, rows = at.rows;
  for (Index x = 0; x < p.d; x += width<T>) {
    Vec<T> in = broadcast<T>(T(1)), out = in;
    for (Index i = 0; i < rows; ++i) {
      in *= load(at.decay + i * ld + x);
      store(at.in_tile + i * ld + x, in);
      store(at.kq_in + i * ld + x, in * load(at.kq + i * ld + x));
      if (queries) store(at.kq_in + (rows + i) * ld + x, in * load(at.q() + i * ld + x));
    }
    store(at.total + x, in);
    for (Index i = rows; i-- > 0;) {
      store(at.out_tile + i * ld + x, out);
      store(at.k_out + i * ld + x, out * load(at.kq + i * ld + x));
      out *= load(at.decay + i * ld + x);
    }
  }
  std::fill_n(at.in, rows, T(1));
  std::fill_n(at.out, at.ldc, T(1));
}

/// Rows of a triangle, times those of E: the first i + `more` numbers of row i, zeros behind them.
template <typename T>
void weigh_triangle(const Chunk<T>& at, Index more, T* x) {
  const Integers<T> lane = iota<T>();
  for (Index i = 0; i < at.rows; ++i)
    for (Index j = 0; j < at.rows; j += width<T>) {
      T* to = x + i * at.ldc + j;
      store(to, lane < static_cast<int>(i + more - j) ? load(to) * load(at.E + i * at.ldc + j) : Vec<T>{});
    }
}

/// A and, with queries, P, of a decay per token.
template <typename T>
void multiply_pairs(const DeltaProblem& p, bool queries, Chunk<T>& at) {
  transpose(at.kq, at.ldd, at.rows, p.d, at.k_t, at.ldc);
  for (Index which = 0; which <= queries; ++which) {
    T* products = which ? at.P : at.A;
    const Left<T> left = {which ? at.q() : at.kq, at.ldd, 1};
    matmul<Part::lower_result>(at.rows, at.rows, p.d, left, at.k_t, at.ldc, products, at.ldc, false);
    weigh_triangle(at, which, products);
  }
}

/// The same of a decay per channel: k_j fades from token to token, and each multiplies it.
template <bool queries, typename T>
void multiply_pairs_by_channels(const DeltaProblem& p, Chunk<T>& at) {
  constexpr Index w = width<T>;
  const Index ld = at.ldd, rows = at.rows;
  for (Index j = 0; j < rows; ++j) {
    clear(at.lanes, 2 * rows * w);
    for (Index x = 0; x < p.d; x += w) {
      Vec<T> key = load(at.kq + j * ld + x);
      for (Index i = j; i < rows; ++i) {
        if (i > j) key *= load(at.decay + i * ld + x);
        T *a = at.lanes + 2 * i * w, *b = a + w;
        store(a, load(a) + key * load(at.kq + i * ld + x));
        if constexpr (queries) store(b, load(b) + key * load(at.q() + i * ld + x));
      }
    }
    for (Index i = 0; i < rows; ++i) {
      at.A[i * at.ldc + j] = i > j ? sum<T>(load(at.lanes + 2 * i * w)) : T(0);
      if constexpr (queries) at.P[i * at.ldc + j] = i >= j ? sum<T>(load(at.lanes + (2 * i + 1) * w)) : T(0);
    }
  }
}

/// Keys, queries, β and decays of a chunk, and its products.
template <typename T>
void load_chunk(const DeltaProblem& p, const DeltaHead& h, Index time, Index rows, bool queries, Chunk<T>& at) {
  at.rows = rows;
  load_delta_keys(p, h, time, rows, at.kq, at.ldd, at.k_factor);
  if (queries) load_delta_queries(p, h, time, rows, T(1), at.q(), at.ldd, at.q_factor);
  load_betas(p, h, time, rows, at.beta);
  load_decays(p, h, time, rows, at.decay, at.ldd);
  if (p.channels) {
    weigh_channels(p, queries, at);
    queries ? multiply_pairs_by_channels<true>(p, at) : multiply_pairs_by_channels<false>(p, at);
  } else {
    weigh_chunk(p, at);
    multiply_pairs(p, queries, at);
  }
}

/// R rows from i on of x = x − L y for the rows before, then y = β x row by row. L_ij = L.at[i·row + j·column]; x and y: rows `ld` apart,
/// which is negative where the last row comes first.
template <int R, int N, typename T>
TARNN_INLINE void solve_rows(Index i, Left<T> L, const T* beta, Index next, T* x, T* y, Index ld) {
  Vec<T> a[R * N];
  unrolled<R>([&](auto r) TARNN_LAMBDA {
    unrolled<N>([&](auto n) TARNN_LAMBDA { a[r * N + n] = load(x + (i + r) * ld + n * width<T>); });
  });
  const T* left = L.at + i * L.row;
  for (Index j = 0; j < i; ++j) {
    Vec<T> right[N];
    unrolled<N>([&](auto n) TARNN_LAMBDA { right[n] = load(y + j * ld + n * width<T>); });
    unrolled<R>([&](auto r) TARNN_LAMBDA {
      const T factor = left[r * L.row + j * L.column];
      unrolled<N>([&](auto n) TARNN_LAMBDA { a[r * N + n] -= right[n] * factor; });
    });
  }
  Vec<T> b[R * N];
  unrolled<R>([&](auto r) TARNN_LAMBDA {
    unrolled<r>([&](auto s) TARNN_LAMBDA {
      const T factor = left[r * L.row + (i + s) * L.column];
      unrolled<N>([&](auto n) TARNN_LAMBDA { a[r * N + n] -= b[s * N + n] * factor; });
    });
    unrolled<N>([&](auto n) TARNN_LAMBDA {
      b[r * N + n] = a[r * N + n] * beta[(i + r) * next];
      store(x + (i + r) * ld + n * width<T>, a[r * N + n]);
      store(y + (i + r) * ld + n * width<T>, b[r * N + n]);
    });
  });
}

/// (I + L Diag(β)) x = x, L strictly lower; y = Diag(β) x. n columns, in whole vectors.
template <typename T>
void solve(Index rows, Index n, Left<T> L, const T* beta, Index next, T* x, T* y, Index ld) {
  constexpr int several = 2;
  for (Index j = 0; j < n; j += several * width<T>) {
    const auto panel = [&]<int N>(std::integral_constant<int, N>) {
      Index i = 0;
      for (; i + 4 <= rows; i += 4) solve_rows<4, N>(i, L, beta, next, x + j, y + j, ld);
      for (; i < rows; ++i) solve_rows<1, N>(i, L, beta, next, x + j, y + j, ld);
    };
    if (j + width<T> < n) panel(std::integral_constant<int, several>());
    else panel(std::integral_constant<int, 1>());
  }
}

}  // namespace TARNN_ISA
}  // namespace tarnn
