// The delta rule, forward: tokens pass over S in pairs (pairs.h), a few columns of S after the other, which stay in the first-level
// cache while the tokens of a block pass over them.
//
// A block begins and ends with S itself: no γ, nothing to enter. So a sequence that is cut where a block ends, and continued from
// the state there, has the same bits; and columns may be computed by anybody.
#pragma once

#include "delta/pairs.h"
#include "simd/ahead.h"

namespace tarnn {
namespace TARNN_ISA {

constexpr Index delta_block = 64;

/// A task's memory: the tokens of a block, and S in panels of `pair_vectors` vectors' columns, each d rows without gaps.
template <typename T>
struct PairsScratch {
  static constexpr Index pairs = delta_block / 2;
  Index ldd, lde;
  T *states, *S;      // of all heads, and of the one that is worked on
  T *k, *q, *v, *o;
  T *enter, *keep;   // where decays have channels: k₁e₂ and k₂, and e₁e₂; k and q are multiplied with a then
  T *beta, *decay, *factor, *dots;
  Pair<T>* numbers;  // and one more, behind the last
  T *none, *nowhere;  // a row of values of no token, and of outputs
  Ahead ahead;
  PairsScratch(Scratch& scratch, const DeltaProblem& p, Index heads) : ldd(padded<T>(p.d)), lde(padded<T>(p.e)) {
    S = states = scratch.take<T>(heads * p.d * whole<T>(p.e));
    k = scratch.take<T>(delta_block * ldd);
    q = scratch.take<T>(delta_block * ldd);
    v = scratch.take<T>(delta_block * lde);
    o = scratch.take<T>(delta_block * lde);
    enter = p.channels ? scratch.take<T>(delta_block * ldd) : k;
    keep = p.channels ? scratch.take<T>(pairs * ldd) : nullptr;
    beta = scratch.take<T>(delta_block);
    decay = scratch.take<T>(p.channels ? delta_block * ldd : delta_block);
    factor = scratch.take<T>(delta_block);
    dots = scratch.take<T>((4 * pairs + width<T>) * width<T>);
    numbers = scratch.take<Pair<T>>(pairs + 1);
    none = scratch.take<T>(lde);
    nowhere = scratch.take<T>(lde);
  }
  T* panel(const DeltaProblem& p, Index j) const { return S + j * p.d; }
};

/// Columns of S that one pass takes: whole vectors, from `begin` to `end`, of which e are there.
struct Columns {
  Index begin, end;
};

/// f(N, j) for the panels of some columns.
template <typename T, typename F>
TARNN_INLINE void over_panels(const DeltaProblem& p, Columns columns, F f) {
  for (Index j = columns.begin; j < columns.end; j += pair_vectors * width<T>) {
    if (j + width<T> < p.e) f(std::integral_constant<int, pair_vectors>(), j);
    else f(std::integral_constant<int, 1>(), j);
  }
}

/// Panels from or to S in rows of e (null: zeros).
template <typename T>
void read_panels(const DeltaProblem& p, Columns columns, const T* from, T* S) {
  over_panels<T>(p, columns, [&]<int N>(std::integral_constant<int, N>, Index j) {
    T* panel = S + j * p.d;
    const Index n = N * width<T>, there = smaller(n, p.e - j);
    if (!from || there < n) clear(panel, p.d * n);
    for (Index i = 0; from && i < p.d; ++i) std::memcpy(panel + i * n, from + i * p.e + j, static_cast<std::size_t>(there) * sizeof(T));
  });
}

template <typename T>
void write_panels(const DeltaProblem& p, Columns columns, const T* S, T* to) {
  over_panels<T>(p, columns, [&]<int N>(std::integral_constant<int, N>, Index j) {
    const Index n = N * width<T>, there = smaller(n, p.e - j);
    for (Index i = 0; i < p.d; ++i)
      std::memcpy(to + i * p.e + j, S + j * p.d + i * n, static_cast<std::size_t>(there) * sizeof(T));
  });
}

/// The four products of two tokens' keys and queries, in lanes; with channels k and q are multiplied with a, and k₁e₂, k₂ enter.
template <typename T>
void pair_products(const DeltaProblem& p, Index rows, const PairsScratch<T>& at) {
  for (Index m = 0; 2 * m < rows; ++m) {
    T *k = at.k + 2 * m * at.ldd, *q = at.q + 2 * m * at.ldd;
    Vec<T> x[4] = {};
    for (Index i = 0; i < p.d; i += width<T>) {
      const Vec<T> k1 = load(k + i), q1 = load(q + i);
      Vec<T> k2 = load(k + at.ldd + i), q2 = load(q + at.ldd + i);
      x[1] += q1 * k1;
      x[3] += q2 * k2;
      if (p.channels) {
        const T* decay = at.decay + 2 * m * at.ldd + i;
        const Vec<T> a1 = load(decay), e2 = load(decay + at.ldd), a2 = a1 * e2;
        store(at.enter + 2 * m * at.ldd + i, k1 * e2);
        store(at.enter + (2 * m + 1) * at.ldd + i, k2);
        store(at.keep + m * at.ldd + i, a2);
        store(k + i, k1 * a1);
        store(q + i, q1 * a1);
        store(k + at.ldd + i, k2 * a2);
        store(q + at.ldd + i, q2 * a2);
        k2 *= e2, q2 *= e2;
      }
      x[0] += k2 * k1;
      x[2] += q2 * k1;
    }
    unrolled<4>([&](auto i) TARNN_LAMBDA { store(at.dots + (4 * m + i) * width<T>, x[i]); });
  }
  for (Index i = 0; i < 2 * rows; i += width<T>) store(at.dots + i, sums_at(at.dots + i * width<T>));
}

/// The numbers of all pairs of a block, and of its end, where S̃ becomes S.
template <typename T>
void pair_numbers(const DeltaProblem& p, Index rows, const PairsScratch<T>& at) {
  T gamma = 1;
  at.numbers[0].by = 1;
  for (Index m = 0; 2 * m < rows; ++m) {
    Pair<T>& z = at.numbers[m];
    const T *beta = at.beta + 2 * m, *dot = at.dots + 4 * m;
    const T e1 = p.channels ? T(1) : at.decay[2 * m], e2 = p.channels ? T(1) : at.decay[2 * m + 1], a = e1 * gamma;
    z.beta[0] = beta[0], z.beta[1] = beta[1];
    z.read[0] = a, z.read[1] = a * e2;
    z.ask[0] = beta[0] * a, z.ask[1] = beta[1] * (a * e2);
    z.k2k1 = beta[1] * (e2 * dot[0]);
    z.q1k1 = dot[1], z.q2k1 = e2 * dot[2], z.q2k2 = dot[3];
    gamma = a * e2;
    at.numbers[m + 1].by = 1;
    if (gamma < static_cast<T>(least_gamma)) at.numbers[m + 1].by = gamma, gamma = 1;
    z.enter[1] = T(1) / gamma;
    z.enter[0] = z.enter[1] * e2;
    if (2 * m + 2 >= rows) z.enter[1] = 1, z.enter[0] = e2, at.numbers[m + 1].by *= gamma;
  }
}

/// Rows of a block as they are read or written: from `at`, `next` apart.
template <typename T>
struct BlockRows {
  T* at;
  Index next;
};

/// All pairs of a block pass over one panel.
template <int N, bool channels, typename T>
void pass_panel(const DeltaProblem& p, Index j, Index rows, BlockRows<const T> v, BlockRows<T> o, PairsScratch<T>& at) {
  T* S = at.panel(p, j);
  Vec<T> x[2 * N], y[2 * N], delta[2 * N] = {};
  PairRows<T> row{};
  const Index last = (rows + 1) / 2;
  const auto pass = [&]<bool enters, bool reads>(std::bool_constant<enters>, std::bool_constant<reads>, Index m) TARNN_LAMBDA {
    const T by = at.numbers[m].by;
    if constexpr (enters) row.enter[0] = at.enter + (2 * m - 2) * at.ldd, row.enter[1] = row.enter[0] + at.ldd;
    if constexpr (enters && channels) row.keep = at.keep + (m - 1) * at.ldd;
    if constexpr (reads) row.k[0] = at.k + 2 * m * at.ldd, row.k[1] = row.k[0] + at.ldd;
    if constexpr (reads) row.q[0] = at.q + 2 * m * at.ldd, row.q[1] = row.q[0] + at.ldd;
    if constexpr (enters && channels) return pass_pair<N, enters, reads, Decay::rows>(S, p.d, row, by, delta, x, y);
    if (enters && by != T(1)) return pass_pair<N, enters, reads, Decay::all>(S, p.d, row, by, delta, x, y);
    pass_pair<N, enters, reads, Decay::none>(S, p.d, row, by, delta, x, y);
  };
  for (Index m = 0; m < last; ++m) {
    at.ahead.some();
    at.ahead.passed(1);
    for (Index token = 2 * m + 2; token < 2 * m + 4; ++token)
      for (Index n = 0; n < N * width<T>; n += 64 / static_cast<Index>(sizeof(T))) {
        __builtin_prefetch(v.at + token * v.next + j + n);
        __builtin_prefetch(o.at + token * o.next + j + n, 1);
      }
    if (m == 0) pass(std::false_type(), std::true_type(), m);
    else pass(std::true_type(), std::true_type(), m);
    const bool two = 2 * m + 1 < rows;
    const T* const values[2] = {v.at + 2 * m * v.next + j, two ? v.at + (2 * m + 1) * v.next + j : at.none};
    T* const to[2] = {o.at + 2 * m * o.next + j, two ? o.at + (2 * m + 1) * o.next + j : at.nowhere};
    solve_pair<N>(at.numbers[m], values, x, y, delta, to);
  }
  pass(std::true_type(), std::false_type(), last);
}

/// Queries, keys and numbers of a block; an odd last token gets a second one that is nothing.
template <typename T>
void load_pairs(const DeltaProblem& p, const DeltaHead& h, Index time, Index rows, PairsScratch<T>& at) {
  load_delta_keys(p, h, time, rows, at.k, at.ldd, at.factor);
  load_delta_queries(p, h, time, rows, static_cast<T>(p.scale), at.q, at.ldd, at.factor);
  load_betas(p, h, time, rows, at.beta);
  load_decays(p, h, time, rows, at.decay, at.ldd);
  if (rows % 2) {
    clear(at.k + rows * at.ldd, whole<T>(p.d));
    clear(at.q + rows * at.ldd, whole<T>(p.d));
    at.beta[rows] = 0;
    if (p.channels) std::fill_n(at.decay + rows * at.ldd, whole<T>(p.d), T(1));
    else at.decay[rows] = 1;
  }
  pair_products(p, rows, at);
  pair_numbers(p, rows, at);
}

/// Some heads side by side of a sequence: `first` and the `count` from there on.
struct HeadBundle {
  DeltaHead first;
  Index count;
};

/// Asks for the part of the block at `time`, of all heads, that is due while head i passes: so memory is read in the order in which it
/// lies.
inline void want_part(const DeltaProblem& p, const HeadBundle& bundle, Index i, Index time, Ahead& ahead) {
  ahead.clear();
  const DeltaHead &first = bundle.first, last(p, first.sequence, first.o + bundle.count - 1);
  const Index rows = smaller(delta_block, first.end - time), from = rows * i / bundle.count, part = rows * (i + 1) / bundle.count - from;
  if (rows <= 0) return;
  ahead.want(p.k, first.row, first.k, time + from, part, p.d * (last.k - first.k + 1));
  ahead.want(p.q, first.row, first.q, time + from, part, p.d * (last.q - first.q + 1));
  ahead.want(p.v, first.row, first.v, time + from, part, p.e * (last.v - first.v + 1));
  ahead.want(p.o, first.row, first.o, time + from, part, p.e * bundle.count);
}

/// The outputs of a block of one head in these columns; S becomes the state behind it.
template <typename T>
void forward_block(const DeltaProblem& p, const DeltaHead& h, Columns columns, Index time, PairsScratch<T>& at) {
  const Index rows = smaller(delta_block, h.end - time), there = smaller(columns.end, p.e) - columns.begin;
  const auto part = [&](View x) {  // these columns alone
    x.data = static_cast<char*>(x.data) + columns.begin * x.stride[3] * bytes_of(x.type);
    return x;
  };
  if (T* to = kept_state_of<T>(p, h, time); to && h.writes_state(p)) write_panels(p, columns, at.S, to);
  load_pairs(p, h, time, rows, at);
  BlockRows<const T> v = {at.v, at.lde};
  BlockRows<T> o = {at.o, at.lde};
  if (passes_directly<T>(p.v, p.e) && !p.mask) {
    v = {static_cast<const T*>(p.v.data) + offset(p.v, h.row, h.v, time), p.v.stride[2]};
  } else {
    load_tile(part(p.v), h.row, h.v, time, rows, there, at.v + columns.begin, at.lde);
    clear_masked(p, h, time, rows, at.v, at.lde, at.lde);
  }
  const bool writes = passes_directly<T>(p.o, p.e);
  if (writes) o = {static_cast<T*>(p.o.data) + offset(p.o, h.row, h.o, time), p.o.stride[2]};
  over_panels<T>(p, columns, [&]<int N>(std::integral_constant<int, N>, Index j) {
    if (p.channels) pass_panel<N, true>(p, j, rows, v, o, at);
    else pass_panel<N, false>(p, j, rows, v, o, at);
  });
  if (!writes) store_tile(at.o + columns.begin, at.lde, part(p.o), h.row, h.o, time, rows, there);
}

/// These columns of all heads of a bundle.
template <typename T>
void forward_columns(const DeltaProblem& p, const HeadBundle& bundle, Columns columns, PairsScratch<T>& at) {
  const DeltaHead& first = bundle.first;
  const auto each = [&](auto f) {
    for (Index i = 0; i < bundle.count; ++i) {
      at.S = at.states + i * p.d * whole<T>(p.e);
      f(DeltaHead(p, first.sequence, first.o + i), i);
    }
  };
  clear(at.none, at.lde);
  each([&](const DeltaHead& h, Index) { read_panels(p, columns, state_of<T>(p, h, p.before), at.S); });
  for (Index time = first.begin; time < first.end; time += delta_block)
    each([&](const DeltaHead& h, Index i) {
      want_part(p, bundle, i, time + delta_block, at.ahead);
      forward_block(p, h, columns, time, at);
    });
  each([&](const DeltaHead& h, Index) {
    if (p.after && h.writes_state(p)) write_panels(p, columns, at.S, state_of<T>(p, h, p.after));
  });
}

/// Into how many tasks the columns of a head are cut: where heads are few, so that no thread is idle. It changes no bit.
template <typename T>
Index cuts_of_columns(const DeltaProblem& p, Index heads) {
  const Index panels = (whole<T>(p.e) / width<T> + pair_vectors - 1) / pair_vectors;
  return heads % p.threads == 0 || heads >= 4 * p.threads ? 1 : smaller(p.threads, panels);
}

template <typename T>
void delta_forward(const DeltaProblem& p) {
  const Index cuts = cuts_of_columns<T>(p, p.sequences * p.heads), panel = pair_vectors * width<T>;
  const Index panels = (whole<T>(p.e) + panel - 1) / panel;
  const Index most = cuts > 1 ? 1 : heads_at_once(p, p.heads, p.d * whole<T>(p.e) * static_cast<Index>(sizeof(T)));
  const Index bundles = (p.heads + most - 1) / most;
  parallel_with<PairsScratch<T>>(p, p.sequences * bundles * cuts, [&](Index i, PairsScratch<T>& at) {
    const Index cut = i % cuts, bundle = i / cuts % bundles, sequence = i / cuts / bundles;
    const Columns columns = {panels * cut / cuts * panel, smaller(panels * (cut + 1) / cuts * panel, whole<T>(p.e))};
    const HeadBundle heads = {DeltaHead(p, sequence, bundle * most), smaller(most, p.heads - bundle * most)};
    if (columns.begin < columns.end) forward_columns(p, heads, columns, at);
  }, p, most);
}

}  // namespace TARNN_ISA
}  // namespace tarnn
