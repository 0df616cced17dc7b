// Hybrid attention, causal, forward: softmax over a window and sinks, features for all keys before, one denominator.
//
//     o_i = (Σ_exact e^(s_ij) v_j + e^(a_i + M_i) Sᵀφ_i) / (Σ_exact e^(s_ij) + e^(a_i + M_i) zᵀφ_i)
//
// A task is a row and a key/value head: it goes through the queries in chunks, those of all its query heads together, with
// the sums in scratch. Exact keys come in blocks, their softmax with a running maximum (Milakov and Gimelshein 2018, arXiv
// 1805.02867); the sums are those of causal linear attention over keys that are `window` tokens late.
#pragma once

#include <cmath>

#include "attention/hybrid_problem.h"
#include "attention/state.h"

namespace tarnn {
namespace TARNN_ISA {

constexpr Index key_block = 64;

template <typename T>
struct HybridScratch {
  Index c, m, ldd, lde, ldf, ldc;
  T *q, *k_t, *v, *p, *o, *most, *total, *sums;               // exact
  T *phi_q, *phi_k, *phi_t, *pairs, *far, *den, *S, *z, *w, *M;  // far
  HybridScratch(Scratch& scratch, const HybridProblem& p_)
      : c(p_.r >= 4 ? 32 : 64), m(p_.r * c), ldd(whole<T>(p_.d)), lde(whole<T>(p_.e)), ldf(whole<T>(p_.f)), ldc(whole<T>(c)) {
    q = scratch.take<T>(m * ldd);
    k_t = scratch.take<T>(ldd * key_block);
    v = scratch.take<T>(key_block * lde);
    p = scratch.take<T>(m * key_block);
    o = scratch.take<T>(m * lde);
    most = scratch.take<T>(m);
    total = scratch.take<T>(m);
    sums = scratch.take<T>(ldd > ldf ? ldd : ldf);
    phi_q = scratch.take<T>(m * ldf);
    phi_k = scratch.take<T>(c * ldf);
    phi_t = scratch.take<T>(ldf * ldc);
    pairs = scratch.take<T>(m * ldc);
    far = scratch.take<T>(m * lde);
    den = scratch.take<T>(m);
    S = scratch.take<T>(ldf * lde);
    z = scratch.take<T>(ldf);
    w = scratch.take<T>(ldc);
    M = scratch.take<T>(c);
  }
};

/// Up to key_block keys from `from` on join the softmax of the rows. first, last (of a row's query i of the chunk): which of
/// these keys it sees, from first(i) up to but not last(i).
template <typename T, typename First, typename Last>
void add_keys(const HybridProblem& p, const View& k, const View& v, Index b, Index g, Index from, Index keys, Index queries,
              HybridScratch<T>& at, First first, Last last) {
  const Index wide = whole<T>(keys);
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
        const Vec<T> x = (number >= begin) & (number < end) ? load(row + j) : broadcast<T>(-INFINITY);
        store(row + j, x);
        largest_of = x > largest_of ? x : largest_of;
      }
      const T now = largest<T>(largest_of), unit = now > most ? now : most;
      if (unit == -INFINITY) {
        clear(row, wide);
        continue;
      }
      Vec<T> sum_of{};
      for (Index j = 0; j < wide; j += width<T>) {
        const Vec<T> x = exp_nonpositive(load(row + j) - unit);
        store(row + j, x);
        sum_of += x;
      }
      const T keep = most == unit ? T(1) : exp_one<T>(most - unit);
      if (keep != T(1))
        for (Index j = 0; j < at.lde; j += width<T>) store(o + j, load(o + j) * keep);
      total = total * keep + sum<T>(sum_of);
      most = unit;
    }
    matmul(queries, p.e, keys, Left<T>{rows, key_block, 1}, at.v, at.lde, at.o + r * at.c * at.lde, at.lde, true);
  }
}

/// The keys that leave the window in this chunk, and those that left it before, as its queries see them: `far`, `den` in units of
/// e^(M_i); then they enter the sums.
template <typename T>
void add_far(const HybridProblem& p, Index b, Index g, Index time, Index queries, T& M, HybridScratch<T>& at) {
  load_tile(p.phi_k, b, g, time, queries, p.f, at.phi_k, at.ldf);
  clear(at.sums, at.ldf);
  load_transposed(p.phi_k, b, g, time, queries, p.f, at.phi_t, at.ldc, at.sums);
  at_position<T>(p.weight, b, g, time, [&](auto format, auto from) {
    load_rows<decltype(format)>(from, 0, p.weight.stride[2], 1, queries, at.w, at.ldc, AsItIs());
  });
  load_tile(p.v, b, g, time, queries, p.e, at.v, at.lde);
  T most = M;
  for (Index i = 0; i < queries; ++i) {
    most = at.w[i] > most ? at.w[i] : most;
    at.M[i] = most;
    if (at.w[i] == -INFINITY) clear(at.v + i * at.lde, at.lde);  // whatever stands there
  }
  const Integers<T> lane = iota<T>();
  for (Index r = 0; r < p.r; ++r) {
    T *phi = at.phi_q + r * at.c * at.ldf, *pairs = at.pairs + r * at.c * at.ldc;
    load_tile(p.phi_q, b, g * p.r + r, time, queries, p.f, phi, at.ldf);
    matmul(queries, queries, p.f, Left<T>{phi, at.ldf, 1}, at.phi_t, at.ldc, pairs, at.ldc, false);
    for (Index i = 0; i < queries; ++i) {
      T* row = pairs + i * at.ldc;
      const T unit = finite(at.M[i]), before = exp_one<T>(M - unit);
      Vec<T> sum_of{};
      for (Index j = 0; j < whole<T>(queries); j += width<T>) {
        const Vec<T> weight = lane + static_cast<int>(j) <= static_cast<int>(i) ? load(at.w + j) - unit : broadcast<T>(-INFINITY);
        const Vec<T> x = lane + static_cast<int>(j) <= static_cast<int>(i) ? load(row + j) * exp_nonpositive(weight) : Vec<T>{};
        store(row + j, x);
        sum_of += x;
      }
      for (Index j = 0; j < at.ldf; j += width<T>) store(phi + i * at.ldf + j, load(phi + i * at.ldf + j) * before);
      at.den[r * at.c + i] = sum<T>(sum_of) + dot(phi + i * at.ldf, at.z, at.ldf);
    }
    T* far = at.far + r * at.c * at.lde;
    matmul(queries, p.e, p.f, Left<T>{phi, at.ldf, 1}, at.S, at.lde, far, at.lde, false);
    matmul<Part::lower_left>(queries, p.e, queries, Left<T>{pairs, at.ldc, 1}, at.v, at.lde, far, at.lde, true);
  }
  const T behind = finite(most), keep = exp_one<T>(M - behind);
  M = most;
  if (keep != T(1))
    for (Index j = 0; j < p.f * at.lde; j += width<T>) store(at.S + j, load(at.S + j) * keep);
  for (Index j = 0; j < at.ldf; j += width<T>) store(at.z + j, load(at.z + j) * keep);
  for (Index i = 0; i < queries; ++i) {
    const T weight = exp_one<T>(at.w[i] - behind);
    T* row = at.phi_k + i * at.ldf;
    for (Index j = 0; j < at.ldf; j += width<T>) {
      const Vec<T> x = load(row + j) * weight;
      store(row + j, x);
      store(at.z + j, load(at.z + j) + x);
    }
  }
  matmul(p.f, p.e, queries, Left<T>{at.phi_k, 1, at.ldf}, at.v, at.lde, at.S, at.lde, true);
}

/// Exact and far parts with one denominator, to o and, if asked for, ρ.
template <typename T>
void put_together(const HybridProblem& p, Index b, Index g, Index time, Index queries, HybridScratch<T>& at) {
  for (Index r = 0; r < p.r; ++r) {
    for (Index i = 0; i < queries; ++i) {
      const Index x = r * at.c + i, head = g * p.r + r;
      T *o = at.o + x * at.lde, near = T(1), far = T(0), share = T(0);
      if (p.f && at.den[x] > T(0)) {
        const T a = static_cast<const T*>(p.a.data)[offset(p.a, b, head, time + i)];
        const T unit = a + finite(at.M[i]), most = at.most[x] > unit ? at.most[x] : unit;
        near = exp_one<T>(at.most[x] - most), far = exp_one<T>(unit - most);
        share = far * at.den[x];
      }
      const T total = near * at.total[x] + share, inverse = total > T(0) ? T(1) / total : T(0);
      near *= inverse, far *= inverse;
      for (Index j = 0; j < at.lde; j += width<T>) {
        Vec<T> y = load(o + j) * near;
        if (far != T(0)) y += load(at.far + x * at.lde + j) * far;
        store(o + j, y);
      }
      if (p.share) static_cast<T*>(p.share.data)[offset(p.share, b, head, time + i)] = share * inverse;
    }
    store_tile(at.o + r * at.c * at.lde, at.lde, p.o, b, g * p.r + r, time, queries, p.e);
  }
}

template <typename T>
void hybrid_head(const HybridProblem& p, Index b, Index g, HybridScratch<T>& at) {
  const Index count = p.count[b], length = p.length[b], size = p.f * p.e, state = b * p.g + g;
  T M = -INFINITY;
  if (p.f) {
    read_rows(static_cast<const T*>(p.before.S) + state * size, p.f, p.e, at.S, at.lde);
    read_rows(static_cast<const T*>(p.before.z) + state * p.f, 1, p.f, at.z, at.ldf);
    M = static_cast<const T*>(p.before.M)[state];
  }
  const T scale = static_cast<T>(p.scale);
  const Index none = p.sinks + p.window - count;  // the first so many of the row are no keys of the window
  for (Index time = 0; time < length; time += at.c) {
    const Index queries = smaller(at.c, length - time);
    for (Index r = 0; r < p.r; ++r)
      load_tile(p.q, b, g * p.r + r, time, queries, p.d, at.q + r * at.c * at.ldd, at.ldd, [&](auto x) { return x * scale; });
    clear(at.o, at.m * at.lde);
    clear(at.total, at.m);
    std::fill_n(at.most, at.m, T(-INFINITY));
    // query i of the chunk sees the row's keys time + i + 1 … time + i + window
    const Index begin = none > time + 1 ? none : time + 1, end = time + queries + p.window;
    for (Index from = begin; from < end; from += key_block) {
      const Index keys = smaller(key_block, end - from);
      add_keys(p, p.k, p.v, b, g, from, keys, queries, at,
               [&](Index i) { return time + i + 1 - from; }, [&](Index i) { return time + i + 1 + p.window - from; });
    }
    for (Index from = 0; from < p.sinks; from += key_block)
      add_keys(p, p.sink_k, p.sink_v, b, g, from, smaller(key_block, p.sinks - from), queries, at,
               [&](Index) { return 0; }, [&](Index i) { return count + time + i + 1 - from; });
    if (p.f) add_far(p, b, g, time, queries, M, at);
    put_together(p, b, g, time, queries, at);
  }
  if (!p.f) return;
  for (Index i = 0; i < p.f; ++i)
    std::copy_n(at.S + i * at.lde, p.e, static_cast<T*>(p.after.S) + state * size + i * p.e);
  std::copy_n(at.z, p.f, static_cast<T*>(p.after.z) + state * p.f);
  static_cast<T*>(p.after.M)[state] = M;
}

template <typename T>
void hybrid_forward(const HybridProblem& p) {
  Scratch counting(nullptr);
  HybridScratch<T> layout(counting, p);
  parallel(p, p.b * p.g, counting.used(), [&](Index i, void* memory) {
    Scratch scratch(memory);
    HybridScratch<T> at(scratch, p);
    hybrid_head<T>(p, i / p.g, i % p.g, at);
  });
}

}  // namespace TARNN_ISA
}  // namespace tarnn
