// Elementwise layers. Compiled once for each instruction set: see ../kernels_of_isa.cpp.
#include "elementwise/elementwise.h"

#include <cmath>

#include "simd/vector.h"

namespace tarnn {
namespace TARNN_ISA {

/// f(at, load, store) for each whole vector of n numbers, then for what is left: load(p) and store(p, x) leave alone what
/// lies behind the n numbers, and read zeros there.
template <typename T, typename F>
TARNN_INLINE void over(Index n, F f) {
  Index i = 0;
  for (; i + width<T> <= n; i += width<T>)
    f(i, [](const T* p) TARNN_LAMBDA { return load(p); }, [](T* p, Vec<T> x) TARNN_LAMBDA { store(p, x); });
  if (i == n) return;
  const Index left = n - i;
  f(i,
    [left](const T* p) TARNN_LAMBDA {
      T lanes[width<T>] = {};
      for (Index j = 0; j < left; ++j) lanes[j] = p[j];
      return load(lanes);
    },
    [left](T* p, Vec<T> x) TARNN_LAMBDA {
      T lanes[width<T>];
      store(lanes, x);
      for (Index j = 0; j < left; ++j) p[j] = lanes[j];
    });
}

template <typename T>
void rms_norm(Index rows, Index n, T eps, const T* x, const T* weight, T* y, T* scale) {
  for (Index row = 0; row < rows; ++row, x += n, y += n) {
    Vec<T> squares{};
    over<T>(n, [&](Index i, auto get, auto) TARNN_LAMBDA {
      const Vec<T> a = get(x + i);
      squares += a * a;
    });
    const T r = T(1) / std::sqrt(sum<T>(squares) / static_cast<T>(n) + eps);
    scale[row] = r;
    over<T>(n, [&](Index i, auto get, auto put) TARNN_LAMBDA { put(y + i, get(x + i) * r * get(weight + i)); });
  }
}

/// The same for R rows at once, so that weight and grad_weight, which may be as long as a cache, are passed once for all of them.
template <typename T, int R>
void rms_norm_backward_of(Index n, const T* grad, const T* x, const T* weight, const T* scale, T* grad_x, T* grad_weight) {
  Vec<T> products[R]{};
  over<T>(n, [&](Index i, auto get, auto put) TARNN_LAMBDA {
    const Vec<T> w = get(weight + i);
    Vec<T> sum = get(grad_weight + i);
    unrolled<R>([&](auto row) TARNN_LAMBDA {
      const Vec<T> gx = get(grad + row * n + i) * get(x + row * n + i);
      products[row] += gx * w;
      sum += gx * scale[row];
    });
    put(grad_weight + i, sum);
  });
  T along[R];  // of x, which scale divides by its own length
  unrolled<R>([&](auto row) TARNN_LAMBDA {
    const T r = scale[row];
    along[row] = sum<T>(products[row]) / static_cast<T>(n) * r * r * r;
  });
  over<T>(n, [&](Index i, auto get, auto put) TARNN_LAMBDA {
    const Vec<T> w = get(weight + i);
    Vec<T> result[R];  // all reads before the first write, as below
    unrolled<R>([&](auto row) TARNN_LAMBDA {
      result[row] = get(grad + row * n + i) * w * scale[row] - get(x + row * n + i) * along[row];
    });
    unrolled<R>([&](auto row) TARNN_LAMBDA { put(grad_x + row * n + i, result[row]); });
  });
}

template <typename T>
void rms_norm_backward(Index rows, Index n, const T* grad, const T* x, const T* weight, const T* scale, T* grad_x,
                       T* grad_weight) {
  constexpr int together = 4;
  const bool long_rows = n * sizeof(T) >= 8192;  // short ones come from memory faster one after the other
  over<T>(n, [&](Index i, auto, auto put) TARNN_LAMBDA { put(grad_weight + i, Vec<T>{}); });
  Index row = 0;
  for (; long_rows && row + together <= rows; row += together)
    rms_norm_backward_of<T, together>(n, grad + row * n, x + row * n, weight, scale + row, grad_x + row * n, grad_weight);
  for (; row < rows; ++row)
    rms_norm_backward_of<T, 1>(n, grad + row * n, x + row * n, weight, scale + row, grad_x + row * n, grad_weight);
}

template <typename T>
void swiglu(Index n, const T* gate, const T* up, T* y) {
  over<T>(n, [&](Index i, auto get, auto put) TARNN_LAMBDA {
    const Vec<T> a = get(gate + i);
    put(y + i, a * sigmoid<T>(a) * get(up + i));
  });
}

template <typename T>
void swiglu_backward(Index n, const T* grad, const T* gate, const T* up, T* grad_gate, T* grad_up) {
  over<T>(n, [&](Index i, auto get, auto put) TARNN_LAMBDA {
    // all reads before the first write: the tensors often lie at one place within their pages, where one waits for the other
    const Vec<T> a = get(gate + i), b = get(up + i), g = get(grad + i), s = sigmoid<T>(a), silu = a * s;
    put(grad_up + i, g * silu);
    put(grad_gate + i, g * b * (s + silu * (T(1) - s)));
  });
}

extern const ElementwiseKernels elementwise_kernels;
const ElementwiseKernels elementwise_kernels = {
    {rms_norm<float>, rms_norm_backward<float>, swiglu<float>, swiglu_backward<float>},
    {rms_norm<double>, rms_norm_backward<double>, swiglu<double>, swiglu_backward<double>},
};

}  // namespace TARNN_ISA
}  // namespace tarnn
