// Elementwise layers. Compiled once for each instruction set: see ../kernels_of_isa.cpp.
#include "elementwise/elementwise.h"

#include <cmath>

#include "common/one_token.h"

namespace tarnn {
namespace TARNN_ISA {

/// f(i, left) for each vector of n numbers, from number i on: a whole one, and of the last one `left` numbers.
template <typename T, typename F>
TARNN_INLINE void over(Index n, F f) {
  Index i = 0;
  for (; i + width<T> <= n; i += width<T>) f(i, width<T>);
  if (i < n) f(i, n - i);
}

template <typename T>
void rms_norm(Index rows, Index n, T eps, const T* x, const T* weight, T* y, T* scale) {
  for (Index row = 0; row < rows; ++row, x += n, y += n) {
    Vec<T> squares{};
    over<T>(n, [&](Index i, Index left) TARNN_LAMBDA {
      const Vec<T> a = read(x + i, left);
      squares += a * a;
    });
    const T r = T(1) / std::sqrt(sum<T>(squares) / static_cast<T>(n) + eps);
    scale[row] = r;
    over<T>(n, [&](Index i, Index left) TARNN_LAMBDA { write(y + i, read(x + i, left) * r * read(weight + i, left), left); });
  }
}

/// The same for R rows at once, so that weight and grad_weight, which may be as long as a cache, are passed once for all of them.
template <typename T, int R>
void rms_norm_backward_of(Index n, const T* grad, const T* x, const T* weight, const T* scale, T* grad_x, T* grad_weight) {
  Vec<T> products[R]{};
  over<T>(n, [&](Index i, Index left) TARNN_LAMBDA {
    const Vec<T> w = read(weight + i, left);
    Vec<T> sum = read(grad_weight + i, left);
    unrolled<R>([&](auto row) TARNN_LAMBDA {
      const Vec<T> gx = read(grad + row * n + i, left) * read(x + row * n + i, left);
      products[row] += gx * w;
      sum += gx * scale[row];
    });
    write(grad_weight + i, sum, left);
  });
  T along[R];  // of x, which scale divides by its own length
  unrolled<R>([&](auto row) TARNN_LAMBDA {
    const T r = scale[row];
    along[row] = sum<T>(products[row]) / static_cast<T>(n) * r * r * r;
  });
  over<T>(n, [&](Index i, Index left) TARNN_LAMBDA {
    const Vec<T> w = read(weight + i, left);
    Vec<T> result[R];  // all reads before the first write, as below
    unrolled<R>([&](auto row) TARNN_LAMBDA {
      result[row] = read(grad + row * n + i, left) * w * scale[row] - read(x + row * n + i, left) * along[row];
    });
    unrolled<R>([&](auto row) TARNN_LAMBDA { write(grad_x + row * n + i, result[row], left); });
  });
}

template <typename T>
void rms_norm_backward(Index rows, Index n, const T* grad, const T* x, const T* weight, const T* scale, T* grad_x,
                       T* grad_weight) {
  constexpr int together = 4;
  const bool long_rows = n * sizeof(T) >= 8192;  // short ones come from memory faster one after the other
  over<T>(n, [&](Index i, Index left) TARNN_LAMBDA { write(grad_weight + i, Vec<T>{}, left); });
  Index row = 0;
  for (; long_rows && row + together <= rows; row += together)
    rms_norm_backward_of<T, together>(n, grad + row * n, x + row * n, weight, scale + row, grad_x + row * n, grad_weight);
  for (; row < rows; ++row)
    rms_norm_backward_of<T, 1>(n, grad + row * n, x + row * n, weight, scale + row, grad_x + row * n, grad_weight);
}

template <typename T>
void swiglu(Index n, const T* gate, const T* up, T* y) {
  over<T>(n, [&](Index i, Index left) TARNN_LAMBDA {
    const Vec<T> a = read(gate + i, left);
    write(y + i, a * sigmoid<T>(a) * read(up + i, left), left);
  });
}

template <typename T>
void swiglu_backward(Index n, const T* grad, const T* gate, const T* up, T* grad_gate, T* grad_up) {
  over<T>(n, [&](Index i, Index left) TARNN_LAMBDA {
    // all reads before the first write: the tensors often lie at one place within their pages, where one waits for the other
    const Vec<T> a = read(gate + i, left), b = read(up + i, left), g = read(grad + i, left), s = sigmoid<T>(a), silu = a * s;
    write(grad_up + i, g * silu, left);
    write(grad_gate + i, g * b * (s + silu * (T(1) - s)), left);
  });
}

template <typename T>
constexpr ElementwiseOf<T> elementwise = {rms_norm<T>, rms_norm_backward<T>, swiglu<T>, swiglu_backward<T>};

extern const ElementwiseKernels elementwise_kernels;
const ElementwiseKernels elementwise_kernels = {OF_TYPES(elementwise)};

}  // namespace TARNN_ISA
}  // namespace tarnn
