// What the sweeps share: scratch memory, the tiles of a chunk, a state in scratch and its way to and from tensors.
#pragma once

#include <cstdlib>

#include "features.h"
#include "matmul.h"
#include "weights.h"

namespace tarnn {
namespace TARNN_ISA {

/// Hands out pieces of a block of memory, each at a multiple of 64 bytes; without a block it only counts.
class Scratch {
 public:
  explicit Scratch(void* block) : begin_(static_cast<char*>(block)) {}
  template <typename T>
  T* take(Index n) {
    char* at = begin_ + used_;
    used_ += (static_cast<std::size_t>(n) * sizeof(T) + 63) / 64 * 64;
    return begin_ ? reinterpret_cast<T*>(at) : nullptr;
  }
  std::size_t used() const { return used_; }

 private:
  char* begin_;
  std::size_t used_ = 0;
};

/// Memory that is given back.
template <typename T>
class Owned {
 public:
  explicit Owned(Index n) : data_(static_cast<T*>(std::malloc(static_cast<std::size_t>(n) * sizeof(T) + 1))) {
    if (!data_) std::abort();
  }
  ~Owned() { std::free(data_); }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  T* get() { return data_; }

 private:
  T* data_;
};

/// The length of a tile's rows: whole vectors, and one more, so that rows don't fall on the same cache sets.
template <typename T>
constexpr Index padded(Index n) {
  return whole<T>(n) + width<T>;
}

template <typename T>
struct Sizes {
  Index f, e, c, ldf, lde, ldc;
  explicit Sizes(const Problem& p)
      : f(p.f), e(p.e), c(p.chunk), ldf(padded<T>(p.f)), lde(padded<T>(p.e)), ldc(padded<T>(p.chunk)) {}
  Index rows() const { return whole<T>(c); }      // of a tile that may be transposed
  Index f_rows() const { return whole<T>(f); }
  Index e_rows() const { return whole<T>(e); }
  Index state() const { return f * e + f + 1 + f; }  // of a state in a block: S, z, M, Σ log_decay
};

/// The keys and values of a chunk.
template <typename T>
struct Keys {
  T *phi, *v;     // (c × f), (c × e); 0 where masked
  T *weighted;    // key ⊙ φ(K); phi itself where there are no weights
  T *scale;       // (c) of exp features
  Weights<T> weights;
  Index rows;
};

template <typename T>
Keys<T> take_keys(Scratch& scratch, const Problem& p, const Sizes<T>& n) {
  Keys<T> keys{};
  keys.phi = scratch.take<T>(n.rows() * n.ldf);
  keys.v = scratch.take<T>(n.rows() * n.lde);
  keys.scale = scratch.take<T>(n.ldc);
  Weights<T>& w = keys.weights;
  w.plain = !p.log_decay && !p.weighted && !p.mask;
  w.channels = p.channels;
  keys.weighted = w.plain ? keys.phi : scratch.take<T>(n.rows() * n.ldf);
  if (w.plain) return keys;
  const Index x = p.channels ? n.rows() * n.ldf : n.rows() * n.ldc;
  w.a = scratch.take<T>(x);
  w.query = scratch.take<T>(x);
  w.key = scratch.take<T>(x);
  w.pair = p.channels ? nullptr : scratch.take<T>(n.rows() * n.ldc);
  w.u = scratch.take<T>(n.ldc);
  w.M = scratch.take<T>(n.ldc);
  w.keep = scratch.take<T>(n.ldf);
  return keys;
}

/// Loads keys time … time + rows − 1, their values, and their weights, M being the maximum before them.
template <typename T>
void load_keys(const Problem& p, const Sizes<T>& n, const Stretch& s, Index time, Index rows, T M, Keys<T>& keys) {
  keys.rows = rows;
  load_tile(p.k, s.row, s.head, time, rows, n.f, keys.phi, n.ldf);
  load_tile(p.v, s.row, s.head, time, rows, n.e, keys.v, n.lde);
  features(p.map, keys.phi, n.ldf, rows, n.f, keys.scale);
  if (p.mask)
    for (Index i = 0; i < rows; ++i)
      if (is_masked(p, s.row, time + i)) clear(keys.phi + i * n.ldf, n.ldf), clear(keys.v + i * n.lde, n.lde);
  chunk_weights(p, s, time, rows, p.map == Map::exp ? keys.scale : nullptr, M, n.ldf, n.ldc, keys.weights);
  if (keys.weights.plain) return;
  if (keys.weights.channels) {
    multiply(keys.phi, keys.weights.key, n.ldf, rows, n.f, keys.weighted);
  } else {
    for (Index i = 0; i < rows; ++i)
      for (Index j = 0; j < n.f; j += width<T>)
        store(keys.weighted + i * n.ldf + j, load(keys.phi + i * n.ldf + j) * keys.weights.key[i]);
  }
}

/// query ⊙ φ(Q), in `to`, or φ(Q) itself where there are no weights.
template <typename T>
const T* weighted_queries(const Keys<T>& keys, const Sizes<T>& n, const T* phi, Index rows, T* to) {
  const Weights<T>& w = keys.weights;
  if (w.plain) return phi;
  if (w.channels) {
    multiply(phi, w.query, n.ldf, rows, n.f, to);
  } else {
    for (Index i = 0; i < rows; ++i)
      for (Index j = 0; j < n.f; j += width<T>) store(to + i * n.ldf + j, load(phi + i * n.ldf + j) * w.query[i]);
  }
  return to;
}

/// S (f × e), z and M so far.
template <typename T>
struct State {
  T *S, *z;
  T M;
};

/// S and z multiplied with `keep`.
template <typename T>
void decay_state(const Weights<T>& w, const Sizes<T>& n, State<T>& state) {
  if (w.plain) return;
  for (Index i = 0; i < n.f; ++i) {
    const T keep = w.keep[w.channels ? i : 0];
    for (Index j = 0; j < n.e; j += width<T>) store(state.S + i * n.lde + j, load(state.S + i * n.lde + j) * keep);
    state.z[i] *= keep;
  }
}

/// S ← keep·S + (key ⊙ φ(K))ᵀ V, and z.
template <typename T>
void absorb(const Keys<T>& keys, const Sizes<T>& n, State<T>& state) {
  decay_state(keys.weights, n, state);
  matmul(n.f, n.e, keys.rows, {keys.weighted, 1, n.ldf}, keys.v, n.lde, state.S, n.lde, true);
  for (Index j = 0; j < n.f; j += width<T>) {
    Vec<T> z = load(state.z + j);
    for (Index i = 0; i < keys.rows; ++i) z += load(keys.weighted + i * n.ldf + j);
    store(state.z + j, z);
  }
  state.M = keys.weights.M_out;
}

// --- states in blocks of memory without gaps: S (f · e), z (f), M, Σ log_decay (f, or one)

template <typename T>
void read_rows(const T* from, Index rows, Index n, T* to, Index ld) {
  for (Index i = 0; i < rows; ++i) {
    std::memcpy(to + i * ld, from + i * n, static_cast<std::size_t>(n) * sizeof(T));
    clear(to + i * ld + n, ld - n);
  }
}

template <typename T>
void write_rows(const T* from, Index ld, Index rows, Index n, T* to) {
  for (Index i = 0; i < rows; ++i) std::memcpy(to + i * n, from + i * ld, static_cast<std::size_t>(n) * sizeof(T));
}

template <typename T>
void read_state(const T* block, const Sizes<T>& n, State<T>& to) {
  read_rows(block, n.f, n.e, to.S, n.lde);
  read_rows(block + n.f * n.e, 1, n.f, to.z, n.ldf);
  to.M = block[n.f * n.e + n.f];
}

template <typename T>
void write_state(const State<T>& from, const Sizes<T>& n, T* block) {
  write_rows(from.S, n.lde, n.f, n.e, block);
  write_rows(from.z, n.ldf, 1, n.f, block + n.f * n.e);
  block[n.f * n.e + n.f] = from.M;
}

// --- states in tensors

/// A sequence's and head's place among states.
inline Index place(const Problem& p, const Stretch& s) { return s.sequence * p.g + s.head; }

/// The state given, or the one that has seen nothing.
template <typename T>
void given_state(const Problem& p, const Sizes<T>& n, const Stretch& s, State<T>& to) {
  const Index at = place(p, s);
  if (p.before.S) {
    read_rows(static_cast<const T*>(p.before.S) + at * n.f * n.e, n.f, n.e, to.S, n.lde);
    read_rows(static_cast<const T*>(p.before.z) + at * n.f, 1, n.f, to.z, n.ldf);
  } else {
    clear(to.S, n.f * n.lde);
    clear(to.z, n.ldf);
  }
  to.M = 0;
  if (p.before.M) to.M = static_cast<const T*>(p.before.M)[at];
  else if (p.weighted && !p.before.S) to.M = minus_infinity<T>;
}

template <typename T>
void put_state(const Problem& p, const Sizes<T>& n, const Stretch& s, const State<T>& from, const Sums& to) {
  const Index at = place(p, s);
  write_rows(from.S, n.lde, n.f, n.e, static_cast<T*>(to.S) + at * n.f * n.e);
  write_rows(from.z, n.ldf, 1, n.f, static_cast<T*>(to.z) + at * n.f);
  if (to.M) static_cast<T*>(to.M)[at] = from.M;
}

/// What the numerator of a query is multiplied with: 1/(den + eps), 0 where den is; unnormalised, e^(M + scale).
template <typename T>
TARNN_INLINE T output_factor(const Problem& p, T den, T M, T scale) {
  if (p.normalize) return den == 0 ? T(0) : T(1) / (den + static_cast<T>(p.eps));
  return p.weighted ? exp_one<T>(M + scale) : T(1);
}

TARNN_INLINE Index smaller(Index a, Index b) { return a < b ? a : b; }

/// f(i, scratch) for i = 0 … tasks − 1, on torch's threads.
template <typename P, typename F>
void parallel(const P& p, Index tasks, std::size_t bytes, F f) {
  p.run(tasks, bytes, [](void* context, Index i, void* scratch) { (*static_cast<F*>(context))(i, scratch); }, &f);
}

}  // namespace TARNN_ISA
}  // namespace tarnn
