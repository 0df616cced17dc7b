// Filters on tiles, a channel in each lane: y_i = a(bias + Σ_l taps_l ⊙ x_(i + l)), added from the oldest row to the newest, whatever
// the number of rows, so that a prompt, its steps and its pieces have the same bits.
#pragma once

#include "simd/tiles.h"

namespace tarnn {
namespace TARNN_ISA {

constexpr int rows_together = 4;  // of which each tap is read once

/// The numbers (n × w, without gaps) of n channels as w rows, or, backward, in the other order.
template <typename T>
void load_taps(const T* weight, Index w, Index n, bool backward, T* to, Index ld) {
  clear(to, w * ld);
  for (Index j = 0; j < n; ++j)
    for (Index l = 0; l < w; ++l) to[l * ld + j] = weight[j * w + (backward ? w - 1 - l : l)];
}

/// sums[r] += Σ_l taps_l x_(r + l) of R rows and one vector of columns; W: the width, or 0 for any.
template <int R, int W, typename T>
TARNN_INLINE void add_products(const T* x, Index ld, Index w, const T* taps, Vec<T> (&sums)[R]) {
  if constexpr (W > 0) {
    Vec<T> rows[R + W - 1];
    unrolled<R + W - 1>([&](auto i) TARNN_LAMBDA { rows[i] = load(x + i * ld); });
    unrolled<W>([&](auto l) TARNN_LAMBDA {
      const Vec<T> tap = load(taps + l * ld);
      unrolled<R>([&](auto r) TARNN_LAMBDA { sums[r] += tap * rows[r + l]; });
    });
  } else {
    for (Index l = 0; l < w; ++l) {
      const Vec<T> tap = load(taps + l * ld);
      unrolled<R>([&](auto r) TARNN_LAMBDA { sums[r] += tap * load(x + (r + l) * ld); });
    }
  }
}

template <int R, int W, bool silu, typename T>
TARNN_INLINE void filter_some(T* x, Index ld, Index n, Index w, const T* taps, const T* bias) {
  for (Index j = 0; j < n; j += width<T>) {
    Vec<T> sums[R];
    unrolled<R>([&](auto r) TARNN_LAMBDA { sums[r] = load(bias + j); });
    add_products<R, W>(x + j, ld, w, taps + j, sums);
    unrolled<R>([&](auto r) TARNN_LAMBDA {
      if constexpr (silu) sums[r] *= sigmoid<T>(sums[r]);
      store(x + r * ld + j, sums[r]);
    });
  }
}

/// The gradient of R sums from that of the outputs, in place in d. Where `inside`, d_i x_(i + l) is added to grad_taps, d to grad_bias.
template <int R, int W, bool silu, typename T>
TARNN_INLINE void unfilter_some(const T* x, T* d, Index ld, Index n, Index w, const T* taps, const T* bias, bool inside, T* grad_taps,
                                T* grad_bias) {
  for (Index j = 0; j < n; j += width<T>) {
    Vec<T> grad[R];
    unrolled<R>([&](auto r) TARNN_LAMBDA { grad[r] = load(d + r * ld + j); });
    if constexpr (silu) {
      Vec<T> sums[R];
      unrolled<R>([&](auto r) TARNN_LAMBDA { sums[r] = load(bias + j); });
      add_products<R, W>(x + j, ld, w, taps + j, sums);
      unrolled<R>([&](auto r) TARNN_LAMBDA {
        const Vec<T> s = sigmoid<T>(sums[r]);
        grad[r] *= s + sums[r] * s * (T(1) - s);
        store(d + r * ld + j, grad[r]);
      });
    }
    if (!inside) continue;
    const auto add = [&](auto l) TARNN_LAMBDA {
      Vec<T> total = load(grad_taps + l * ld + j);
      unrolled<R>([&](auto r) TARNN_LAMBDA { total += grad[r] * load(x + (r + l) * ld + j); });
      store(grad_taps + l * ld + j, total);
    };
    if constexpr (W > 0) unrolled<W>(add);
    else for (Index l = 0; l < w; ++l) add(l);
    Vec<T> total = load(grad_bias + j);
    unrolled<R>([&](auto r) TARNN_LAMBDA { total += grad[r]; });
    store(grad_bias + j, total);
  }
}

/// f(first row, R, W, silu), all but the first as constants, for all rows, a few together.
template <typename F>
TARNN_INLINE void in_groups(Index rows, Index w, bool silu, F f) {
  const auto of_width = [&](auto W, auto act) TARNN_LAMBDA {
    Index i = 0;
    for (; i + rows_together <= rows; i += rows_together) f(i, std::integral_constant<int, rows_together>(), W, act);
    for (; i < rows; ++i) f(i, std::integral_constant<int, 1>(), W, act);
  };
  const auto of_act = [&](auto act) TARNN_LAMBDA {
    switch (w) {
      case 2: return of_width(std::integral_constant<int, 2>(), act);
      case 3: return of_width(std::integral_constant<int, 3>(), act);
      case 4: return of_width(std::integral_constant<int, 4>(), act);
      default: return of_width(std::integral_constant<int, 0>(), act);
    }
  };
  silu ? of_act(std::true_type()) : of_act(std::false_type());
}

/// Rows of a tile become those of the result, in place: row i is made of rows i … i + w − 1, and is not read again.
template <typename T>
void filter(T* x, Index ld, Index rows, Index n, Index w, const T* taps, const T* bias, bool silu) {
  in_groups(rows, w, silu, [&](Index i, auto R, auto W, auto act) TARNN_LAMBDA {
    filter_some<R, W, act>(x + i * ld, ld, n, w, taps, bias);
  });
}

template <typename T>
void unfilter(const T* x, T* d, Index ld, Index rows, Index n, Index w, const T* taps, const T* bias, bool silu, bool inside,
              T* grad_taps, T* grad_bias) {
  in_groups(rows, w, silu, [&](Index i, auto R, auto W, auto act) TARNN_LAMBDA {
    unfilter_some<R, W, act>(x + i * ld, d + i * ld, ld, n, w, taps, bias, inside, grad_taps, grad_bias);
  });
}

}  // namespace TARNN_ISA
}  // namespace tarnn
