// Features of a linear function of x, as random features are:
//
//     u = factor·Ω x + β − square·|x|² + offset        φ(x) = map(u) + shift
//
// made from a tile of x in the moment in which they are needed, and never stored. Ω (m × d) is packed once a call, with the
// factor in it: transposed for the features, as it is for their gradients
//
//     dx = factor·Ωᵀ du − 2·square·(Σ_i du_i) x        dΩ = factor·du xᵀ        dβ = du
//
// (positive random features: Choromanski et al. 2021, eq. 5, arXiv 2009.14794, with map = exp, square = ½.)
#pragma once

#include "common/memory.h"
#include "linear/maps.h"
#include "linear/weights.h"
#include "simd/matmul.h"

namespace tarnn {
namespace TARNN_ISA {

/// Rows of numbers to read: a tile, or the tensor itself.
template <typename T>
struct Source {
  const T* at;
  Index ld;
};

/// A call's projection, packed. Without one it is empty, and features are made of x itself.
template <typename T>
class Projected {
 public:
  const Projection& of;
  const Map map;
  const Index f, d, ldf, ldd;

  Projected(const Projection& projection, Map map, Index f, Index d)
      : of(projection), map(map), f(f), d(d), ldf(padded<T>(f)), ldd(padded<T>(d)),
        right_(of ? matrices() * whole<T>(d) * ldf : 0), down_(of ? matrices() * whole<T>(f) * ldd : 0),
        bias_(of ? matrices() * ldf : 0) {
    for (Index i = 0; of && i < matrices(); ++i) pack(i);
  }
  explicit operator bool() const { return static_cast<bool>(of); }

  /// x (rows × d) to features (rows × f), a tile; of exp, `scale` gets each row's maximum: φ = tile · e^scale.
  void features(Index row, Index head, Index rows, Source<T> x, T* to, T* scale, Ahead* ahead) const {
    matmul(rows, f, d, {x.at, x.ld, 1}, right_.get() + matrix(row, head) * whole<T>(d) * ldf, ldf, to, ldf, false, ahead);
    const T* bias = bias_.get() + matrix(row, head) * ldf;
    for (Index i = 0; i < rows; ++i) {
      const T* here = x.at + i * x.ld;
      const T constant = static_cast<T>(of.offset) - (of.square == 0 ? T(0) : static_cast<T>(of.square) * dot(here, here, d));
      if (map == Map::exp) scale[i] = exponentials(to + i * ldf, bias) + constant;
      else with_map(map, [&](auto function) { apply(to + i * ldf, bias, constant, function); });
    }
  }

  /// The gradient of features (a tile, overwritten with du) to that of x; grad_omega (f × ldd) and behind it grad_bias
  /// (ldf) are added to, where there are any.
  void gradients(Index row, Index head, Index rows, Source<T> x, const T* phi, T* grad, T* grad_x, T* grad_omega,
                 Ahead* ahead) const {
    features_backward(map, grad, phi, static_cast<const T*>(nullptr), ldf, rows, f, static_cast<T>(of.shift));
    matmul(rows, d, f, {grad, ldf, 1}, down_.get() + matrix(row, head) * whole<T>(f) * ldd, ldd, grad_x, ldd, false, ahead);
    for (Index i = 0; of.square != 0 && i < rows; ++i) {
      const T factor = static_cast<T>(-2 * of.square) * total(grad + i * ldf);
      for (Index j = 0; j < d; j += width<T>)
        store(grad_x + i * ldd + j, load(grad_x + i * ldd + j) + factor * load(x.at + i * x.ld + j));
    }
    if (!grad_omega) return;
    matmul(f, d, rows, {grad, 1, ldf}, x.at, x.ld, grad_omega, ldd, true, ahead);
    for (Index i = 0; i < rows; ++i)
      for (Index j = 0; j < f; j += width<T>)
        store(grad_omega + f * ldd + j, load(grad_omega + f * ldd + j) + load(grad + i * ldf + j));
  }

  /// Numbers that the gradients of Ω and β take, of one stretch.
  Index gradient_size() const { return f * ldd + ldf; }

  /// A stretch's gradient of feature i's row of Ω and of its β, added to the results.
  void put(const T* own, Index i, Index row, Index head, const View& grad_omega, const View& grad_bias) const {
    if (grad_omega) {
      T* to = static_cast<T*>(grad_omega.data) + (matrix(row, head) * f + i) * d;
      for (Index j = 0; j < d; ++j) to[j] += static_cast<T>(of.factor) * own[i * ldd + j];
    }
    if (grad_bias) static_cast<T*>(grad_bias.data)[matrix(row, head) * f + i] += own[f * ldd + i];
  }

 private:
  Owned<T> right_, down_, bias_;

  Index matrices() const { return of.rows * of.heads; }
  Index matrix(Index row, Index head) const {
    return (of.rows == 1 ? 0 : row) * of.heads + (of.heads == 1 ? 0 : head);
  }

  void pack(Index at) {
    T* down = down_.get() + at * whole<T>(f) * ldd;
    const T factor = static_cast<T>(of.factor);
    load_rows<Same<T>>(static_cast<const T*>(of.omega) + at * f * d, d, 1, f, d, down, ldd,
                       [&](Vec<T> x) TARNN_LAMBDA { return x * factor; });
    clear(down + f * ldd, (whole<T>(f) - f) * ldd);
    transpose(down, ldd, f, d, right_.get() + at * whole<T>(d) * ldf, ldf);
    T* bias = bias_.get() + at * ldf;
    clear(bias, ldf);
    if (of.bias) std::memcpy(bias, static_cast<const T*>(of.bias) + at * f, static_cast<std::size_t>(f) * sizeof(T));
  }

  /// visit(j, in_row) for each vector of a row of features: in_row(y, z) has y in the lanes that are features and z in
  /// those, in the last vector, that are padding.
  template <typename F>
  TARNN_INLINE void over_row(F visit) const {
    Index j = 0;
    for (; j + width<T> <= f; j += width<T>) visit(j, [](Vec<T> y, Vec<T>) TARNN_LAMBDA { return y; });
    const Integers<T> there = iota<T>() < static_cast<int>(f - j);
    if (j < f) visit(j, [there](Vec<T> y, Vec<T> z) TARNN_LAMBDA { return there ? y : z; });
  }

  /// u + β to e^(u + β − its maximum), which is returned.
  T exponentials(T* u, const T* bias) const {
    Vec<T> seen = broadcast<T>(minus_infinity<T>);
    over_row([&](Index j, auto in_row) TARNN_LAMBDA {
      Vec<T> y = load(u + j);
      if (of.bias) store(u + j, y = y + load(bias + j));
      seen = in_row(y > seen ? y : seen, seen);
    });
    const T most = largest<T>(seen);
    over_row([&](Index j, auto in_row) TARNN_LAMBDA {
      store(u + j, in_row(exp_nonpositive(load(u + j) - most), Vec<T>{}));
    });
    return most;
  }

  template <typename F>
  TARNN_INLINE void apply(T* u, const T* bias, T constant, F function) const {
    over_row([&](Index j, auto in_row) TARNN_LAMBDA {
      const Vec<T> y = function(load(u + j) + load(bias + j) + constant) + static_cast<T>(of.shift);
      store(u + j, in_row(y, Vec<T>{}));
    });
  }

  T total(const T* x) const {
    Vec<T> sums{};
    over_row([&](Index j, auto in_row) TARNN_LAMBDA { sums += in_row(load(x + j), Vec<T>{}); });
    return sum<T>(sums);
  }
};

}  // namespace TARNN_ISA
}  // namespace tarnn
