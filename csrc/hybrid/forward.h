// Hybrid attention, forward: softmax over a window and sinks, features for all other keys, one denominator.
//
//     o_i = (Σ_exact e^(s_ij) v_j + e^(a_i + M_i) Sᵀφ_i) / (Σ_exact e^(s_ij) + e^(a_i + M_i) zᵀφ_i)
//
// To both sides, sums of the keys behind the window join: the same sweep with time reversed, done first.
//
// A task is a row and a key/value head: it goes through the queries in chunks, those of all its query heads together, with
// the sums in scratch. Exact keys come in blocks, their softmax with a running maximum (Milakov and Gimelshein 2018, arXiv
// 1805.02867); the sums are those of causal linear attention over keys that are `window` tokens late. Where features come as
// logarithms, sums have a unit for each (units.h), and M is 0.
#pragma once

#include <cmath>

#include "common/memory.h"
#include "hybrid/problem.h"
#include "hybrid/units.h"
#include "simd/matmul.h"

namespace tarnn {
namespace TARNN_ISA {

constexpr Index key_block = 64;

template <typename T>
struct HybridScratch {
  Index c, m, ldd, lde, ldf, ldc;
  T *q, *k_t, *v, *p, *o, *most, *total, *sums, *fade;                // exact
  T *phi_q, *phi_k, *phi_t, *pairs, *far, *den, *S, *z, *w, *unit, *units, *keep;  // far
  template <typename P>
  HybridScratch(Scratch& scratch, const P& p_, Index c)
      : c(c), m(p_.r * c), ldd(whole<T>(p_.d)), lde(whole<T>(p_.e)), ldf(whole<T>(p_.f)), ldc(whole<T>(c)) {
    q = scratch.take<T>(m * ldd);
    k_t = scratch.take<T>(ldd * key_block);
    v = scratch.take<T>(key_block * lde);
    p = scratch.take<T>(m * key_block);
    sums = scratch.take<T>(ldd > ldf ? ldd : ldf);
    fade = scratch.take<T>(key_block);
    phi_q = scratch.take<T>(m * ldf);
    pairs = scratch.take<T>(m * ldc);
    S = scratch.take<T>(ldf * lde);
    w = scratch.take<T>(ldc);
    for (T** x : {&phi_k, &phi_t}) *x = scratch.take<T>(ldc * ldf);
    for (T** x : {&o, &far}) *x = scratch.take<T>(m * lde);
    for (T** x : {&most, &total, &den, &unit}) *x = scratch.take<T>(m);
    for (T** x : {&z, &units, &keep}) *x = scratch.take<T>(ldf);
  }
};

inline Index chunk_of(const HybridProblem& p) {
  return p.r >= 4 ? 32 : 64;
}

/// softcap·tanh(x/softcap), by e^(−2|x|/softcap).
template <typename T>
TARNN_INLINE Vec<T> capped(Vec<T> x, T softcap) {
  const Vec<T> y = x / softcap, size = y < 0 ? -y : y, small = exp_nonpositive(T(-2) * size);
  const Vec<T> tanh = (T(1) - small) / (T(1) + small);
  return softcap * (y < 0 ? -tanh : tanh);
}

/// Up to key_block keys from `from` on join the softmax of the rows. first, last (of a row's query i of the chunk): which of
/// these keys it sees, from first(i) up to but not last(i).
/// fade: added to the products with each key; null: nothing. (Inlined, so that first and last are: they are asked for each row.)
template <typename T, typename P, typename First, typename Last>
TARNN_INLINE void add_keys(const P& p, const View& k, const View& v, Index b, Index g, Index from, Index keys, Index queries,
              HybridScratch<T>& at, First first, Last last, const T* fade = nullptr) {
  const Index wide = whole<T>(keys);
  const T softcap = static_cast<T>(p.softcap);
  clear(at.sums, at.ldd);
  load_transposed(k, b, g, from, keys, p.d, at.k_t, key_block, at.sums);
  load_tile(v, b, g, from, keys, p.e, at.v, at.lde);
  for (Index i = keys; i < wide; ++i) clear(at.v + i * at.lde, at.lde);
  const Integers<T> lane = iota<T>();
  for (Index r = 0; r < p.r; ++r) {
    T* rows = at.p + r * at.c * key_block;
    matmul(queries, keys, p.d, Left<T>{at.q + r * at.c * at.ldd, at.ldd, 1}, at.k_t, key_block, rows, key_block, false);
    for (Index i = 0; i < queries; ++i) {
      T *row = rows + i * key_block, *o = at.o + (r * at.c + i) * at.lde;
      const int begin = static_cast<int>(first(i)), end = static_cast<int>(last(i) < keys ? last(i) : keys);
      T &most = at.most[r * at.c + i], &total = at.total[r * at.c + i];
      Vec<T> largest_of = broadcast<T>(-INFINITY);
      for (Index j = 0; j < wide; j += width<T>) {
        const Integers<T> number = lane + static_cast<int>(j);
        Vec<T> y = load(row + j);
        if (softcap != T(0)) y = capped(y, softcap);
        if (fade) y += load(fade + j);
        const Vec<T> x = (number >= begin) & (number < end) ? y : broadcast<T>(-INFINITY);
        store(row + j, x);
        largest_of = x > largest_of ? x : largest_of;
      }
      const T now = largest<T>(largest_of), unit = now > most ? now : most;
      if (unit == -INFINITY) {  // no key is seen, or NaN in all of them, which is no maximum
        Vec<T> nothing{};
        for (Index j = 0; j < wide; j += width<T>) {
          const Vec<T> x = load(row + j);
          nothing += x == x ? Vec<T>{} : x;
        }
        total += sum<T>(nothing);
        clear(row, wide);
        continue;
      }
      const T added = exp_in_units(row, wide, unit), keep = most == unit ? T(1) : raise_maximum(most, unit);
      if (keep != T(1)) scale(o, at.lde, keep);
      total = total * keep + added;
    }
    matmul(queries, p.e, keys, Left<T>{rows, key_block, 1}, at.v, at.lde, at.o + r * at.c * at.lde, at.lde, true);
  }
}

/// The first `length` tokens of x, with time reversed.
inline View reversed(const View& x, Index length) {
  View out = x;
  if (!x) return out;
  out.data = static_cast<char*>(x.data) + (length - 1) * x.stride[2] * bytes_of(x.type);
  out.stride[2] = -x.stride[2];
  return out;
}

/// Where the features of the keys are that enter the sums: number time + i + shift at query time + i, if it is one of `limit`.
struct Entering {
  View phi_q, phi_k, weight, v;
  Index shift, limit;
};

inline Entering entering(const HybridProblem& p, Index b, bool behind) {
  if (p.causal) return {p.phi_q, p.phi_k, p.weight, p.v, 0, p.t};
  const Index length = p.length[b];
  View v = p.v;  // of the new keys
  v.data = static_cast<char*>(v.data) + p.window * v.stride[2] * bytes_of(v.type);
  if (!behind) return {p.phi_q, p.phi_k, p.weight, v, -p.window, length};
  return {reversed(p.phi_q, length), reversed(p.phi_k, length), reversed(p.weight, length), reversed(v, length),
          -p.window, length};
}

/// Those of a chunk, into phi_k, w and v; zeros and −∞ where there are none.
template <typename T>
void load_entering(const HybridProblem& p, const Entering& in, Index b, Index g, Index time, Index queries, HybridScratch<T>& at) {
  const Index from = time + in.shift, first = from < 0 ? smaller(-from, queries) : 0;
  const Index last = in.limit - from < queries ? (in.limit - from > first ? in.limit - from : first) : queries;
  clear(at.phi_k, at.ldc * at.ldf);
  clear(at.v, queries * at.lde);
  std::fill_n(at.w, at.ldc, T(-INFINITY));
  if (first == last) return;
  load_tile(in.phi_k, b, g, from + first, last - first, p.f, at.phi_k + first * at.ldf, at.ldf);
  for (Index i = first; i < last; ++i) at.w[i] = element<T>(in.weight, b, g, from + i);
  load_tile(in.v, b, g, from + first, last - first, p.e, at.v + first * at.lde, at.lde);
}

/// A run's keys, in units of e^M, enter z, which is multiplied with `keep` before.
template <typename T>
void enter(T* phi_k, const T* w, Index rows, T M, T keep, HybridScratch<T>& at) {
  scale(at.z, at.ldf, keep);
  for (Index i = 0; i < rows; ++i, phi_k += at.ldf) {
    const T weight = exp_one<T>(w[i] - finite(M));
    for (Index j = 0; j < at.ldf; j += width<T>) {
      const Vec<T> x = load(phi_k + j) * weight;
      store(phi_k + j, x);
      store(at.z + j, load(at.z + j) + x);
    }
  }
}

/// Some keys that leave the window in this chunk, from number `first` on, and those that left it before, as its queries see
/// them: `far`, `den` in units of e^unit; then they enter the sums.
template <typename T>
void add_run(const HybridProblem& p, const Entering& in, Index b, Index g, Index time, Index first, Index queries, T& M,
             HybridScratch<T>& at) {
  T *phi_k = at.phi_k + first * at.ldf, *v = at.v + first * at.lde;
  const T* w = at.w + first;
  transpose(phi_k, at.ldf, queries, p.f, at.phi_t, at.ldc);
  T most = M;
  for (Index i = 0; i < queries; ++i) {
    most = w[i] > most ? w[i] : most;
    at.unit[first + i] = finite(most);
    if (w[i] == -INFINITY) clear(v + i * at.lde, at.lde);  // whatever stands there
  }
  const Integers<T> lane = iota<T>();
  for (Index r = 0; r < p.r; ++r) {
    T *phi = at.phi_q + r * at.c * at.ldf, *pairs = at.pairs + r * at.c * at.ldc, *den = at.den + r * at.c + first;
    T* units = at.unit + r * at.c + first;
    std::copy_n(at.unit + first, queries, units);
    load_tile(in.phi_q, b, g * p.r + r, time + first, queries, p.f, phi, at.ldf);
    for (Index i = 0; p.log_features && i < queries; ++i) {
      add_weight(phi + i * at.ldf, T(0), p.f, at.ldf);
      units[i] = query_in_units(phi + i * at.ldf, at.units, at.ldf);
    }
    matmul(queries, queries, p.f, Left<T>{phi, at.ldf, 1}, at.phi_t, at.ldc, pairs, at.ldc, false);
    for (Index i = 0; i < queries; ++i) {
      T* row = pairs + i * at.ldc;
      const T unit = p.log_features ? T(0) : units[i], before = exp_one<T>(M - unit);
      Vec<T> sum_of{};
      for (Index j = 0; j < whole<T>(queries); j += width<T>) {
        const Vec<T> weight = lane + static_cast<int>(j) <= static_cast<int>(i) ? load(w + j) - unit : broadcast<T>(-INFINITY);
        const Vec<T> x = lane + static_cast<int>(j) <= static_cast<int>(i) ? load(row + j) * exp_nonpositive(weight) : Vec<T>{};
        store(row + j, x);
        sum_of += x;
      }
      scale(phi + i * at.ldf, at.ldf, before);
      den[i] = sum<T>(sum_of) + dot(phi + i * at.ldf, at.z, at.ldf);
    }
    T* far = at.far + (r * at.c + first) * at.lde;
    matmul(queries, p.e, p.f, Left<T>{phi, at.ldf, 1}, at.S, at.lde, far, at.lde, false);
    matmul<Part::lower_left>(queries, p.e, queries, Left<T>{pairs, at.ldc, 1}, v, at.lde, far, at.lde, true);
  }
  const T keep = raise_maximum(M, most);
  if (keep != T(1)) scale(at.S, p.f * at.lde, keep);
  enter(phi_k, w, queries, M, keep, at);
  matmul(p.f, p.e, queries, Left<T>{phi_k, 1, at.ldf}, v, at.lde, at.S, at.lde, true);
}

/// Logarithms of the features of a chunk's keys take up their weights: 0 is left of those, or −∞.
template <typename T>
void take_weights(const HybridProblem& p, Index queries, HybridScratch<T>& at) {
  for (Index i = 0; i < queries; ++i) {
    add_weight(at.phi_k + i * at.ldf, at.w[i], p.f, at.ldf);
    if (at.w[i] != T(-INFINITY)) at.w[i] = T(0);
  }
}

/// Begins a run of a chunk's keys at number `first`: raises units, by which scale(keep) changes the sums, and makes features
/// of logarithms. Returns how many keys it has.
template <typename T, typename F>
Index begin_run(Index first, Index queries, HybridScratch<T>& at, F scale) {
  T* row = at.phi_k + first * at.ldf;
  if (!is_within(row, at.units, at.ldf)) {
    raise(row, at.units, at.keep, at.ldf);
    scale(at.keep);
  }
  Index rows = 1;
  while (first + rows < queries && is_within(row + rows * at.ldf, at.units, at.ldf)) ++rows;
  for (Index i = 0; i < rows; ++i) key_in_units(row + i * at.ldf, at.units, at.ldf);
  return rows;
}

/// All keys that leave the window in this chunk.
template <typename T>
void add_far(const HybridProblem& p, const Entering& in, Index b, Index g, Index time, Index queries, T& M, HybridScratch<T>& at) {
  load_entering(p, in, b, g, time, queries, at);
  if (!p.log_features) return add_run(p, in, b, g, time, 0, queries, M, at);
  take_weights(p, queries, at);
  for (Index first = 0, rows; first < queries; first += rows) {
    rows = begin_run(first, queries, at, [&](const T* keep) {
      scale_rows(at.S, at.lde, p.f, p.e, keep);
      multiply(at.z, keep, at.ldf, 1, at.ldf, at.z);
    });
    add_run(p, in, b, g, time, first, rows, M, at);
  }
}

/// Features that have underflowed beyond this say nothing, and their gradients would be infinite (numerics.default_eps).
template <typename T>
constexpr T least_den = sizeof(T) == 4 ? T(1e-30) : T(1e-290);

/// One query's far parts are put together with its exact one: (e^(most)·o, total) += e^(unit)·(far, den), and the far share of the
/// total.
template <typename T>
void join_far(T unit, const T* far, T den, Index lde, T* o, T& most, T& total, T& share) {
  if (den <= least_den<T>) return;  // a NaN goes on
  const T next = most > unit ? most : unit, keep = exp_one<T>(most - next), factor = exp_one<T>(unit - next);
  for (Index j = 0; j < lde; j += width<T>) store(o + j, load(o + j) * keep + load(far + j) * factor);
  total = total * keep + factor * den;
  share = share * keep + factor * den;
  most = next;
}

/// Exact and far parts with one denominator, to o and, if asked for, ρ and ℓ.
template <typename T>
void put_together(const HybridProblem& p, Index b, Index g, Index time, Index queries, HybridScratch<T>& at) {
  for (Index r = 0; r < p.r; ++r) {
    const Index head = g * p.r + r;
    for (Index i = 0; i < queries; ++i) {
      const Index x = r * at.c + i;
      T *o = at.o + x * at.lde, share = T(0);
      if (p.f) {
        const T a = element<T>(p.a, b, head, time + i);
        join_far(a + at.unit[x], at.far + x * at.lde, at.den[x], at.lde, o, at.most[x], at.total[x], share);
        if (p.behind) {
          const T* behind = &element<T>(p.behind, b, head, time + i);
          if (p.joined) {
            T* joined = &element<T>(p.joined, b, head, time + i);
            joined[0] = !(at.den[x] <= least_den<T>), joined[1] = !(behind[p.e] <= least_den<T>);
          }
          read_rows(behind, 1, p.e, at.far + x * at.lde, at.lde);
          join_far(a + behind[p.e + 1], at.far + x * at.lde, behind[p.e], at.lde, o, at.most[x], at.total[x], share);
        }
      }
      const T inverse = at.total[x] == T(0) ? T(0) : T(1) / at.total[x];
      scale(o, at.lde, inverse);
      if (p.share) element<T>(p.share, b, head, time + i) = share * inverse;
      if (p.log_total)
        element<T>(p.log_total, b, head, time + i) = at.total[x] == T(0) ? T(INFINITY) : at.most[x] + std::log(at.total[x]);
    }
    store_tile(at.o + r * at.c * at.lde, at.lde, p.o, b, head, time, queries, p.e);
  }
}

/// The units of sums (null: of none yet), into `units` where features come as logarithms; returns M.
template <typename T>
T begin_units(const HybridProblem& p, const T* M, HybridScratch<T>& at) {
  if (!p.log_features) return M ? *M : T(-INFINITY);
  clear(at.units, at.ldf);
  M ? std::copy_n(M, p.f, at.units) : std::fill_n(at.units, p.f, T(-INFINITY));
  return T(0);
}

/// What the sums of the keys behind their windows give to all queries, to `behind`: numerators, denominator and its unit.
template <typename T>
void look_behind(const HybridProblem& p, Index b, Index g, HybridScratch<T>& at) {
  const Index length = p.length[b];
  const Entering in = entering(p, b, true);
  clear(at.S, at.ldf * at.lde);
  clear(at.z, at.ldf);
  T M = begin_units<T>(p, nullptr, at);
  for (Index time = 0; time < length; time += at.c) {
    const Index queries = smaller(at.c, length - time);
    add_far(p, in, b, g, time, queries, M, at);
    for (Index r = 0; r < p.r; ++r)
      for (Index i = 0; i < queries; ++i) {
        const Index x = r * at.c + i;
        T* to = &element<T>(p.behind, b, g * p.r + r, length - 1 - time - i);
        std::copy_n(at.far + x * at.lde, p.e, to);
        to[p.e] = at.den[x], to[p.e + 1] = at.unit[x];
      }
  }
}

/// The queries of a chunk, times the scale.
template <typename T>
void load_scaled_queries(const HybridProblem& p, Index b, Index g, Index time, Index queries, HybridScratch<T>& at) {
  const T scale = static_cast<T>(p.scale);
  for (Index r = 0; r < p.r; ++r)
    load_tile(p.q, b, g * p.r + r, time, queries, p.d, at.q + r * at.c * at.ldd, at.ldd, [&](auto x) { return x * scale; });
}

/// Which keys a chunk of queries sees: visit(k, v, from, keys, first, last) for each block of the window's row, then of sinks.
/// Query i of the chunk sees keys first(i) … last(i) − 1 of the block.
template <typename V>
void over_exact(const HybridProblem& p, Index b, Index time, Index queries, V visit) {
  const Index count = p.count[b], length = p.length[b];
  const Index sinks = p.barred ? p.num_sinks[b] : p.sinks, seen = p.barred ? sinks : length;
  const Index none = (p.barred ? 0 : sinks) + p.window - count;  // the first so many of the row are no keys of the window
  const Index reach = p.causal ? p.window : 2 * p.window - 1, all = p.window + length;
  const Index begin = none > time + 1 ? none : time + 1;
  const Index end = smaller(time + queries + reach, all);
  for (Index from = begin; from < end; from += key_block)
    visit(false, from, smaller(key_block, end - from), [=](Index i) { return time + i + 1 - from; },
          [=](Index i) { return time + i + 1 + reach - from; });
  for (Index from = 0; from < sinks; from += key_block) {
    const bool causal = p.causal;
    visit(true, from, smaller(key_block, sinks - from), [](Index) { return Index(0); },
          [=](Index i) { return (causal ? count + time + i + 1 : seen) - from; });
  }
}

/// What is added to the products with these keys of the window's row: −∞ where they stand among the sinks. Null: nothing.
template <typename T>
const T* bars(const HybridProblem& p, bool sink, Index b, Index from, Index keys, HybridScratch<T>& at) {
  if (sink || !p.barred) return nullptr;
  for (Index j = 0; j < key_block; ++j) at.fade[j] = j < keys ? element<T>(p.barred, b, 0, from + j) : T(0);
  return at.fade;
}

template <typename T>
void hybrid_head(const HybridProblem& p, Index b, Index g, HybridScratch<T>& at) {
  const Index length = p.length[b], size = p.f * p.e, state = b * p.g + g, maxima = p.log_features ? p.f : 1;
  T M = -INFINITY;
  Entering in{};
  if (p.f && !p.causal) look_behind(p, b, g, at);
  if (p.f) {
    in = entering(p, b, false);
    read_rows(static_cast<const T*>(p.before.S) + state * size, p.f, p.e, at.S, at.lde);
    read_rows(static_cast<const T*>(p.before.z) + state * p.f, 1, p.f, at.z, at.ldf);
    M = begin_units(p, static_cast<const T*>(p.before.M) + state * maxima, at);
  }
  for (Index time = 0; time < length; time += at.c) {
    const Index queries = smaller(at.c, length - time);
    load_scaled_queries(p, b, g, time, queries, at);
    clear(at.o, at.m * at.lde);
    clear(at.total, at.m);
    std::fill_n(at.most, at.m, T(-INFINITY));
    over_exact(p, b, time, queries, [&](bool sink, Index from, Index keys, auto first, auto last) {
      add_keys(p, sink ? p.sink_k : p.k, sink ? p.sink_v : p.v, b, g, from, keys, queries, at, first, last,
               bars(p, sink, b, from, keys, at));
    });
    if (p.f) add_far(p, in, b, g, time, queries, M, at);
    put_together(p, b, g, time, queries, at);
  }
  if (!p.f) return;
  write_rows(at.S, at.lde, p.f, p.e, static_cast<T*>(p.after.S) + state * size);
  write_rows(at.z, at.ldf, 1, p.f, static_cast<T*>(p.after.z) + state * p.f);
  std::copy_n(p.log_features ? at.units : &M, maxima, static_cast<T*>(p.after.M) + state * maxima);
}

/// head(b, g, scratch) for each row and key/value head, on torch's threads; chunks of c tokens.
template <typename Layout, typename P, typename F>
void over_heads(const P& p, Index c, F head) {
  parallel_with<Layout>(p, p.b * p.g, [&](Index i, Layout& at) { head(i / p.g, i % p.g, at); }, p, c);
}

template <typename T>
void hybrid_forward(const HybridProblem& p) {
  over_heads<HybridScratch<T>>(p, chunk_of(p), [&](Index b, Index g, auto& at) { hybrid_head<T>(p, b, g, at); });
}

}  // namespace TARNN_ISA
}  // namespace tarnn
