// The selective scan, forward. Lanes are channels. A task is a bundle of channels of a sequence; it goes through time a segment at a
// time, whose x and dt are tiles in cache. Within it a vector of channels and a group of their n numbers stay in registers for all
// tokens of the segment:
//
//   h_k ← 2^(dt A'_k) h_k + (dt x) B_k      o += h_k C_k          k: the numbers of a group
//
// where B_k and C_k, the same for all channels, are sent to all lanes. Nothing but the exponential, seven multiplications of it,
// costs more than one instruction.
#pragma once

#include "scan/blocks.h"

namespace tarnn {
namespace TARNN_ISA {

/// Numbers of a channel that are computed together, as many as there are registers for.
constexpr Index group = TARNN_VECTOR_BYTES == 64 ? 4 : 2;

/// n, rounded up to whole groups.
TARNN_INLINE Index in_groups(Index n) { return (n + group - 1) / group * group; }

/// A bundle's rates A' and state h, (n, bundle) each; D.
template <typename T>
struct SelectiveState {
  T *rate, *h, *D;
  SelectiveState(Scratch& scratch, Index n)
      : rate(scratch.take<T>(in_groups(n) * bundle)), h(scratch.take<T>(in_groups(n) * bundle)), D(scratch.take<T>(bundle)) {}
};

template <typename T>
void load_rates(const SelectiveScan& p, Index channel, T* rate, T* D) {
  const Index n = smaller(bundle, p.c - channel), numbers = in_groups(p.n);
  load_numbers(static_cast<const T*>(p.A) + channel * p.n, n, p.n, rate, bundle, numbers);
  scale(rate, numbers * bundle, rate_unit<T>);
  clear(D, bundle);
  if (p.D) std::copy_n(static_cast<const T*>(p.D) + channel, n, D);
}

/// A segment's tiles: x, dt, dt x and o (tokens, bundle), B and C (tokens, n).
template <typename T>
struct SelectiveTiles {
  T *x, *dt, *u, *o, *B, *C;
  SelectiveState<T> of;
  Index ld;  // of B and C
  SelectiveTiles(Scratch& scratch, Index tokens, Index n)
      : x(scratch.take<T>(tokens * bundle)),
        dt(scratch.take<T>(tokens * bundle)),
        u(scratch.take<T>(tokens * bundle)),
        o(scratch.take<T>(tokens * bundle)),
        B(scratch.take<T>(tokens * (in_groups(n) + width<T>))),
        C(scratch.take<T>(tokens * (in_groups(n) + width<T>))),
        of(scratch, n),
        ld(in_groups(n) + width<T>) {}
};

/// B or C of some tokens as a tile, with zeros behind the n numbers.
template <typename T>
void load_shared(const View& x, const bool* present, Index row, Index time, Index rows, Index n, T* to, Index ld) {
  clear(to, rows * ld);
  load_block(x, row, time, 0, rows, n, to, ld);
  clear_absent(present, rows, to, ld);
}

/// A vector of channels and a group of numbers through a segment.
template <typename T>
TARNN_INLINE void selective_pass(Index rows, const T* dt, const T* u, T* o, const T* rate, T* state, const T* B, const T* C, Index ld) {
  Vec<T> a[group], h[group];
  unrolled<group>([&](auto k) TARNN_LAMBDA {
    a[k] = load(rate + k * bundle);
    h[k] = load(state + k * bundle);
  });
  for (Index i = 0; i < rows; ++i, dt += bundle, u += bundle, o += bundle, B += ld, C += ld) {
    const Vec<T> step = load(dt), in = load(u);
    Vec<T> total = load(o);
    unrolled<group>([&](auto k) TARNN_LAMBDA {
      h[k] = decay_of(step * a[k]) * h[k] + in * B[k];
      total += h[k] * C[k];
    });
    store(o, total);
  }
  unrolled<group>([&](auto k) TARNN_LAMBDA { store(state + k * bundle, h[k]); });
}

template <typename T>
void selective_forward(const SelectiveScan& p) {
  const Index bundles = (p.c + bundle - 1) / bundle, numbers = in_groups(p.n);
  const Index tokens = smaller(p.segment, p.t);
  parallel_with<SelectiveTiles<T>>(p, p.sequences * bundles, [&](Index task, SelectiveTiles<T>& at) {
    const Index which = task / bundles, channel = task % bundles * bundle, n = smaller(bundle, p.c - channel);
    const Sequence s = sequence_of(p, which);
    const Index place = (which * p.c + channel) * p.n;
    T* kept = p.kept ? static_cast<T*>(p.kept) + (s.kept * p.c + channel) * p.n : nullptr;
    load_rates(p, channel, at.of.rate, at.of.D);
    load_numbers(p.before ? static_cast<const T*>(p.before) + place : nullptr, n, p.n, at.of.h, bundle, numbers);
    for (Index time = s.first; time < s.last; time += p.segment) {
      const Index rows = smaller(p.segment, s.last - time);
      const bool* present = there(p, s.row, time);
      if (kept && time > s.first) store_numbers(at.of.h, bundle, n, p.n, kept), kept += p.c * p.n;
      load_block(p.x, s.row, time, channel, rows, n, at.x, bundle);
      load_block(p.dt, s.row, time, channel, rows, n, at.dt, bundle);
      clear_absent(present, rows, at.x, bundle);
      clear_absent(present, rows, at.dt, bundle);
      load_shared(p.B, present, s.row, time, rows, p.n, at.B, at.ld);
      load_shared(p.C, present, s.row, time, rows, p.n, at.C, at.ld);
      for (Index j = 0; j < n; j += width<T>) {
        const Vec<T> D = load(at.of.D + j);
        for (Index i = j; i < rows * bundle; i += bundle) {
          const Vec<T> x = load(at.x + i);
          store(at.u + i, load(at.dt + i) * x);
          store(at.o + i, D * x);
        }
        for (Index k = 0; k < numbers; k += group)
          selective_pass<T>(rows, at.dt + j, at.u + j, at.o + j, at.of.rate + k * bundle + j, at.of.h + k * bundle + j, at.B + k, at.C + k, at.ld);
      }
      clear_absent(present, rows, at.o, bundle);
      store_block(at.o, bundle, p.o, s.row, time, channel, rows, n);
    }
    if (p.behind) store_numbers(at.of.h, bundle, n, p.n, static_cast<T*>(p.behind) + place);
  }, tokens, p.n);
}

}  // namespace TARNN_ISA
}  // namespace tarnn
