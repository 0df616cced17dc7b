// What the backward passes share: the queries of a chunk with the gradients of their outputs, and the way of gradients of
// features to gradients of inputs.
#pragma once

#include "linear/stretches.h"

namespace tarnn {
namespace TARNN_ISA {

/// The queries of a chunk and head, and G' = [G | G_z]: the gradient of numerator and denominator,
/// G = grad_o · factor, G_z = −factor · (grad_o · o).
template <typename T>
struct Queries {
  T *phi, *weighted, *scale;  // (c × f), query ⊙ phi, (c)
  T *G, *G_z;                 // (c × e), (c)
  T *factor, *grad_phi;       // (c), (c × f)
  T *x, *grad_x;              // (c × f) x for the derivative of relu²; of a projection, (c × d) a tile for x, its gradient
  Source<T> from;               // (c × d) what was projected
  T* shared;                    // (c × f or d) the gradient's sum over heads that share these queries
};

/// A tile for the gradient of what several heads share.
template <typename T>
T* take_shared(Scratch& scratch, const Problem& p, const Sizes<T>& n) {
  return p.together > 1 ? scratch.take<T>(n.rows() * std::max(n.ldf, n.projected.ldd)) : nullptr;
}

template <typename T>
Queries<T> take_queries(Scratch& scratch, const Problem& p, const Sizes<T>& n, bool no_weights) {
  Queries<T> q{};
  q.phi = scratch.take<T>(n.rows() * n.ldf);
  q.weighted = no_weights ? q.phi : scratch.take<T>(n.rows() * n.ldf);
  q.scale = scratch.take<T>(n.ldc);
  q.G = scratch.take<T>(n.rows() * n.lde);
  q.G_z = scratch.take<T>(n.ldc);
  q.factor = scratch.take<T>(n.ldc);
  q.grad_phi = scratch.take<T>(n.rows() * n.ldf);
  q.x = scratch.take<T>(p.map == Map::squared_relu ? n.rows() * n.ldf : n.inputs());
  q.grad_x = scratch.take<T>(n.inputs());
  q.shared = take_shared(scratch, p, n);
  return q;
}

/// The tile G, and G_z, from grad_o and o, in one pass where both are stored alike.
template <typename T>
void load_output_gradients(const Problem& p, const Sizes<T>& n, Index row, Index head, Index time, Index rows, Queries<T>& q) {
  at_position<T>(p.grad_o, row, head, time, [&](auto format, auto grad) {
    using Format = decltype(format);
    auto out = static_cast<decltype(grad)>(p.o.data) + offset(p.o, row, head, time);  // of the same type as grad_o
    const Index step = p.grad_o.stride[3], out_step = p.o.stride[3];
    for (Index i = 0; i < rows; ++i, grad += p.grad_o.stride[2], out += p.o.stride[2]) {
      Vec<T> total{};
      for (Index j = 0; j < n.e; j += width<T>) {
        const Index there = n.e - j < width<T> ? n.e - j : width<T>;
        const bool whole_one = there == width<T>;
        const Vec<T> g = (whole_one && step == 1 ? Format::load(grad + j) : load_some<Format>(grad + j * step, step, there)) * q.factor[i];
        store(q.G + i * n.lde + j, g);
        if (p.normalize)
          total += g * (whole_one && out_step == 1 ? Format::load(out + j) : load_some<Format>(out + j * out_step, out_step, there));
      }
      q.G_z[i] = p.at_least_one ? -sum<T>(total) * q.G_z[i] : -sum<T>(total);
    }
  });
}

/// What the gradients of outputs are multiplied with. M: the units of each row's sums, or null where all are in those of `M_all`.
template <typename T>
void load_output_factors(const Problem& p, const Stretch& s, Index head, Index time, Index rows, const T* M, T M_all, Queries<T>& q) {
  const T* den = static_cast<const T*>(p.den.data) + offset(p.den, s.row, head, time);
  for (Index i = 0; i < rows; ++i) {
    const T units = M ? M[i] : M_all, scale = p.map == Map::exp ? q.scale[i] : T(0);
    q.factor[i] = output_factor(p, den[i], units, scale);
    if (!p.at_least_one) continue;
    const T one = one_in_units(p, units, scale);
    q.G_z[i] = den[i] > one ? T(1) : den[i] < -one ? T(-1) : T(0);  // by how much the divisor grows with den
  }
}

template <typename T>
void load_queries(const Problem& p, const Sizes<T>& n, const Stretch& s, Index head, Index time, Index rows, const T* M, T M_all,
                  Queries<T>& q, Ahead* ahead = nullptr) {
  q.from = make_features(p, n, s, p.q, head, time, rows, q.x, q.phi, q.scale, ahead);
  load_output_factors(p, s, head, time, rows, M, M_all, q);
  load_output_gradients(p, n, s.row, head, time, rows, q);
}

/// A tile of gradients of queries or keys. Those of heads that share them are summed first, one head after the other: the first of a
/// task begins the sum, and the last stores it.
template <typename T>
void store_summed(const Problem& p, const Stretch& s, const View& to, Index head, Index time, Index rows, Index n, const T* grad,
                  Index ld, T* shared) {
  if (p.together > 1) {
    const Index i = s.head % p.together;
    for (Index j = 0; j < rows * ld; j += width<T>) store(shared + j, i ? load(shared + j) + load(grad + j) : load(grad + j));
    if (i + 1 < p.together) return;
    grad = shared;
  }
  store_tile(grad, ld, to, s.row, head, time, rows, n);
}

/// Gradients of features (a tile, overwritten) to those of the inputs, stored in `to`. from: of a projection, what
/// was projected, and grad_x a tile for its gradient; else x is a tile to load inputs into. of_keys: of those that the mask is for.
template <typename T>
void store_feature_gradients(const Problem& p, const Sizes<T>& n, const Stretch& s, const View& input, const View& to, Index head,
                             Index time, Index rows, const T* phi, T* grad, Source<T> from, T* x, T* grad_x, T* grad_omega, T* shared,
                             Ahead* ahead, bool of_keys = false) {
  if (n.projected) {
    n.projected.gradients(s.row, s.head, rows, from, phi, grad, grad_x, grad_omega, ahead);
    return store_summed(p, s, to, head, time, rows, n.projected.d, grad_x, n.projected.ldd, shared);
  }
  if (p.map == Map::squared_relu) load_tile(input, s.row, head, time, rows, n.f, x, n.ldf);
  if (p.map == Map::squared_relu && of_keys) clear_masked(p, s, time, rows, x, n.ldf);
  features_backward(p.map, grad, phi, x, n.ldf, rows, n.f);
  store_summed(p, s, to, head, time, rows, n.f, grad, n.ldf, shared);
}

/// The gradients of Ω and β of each stretch, from zero, and their sums: in the order of the stretches, whatever thread had them.
template <typename T>
class OmegaGradients {
 public:
  OmegaGradients(const Problem& p, const Sizes<T>& n, const Stretches& stretches)
      : p_(p), n_(n), stretches_(stretches), size_(p.grad_omega || p.grad_bias ? n.projected.gradient_size() : 0),
        all_(stretches.count * size_) {
    if (size_) clear(all_.get(), stretches.count * size_);
  }
  T* at(const Stretch& s) { return size_ ? all_.get() + (&s - stretches_.at) * size_ : nullptr; }
  /// A row of Ω after the other, on as many threads as there are.
  void put() {
    if (!size_) return;
    parallel(p_, n_.f, 64, [&](Index row, void*) {
      for (Index i = 0; i < stretches_.count; ++i)
        n_.projected.put(at(stretches_.at[i]), row, stretches_.at[i].row, stretches_.at[i].head, p_.grad_omega, p_.grad_bias);
    });
  }

 private:
  const Problem& p_;
  const Sizes<T>& n_;
  const Stretches& stretches_;
  const Index size_;
  Owned<T> all_;
};

/// Gradients of a chunk's keys and values (tiles, overwritten), of its log-weights too; 0 at masked keys.
template <typename T>
void store_key_gradients(const Problem& p, const Sizes<T>& n, const Stretch& s, Index time, const Keys<T>& keys, T* grad_phi,
                         T* grad_v, T* x, T* grad_x, T* grad_omega, T* shared, Ahead* ahead) {
  clear_masked(p, s, time, keys.rows, grad_phi, n.ldf);
  clear_masked(p, s, time, keys.rows, grad_v, n.lde);
  if (p.grad_key_log_weight) {
    T* w = static_cast<T*>(p.grad_key_log_weight.data) + offset(p.grad_key_log_weight, s.row, s.head, time);
    for (Index i = 0; i < keys.rows; ++i)
      w[i * p.grad_key_log_weight.stride[2]] = dot(keys.phi + i * n.ldf, grad_phi + i * n.ldf, n.f);
  }
  store_feature_gradients(p, n, s, p.k, p.grad_k, s.head, time, keys.rows, keys.phi, grad_phi, keys.x, x, grad_x,
                          grad_omega, shared, ahead, true);
  store_tile(grad_v, n.lde, p.grad_v, s.row, s.head, time, keys.rows, n.e);
}

}  // namespace TARNN_ISA
}  // namespace tarnn
