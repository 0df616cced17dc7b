// The delta rule of low rank, forward: S ← (Diag(e) + b aᵀ) S + k vᵀ with e = e^g, two tokens in a pass over S, as in pairs.h.
//
//     z₁ = a₁ᵀS                                     o₁ = (e₁q₁)ᵀS + (q₁ᵀb₁) z₁ + (q₁ᵀk₁) v₁
//     z₂ = (e₁a₂)ᵀS + (a₂ᵀb₁) z₁ + (a₂ᵀk₁) v₁       o₂ = (e₁e₂q₂)ᵀS + (q₂ᵀe₂b₁) z₁ + (q₂ᵀe₂k₁) v₁ + (q₂ᵀb₂) z₂ + (q₂ᵀk₂) v₂
//     S ← e₁e₂ S + (e₂b₁) z₁ᵀ + (e₂k₁) v₁ᵀ + b₂ z₂ᵀ + k₂ v₂ᵀ
//
// All products with S read the same S, and the pass of the next pair adds what this one writes. No decay is divided by.
#pragma once

#include "delta/forward.h"

namespace tarnn {
namespace TARNN_ISA {

constexpr Index low_rank_dots = 8;  // products of two tokens' vectors, in the order in which `solve_low_rank` takes them

/// The vectors of some tokens; a, b, k, q, decay: rows of ldd, v and o of lde.
template <typename T>
struct LowRankTokens {
  Index ldd, lde;
  T *a, *b, *k, *q, *decay, *v;
  LowRankTokens(Scratch& scratch, const LowRankProblem& p, Index rows) : ldd(padded<T>(p.d)), lde(padded<T>(p.e)) {
    for (T** x : {&a, &b, &k, &q, &decay}) *x = scratch.take<T>(rows * ldd);
    v = scratch.take<T>(rows * lde);
  }
};

/// A task's memory: the tokens of a block, and S in panels.
template <typename T>
struct LowRankScratch : LowRankTokens<T> {
  T *S, *o, *keep, *dots, *nowhere;
  Ahead ahead;
  LowRankScratch(Scratch& scratch, const LowRankProblem& p) : LowRankTokens<T>(scratch, p, delta_block) {
    S = scratch.take<T>(p.d * whole<T>(p.e));
    o = scratch.take<T>(delta_block * this->lde);
    keep = scratch.take<T>(delta_block / 2 * this->ldd);
    dots = scratch.take<T>((low_rank_dots * delta_block / 2 + width<T>) * width<T>);
    nowhere = scratch.take<T>(this->lde);
  }
};

/// Decays of some tokens as rows of d factors, 1 where masked.
template <typename T>
void load_decay_rows(const LowRankProblem& p, const DeltaHead& h, Index time, Index rows, T* to, Index ld) {
  load_decays(p, h, time, rows, to, ld);
  if (p.channels) return;
  for (Index i = rows - 1; i >= 0; --i) {  // numbers stand at the front
    const T decay = to[i];
    std::fill_n(to + i * ld, whole<T>(p.d), decay);
  }
}

/// All vectors but queries, nothing where masked.
template <typename T>
void load_low_rank(const LowRankProblem& p, const DeltaHead& h, Index time, Index rows, const LowRankTokens<T>& at) {
  const auto load = [&](const View& x, T* to, Index n, Index ld) {
    load_tile(x, h.row, h.k, time, rows, n, to, ld);
    clear_masked(p, h, time, rows, to, ld, n);
  };
  load(p.a, at.a, p.d, at.ldd);
  load(p.b, at.b, p.d, at.ldd);
  load(p.k, at.k, p.d, at.ldd);
  load(p.v, at.v, p.e, at.lde);
  load_decay_rows(p, h, time, rows, at.decay, at.ldd);
}

template <typename T>
void load_scaled_queries(const LowRankProblem& p, const DeltaHead& h, Index time, Index rows, T* to, Index ld) {
  load_tile(p.q, h.row, h.q, time, rows, p.d, to, ld);
  scale(to, rows * ld, static_cast<T>(p.scale));
}

/// The products of two tokens' vectors, and the vectors as they enter S and read it.
template <typename T>
void low_rank_pairs(const LowRankProblem& p, Index rows, const LowRankScratch<T>& at) {
  const Index pairs = (rows + 1) / 2;
  for (Index m = 0; m < pairs; ++m) {
    const Index first = 2 * m * at.ldd, second = first + at.ldd;
    Vec<T> x[low_rank_dots] = {};
    for (Index i = 0; i < p.d; i += width<T>) {
      const Vec<T> e1 = load(at.decay + first + i), e2 = load(at.decay + second + i);
      const Vec<T> b1 = load(at.b + first + i), k1 = load(at.k + first + i), q1 = load(at.q + first + i);
      const Vec<T> a2 = load(at.a + second + i), b2 = load(at.b + second + i), k2 = load(at.k + second + i);
      const Vec<T> q2 = load(at.q + second + i), faded_b = e2 * b1, faded_k = e2 * k1;
      x[0] += a2 * b1;
      x[1] += a2 * k1;
      x[2] += q1 * b1;
      x[3] += q1 * k1;
      x[4] += q2 * faded_b;
      x[5] += q2 * faded_k;
      x[6] += q2 * b2;
      x[7] += q2 * k2;
      store(at.keep + m * at.ldd + i, e1 * e2);
      store(at.b + first + i, faded_b);
      store(at.k + first + i, faded_k);
      store(at.a + second + i, a2 * e1);
      store(at.q + first + i, q1 * e1);
      store(at.q + second + i, q2 * (e1 * e2));
    }
    unrolled<low_rank_dots>([&](auto i) TARNN_LAMBDA { store(at.dots + (low_rank_dots * m + i) * width<T>, x[i]); });
  }
  for (Index i = 0; i < low_rank_dots * pairs; i += width<T>) store(at.dots + i, sums_at(at.dots + i * width<T>));
}

/// The tokens of a block; an odd last one gets a second that is nothing.
template <typename T>
void load_low_rank_pairs(const LowRankProblem& p, const DeltaHead& h, Index time, Index rows, const LowRankScratch<T>& at) {
  load_low_rank(p, h, time, rows, at);
  load_scaled_queries(p, h, time, rows, at.q, at.ldd);
  if (rows % 2) {
    for (T* x : {at.a, at.b, at.k, at.q}) clear(x + rows * at.ldd, whole<T>(p.d));
    std::fill_n(at.decay + rows * at.ldd, whole<T>(p.d), T(1));
    clear(at.v + rows * at.lde, whole<T>(p.e));
  }
  low_rank_pairs(p, rows, at);
}

/// The rows that pass over N vectors' columns of S: those that enter, from the pair before, and those that read.
template <typename T>
struct LowRankRows {
  const T *keep, *b[2], *k[2], *a[2], *q[2];
};

/// A pass. S: d rows, N vectors apart; z, v: what enters; x, y: aᵀS and qᵀS.
template <int N, bool enters, bool reads, typename T>
TARNN_INLINE void pass_low_rank(T* S, Index d, const LowRankRows<T>& at, const Vec<T> (&z)[2 * N], const Vec<T> (&v)[2 * N],
                                Vec<T> (&x)[2 * N], Vec<T> (&y)[2 * N]) {
  unrolled<2 * N>([&](auto i) TARNN_LAMBDA { x[i] = y[i] = Vec<T>{}; });
  for (Index i = 0; i < d; ++i) {
    T* to = S + i * (N * width<T>);
    unrolled<N>([&](auto n) TARNN_LAMBDA {
      Vec<T> s = load(to + n * width<T>);
      if constexpr (enters) {
        s *= at.keep[i];
        s += broadcast<T>(at.b[0][i]) * z[n];
        s += broadcast<T>(at.k[0][i]) * v[n];
        s += broadcast<T>(at.b[1][i]) * z[N + n];
        s += broadcast<T>(at.k[1][i]) * v[N + n];
        store(to + n * width<T>, s);
      }
      if constexpr (reads) {
        x[n] += broadcast<T>(at.a[0][i]) * s;
        x[N + n] += broadcast<T>(at.a[1][i]) * s;
        y[n] += broadcast<T>(at.q[0][i]) * s;
        y[N + n] += broadcast<T>(at.q[1][i]) * s;
      }
    });
  }
}

/// From aᵀS and qᵀS to z and o; c: the products of the two tokens' vectors.
template <int N, typename T>
TARNN_INLINE void solve_low_rank(const T* c, const Vec<T> (&v)[2 * N], const Vec<T> (&x)[2 * N], const Vec<T> (&y)[2 * N],
                                 Vec<T> (&z)[2 * N], T* const (&to)[2]) {
  unrolled<N>([&](auto n) TARNN_LAMBDA {
    z[n] = x[n];
    z[N + n] = (x[N + n] + z[n] * c[0]) + v[n] * c[1];
    store(to[0] + n * width<T>, (y[n] + z[n] * c[2]) + v[n] * c[3]);
    store(to[1] + n * width<T>, ((y[N + n] + z[n] * c[4]) + v[n] * c[5]) + (z[N + n] * c[6] + v[N + n] * c[7]));
  });
}

/// All pairs of a block pass over one panel.
template <int N, typename T>
void pass_low_rank_panel(const LowRankProblem& p, Index j, Index rows, LowRankScratch<T>& at) {
  T* S = at.S + j * p.d;
  Vec<T> x[2 * N], y[2 * N], z[2 * N] = {}, v[2 * N] = {};
  LowRankRows<T> row{};
  const auto enter = [&](Index m) TARNN_LAMBDA {
    row.keep = at.keep + m * at.ldd;
    unrolled<2>([&](auto i) TARNN_LAMBDA { row.b[i] = at.b + (2 * m + i) * at.ldd, row.k[i] = at.k + (2 * m + i) * at.ldd; });
  };
  const Index last = (rows + 1) / 2;
  for (Index m = 0; m < last; ++m) {
    at.ahead.some();
    at.ahead.passed(1);
    unrolled<2>([&](auto i) TARNN_LAMBDA { row.a[i] = at.a + (2 * m + i) * at.ldd, row.q[i] = at.q + (2 * m + i) * at.ldd; });
    if (m == 0) {
      pass_low_rank<N, false, true>(S, p.d, row, z, v, x, y);
    } else {
      enter(m - 1);
      pass_low_rank<N, true, true>(S, p.d, row, z, v, x, y);
    }
    unrolled<2 * N>([&](auto i) TARNN_LAMBDA { v[i] = load(at.v + (2 * m + i / N) * at.lde + j + i % N * width<T>); });
    T* const to[2] = {at.o + 2 * m * at.lde + j, 2 * m + 1 < rows ? at.o + (2 * m + 1) * at.lde + j : at.nowhere + j};
    solve_low_rank<N>(at.dots + low_rank_dots * m, v, x, y, z, to);
  }
  enter(last - 1);
  pass_low_rank<N, true, false>(S, p.d, row, z, v, x, y);
}

template <typename T>
void low_rank_columns(const LowRankProblem& p, const DeltaHead& h, Columns columns, LowRankScratch<T>& at) {
  read_panels(p, columns, state_of<T>(p, h, p.before), at.S);
  const Index there = smaller(columns.end, p.e) - columns.begin;
  View o = p.o;  // these columns alone
  o.data = static_cast<char*>(o.data) + columns.begin * o.stride[3] * bytes_of(o.type);
  for (Index time = h.begin; time < h.end; time += delta_block) {
    const Index rows = smaller(delta_block, h.end - time);
    if (T* to = kept_state_of<T>(p, h, time)) write_panels(p, columns, at.S, to);
    load_low_rank_pairs(p, h, time, rows, at);
    want_part(p, {h, 1}, 0, time + delta_block, at.ahead);
    if (const Index next = smaller(delta_block, h.end - time - delta_block); next > 0) {
      at.ahead.want(p.a, h.row, h.k, time + delta_block, next, p.d);
      at.ahead.want(p.b, h.row, h.k, time + delta_block, next, p.d);
    }
    over_panels<T>(p, columns, [&]<int N>(std::integral_constant<int, N>, Index j) { pass_low_rank_panel<N>(p, j, rows, at); });
    store_tile(at.o + columns.begin, at.lde, o, h.row, h.o, time, rows, there);
  }
  if (p.after) write_panels(p, columns, at.S, state_of<T>(p, h, p.after));
}

/// One token, too: each column of S is read before it is written, so `after` may be `before`.
template <typename T>
void low_rank_forward(const LowRankProblem& p) {
  const Index heads = p.sequences * p.heads, cuts = cuts_of_columns<T>(p, heads), panel = pair_vectors * width<T>;
  const Index panels = (whole<T>(p.e) + panel - 1) / panel;
  parallel_with<LowRankScratch<T>>(p, heads * cuts, [&](Index i, LowRankScratch<T>& at) {
    const Index cut = i % cuts, head = i / cuts;
    const Columns columns = {panels * cut / cuts * panel, smaller(panels * (cut + 1) / cuts * panel, whole<T>(p.e))};
    if (columns.begin < columns.end) low_rank_columns(p, DeltaHead(p, head / p.heads, head % p.heads), columns, at);
  }, p);
}

}  // namespace TARNN_ISA
}  // namespace tarnn
