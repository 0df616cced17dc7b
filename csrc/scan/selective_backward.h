// The selective scan, backward: segment by segment from the last to the first. Within a segment e^(dt A) and h are computed again
// from the state that was kept before it, for a vector of channels and a group of numbers k at a time, and then, with R the gradient
// of h and u = dt x, from the last token to the first,
//
//   R_k ← R_k + C_k grad_o      grad_B_k += R_k u       grad_u += R_k B_k          grad_C_k += h_k grad_o
//   R_k ← e^(dt A_k) R_k        q_k = R_k h_k before    grad_dt += A_k q_k         grad_A_k += dt q_k
//
// and at last grad_x = dt grad_u + D grad_o, grad_dt += x grad_u, grad_D = Σ x grad_o.
//
// The sums of grad_B and grad_C over channels stay vectors, one for each token and number, until all channels of the task are added:
// then their lanes are. A task is a group of bundles; sums of several tasks are added in the end, in their order.
#pragma once

#include "scan/selective.h"

namespace tarnn {
namespace TARNN_ISA {

template <typename T>
struct SelectiveBackwardTiles {
  SelectiveTiles<T> tiles;  // o: grad_o
  T *grad_u, *grad_dt;      // (tokens, bundle)
  T *keep, *h;              // (tokens, group) vectors: e^(dt A), and h before each token
  T *grad_B, *grad_C;       // (numbers / group, tokens, group) vectors
  T *A, *R, *grad_A, *grad_D;  // of all bundles: (bundles, n, bundle), D (bundles, bundle)
  SelectiveBackwardTiles(Scratch& scratch, Index tokens, Index n, Index bundles)
      : tiles(scratch, tokens, n),
        grad_u(scratch.take<T>(tokens * bundle)),
        grad_dt(scratch.take<T>(tokens * bundle)),
        keep(scratch.take<T>(tokens * group * width<T>)),
        h(scratch.take<T>((tokens + 1) * group * width<T>)),
        grad_B(scratch.take<T>(tokens * in_groups(n) * width<T>)),
        grad_C(scratch.take<T>(tokens * in_groups(n) * width<T>)),
        A(scratch.take<T>(bundles * in_groups(n) * bundle)),
        R(scratch.take<T>(bundles * in_groups(n) * bundle)),
        grad_A(scratch.take<T>(bundles * in_groups(n) * bundle)),
        grad_D(scratch.take<T>(bundles * bundle)) {}
};

/// e^(dt A) and the states before all tokens of a segment, and the one behind it.
template <typename T>
TARNN_INLINE void selective_again(Index rows, const T* dt, const T* u, const T* rate, const T* state, const T* B, Index ld, T* keep, T* before) {
  Vec<T> a[group], h[group];
  unrolled<group>([&](auto k) TARNN_LAMBDA {
    a[k] = load(rate + k * bundle);
    h[k] = load(state + k * bundle);
  });
  for (Index i = 0; i < rows; ++i, dt += bundle, u += bundle, B += ld, keep += group * width<T>, before += group * width<T>) {
    const Vec<T> step = load(dt), in = load(u);
    unrolled<group>([&](auto k) TARNN_LAMBDA {
      const Vec<T> e = decay_of(step * a[k]);
      store(keep + k * width<T>, e);
      store(before + k * width<T>, h[k]);
      h[k] = e * h[k] + in * B[k];
    });
  }
  unrolled<group>([&](auto k) TARNN_LAMBDA { store(before + k * width<T>, h[k]); });
}

/// From the last token of a segment to the first.
template <typename T>
TARNN_INLINE void selective_back(Index rows, const T* dt, const T* u, const T* grad_o, T* grad_u, T* grad_dt, const T* A, T* R_at, T* grad_A,
                                 const T* B, const T* C, Index ld, const T* keep, const T* before, T* grad_B, T* grad_C) {
  constexpr Index next = group * width<T>;
  Vec<T> a[group], R[group], sum[group], h[group];
  unrolled<group>([&](auto k) TARNN_LAMBDA {
    a[k] = load(A + k * bundle);
    R[k] = load(R_at + k * bundle);
    sum[k] = load(grad_A + k * bundle);
    h[k] = load(before + rows * next + k * width<T>);
  });
  for (Index i = rows - 1; i >= 0; --i) {
    const Vec<T> step = load(dt + i * bundle), in = load(u + i * bundle), sent = load(grad_o + i * bundle);
    Vec<T> of_u = load(grad_u + i * bundle), of_dt = load(grad_dt + i * bundle);
    unrolled<group>([&](auto k) TARNN_LAMBDA {
      const Index at = i * next + k * width<T>;
      store(grad_C + at, load(grad_C + at) + sent * h[k]);
      R[k] += sent * C[i * ld + k];
      store(grad_B + at, load(grad_B + at) + R[k] * in);
      of_u += R[k] * B[i * ld + k];
      R[k] *= load(keep + at);
      h[k] = load(before + at);
      const Vec<T> q = R[k] * h[k];
      of_dt += a[k] * q;
      sum[k] += step * q;
    });
    store(grad_u + i * bundle, of_u);
    store(grad_dt + i * bundle, of_dt);
  }
  unrolled<group>([&](auto k) TARNN_LAMBDA {
    store(R_at + k * bundle, R[k]);
    store(grad_A + k * bundle, sum[k]);
  });
}

/// The sums over lanes of (numbers / group, tokens, group) vectors, as rows of n numbers without gaps.
template <typename T>
void sum_lanes(const T* from, Index rows, Index n, T* to) {
  for (Index i = 0; i < rows; ++i)
    for (Index k = 0; k < n; ++k)
      to[i * n + k] = sum<T>(load(from + ((k / group * rows + i) * group + k % group) * width<T>));
}

template <typename T>
void selective_backward(const SelectiveScan& p) {
  using Tiles = SelectiveBackwardTiles<T>;
  const Index all = (p.c + bundle - 1) / bundle, groups = (all + p.bundles - 1) / p.bundles, numbers = in_groups(p.n);
  const Index tokens = smaller(p.segment, p.t), size = numbers * bundle;
  T* parts = static_cast<T*>(p.parts);
  const Index part = p.b * p.t * p.n;
  parallel_with<Tiles>(p, p.sequences * groups, [&](Index task, Tiles& at) {
    SelectiveTiles<T>& in = at.tiles;
    const Index which = task / groups, first = task % groups * p.bundles, bundles = smaller(p.bundles, all - first);
    const Sequence s = sequence_of(p, which);
    for (Index m = 0; m < bundles; ++m) {
      const Index channel = (first + m) * bundle, n = smaller(bundle, p.c - channel);
      const T* behind = static_cast<const T*>(p.grad_behind);
      load_numbers(behind ? behind + (which * p.c + channel) * p.n : nullptr, n, p.n, at.R + m * size, bundle, numbers);
      load_numbers(static_cast<const T*>(p.A) + channel * p.n, n, p.n, at.A + m * size, bundle, numbers);
    }
    clear(at.grad_A, bundles * size);
    clear(at.grad_D, bundles * bundle);
    for (Index segment = s.segments(p.segment) - 1; segment >= 0; --segment) {
      const Index time = s.first + segment * p.segment, rows = smaller(p.segment, s.last - time);
      const bool* present = there(p, s.row, time);
      load_shared(p.B, present, s.row, time, rows, p.n, in.B, in.ld);
      load_shared(p.C, present, s.row, time, rows, p.n, in.C, in.ld);
      clear(at.grad_B, rows * numbers * width<T>);
      clear(at.grad_C, rows * numbers * width<T>);
      for (Index m = 0; m < bundles; ++m) {
        const Index channel = (first + m) * bundle, n = smaller(bundle, p.c - channel);
        const T* before = static_cast<const T*>(segment ? p.kept : p.before);
        if (before) before += ((segment ? s.kept + segment - 1 : which) * p.c + channel) * p.n;
        load_rates(p, channel, in.of.rate, in.of.D);
        load_numbers(before, n, p.n, in.of.h, bundle, numbers);
        load_block(p.x, s.row, time, channel, rows, n, in.x, bundle);
        load_block(p.dt, s.row, time, channel, rows, n, in.dt, bundle);
        load_block(p.grad_o, s.row, time, channel, rows, n, in.o, bundle);
        for (T* tile : {in.x, in.dt, in.o}) clear_absent(present, rows, tile, bundle);
        multiply(in.x, in.dt, bundle, rows, whole<T>(n), in.u);
        for (T* tile : {at.grad_u, at.grad_dt}) clear(tile, rows * bundle);
        for (Index k = 0; k < numbers; k += group)
          for (Index j = 0; j < n; j += width<T>) {
            const Index place = k * bundle + j;
            selective_again<T>(rows, in.dt + j, in.u + j, in.of.rate + place, in.of.h + place, in.B + k, in.ld, at.keep, at.h);
            selective_back<T>(rows, in.dt + j, in.u + j, in.o + j, at.grad_u + j, at.grad_dt + j, at.A + m * size + place, at.R + m * size + place,
                              at.grad_A + m * size + place, in.B + k, in.C + k, in.ld, at.keep, at.h, at.grad_B + k * rows * width<T>,
                              at.grad_C + k * rows * width<T>);
          }
        for (Index j = 0; j < n; j += width<T>) {
          const Vec<T> D = load(in.of.D + j);
          Vec<T> total = load(at.grad_D + m * bundle + j);
          for (Index i = j; i < rows * bundle; i += bundle) {
            const Vec<T> x = load(in.x + i), sent = load(in.o + i), of_u = load(at.grad_u + i);
            total += x * sent;
            store(at.grad_dt + i, load(at.grad_dt + i) + x * of_u);
            store(at.grad_u + i, load(in.dt + i) * of_u + D * sent);
          }
          store(at.grad_D + m * bundle + j, total);
        }
        for (T* tile : {at.grad_u, at.grad_dt}) clear_absent(present, rows, tile, bundle);
        store_block(at.grad_u, bundle, p.grad_x, s.row, time, channel, rows, n);
        store_block(at.grad_dt, bundle, p.grad_dt, s.row, time, channel, rows, n);
      }
      T* to = parts + (task % groups) * 2 * part + (s.row * p.t + time) * p.n;
      sum_lanes<T>(at.grad_B, rows, p.n, to);
      sum_lanes<T>(at.grad_C, rows, p.n, to + part);
    }
    for (Index m = 0; m < bundles; ++m) {
      const Index channel = (first + m) * bundle, n = smaller(bundle, p.c - channel), place = which * p.c + channel;
      store_numbers(at.grad_A + m * size, bundle, n, p.n, static_cast<T*>(p.grad_A) + place * p.n);
      if (p.grad_D) std::copy_n(at.grad_D + m * bundle, n, static_cast<T*>(p.grad_D) + place);
      if (p.grad_before) store_numbers(at.R + m * size, bundle, n, p.n, static_cast<T*>(p.grad_before) + place * p.n);
    }
  }, tokens, p.n, p.bundles);
  constexpr Index block = 1 << 14;
  parallel(p, (part + block - 1) / block, 64, [&](Index task, void*) {
    const Index begin = task * block, end = smaller(begin + block, part);
    for (Index which = 0; which < 2; ++which) {
      T* to = static_cast<T*>(which ? p.grad_C : p.grad_B);
      const T* from = parts + which * part;
      std::copy(from + begin, from + end, to + begin);
      for (Index other = 1; other < groups; ++other)
        for (Index i = begin; i < end; ++i) to[i] += from[other * 2 * part + i];
    }
  });
}

}  // namespace TARNN_ISA
}  // namespace tarnn
