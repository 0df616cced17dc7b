// The state of a sweep: S and z, as the forward pass keeps them and, transposed, as the backward pass reads them; and
// its way from and to memory.
#pragma once

#include "linear/keys.h"

namespace tarnn {
namespace TARNN_ISA {

/// S (f × e), z and M so far.
template <typename T>
struct State {
  T *S, *z;
  T M;
};

template <typename T>
State<T> take_state(Scratch& scratch, const Sizes<T>& n) {
  return {scratch.take<T>(n.f_rows() * n.lde), scratch.take<T>(n.ldf), 0};
}

/// Of each head in a bundle one.
template <typename T>
State<T>* take_states(Scratch& scratch, const Sizes<T>& n, Index heads) {
  const auto states = scratch.take<State<T>>(heads);
  for (Index i = 0; i < heads; ++i) {
    const State<T> state = take_state(scratch, n);
    if (states) states[i] = state;
  }
  return states;
}

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

/// S ← keep·S + (key ⊙ φ(K))ᵀ V, and z. empty: S is not there yet.
template <typename T>
void absorb(const Keys<T>& keys, const Sizes<T>& n, State<T>& state, Ahead* ahead, bool empty) {
  if (!empty) decay_state(keys.weights, n, state);
  matmul(n.f, n.e, keys.rows, {keys.weighted, 1, n.ldf}, keys.v, keys.ldv, state.S, n.lde, !empty, ahead);
  sum_rows(keys.weighted, n.ldf, keys.rows, n.f, state.z);
  state.M = keys.weights.M_out;
}

// --- states in blocks of memory without gaps: S (f · e), z (f), M; behind them, of a stretch, what decays across it

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

/// A sequence's and head's S and z from tensors, zeros for those that aren't there, and M, 0 where there is none.
template <typename T>
void get_state(const Problem& p, const Sizes<T>& n, const Stretch& s, const Sums& from, State<T>& to) {
  const Index at = place(p, s);
  if (from.S) read_rows(static_cast<const T*>(from.S) + at * n.f * n.e, n.f, n.e, to.S, n.lde);
  else clear(to.S, n.f * n.lde);
  if (from.z) read_rows(static_cast<const T*>(from.z) + at * n.f, 1, n.f, to.z, n.ldf);
  else clear(to.z, n.ldf);
  to.M = from.M ? static_cast<const T*>(from.M)[at] : T(0);
}

/// Whether no key comes before these positions: then the state is zero, its S is not even written, and products with it are
/// left out.
inline bool begins_empty(const Problem& p, const Stretch& s, Index time) {
  return s.first && time == s.begin && time < s.end && !p.before.S && !p.before.z && !p.before.M;
}

/// The state given, or the one that has seen nothing.
template <typename T>
void given_state(const Problem& p, const Sizes<T>& n, const Stretch& s, State<T>& to) {
  if (begins_empty(p, s, s.begin)) clear(to.z, n.ldf), to.M = T(0);
  else get_state(p, n, s, p.before, to);
  if (p.weighted && !p.before.M && !p.before.z) to.M = minus_infinity<T>;
}

/// Nothing where nobody wants it: without M, which a state has even where it has no features.
template <typename T>
void put_state(const Problem& p, const Sizes<T>& n, const Stretch& s, const State<T>& from, const Sums& to) {
  if (!to.z && !to.M) return;
  const Index at = place(p, s);
  write_rows(from.S, n.lde, n.f, n.e, static_cast<T*>(to.S) + at * n.f * n.e);
  write_rows(from.z, n.ldf, 1, n.f, static_cast<T*>(to.z) + at * n.f);
  if (to.M) static_cast<T*>(to.M)[at] = from.M;
}

// --- transposed

/// Sᵀ (e × f) and z (f), or R, the gradient of a state, likewise: one block of (e + 1) rows, z the last.
template <typename T>
struct Transposed {
  T *S, *z;

  Transposed() : S(nullptr), z(nullptr) {}
  Transposed(T* block, const Sizes<T>& n) : S(block), z(block ? block + n.e * n.ldf : nullptr) {}
  /// With the room that a transposition of S writes; z lies behind it.
  static Transposed take(Scratch& scratch, const Sizes<T>& n) {
    Transposed made;
    made.S = scratch.take<T>(n.e_rows() * n.ldf);
    made.z = scratch.take<T>(n.ldf);
    return made;
  }
  static Index block(const Sizes<T>& n) { return (n.e + 1) * n.ldf; }

  void clear(const Sizes<T>& n) const {
    TARNN_ISA::clear(S, n.e * n.ldf);
    TARNN_ISA::clear(z, n.ldf);
  }
  void copy_to(const Transposed& to, const Sizes<T>& n) const {
    if (n.e) std::memcpy(to.S, S, static_cast<std::size_t>(n.e * n.ldf) * sizeof(T));
    std::memcpy(to.z, z, static_cast<std::size_t>(n.ldf) * sizeof(T));
  }
  /// += other, of which column j counts factor[j] times.
  void add(const Transposed& other, const T* factor, const Sizes<T>& n) const {
    for (Index row = 0; row <= n.e; ++row) {
      T* to = row < n.e ? S + row * n.ldf : z;
      const T* from = row < n.e ? other.S + row * n.ldf : other.z;
      for (Index j = 0; j < n.f; ++j) to[j] += factor[j] * from[j];
    }
  }
  void scale(T factor, const Sizes<T>& n) const {
    if (factor == 1) return;
    TARNN_ISA::scale(S, n.e * n.ldf, factor);
    TARNN_ISA::scale(z, n.ldf, factor);
  }
  void decay(const Weights<T>& w, const Sizes<T>& n) const {
    if (w.plain) return;
    if (w.channels) {
      scale_columns(S, n.ldf, n.e, n.f, w.keep);
      multiply(z, w.keep, n.ldf, 1, n.f, z);
    } else {
      scale(w.keep[0], n);
    }
  }
  /// The transpose of S (f × e), whose rows beyond f get zeros.
  void from(const State<T>& state, const Sizes<T>& n) const {
    TARNN_ISA::clear(state.S + n.f * n.lde, (n.f_rows() - n.f) * n.lde);
    transpose(state.S, n.lde, n.f, n.e, S, n.ldf);
    if (z != state.z) std::memcpy(z, state.z, static_cast<std::size_t>(n.ldf) * sizeof(T));
  }
  /// S ← keep·S + (key ⊙ φ(K))ᵀ V, and z. empty: S is not there yet.
  void absorb(const Keys<T>& keys, const Sizes<T>& n, Ahead* ahead, bool empty) const {
    if (!empty) decay(keys.weights, n);
    matmul(n.e, n.f, keys.rows, {keys.v, 1, keys.ldv}, keys.weighted, n.ldf, S, n.ldf, !empty, ahead);
    sum_rows(keys.weighted, n.ldf, keys.rows, n.f, z);
  }
};

}  // namespace TARNN_ISA
}  // namespace tarnn
