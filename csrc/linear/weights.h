// What decay and key log-weights do to a chunk: the factors between its queries, its keys and the state.
//
// With w_i the log-weight of key i and d_i the log-decay at i, position by position,
//
//     M_i = max(M_{i−1} + d_i, w_i)        the running maximum, in whose units the sums are
//     a_i = e^(d_i + M_{i−1} − M_i)        what everything before i is multiplied with; 1 but for M's rounding, or less
//     u_i = e^(w_i − M_i)                  what key i enters with
//
// and all factors are products of these, none above 1 (but for roundings):
//
//     pair_ij = u_j Π_{j<l≤i} a_l    query_i = Π_{l≤i} a_l    key_j = u_j Π_{l>j} a_l    keep = Π a_l
//
// where one number serves all channels, by one exponential each, of a sum of terms (a difference of prefix sums would not
// survive d = −∞). A masked key has u = 0 and d = 0: it is absent. Without log-weights M is 0. A decay with channels has a (…, f), and M
// goes by the channel that decays least; then `pair` is not formed (causal.h multiplies keys up as it goes).
#pragma once

#include "common/maximum.h"
#include "linear/problem.h"

namespace tarnn {
namespace TARNN_ISA {

template <typename T>
struct Weights {
  bool none;      // the call has no weights: nothing below is there
  bool plain;     // all factors of the chunk are 1
  bool within;    // u is a factor of the tile of features and not of `pair` and `key`
  bool channels;  // a, query, key have a row of f for each position, keep is one; else they are one number each
  T *a, *u;       // (c[, f]), (c)
  T *pair;        // (c × c) rows of ldc, by whole vectors up to the diagonal; none where not causal
  T *query, *key, *keep;
  T* M;           // (c) M_i, finite
  T M_out;        // behind the chunk; may be −∞
};

/// One key's log-weight: as given, plus the scale of its features; −∞ where masked.
template <typename T>
TARNN_INLINE T log_weight(const Problem& p, const Stretch& s, Index time, T scale, bool masked) {
  if (masked) return minus_infinity<T>;
  T w = scale;
  if (p.key_log_weight)
    w += element<T>(p.key_log_weight, s.row, s.head, time);
  return w;
}

TARNN_INLINE bool is_masked(const Problem& p, Index row, Index time) {
  return p.mask && !static_cast<const bool*>(p.mask.data)[row * p.mask.stride[0] + time * p.mask.stride[2]];
}

/// Factors without channels, each from one exponent, which is summed term by term. Comes with the logarithms of a in `query`
/// and of u in `u`. All are beside M, for log-weights are large, and a rounding of one would count. Where M stays as it is
/// and u is within the features, all of them are 1 and not made. (They would be exactly 1, so no bit depends on that.)
template <typename T>
void scalar_weights(Index rows, Index ldc, bool causal, Weights<T>& out) {
  const Index c = whole<T>(rows);
  out.plain = out.within;
  for (Index i = 0; i < rows; ++i) {
    out.plain = out.plain && out.query[i] == 0;
    if (out.within) out.key[i] = 0;
    else out.key[i] = out.u[i];
  }
  if (out.within)
    for (Index i = 0; i < c; i += width<T>) store(out.u + i, exp_nonpositive(load(out.u + i)));
  if (out.plain) {
    out.keep[0] = 1;
    return;
  }
  T* seen = out.a;  // log-weight of each key beside M, as position i sees it
  for (Index j = 0; j < c; ++j) seen[j] = minus_infinity<T>;
  T total = 0;
  for (Index i = 0; i < rows; ++i) {
    const T d = out.query[i];
    for (Index j = 0; d != 0 && j <= i; j += width<T>) store(seen + j, load(seen + j) + d);
    seen[i] = out.key[i];
    if (causal)
      for (Index j = 0; j <= i; j += width<T>) store(out.pair + i * ldc + j, exp_nonpositive(load(seen + j)));
    out.query[i] = total += d;
  }
  for (Index i = 0; i < c; i += width<T>) store(out.query + i, exp_nonpositive(load(out.query + i)));
  for (Index j = 0; j < c; j += width<T>) store(out.key + j, exp_nonpositive(load(seen + j)));
  out.keep[0] = out.query[rows - 1];
}

/// The factors of positions time … time + rows − 1. ldf, ldc: rows of tiles of features and of pairs.
template <typename T>
void chunk_weights(const Problem& p, const Stretch& s, Index time, Index rows, const T* scale, T M, Index ldf,
                   Index ldc, Weights<T>& out) {
  out.M_out = M;
  if (out.none) return;
  const Index x = p.channels ? ldf : 1, c = whole<T>(rows);
  if (p.log_decay) load_tile(p.log_decay, s.row, s.head, time, rows, p.channels ? p.f : 1, out.a, p.channels ? ldf : ldc);
  for (Index i = 0; i < rows; ++i) {
    const bool masked = is_masked(p, s.row, time + i);
    T* d = p.channels ? out.a + i * ldf : out.query + i;  // where the exponent of a_i goes
    T most = 0;
    if (!p.log_decay || masked) {
      for (Index j = 0; j < x; ++j) d[j] = 0;
    } else if (p.channels) {
      most = p.f ? d[0] : T(0);
      for (Index j = 1; j < p.f; ++j) most = d[j] > most ? d[j] : most;
    } else {
      most = d[0] = out.a[i * ldc];
    }
    if (!p.weighted) {
      out.M[i] = 0;
      out.u[i] = masked ? minus_infinity<T> : T(0);
      continue;
    }
    const T w = log_weight(p, s, time + i, scale ? scale[i] : T(0), masked), decayed = M + most;
    const T next = decayed > w ? decayed : w;
    // the padding behind f channels stays 0: M is not its maximum, and what grew there would meet zeros as infinity
    for (Index j = 0; j < (p.channels ? p.f : 1); ++j) d[j] = log_keep(d[j], M, next);
    out.u[i] = w - finite(next);
    out.M[i] = finite(next);
    M = next;
  }
  out.M_out = M;
  if (p.channels) {
    for (Index i = 0; i < c; i += width<T>) store(out.u + i, exp_nonpositive(load(out.u + i)));
    for (Index i = 0; i < rows * ldf; i += width<T>) store(out.a + i, exp_nonpositive(load(out.a + i)));
    for (Index i = 0; i < rows; ++i)
      for (Index j = 0; j < ldf; j += width<T>) {
        Vec<T> a = load(out.a + i * ldf + j);
        store(out.query + i * ldf + j, i ? load(out.query + (i - 1) * ldf + j) * a : a);
      }
    for (Index j = 0; j < ldf; j += width<T>) {
      Vec<T> behind = broadcast<T>(1);
      for (Index i = rows - 1; i >= 0; --i) {
        store(out.key + i * ldf + j, behind * out.u[i]);
        behind *= load(out.a + i * ldf + j);
      }
      store(out.keep + j, behind);
    }
    return;
  }
  scalar_weights(rows, ldc, p.causal, out);
}

}  // namespace TARNN_ISA
}  // namespace tarnn
