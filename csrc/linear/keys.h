// The tiles of a chunk: its keys and values with their weights, and the features of its queries.
#pragma once

#include <limits>

#include "linear/projection.h"

namespace tarnn {
namespace TARNN_ISA {

template <typename T>
struct Sizes {
  Index f, e, c, ldf, lde, ldc;
  Index longest = 1;  // stretch of keys, in positions
  Projected<T> projected;
  explicit Sizes(const Problem& p)
      : f(p.f), e(p.e), c(p.chunk), ldf(padded<T>(p.f)), lde(padded<T>(p.e)), ldc(padded<T>(p.chunk)),
        projected(p.projection, p.map, p.f, p.d) {
    for (Index i = 0; i < p.keys.count; ++i) longest = std::max(longest, p.keys.at[i].end - p.keys.at[i].begin);
  }
  Index rows() const { return whole<T>(c); }      // of a tile that may be transposed
  Index inputs() const { return projected ? rows() * projected.ldd : 0; }  // of a tile of what is projected
  Index f_rows() const { return whole<T>(f); }
  Index e_rows() const { return whole<T>(e); }
  Index tile() const { return rows() * ldf + ldc; }  // of features, with their scales
  Index state() const { return f * e + f + 1 + f + 1; }  // of a state in a block: S, z, M, Σ log_decay, Σ of its largest
};

/// The keys and values of a chunk.
template <typename T>
struct Keys {
  T* phi;         // (c × f), of exponential features times u; 0 where masked
  T* weighted;    // key ⊙ φ(K); phi itself where all factors are 1
  T* room;        // where `weighted` is made
  T* phi_t;       // (f × c) φ(K)ᵀ, where pairs need it
  T* sums;        // (f) Σ_j of `weighted` (bfloat16/keys.h)
  const T* v;     // (c × e) rows of ldv: a tile, 0 where masked, or the tensor itself
  Index ldv;
  T* v_tile;
  T* x_tile;
  Source<T> x;      // (c × d) what was projected
  T *scale;       // (c) of exp features
  Weights<T> weights;
  Index rows;
};

template <typename T>
Keys<T> take_keys(Scratch& scratch, const Problem& p, const Sizes<T>& n) {
  Keys<T> keys{};
  keys.phi = scratch.take<T>(n.rows() * n.ldf);
  keys.v_tile = scratch.take<T>(n.rows() * n.lde);
  keys.phi_t = scratch.take<T>(n.f_rows() * n.ldc);
  keys.sums = scratch.take<T>(n.ldf);
  keys.x_tile = scratch.take<T>(n.inputs());
  keys.scale = scratch.take<T>(n.ldc);
  Weights<T>& w = keys.weights;
  w.none = w.plain = !p.log_decay && !p.weighted && !p.mask;
  w.channels = p.channels;
  w.within = p.map == Map::exp && !p.channels;  // so du = φ ⊙ dφ is the same
  keys.weighted = keys.room = w.none ? keys.phi : scratch.take<T>(n.rows() * n.ldf);
  if (w.none) return keys;
  const Index x = p.channels ? n.rows() * n.ldf : n.rows() * n.ldc;
  w.a = scratch.take<T>(x);
  w.query = scratch.take<T>(x);
  w.key = scratch.take<T>(x);
  w.pair = p.channels || !p.causal ? nullptr : scratch.take<T>(n.rows() * n.ldc);
  w.u = scratch.take<T>(n.ldc);
  w.M = scratch.take<T>(n.ldc);
  w.keep = scratch.take<T>(n.ldf);
  return keys;
}

/// Whether products may read rows of x where they lie: as a pass may, and without gaps. (Rows far apart would fall on the same
/// few sets of the cache.)
template <typename T>
bool lies_well(const View& x, Index n) {
  return passes_directly<T>(x, n) && x.stride[2] == n;
}

/// Zeros in those rows of a tile that belong to masked keys, whatever stood there: a product with NaN is NaN.
template <typename T>
void clear_masked(const Problem& p, const Stretch& s, Index time, Index rows, T* tile, Index ld) {
  for (Index i = 0; p.mask && i < rows; ++i)
    if (is_masked(p, s.row, time + i)) clear(tile + i * ld, ld);
}

template <typename T>
void load_values(const Problem& p, const Sizes<T>& n, const Stretch& s, Index time, Index rows, Keys<T>& keys) {
  keys.v = keys.v_tile;
  keys.ldv = n.lde;
  if (lies_well<T>(p.v, n.e) && !p.mask && rows % width<T> == 0) {
    keys.v = static_cast<const T*>(p.v.data) + offset(p.v, s.row, s.head, time);
    keys.ldv = n.e;
    return;
  }
  load_tile(p.v, s.row, s.head, time, rows, n.e, keys.v_tile, n.lde);
  clear_masked(p, s, time, rows, keys.v_tile, n.lde);
}

/// A place for a tile of features and their scales that are needed twice, if there is one; there: they were made before.
template <typename T>
struct Memo {
  T* at = nullptr;
  bool there = false;
};

/// φ of positions time … time + rows − 1 of a query or key head as a tile; of exp, `scale` gets each row's maximum. x: a
/// tile for what is projected, if it is. Returns where that lies.
template <typename T>
Source<T> make_features(const Problem& p, const Sizes<T>& n, const Stretch& s, const View& input, Index head, Index time, Index rows,
                      T* x, T* to, T* scale, Ahead* ahead = nullptr, Memo<T> memo = {}) {
  Source<T> from{x, n.projected.ldd};
  if (!n.projected) {
    load_features(p.map, input, s.row, head, time, rows, n.f, to, n.ldf, scale);
    return from;
  }
  if (!p.mask && lies_well<T>(input, n.projected.d))
    from = {static_cast<const T*>(input.data) + offset(input, s.row, head, time), n.projected.d};
  else load_tile(input, s.row, head, time, rows, n.projected.d, x, n.projected.ldd);
  const auto copy = [&](const T* features, const T* scales, T* to_features, T* to_scales) {
    std::memcpy(to_features, features, static_cast<std::size_t>(rows * n.ldf) * sizeof(T));
    std::memcpy(to_scales, scales, static_cast<std::size_t>(rows) * sizeof(T));
  };
  T* scales = memo.at + n.rows() * n.ldf;
  if (memo.there) {
    copy(memo.at, scales, to, scale);
  } else {
    n.projected.features(s.row, s.head, rows, from, to, scale, ahead);
    if (memo.at) copy(to, scale, memo.at, scales);
  }
  return from;
}

/// Features of keys time … time + rows − 1, without weights.
template <typename T>
void load_plain_key_features(const Problem& p, const Sizes<T>& n, const Stretch& s, Index time, Index rows, Keys<T>& keys,
                             Ahead* ahead, Memo<T> memo) {
  keys.rows = rows;
  keys.x = make_features(p, n, s, p.k, s.head, time, rows, keys.x_tile, keys.phi, keys.scale, ahead, memo);
  clear_masked(p, s, time, rows, keys.phi, n.ldf);
  if (n.projected) clear_masked(p, s, time, rows, keys.x_tile, n.projected.ldd);
}

/// The same, and their values.
template <typename T>
void load_plain_keys(const Problem& p, const Sizes<T>& n, const Stretch& s, Index time, Index rows, Keys<T>& keys,
                     Ahead* ahead = nullptr, Memo<T> memo = {}) {
  load_plain_key_features(p, n, s, time, rows, keys, ahead, memo);
  load_values(p, n, s, time, rows, keys);
}

/// factor ⊙ x, for the factors `query` or `key` of a chunk; `to` may be x.
template <typename T>
void weigh_rows(const Weights<T>& w, const T* factor, const Sizes<T>& n, Index rows, const T* x, T* to) {
  w.channels ? multiply(x, factor, n.ldf, rows, n.f, to) : scaled_rows(x, n.ldf, rows, n.f, factor, to);
}

/// Features of keys time … time + rows − 1 and their weights, M being the maximum before them.
template <typename T>
void load_key_features(const Problem& p, const Sizes<T>& n, const Stretch& s, Index time, Index rows, T M, Keys<T>& keys,
                       Ahead* ahead = nullptr, Memo<T> memo = {}) {
  load_plain_key_features(p, n, s, time, rows, keys, ahead, memo);
  chunk_weights(p, s, time, rows, p.map == Map::exp ? keys.scale : nullptr, M, n.ldf, n.ldc, keys.weights);
  if (keys.weights.none) return;
  if (keys.weights.within) scale_rows(keys.phi, n.ldf, rows, n.f, keys.weights.u);
  keys.weighted = keys.weights.plain ? keys.phi : keys.room;
  if (!keys.weights.plain) weigh_rows(keys.weights, keys.weights.key, n, rows, keys.phi, keys.weighted);
}

/// The same, and their values.
template <typename T>
void load_keys(const Problem& p, const Sizes<T>& n, const Stretch& s, Index time, Index rows, T M, Keys<T>& keys,
               Ahead* ahead = nullptr, Memo<T> memo = {}) {
  load_key_features(p, n, s, time, rows, M, keys, ahead, memo);
  load_values(p, n, s, time, rows, keys);
}

/// query ⊙ φ(Q), in `to`, or φ(Q) itself where all factors are 1.
template <typename T>
const T* weighted_queries(const Keys<T>& keys, const Sizes<T>& n, const T* phi, Index rows, T* to) {
  if (keys.weights.plain) return phi;
  weigh_rows(keys.weights, keys.weights.query, n, rows, phi, to);
  return to;
}

/// 1 in the units of a query's sums, e^−(M + scale); never 0.
template <typename Of, typename T>
TARNN_INLINE T one_in_units(const Of& p, T M, T scale) {
  const T one = p.weighted ? exp_one<T>(-M - scale) * (T(1) - rounded_off(M, scale)) : T(1);
  return one > std::numeric_limits<T>::min() ? one : std::numeric_limits<T>::min();
}

/// What the numerator of a query is multiplied with: 1/(den + eps), 0 where den is; 1/max(|den|, 1); unnormalised, e^(M + scale), which
/// may be infinite, and 0 for a query of exponential features that meets no key.
template <typename Of, typename T>
TARNN_INLINE T output_factor(const Of& p, T den, T M, T scale) {
  if (p.at_least_one) {
    const T size = den < 0 ? -den : den, one = one_in_units(p, M, scale);
    return T(1) / (size < one ? one : size);
  }
  if (p.normalize) return den == 0 ? T(0) : T(1) / (den + static_cast<T>(p.eps));
  if (!p.weighted) return T(1);
  return den == 0 && p.map == Map::exp ? T(0) : exp_one<T>(M + scale) * (T(1) + rounded_off(M, scale));
}

template <typename T>
void store_denominators(const Problem& p, Index row, Index head, Index time, Index rows, const T* den) {
  if (!p.den) return;
  std::memcpy(static_cast<T*>(p.den.data) + offset(p.den, row, head, time), den, static_cast<std::size_t>(rows) * sizeof(T));
}

}  // namespace TARNN_ISA
}  // namespace tarnn
