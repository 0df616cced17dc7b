// RWKV-7's state, for some rows of one unit's heads: S ← Diag(e^d) S + b (aᵀS) + k vᵀ, o = Sᵀr.
#pragma once

#include "runtime/instructions/rows.h"

namespace tarnn::runtime {
namespace TARNN_ISA {

/// One token of a head, in whole vectors.
struct LowRankToken {
  float *r, *decay, *k, *v, *a, *b, *o;
  LowRankToken(Scratch& scratch, Index d) {
    for (float** x : {&r, &decay, &k, &v, &a, &b, &o}) *x = scratch.take<float>(whole_panels(d) + width<float>);
  }
};

/// N vectors' columns of S (d, d), or in part the `left` columns of one.
template <int N, bool part>
TARNN_INLINE void low_rank_columns(Index d, const LowRankToken& at, float* S, Index j) {
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

/// Inputs: r, log-decay, k, v, a, b. states: S.
inline void low_rank_delta(const Instruction& x, const View& at, Index row, Index rows) {
  const Index d = x.in().width;
  const Part part = at.part(x.in());
  Scratch scratch(at.own.scratch);
  const LowRankToken token(scratch, d);
  for (Index head = 0; head < part.heads; ++head) {
    float* S = at.memory(x, 0, (at.sequence(row) * at.heads(x.in()) + part.first + head) * d * d);
    for (Index i = row; i < row + rows; ++i) {
      float* const to[] = {token.r, token.decay, token.k, token.v, token.a, token.b};
      for (Index j = 0; j < 6; ++j) {
        const float* from = at.at(x.in(j), i) + head * d;
        for (Index c = 0; c < d; c += width<float>) store(to[j] + c, j == 1 ? exp_nonpositive(read(from + c, d - c)) : read(from + c, d - c));
      }
      over_columns<float>(d, [&](auto n, auto part, Index j) TARNN_LAMBDA { low_rank_columns<n, part>(d, token, S, j); });
      std::copy_n(token.o, d, at.at(x.out(), i) + head * d);
    }
  }
}

}  // namespace TARNN_ISA
}  // namespace tarnn::runtime
