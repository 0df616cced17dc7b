// The diagonal scan: h ← e^g h + x for every channel, o = h; and backward, with R the gradient of h, from the last token to the first,
//
//   R ← R + grad_o      grad_x = R      grad_g = R e^g h_before      R ← e^g R
//
// where h is computed again, a segment at a time, from the states that were kept.
#pragma once

#include "scan/blocks.h"

namespace tarnn {
namespace TARNN_ISA {

/// Tokens and channels of x and g that are loaded at a time.
constexpr Index diagonal_rows = 16;
constexpr Index diagonal_bundle = 256;

/// e^g, and zero for numbers below the smallest normal one.
template <typename T>
TARNN_INLINE Vec<T> keep_of(Vec<T> g) {
  return decay_of(g * rate_unit<T>);
}

template <typename T>
struct DiagonalTiles {
  T *x, *g;
  explicit DiagonalTiles(Scratch& scratch)
      : x(scratch.take<T>(diagonal_rows * diagonal_bundle)), g(scratch.take<T>(diagonal_rows * diagonal_bundle)) {}
};

/// Some tokens: x becomes h, and the state h (n) goes along.
template <typename T>
TARNN_INLINE void diagonal_pass(Index rows, Index n, const T* g, T* x, Index ld, T* h) {
  constexpr Index w = width<T>;
  for (Index i = 0; i < rows; ++i, g += ld, x += ld)
    for (Index j = 0; j < n; j += w) {
      const Vec<T> state = keep_of<T>(load(g + j)) * load(h + j) + load(x + j);
      store(h + j, state);
      store(x + j, state);
    }
}

template <typename T>
void diagonal_forward(const DiagonalScan& p) {
  constexpr Index ld = diagonal_bundle;
  const Index bundles = (p.c + ld - 1) / ld;
  parallel_with<DiagonalTiles<T>>(p, p.sequences * bundles, [&](Index task, DiagonalTiles<T>& at) {
    const Index which = task / bundles, channel = task % bundles * ld, n = smaller(ld, p.c - channel);
    const Sequence s = sequence_of(p, which);
    T h[ld] = {};
    if (p.before) std::copy_n(static_cast<const T*>(p.before) + which * p.c + channel, n, h);
    T* kept = static_cast<T*>(p.kept) + (s.kept * p.c + channel);
    for (Index start = s.first; start < s.last; start += p.segment) {
      const Index stop = smaller(start + p.segment, s.last);
      if (p.kept && start > s.first) std::copy_n(h, n, kept), kept += p.c;
      for (Index time = start; time < stop; time += diagonal_rows) {
        const Index rows = smaller(diagonal_rows, stop - time);
        const bool* present = there(p, s.row, time);
        load_block(p.x, s.row, time, channel, rows, n, at.x, ld);
        load_block(p.log_decay, s.row, time, channel, rows, n, at.g, ld);
        clear_absent(present, rows, at.x, ld);
        clear_absent(present, rows, at.g, ld);
        diagonal_pass<T>(rows, n, at.g, at.x, ld, h);
        clear_absent(present, rows, at.x, ld);
        store_block(at.x, ld, p.o, s.row, time, channel, rows, n);
      }
    }
    if (p.behind) std::copy_n(h, n, static_cast<T*>(p.behind) + which * p.c + channel);
  });
}

/// Of one segment: e^g, h before each token, and grad_o, which becomes grad_x.
template <typename T>
struct DiagonalSegment {
  T *keep, *h, *grad;
  DiagonalSegment(Scratch& scratch, Index tokens)
      : keep(scratch.take<T>(tokens * bundle)), h(scratch.take<T>((tokens + 1) * bundle)), grad(scratch.take<T>(tokens * bundle)) {}
};

template <typename T>
void diagonal_backward(const DiagonalScan& p) {
  constexpr Index w = width<T>, ld = bundle;
  const Index bundles = (p.c + ld - 1) / ld;
  parallel_with<DiagonalSegment<T>>(p, p.sequences * bundles, [&](Index task, DiagonalSegment<T>& at) {
    const Index which = task / bundles, channel = task % bundles * ld, n = smaller(ld, p.c - channel);
    const Sequence s = sequence_of(p, which);
    T R[ld] = {};
    if (p.grad_behind) std::copy_n(static_cast<const T*>(p.grad_behind) + which * p.c + channel, n, R);
    for (Index segment = s.segments(p.segment) - 1; segment >= 0; --segment) {
      const Index time = s.first + segment * p.segment, rows = smaller(p.segment, s.last - time);
      const bool* present = there(p, s.row, time);
      const T* before = static_cast<const T*>(segment ? p.kept : p.before);
      clear(at.h, ld);
      if (before) std::copy_n(before + (segment ? s.kept + segment - 1 : which) * p.c + channel, n, at.h);
      load_block(p.x, s.row, time, channel, rows, n, at.h + ld, ld);
      load_block(p.log_decay, s.row, time, channel, rows, n, at.keep, ld);
      load_block(p.grad_o, s.row, time, channel, rows, n, at.grad, ld);
      clear_absent(present, rows, at.h + ld, ld);
      clear_absent(present, rows, at.keep, ld);
      clear_absent(present, rows, at.grad, ld);
      for (Index i = 0; i < rows; ++i)
        for (Index j = i * ld; j < i * ld + n; j += w) {
          const Vec<T> keep = keep_of<T>(load(at.keep + j));
          store(at.keep + j, keep);
          store(at.h + ld + j, keep * load(at.h + j) + load(at.h + ld + j));
        }
      for (Index i = rows - 1; i >= 0; --i)
        for (Index j = 0; j < n; j += w) {
          const Index k = i * ld + j;
          const Vec<T> total = load(R + j) + load(at.grad + k), carried = total * load(at.keep + k);
          store(R + j, carried);
          store(at.grad + k, total);
          store(at.keep + k, carried * load(at.h + k));
        }
      clear_absent(present, rows, at.grad, ld);
      clear_absent(present, rows, at.keep, ld);
      store_block(at.grad, ld, p.grad_x, s.row, time, channel, rows, n);
      store_block(at.keep, ld, p.grad_log_decay, s.row, time, channel, rows, n);
    }
    if (p.grad_before) std::copy_n(R, n, static_cast<T*>(p.grad_before) + which * p.c + channel);
  }, p.segment);
}

}  // namespace TARNN_ISA
}  // namespace tarnn
