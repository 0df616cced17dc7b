// φ of one token's queries and key, for every map that a model can have. Those that act on each channel by itself are left to
// linear/step.h; the others are made here:
//
//     x ← (x − centre)·stretch, u = Ω x + bias − square·|x|² + offset, φ = gain·function(u) + shift
//
// and of some functions a logarithm is kept apart: φ is what is put out times e^scale.
#pragma once

#include <cmath>

#include "common/one_token.h"
#include "runtime/feature_map.h"
#include "runtime/rows.h"

namespace tarnn {
namespace TARNN_ISA {

/// The features of n heads' x (d of each, ldx apart), moved already, to rows of f, ldf apart. u: room for n·ldf. The first `each`
/// have that position, as many have the next, and so on.
class Featurer {
 public:
  Featurer(const FeatureMap& map, Index head, Index d, Index n, const float* x, Index ldx, double position, Index each, float* u, float* to, Index ldf, float* scale)
      : map_(map), d_(d) {
    const Index group = map.heads > 1 ? head * map.omega_panels() : 0;
    for (Index i = 0; map.heads && i < map.omega_panels(); ++i)
      product(map.omega, {}, {n, ldx, x, nullptr, 0, nullptr, nullptr}, group + i, u + i * panel, ldf);
    for (Index i = 0; i < n; ++i) {
      float square = 0;
      for (Index c = 0; map.square != 0 && c < d; ++c) square += x[i * ldx + c] * x[i * ldx + c];
      const float constant = map.offset - map.square * square;
      const double place = position + static_cast<double>(i / each);
      one(map.heads ? u + i * ldf : x + i * ldx, map.heads ? map.m : d, constant, place, to + i * ldf, scale[i], u + i * ldf);
    }
  }

 private:
  void one(const float* u, Index m, float constant, double position, float* to, float& scale, float* room) const {
    const float gain = map_.gain, shift = map_.shift;
    const auto each = [&](auto f) {
      for (Index i = 0; i < m; ++i) to[i] = gain * f(u[i] + constant) + shift;
    };
    const auto vectors = [&](auto f) {
      for (Index i = 0; i < m; i += width<float>) store(to + i, within(m - i, f(load(u + i) + constant) * gain + shift));
    };
    scale = 0;
    switch (map_.function) {
      case Function::identity: return each([](float x) { return x; });
      case Function::elu: return vectors([](Vec<float> x) TARNN_LAMBDA { return x > 0 ? x + 1.f : exp_nonpositive(x > 0 ? -x : x); });
      case Function::relu: return each([](float x) { return x > 0 ? x : 0.f; });
      case Function::squared_relu: return each([](float x) { return x > 0 ? x * x : 0.f; });
      case Function::abs: return each([](float x) { return std::fabs(x); });
      case Function::sigmoid: return vectors([](Vec<float> x) TARNN_LAMBDA {
        const Vec<float> e = exp_nonpositive(x > 0 ? -x : x);
        return (x > 0 ? Vec<float>{} + 1.f : e) / (e + 1.f);
      });
      case Function::gelu: return each([](float x) { return 0.5f * x * (1.f + std::erf(x * 0.707106781f)); });
      case Function::cos: return each([](float x) { return std::cos(x); });
      case Function::plain_exp: return each([](float x) { return std::exp(x); });
      case Function::exp: return exponentials(u, m, constant, to, scale);
      case Function::waves:
        for (Index i = 0; i < m; ++i) to[i] = gain * std::sin(u[i]), to[m + i] = gain * std::cos(u[i]);
        scale = constant;
        return;
      case Function::halves: return halves(u, m, to);
      case Function::log_softmax: return log_softmax(u, m, to);
      case Function::dpfp: return dpfp(u, to, room);
      case Function::pairs: return pairs(u, to);
      case Function::cosformer: {
        const double angle = position * map_.number;
        const float cos = static_cast<float>(std::cos(angle)), sin = static_cast<float>(std::sin(angle));
        for (Index i = 0; i < m; ++i) {
          const float x = u[i] > 0 ? u[i] : 0.f;
          to[i] = x * cos, to[m + i] = x * sin;
        }
      }
    }
  }

  /// u − log Σ e^u.
  static void log_softmax(const float* u, Index m, float* to) {
    Vec<float> seen = broadcast(u[0]);
    for (Index i = 0; i < m; i += width<float>) seen = within(m - i, load(u + i), seen) > seen ? load(u + i) : seen;
    const float most = largest<float>(seen);
    const float total = summed(m, [&](Index i) TARNN_LAMBDA { return exp_nonpositive(load(u + i) - most); });
    const float log_total = most + std::log(total);
    for (Index i = 0; i < m; i += width<float>) store(to + i, within(m - i, load(u + i) - log_total));
  }

  /// e^(u − scale)·gain + shift·e^(−scale): `number` is the least that the scale may be.
  void exponentials(const float* u, Index m, float constant, float* to, float& scale) const {
    Vec<float> seen = broadcast(u[0]);
    for (Index i = 0; i < m; i += width<float>) {
      const Vec<float> y = within(m - i, load(u + i), broadcast(u[0]));
      seen = y > seen ? y : seen;
    }
    const float most = largest<float>(seen), least = static_cast<float>(map_.number) - constant;
    const float top = most < least ? least : most;
    scale = top + constant;
    const float more = map_.shift == 0 ? 0.f : map_.shift * std::exp(-scale);
    for (Index i = 0; i < m; i += width<float>)
      store(to + i, within(m - i, exp_nonpositive(load(u + i) - top) * map_.gain + more));
  }

  /// softmax(u), softmax(−u)
  static void halves(const float* u, Index m, float* to) {
    for (const float sign : {1.f, -1.f}) {
      const auto at = [&](Index i) TARNN_LAMBDA { return within(m - i, load(u + i), broadcast(u[0])) * sign; };
      Vec<float> seen = at(0);
      for (Index i = width<float>; i < m; i += width<float>) seen = at(i) > seen ? at(i) : seen;
      const float most = largest<float>(seen);
      const auto part = [&](Index i) TARNN_LAMBDA { return exp_nonpositive(at(i) - most); };
      const float total = summed(m, part);
      for (Index i = 0; i < m; i += width<float>) write(to + i, part(i) / total, m - i);
      to += m;
    }
  }

  /// r ⊙ roll(r, j) for j = 1 … ν, r = [relu(x), relu(−x)]
  void dpfp(const float* x, float* to, float* r) const {
    const Index n = 2 * d_, nu = static_cast<Index>(map_.number);
    for (Index i = 0; i < d_; ++i) r[i] = x[i] > 0 ? x[i] : 0.f, r[d_ + i] = x[i] < 0 ? -x[i] : 0.f;
    for (Index j = 1; j <= nu; ++j, to += n) {
      const Index back = j % n;
      for (Index i = 0; i < back; ++i) to[i] = r[i] * r[i + n - back];
      for (Index i = back; i < n; ++i) to[i] = r[i] * r[i - back];
    }
  }

  /// 1 where `leads`, x·line, x_i²·square, x_i·x_j·pair for i < j, offset where it ends: Taylor's and the polynomial's parts.
  void pairs(const float* x, float* to) const {
    const float *part = map_.parts;  // leads, line before, square, pair, line behind, ends
    if (part[0] != 0) *to++ = part[0];
    for (Index i = 0; part[1] != 0 && i < d_; ++i) *to++ = part[1] * x[i];
    for (Index i = 0; i < d_; ++i) *to++ = part[2] * x[i] * x[i];
    for (Index i = 0; i < d_; ++i)
      for (Index j = i + 1; j < d_; ++j) *to++ = part[3] * x[i] * x[j];
    for (Index i = 0; part[4] != 0 && i < d_; ++i) *to++ = part[4] * x[i];
    if (part[5] != 0) *to++ = part[5];
  }

  const FeatureMap& map_;
  const Index d_;
};

/// x ← (x − centre)·stretch; returns weight·x of the x before, + constant. Nothing where there is no move.
inline float move(const Move& by, Index head, Index d, const float* x, float* to) {
  if (!by.centre) {
    std::memcpy(to, x, sizeof(float) * static_cast<std::size_t>(d));
    return 0;
  }
  const Index at = by.heads > 1 ? head * d : 0;
  float weight = by.constant[by.heads > 1 ? head : 0];
  for (Index i = 0; i < d; ++i) {
    weight += by.weight[at + i] * x[i];
    to[i] = (x[i] - by.centre[at + i]) * by.stretch[at + i];
  }
  return weight;
}

}  // namespace TARNN_ISA
}  // namespace tarnn
