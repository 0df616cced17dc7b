// RWKV-7's mixing of tokens: rows of one sequence for one head; see model_step/rwkv7.h.
#pragma once

#include "delta/step.h"
#include "model_step/stack.h"
#include "runtime/features.h"

namespace tarnn {
namespace TARNN_ISA {

constexpr Index rwkv7_tokens = 12;  // of a head, whose products of low rank are made together

/// What each thread has for some tokens of a head.
struct Rwkv7Room {
  Index ld = 0;
  float *low[Rwkv7::num_low], *r, *k, *v, *a, *b, *decay, *o;
  Rwkv7Room(Scratch& scratch, const Stack& s) {
    for (Index i = 0; i < s.num_layers; ++i)
      if (s.layers[i].attention == Attention::rwkv7) ld = std::max(ld, whole_panels(s.layers[i].rwkv7.d));
    for (float*& x : low) x = scratch.take<float>(smaller(s.most_slots, rwkv7_tokens) * ld);
    for (float** x : {&r, &k, &v, &a, &b, &decay, &o}) *x = scratch.take<float>(ld);
  }
};

/// x + (before − x)·mixture
inline void mix_row(const float* x, const float* before, const float* mixture, Index n, float* to) {
  for (Index i = 0; i < n; i += width<float>) store(to + i, load(x + i) + (read(before + i, n - i) - load(x + i)) * load(mixture + i));
}

/// N vectors' columns of S (d, d), or in part the `left` columns of one: z = aᵀS, S ← Diag(decay) S + b zᵀ + k vᵀ, o = Sᵀr.
template <int N, bool part>
TARNN_INLINE void rwkv7_columns(Index d, const Rwkv7Room& at, float* S, Index j) {
  const Index left = d - j;
  Vec<float> z[N], o[N], v[N];
  unrolled<N>([&](auto n) TARNN_LAMBDA { z[n] = o[n] = Vec<float>{}, v[n] = load(at.v + j + n * width<float>); });
  const auto row = [&](Index i, Index n) TARNN_LAMBDA {
    const float* from = S + i * d + j + n * width<float>;
    return part ? load_some<Same<float>>(from, 1, left) : load(from);
  };
  for (Index i = 0; i < d; ++i)
    unrolled<N>([&](auto n) TARNN_LAMBDA { z[n] += row(i, n) * at.a[i]; });
  for (Index i = 0; i < d; ++i)
    unrolled<N>([&](auto n) TARNN_LAMBDA {
      const Vec<float> s = row(i, n) * at.decay[i] + z[n] * at.b[i] + v[n] * at.k[i];
      write(S + i * d + j + n * width<float>, s, part ? left : width<float>);
      o[n] += s * at.r[i];
    });
  unrolled<N>([&](auto n) TARNN_LAMBDA { store(at.o + j + n * width<float>, o[n]); });
}

/// Rows of a sequence for one head. made: what the layer's first products put out, rows ldm apart; first: the first layer's values, rows
/// ldf apart, which this layer writes if it mixes none; S: of this sequence and head.
inline void rwkv7_head(const Rwkv7& l, Index head, const float* made, Index ldm, Index rows, float* first, Index ldf, float* S, float* out,
                       Index ldo, const Rwkv7Room& at) {
  const Index d = l.d, begin = head * d, panels = whole_panels(d) / panel;
  const bool mixes = l.down[Rwkv7::v].outputs > 0;
  for (Index row = 0; row < rows; ++row, made += ldm, first += ldf, out += ldo) {
    const Index i = row % rwkv7_tokens * at.ld;
    for (Index low = 0; row % rwkv7_tokens == 0 && low < Rwkv7::num_low; ++low)
      for (Index p = 0; l.down[low].outputs && p < panels; ++p)
        product(l.up[low], false, {smaller(rows - row, rwkv7_tokens), ldm, made + l.at_low(low), nullptr, 0, nullptr, nullptr}, head * panels + p, at.low[low] + p * panel, at.ld);
    Vec<float> square{}, bonus{};
    for (Index c = 0; c < d; c += width<float>) {
      const auto of_head = [&](const float* x) TARNN_LAMBDA { return read(x + begin + c, d - c); };
      const Vec<float> r = of_head(made), k = of_head(made + l.at(1)), alpha = sigmoid<float>(load(at.low[Rwkv7::a] + i + c));
      const Vec<float> direction = k * of_head(l.k_k), key = k * ((alpha - 1.f) * of_head(l.k_a) + 1.f);
      Vec<float> v = of_head(made + l.at(2));
      if (mixes) v += (of_head(first) - v) * sigmoid<float>(load(at.low[Rwkv7::v] + i + c));
      else write(first + begin + c, v, d - c);
      square += direction * direction;
      bonus += r * key * of_head(l.r_k);
      store(at.r + c, r), store(at.k + c, key), store(at.v + c, v);
      store(at.a + c, direction), store(at.b + c, alpha);
      store(at.decay + c, exp_nonpositive(sigmoid<float>(load(at.low[Rwkv7::w] + i + c)) * -0.606530659713f));  // e^−½
    }
    const float length = __builtin_sqrtf(sum<float>(square)), scale = 1.f / (length > 1e-12f ? length : 1e-12f), of_value = sum<float>(bonus);
    for (Index c = 0; c < d; c += width<float>) {
      const Vec<float> direction = load(at.a + c) * scale;
      store(at.a + c, -direction), store(at.b + c, load(at.b + c) * direction);
    }
    over_columns<float>(d, [&](auto n, auto part, Index j) TARNN_LAMBDA { rwkv7_columns<n, part>(d, at, S, j); });
    const auto of = [&](const float* x, Index c) TARNN_LAMBDA { return read(x + c, d - c); };
    const float mean = summed(d, [&](Index c) TARNN_LAMBDA { return of(at.o, c); }) / static_cast<float>(d);
    const float variance = summed(d, [&](Index c) TARNN_LAMBDA { return (of(at.o, c) - mean) * (of(at.o, c) - mean); }) / static_cast<float>(d);
    const float factor = 1.f / __builtin_sqrtf(variance + l.eps);
    for (Index c = 0; c < d; c += width<float>) {
      const Vec<float> normed = (load(at.o + c) - mean) * factor * of(l.gain + begin, c) + of(l.bias + begin, c);
      write(out + begin + c, (normed + load(at.v + c) * of_value) * load(at.low[Rwkv7::g] + i + c), d - c);
    }
  }
}

}  // namespace TARNN_ISA
}  // namespace tarnn
