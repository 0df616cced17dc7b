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

template <typename T>
void rms_norm_backward(Index rows, Index n, const T* grad, const T* x, const T* weight, const T* scale, T* grad_x,
                       T* grad_weight) {
  over<T>(n, [&](Index i, auto, auto put) TARNN_LAMBDA { put(grad_weight + i, Vec<T>{}); });
  for (Index row = 0; row < rows; ++row, grad += n, x += n, grad_x += n) {
    const T r = scale[row];
    Vec<T> products{};
    over<T>(n, [&](Index i, auto get, auto put) TARNN_LAMBDA {
      const Vec<T> gx = get(grad + i) * get(x + i);
      products += gx * get(weight + i);
      put(grad_weight + i, get(grad_weight + i) + gx * r);
    });
    const T along = sum<T>(products) / static_cast<T>(n) * r * r * r;  // of x, which scale divides by its own length
    over<T>(n, [&](Index i, auto get, auto put) TARNN_LAMBDA {
      put(grad_x + i, get(grad + i) * get(weight + i) * r - get(x + i) * along);
    });
  }
}

/// 1 / (1 + e⁻ˣ), without overflow on either side.
template <typename T>
TARNN_INLINE Vec<T> sigmoid(Vec<T> x) {
  const Vec<T> e = exp_nonpositive(x < 0 ? x : -x);
  return (x < 0 ? e : e * 0 + T(1)) / (e + T(1));
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
