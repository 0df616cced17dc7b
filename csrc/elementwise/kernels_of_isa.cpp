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

/// f(Format()) for the format of type `stored`.
template <typename T, typename F>
TARNN_INLINE void as_stored(Type stored, F f) {
  if constexpr (sizeof(T) == 4) {
    if (stored == Type::bfloat16) return f(Bfloat16());
    if (stored == Type::float16) return f(Float16());
  }
  f(Same<T>());
}

/// Rows of a format: a vector from number i on, of which `left` numbers are there, read and written.
template <typename Format>
struct At {
  using T = typename Format::Wide;
  typename Format::Stored* at;
  explicit At(Rows x) : at(static_cast<typename Format::Stored*>(x.at)) {}
  TARNN_INLINE Vec<T> read(Index i, Index left) const { return read_as<Format>(at + i, left); }
  TARNN_INLINE void write(Index i, Vec<T> x, Index left) const { write_as<Format>(at + i, x, left); }
};

/// The derivative of silu.
template <typename T>
TARNN_INLINE Vec<T> silu_slope(Vec<T> a) {
  const Vec<T> s = sigmoid<T>(a);
  return s + a * s * (T(1) - s);
}

template <typename T>
void rms_norm(Type stored, Index rows, Index n, T eps, Rows x, Rows gate, const T* weight, Rows y, T* scale) {
  as_stored<T>(stored, [&](auto format) TARNN_LAMBDA {
    const At<decltype(format)> in(x), g(gate), out(y);
    for (Index row = 0, at = 0; row < rows; ++row, at += n) {
      Vec<T> squares{};
      over<T>(n, [&](Index i, Index left) TARNN_LAMBDA {
        const Vec<T> a = in.read(at + i, left);
        squares += a * a;
      });
      const T r = T(1) / std::sqrt(sum<T>(squares) / static_cast<T>(n) + eps);
      scale[row] = r;
      over<T>(n, [&](Index i, Index left) TARNN_LAMBDA {
        Vec<T> o = in.read(at + i, left) * r * read(weight + i, left);
        if (g.at) {
          const Vec<T> a = g.read(at + i, left);
          o *= a * sigmoid<T>(a);
        }
        out.write(at + i, o, left);
      });
    }
  });
}

/// The gradients of R rows at once, so that weight and grad_weight, which may be as long as a cache, are passed once for all of them.
template <int R, bool gated, typename Format, typename T>
TARNN_INLINE void rms_norm_backward_of(Index n, Index at, At<Format> grad, At<Format> x, At<Format> gate, const T* weight,
                                       const T* scale, At<Format> grad_x, At<Format> grad_gate, T* grad_weight) {
  const auto before_gate = [&](Index i, Index left) TARNN_LAMBDA {  // the gradient of what the gate lets through
    Vec<T> g = grad.read(i, left);
    if constexpr (gated) {
      const Vec<T> a = gate.read(i, left);
      g *= a * sigmoid<T>(a);
    }
    return g;
  };
  Vec<T> products[R]{};
  over<T>(n, [&](Index i, Index left) TARNN_LAMBDA {
    const Vec<T> w = read(weight + i, left);
    Vec<T> sum = read(grad_weight + i, left);
    unrolled<R>([&](auto row) TARNN_LAMBDA {
      const Index j = at + row * n + i;
      const Vec<T> gx = before_gate(j, left) * x.read(j, left);
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
    Vec<T> result[R], of_gate[R];  // all reads before the first write, as below
    unrolled<R>([&](auto row) TARNN_LAMBDA {
      const Index j = at + row * n + i;
      const Vec<T> a = x.read(j, left);
      result[row] = before_gate(j, left) * w * scale[row] - a * along[row];
      if constexpr (gated) of_gate[row] = grad.read(j, left) * a * scale[row] * w * silu_slope<T>(gate.read(j, left));
    });
    unrolled<R>([&](auto row) TARNN_LAMBDA {
      grad_x.write(at + row * n + i, result[row], left);
      if constexpr (gated) grad_gate.write(at + row * n + i, of_gate[row], left);
    });
  });
}

template <typename T>
void rms_norm_backward(Type stored, Index rows, Index n, Rows grad, Rows x, Rows gate, const T* weight, const T* scale,
                       Rows grad_x, Rows grad_gate, T* grad_weight) {
  constexpr int together = 4;
  const bool long_rows = n * bytes_of(stored) >= 8192;  // short ones come from memory faster one after the other
  over<T>(n, [&](Index i, Index left) TARNN_LAMBDA { write(grad_weight + i, Vec<T>{}, left); });
  as_stored<T>(stored, [&](auto format) TARNN_LAMBDA {
    using In = At<decltype(format)>;
    const auto some = [&](auto R, auto gated, Index row) TARNN_LAMBDA {
      rms_norm_backward_of<R, gated>(n, row * n, In(grad), In(x), In(gate), weight, scale + row, In(grad_x), In(grad_gate), grad_weight);
    };
    Index row = 0;
    if (gate.at) {
      for (; row < rows; ++row) some(std::integral_constant<int, 1>(), std::true_type(), row);
      return;
    }
    for (; long_rows && row + together <= rows; row += together) some(std::integral_constant<int, together>(), std::false_type(), row);
    for (; row < rows; ++row) some(std::integral_constant<int, 1>(), std::false_type(), row);
  });
}

template <typename T>
void swiglu(Type stored, Index n, Rows gate, Rows up, Rows y) {
  as_stored<T>(stored, [&](auto format) TARNN_LAMBDA {
    const At<decltype(format)> in(gate), through(up), out(y);
    over<T>(n, [&](Index i, Index left) TARNN_LAMBDA {
      const Vec<T> a = in.read(i, left);
      out.write(i, a * sigmoid<T>(a) * through.read(i, left), left);
    });
  });
}

template <typename T>
void swiglu_backward(Type stored, Index n, Rows grad, Rows gate, Rows up, Rows grad_gate, Rows grad_up) {
  as_stored<T>(stored, [&](auto format) TARNN_LAMBDA {
    using In = At<decltype(format)>;
    const In of_y(grad), in(gate), through(up), of_gate(grad_gate), of_up(grad_up);
    over<T>(n, [&](Index i, Index left) TARNN_LAMBDA {
      // all reads before the first write: the tensors often lie at one place within their pages, where one waits for the other
      const Vec<T> a = in.read(i, left), b = through.read(i, left), g = of_y.read(i, left);
      of_up.write(i, g * a * sigmoid<T>(a), left);
      of_gate.write(i, g * b * silu_slope<T>(a), left);
    });
  });
}

template <typename T>
constexpr ElementwiseOf<T> elementwise = {rms_norm<T>, rms_norm_backward<T>, swiglu<T>, swiglu_backward<T>};

extern const ElementwiseKernels elementwise_kernels;
const ElementwiseKernels elementwise_kernels = {OF_TYPES(elementwise)};

}  // namespace TARNN_ISA
}  // namespace tarnn
