// Gradients of hybrid attention, from o and ℓ of its forward pass (log of each query's denominator):
//
//     D_i = do_i·o_i       exact: p_ij = e^(s_ij − ℓ_i)            ds_ij = p_ij (do_i·v_j − D_i)
//                          far:   P_ij = e^(w_j + a_i − ℓ_i) φ_i·ψ_j   dφ_i = Σ_j e^(w_j + a_i − ℓ_i) (do_i·v_j − D_i) ψ_j
//
// and dψ_j, dv_j likewise. Of the far part, a forward sweep with S, z gives dφ; a reverse one, with T = Σ e^(a_i − ℓ_i) φ_i do_iᵀ
// and u = Σ e^(a_i − ℓ_i) D_i φ_i in units of e^N, dψ and dv. To both sides, the keys behind the window have both sweeps, too,
// with time reversed. Exponents of single pairs are bounded by what
// the least denominator allows; queries below that have a = −∞. Where features come as logarithms, the gradients are those of
// the logarithms; sums have units as in the forward pass, and T and u units N_c of their own, of log φ_ic + a_i − ℓ_i.
#pragma once

#include "hybrid/forward.h"

namespace tarnn {
namespace TARNN_ISA {

template <typename T>
constexpr T largest_exponent = sizeof(T) == 4 ? T(76) : T(668);  // −log of the least denominator

/// eˣ of any x, bounded above.
template <typename T>
TARNN_INLINE Vec<T> exp_bounded(Vec<T> x) {
  const Vec<T> y = x > largest_exponent<T> ? broadcast<T>(largest_exponent<T>) : x;
  const Vec<T> small = exp_nonpositive(y > 0 ? -y : y);
  return y > 0 ? T(1) / small : small;
}

template <typename T>
struct HybridGradients : HybridScratch<T> {
  T *grad_o, *grad_q, *D, *log_total, *a, *k, *v_t, *dp, *tile_k, *tile_v, *state_t, *grad_phi, *tile_phi;
  HybridGradients(Scratch& scratch, const HybridProblem& p, Index c) : HybridScratch<T>(scratch, p, c) {
    const Index rows = key_block > this->ldc ? key_block : this->ldc;
    grad_o = scratch.take<T>(this->m * this->lde);
    grad_q = scratch.take<T>(this->m * this->ldd);
    D = scratch.take<T>(this->m);
    log_total = scratch.take<T>(this->m);
    a = scratch.take<T>(this->m);
    k = scratch.take<T>(key_block * this->ldd);
    v_t = scratch.take<T>(this->lde * rows);
    dp = scratch.take<T>(this->m * rows);
    tile_k = scratch.take<T>(key_block * this->ldd);
    tile_v = scratch.take<T>(rows * this->lde);
    state_t = scratch.take<T>(this->lde * this->ldf);
    grad_phi = scratch.take<T>(this->ldc * this->ldf);
    tile_phi = scratch.take<T>(this->ldc * this->ldf);
  }
};

/// A tile is added to positions time, time + 1, … of a gradient with n channels, to those from 0 to below `limit`.
template <typename T>
void add_tile(const T* tile, Index ld, Index rows, Index n, const View& to, Index b, Index head, Index time, Index limit) {
  for (Index i = time < 0 ? -time : 0; i < smaller(rows, limit - time); ++i) {
    T* row = &element<T>(to, b, head, time + i);
    for (Index j = 0; j < n; ++j) row[j] += tile[i * ld + j];
  }
}

/// What all of a chunk's queries bring: do, D, ℓ and a.
template <typename T>
void load_gradients(const HybridProblem& p, Index b, Index g, Index time, Index queries, HybridGradients<T>& at) {
  for (Index r = 0; r < p.r; ++r) {
    const Index head = g * p.r + r, x = r * at.c;
    load_tile(p.grad_o, b, head, time, queries, p.e, at.grad_o + x * at.lde, at.lde);
    load_tile(p.o, b, head, time, queries, p.e, at.o + x * at.lde, at.lde);
    for (Index i = 0; i < queries; ++i) {
      at.D[x + i] = dot(at.grad_o + (x + i) * at.lde, at.o + (x + i) * at.lde, at.lde);
      at.log_total[x + i] = element<T>(p.log_total, b, head, time + i);
      at.a[x + i] = p.f ? element<T>(p.a, b, head, time + i) : T(0);
    }
  }
}

/// The exact keys of a block: their gradients, and what they add to those of the queries.
template <typename T, typename First, typename Last>
void exact_gradients(const HybridProblem& p, bool sink, Index b, Index g, Index from, Index keys, Index queries,
                     HybridGradients<T>& at, First first, Last last) {
  const View &k = sink ? p.sink_k : p.k, &v = sink ? p.sink_v : p.v;
  const T* barred = bars(p, sink, b, from, keys, at);
  const T softcap = static_cast<T>(p.softcap);
  const Integers<T> lane = iota<T>();
  clear(at.sums, at.ldd);
  load_transposed(k, b, g, from, keys, p.d, at.k_t, key_block, at.sums);
  load_tile(k, b, g, from, keys, p.d, at.k, at.ldd);
  load_tile(v, b, g, from, keys, p.e, at.v, at.lde);
  clear(at.v + keys * at.lde, (key_block - keys) * at.lde);
  transpose(at.v, at.lde, keys, p.e, at.v_t, key_block);
  clear(at.tile_k, keys * at.ldd);
  clear(at.tile_v, keys * at.lde);
  for (Index r = 0; r < p.r; ++r) {
    const T *q = at.q + r * at.c * at.ldd, *grad_o = at.grad_o + r * at.c * at.lde;
    T *rows = at.p + r * at.c * key_block, *dp = at.dp;
    matmul(queries, keys, p.d, Left<T>{q, at.ldd, 1}, at.k_t, key_block, rows, key_block, false);
    matmul(queries, keys, p.e, Left<T>{grad_o, at.lde, 1}, at.v_t, key_block, dp, key_block, false);
    for (Index i = 0; i < queries; ++i) {
      const int begin = static_cast<int>(first(i)), end = static_cast<int>(last(i) < keys ? last(i) : keys);
      const T D = at.D[r * at.c + i], log_total = at.log_total[r * at.c + i];
      for (Index j = 0; j < keys; j += width<T>) {
        const Integers<T> number = lane + static_cast<int>(j);
        Vec<T> x = load(rows + i * key_block + j), slope = broadcast<T>(T(1));
        if (softcap != T(0)) {
          x = capped(x, softcap);
          slope = T(1) - (x / softcap) * (x / softcap);
        }
        if (barred) x += load(barred + j);
        x -= log_total;
        const Vec<T> e = exp_nonpositive(x > 0 ? Vec<T>{} : x), weight = (number >= begin) & (number < end) ? e : Vec<T>{};
        const Vec<T> change = weight * slope * (load(dp + i * key_block + j) - D);
        store(rows + i * key_block + j, weight);
        store(dp + i * key_block + j, (number >= begin) & (number < end) ? change : Vec<T>{});
      }
    }
    matmul(queries, p.d, keys, Left<T>{dp, key_block, 1}, at.k, at.ldd, at.grad_q + r * at.c * at.ldd, at.ldd, true);
    matmul(keys, p.d, queries, Left<T>{dp, 1, key_block}, q, at.ldd, at.tile_k, at.ldd, true);
    matmul(keys, p.e, queries, Left<T>{rows, 1, key_block}, grad_o, at.lde, at.tile_v, at.lde, true);
  }
  add_tile(at.tile_k, at.ldd, keys, p.d, sink ? p.grad_sink_k : p.grad_k, b, g, from, from + keys);
  add_tile(at.tile_v, at.lde, keys, p.e, sink ? p.grad_sink_v : p.grad_v, b, g, from, from + keys);
}

/// pairs (i, j) of a run from `first` on, j ≤ i: to `dp` e^(w_j + a_i − ℓ_i) (do_i·v_j − D_i), and `products`, if there, times that power; zeros above.
template <typename T>
void weigh_pairs(Index r, Index first, Index queries, T* products, HybridGradients<T>& at) {
  const Integers<T> lane = iota<T>();
  const T* w = at.w + first;
  for (Index i = 0; i < queries; ++i) {
    const Index x = r * at.c + first + i;
    const T unit = at.a[x] - at.log_total[x], D = at.D[x];
    for (Index j = 0; j < whole<T>(queries); j += width<T>) {
      const auto seen = lane + static_cast<int>(j) <= static_cast<int>(i);
      const Vec<T> power = exp_bounded<T>(load(w + j) + unit);
      T* dp = at.dp + i * at.ldc + j;
      store(dp, seen ? (load(dp) - D) * power : Vec<T>{});
      if (!products) continue;
      T* product = products + i * at.ldc + j;
      store(product, seen ? load(product) * power : Vec<T>{});
    }
  }
}

/// The keys that enter in a chunk, and their values transposed.
template <typename T>
void load_far_keys(const HybridProblem& p, const Entering& in, Index b, Index g, Index time, Index queries, HybridGradients<T>& at) {
  load_entering(p, in, b, g, time, queries, at);
  clear(at.v + queries * at.lde, (at.ldc - queries) * at.lde);
  transpose(at.v, at.lde, queries, p.e, at.v_t, at.ldc);
}

/// dφ of a run's queries, from number `first` of the chunk on, then its keys enter Sᵀ (`state_t`) and z.
template <typename T>
void query_run(const HybridProblem& p, const Entering& in, Index b, Index g, Index time, Index first, Index queries, T& M,
               HybridGradients<T>& at) {
  T *phi_k = at.phi_k + first * at.ldf, *v = at.v + first * at.lde;
  const T* w = at.w + first;
  for (Index r = 0; r < p.r; ++r) {
    const Left<T> grad_o{at.grad_o + (r * at.c + first) * at.lde, at.lde, 1};
    T *dphi = at.tile_phi, *phi = at.phi_q;
    if (p.log_features) load_tile(in.phi_q, b, g * p.r + r, time + first, queries, p.f, phi, at.ldf);
    for (Index i = 0; p.log_features && i < queries; ++i) {
      add_weight(phi + i * at.ldf, T(0), p.f, at.ldf);
      at.a[r * at.c + first + i] += query_in_units(phi + i * at.ldf, at.units, at.ldf);
    }
    matmul(queries, queries, p.e, grad_o, at.v_t + first, at.ldc, at.dp, at.ldc, false);
    weigh_pairs<T>(r, first, queries, nullptr, at);
    matmul<Part::lower_left>(queries, p.f, queries, Left<T>{at.dp, at.ldc, 1}, phi_k, at.ldf, dphi, at.ldf, false);
    if (M != T(-INFINITY)) {
      matmul(queries, p.f, p.e, grad_o, at.state_t, at.ldf, at.grad_phi, at.ldf, false);
      for (Index i = 0; i < queries; ++i) {
        const Index x = r * at.c + first + i;
        const T power = exp_bounded<T>(broadcast<T>(at.a[x] + M - at.log_total[x]))[0];
        for (Index j = 0; j < at.ldf; j += width<T>)
          store(dphi + i * at.ldf + j,
                load(dphi + i * at.ldf + j) + power * (load(at.grad_phi + i * at.ldf + j) - at.D[x] * load(at.z + j)));
      }
    }
    if (p.log_features) multiply(dphi, phi, at.ldf, queries, at.ldf, dphi);
    add_tile(dphi, at.ldf, queries, p.f, p.grad_phi_q, b, g * p.r + r, time + first, p.t);
  }
  T most = M;
  for (Index i = 0; i < queries; ++i) most = w[i] > most ? w[i] : most;
  const T keep = raise_maximum(M, most);
  scale(at.state_t, p.e * at.ldf, keep);
  enter(phi_k, w, queries, M, keep, at);
  matmul(p.e, p.f, queries, Left<T>{v, 1, at.lde}, phi_k, at.ldf, at.state_t, at.ldf, true);
}

/// Sᵀ or Tᵀ (`state_t`) and z or u (`z`) in other units.
template <typename T>
void change_units(const HybridProblem& p, const T* keep, HybridGradients<T>& at) {
  scale_columns(at.state_t, at.ldf, p.e, at.ldf, keep);
  scale_columns(at.z, at.ldf, 1, at.ldf, keep);
}

/// dφ of all of a chunk's queries.
template <typename T>
void query_gradients(const HybridProblem& p, const Entering& in, Index b, Index g, Index time, Index queries, T& M,
                     HybridGradients<T>& at) {
  load_far_keys(p, in, b, g, time, queries, at);
  if (!p.log_features) return query_run(p, in, b, g, time, 0, queries, M, at);
  take_weights(p, queries, at);
  for (Index first = 0, rows; first < queries; first += rows) {
    rows = begin_run(first, queries, at, [&](const T* keep) { change_units(p, keep, at); });
    query_run(p, in, b, g, time, first, rows, M, at);
  }
}

/// dψ and dv of a run's keys, from number `first` of the chunk on, from its queries and, through Tᵀ (`state_t`) and u (`z`), from
/// all later ones.
template <typename T>
void key_run(const HybridProblem& p, const Entering& in, Index b, Index g, Index time, Index first, Index queries, T& N,
             HybridGradients<T>& at) {
  T *phi_k = at.phi_k + first * at.ldf, *v = at.v + first * at.lde;
  const T* w = at.w + first;
  transpose(phi_k, at.ldf, queries, p.f, at.phi_t, at.ldc);
  clear(at.tile_phi, queries * at.ldf);
  clear(at.tile_v, queries * at.lde);
  if (N != T(-INFINITY)) {
    matmul(queries, p.f, p.e, Left<T>{v, at.lde, 1}, at.state_t, at.ldf, at.tile_phi, at.ldf, false);
    clear(at.state_t + p.e * at.ldf, (at.lde - p.e) * at.ldf);
    transpose(at.state_t, at.ldf, p.e, p.f, at.S, at.lde);
    matmul(queries, p.e, p.f, Left<T>{phi_k, at.ldf, 1}, at.S, at.lde, at.tile_v, at.lde, false);
    for (Index i = 0; i < queries; ++i) {
      const T power = exp_bounded<T>(broadcast<T>(w[i] + N))[0];
      T* row = at.tile_phi + i * at.ldf;
      for (Index j = 0; j < at.ldf; j += width<T>) store(row + j, power * (load(row + j) - load(at.z + j)));
      scale(at.tile_v + i * at.lde, at.lde, power);
    }
  }
  T most = N;
  for (Index r = 0; r < p.r; ++r) {
    const T* grad_o = at.grad_o + (r * at.c + first) * at.lde;
    T *phi = at.phi_q + (r * at.c + first) * at.ldf, *products = at.pairs;
    matmul(queries, queries, p.f, Left<T>{phi, at.ldf, 1}, at.phi_t, at.ldc, products, at.ldc, false);
    matmul(queries, queries, p.e, Left<T>{grad_o, at.lde, 1}, at.v_t + first, at.ldc, at.dp, at.ldc, false);
    weigh_pairs<T>(r, first, queries, products, at);
    matmul(queries, p.f, queries, Left<T>{at.dp, 1, at.ldc}, phi, at.ldf, at.tile_phi, at.ldf, true);
    matmul(queries, p.e, queries, Left<T>{products, 1, at.ldc}, grad_o, at.lde, at.tile_v, at.lde, true);
    for (Index i = 0; i < queries; ++i) {
      const T unit = at.a[r * at.c + first + i] - at.log_total[r * at.c + first + i];
      most = unit > most ? unit : most;
    }
  }
  if (p.log_features) multiply(at.tile_phi, phi_k, at.ldf, queries, at.ldf, at.tile_phi);
  const Index number = time + first + in.shift;
  add_tile(at.tile_phi, at.ldf, queries, p.f, p.grad_phi_k, b, g, number, in.limit);
  add_tile(at.tile_v, at.lde, queries, p.e, p.grad_v, b, g, number, in.limit);
  const T keep = raise_maximum(N, most);
  scale(at.state_t, p.e * at.ldf, keep);
  scale(at.z, at.ldf, keep);
  for (Index r = 0; r < p.r; ++r) {
    const Index x = r * at.c + first;
    T* phi = at.phi_q + x * at.ldf;
    for (Index i = 0; i < queries; ++i)
      scale(phi + i * at.ldf, at.ldf, exp_one<T>(at.a[x + i] - at.log_total[x + i] - finite(most)));
    add_rows(at.z, at.D + x, phi, at.ldf, queries, at.ldf);
    matmul(p.e, p.f, queries, Left<T>{at.grad_o + (r * at.c + first) * at.lde, 1, at.lde}, phi, at.ldf, at.state_t, at.ldf, true);
  }
}

/// Whether the logarithms of all heads' queries at a token of the chunk lie within the units; `raise_too`: raises these.
template <typename T>
bool queries_are_within(const HybridProblem& p, Index i, bool raise_too, HybridGradients<T>& at) {
  bool all = true;
  for (Index r = 0; r < p.r; ++r) {
    const T* row = at.phi_q + (r * at.c + i) * at.ldf;
    if (is_within(row, at.units, at.ldf)) continue;
    all = false;
    if (!raise_too) break;
    raise(row, at.units, at.keep, at.ldf);
    change_units(p, at.keep, at);
  }
  return all;
}

/// dψ and dv of all of a chunk's keys. Logarithms: in runs from the last token to the first, of which the last alone raises
/// units, so that e^(log ψ_jc + N_c) is bounded by what query and key weigh together.
template <typename T>
void key_gradients(const HybridProblem& p, const Entering& in, Index b, Index g, Index time, Index queries, T& N,
                   HybridGradients<T>& at) {
  load_far_keys(p, in, b, g, time, queries, at);
  for (Index r = 0; r < p.r; ++r)
    load_tile(in.phi_q, b, g * p.r + r, time, queries, p.f, at.phi_q + r * at.c * at.ldf, at.ldf);
  if (!p.log_features) return key_run(p, in, b, g, time, 0, queries, N, at);
  take_weights(p, queries, at);
  for (Index r = 0; r < p.r; ++r)
    for (Index x = r * at.c; x < r * at.c + queries; ++x) {
      add_weight(at.phi_q + x * at.ldf, at.a[x] - at.log_total[x], p.f, at.ldf);
      at.a[x] = at.log_total[x] = T(0);
    }
  for (Index last = queries, first; last > 0; last = first) {
    queries_are_within(p, last - 1, true, at);
    for (first = last - 1; first > 0 && queries_are_within(p, first - 1, false, at);) --first;
    for (Index i = first; i < last; ++i) {
      for (Index r = 0; r < p.r; ++r) key_in_units(at.phi_q + (r * at.c + i) * at.ldf, at.units, at.ldf);
      T* row = at.phi_k + i * at.ldf;
      for (Index j = 0; j < at.ldf; j += width<T>) store(row + j, exp_bounded<T>(load(row + j) + load(at.units + j)));
    }
    key_run(p, in, b, g, time, first, last - first, N, at);
  }
}

/// The far part of the keys before the window, or of those behind it, as they look with time reversed: two sweeps.
template <typename T>
void far_gradients(HybridProblem p, bool behind, Index b, Index g, HybridGradients<T>& at) {
  const Index length = p.length[b];
  const Entering in = entering(p, b, behind);
  if (!p.causal) p.grad_v.data = static_cast<T*>(p.grad_v.data) + p.window * p.grad_v.stride[2];  // of the new keys
  if (behind) {
    p.a = p.a_behind;
    for (View* x : {&p.a, &p.o, &p.log_total, &p.grad_o, &p.grad_v, &p.grad_phi_q, &p.grad_phi_k}) *x = reversed(*x, length);
  }
  T M = begin_units<T>(p, nullptr, at);
  clear(at.state_t, at.lde * at.ldf);
  clear(at.z, at.ldf);
  for (Index time = 0; time < length; time += at.c) {
    const Index queries = smaller(at.c, length - time);
    load_gradients(p, b, g, time, queries, at);
    query_gradients(p, in, b, g, time, queries, M, at);
  }
  T N = begin_units<T>(p, nullptr, at);
  clear(at.state_t, at.lde * at.ldf);
  clear(at.z, at.ldf);
  for (Index time = (length - 1) / at.c * at.c; time >= 0 && length; time -= at.c) {
    const Index queries = smaller(at.c, length - time);
    load_gradients(p, b, g, time, queries, at);
    key_gradients(p, in, b, g, time, queries, N, at);
  }
}

template <typename T>
void hybrid_backward_head(const HybridProblem& p, Index b, Index g, HybridGradients<T>& at) {
  const Index length = p.length[b];
  const T factor = static_cast<T>(p.scale);
  for (Index time = 0; time < length; time += at.c) {
    const Index queries = smaller(at.c, length - time);
    load_scaled_queries(p, b, g, time, queries, at);
    load_gradients(p, b, g, time, queries, at);
    clear(at.grad_q, at.m * at.ldd);
    over_exact(p, b, time, queries, [&](bool sink, Index from, Index keys, auto first, auto last) {
      exact_gradients(p, sink, b, g, from, keys, queries, at, first, last);
    });
    for (Index r = 0; r < p.r; ++r) {
      T* rows = at.grad_q + r * at.c * at.ldd;
      scale(rows, queries * at.ldd, factor);
      store_tile(rows, at.ldd, p.grad_q, b, g * p.r + r, time, queries, p.d);
    }
  }
  if (p.f) far_gradients(p, false, b, g, at);
  if (p.f && !p.causal) far_gradients(p, true, b, g, at);
}

template <typename T>
void hybrid_backward(const HybridProblem& p) {
  over_heads<HybridGradients<T>>(p, chunk_of(p), [&](Index b, Index g, auto& at) { hybrid_backward_head<T>(p, b, g, at); });
}

}  // namespace TARNN_ISA
}  // namespace tarnn
