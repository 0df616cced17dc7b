// One token of the delta rule, in place if wanted: kᵀS and qᵀS in one pass over a panel of S, then S itself, which is in the cache by then.
//
//     δ = β (v − kᵀe^g S)      o = q̂ᵀe^g S + (q̂ᵀk) δ      S ← e^g S + k δᵀ
#pragma once

#include "common/one_token.h"
#include "delta/tokens.h"

namespace tarnn {
namespace TARNN_ISA {

/// One token of a state, in whole vectors. asks, reads: e^g ⊙ k and e^g ⊙ q; qk: qᵀk.
template <typename T>
struct DeltaToken {
  T *k, *q, *asks, *reads, *decay, *v, *o;
  T beta, qk;
};

template <typename T>
struct DeltaStepScratch : DeltaToken<T> {
  DeltaStepScratch(Scratch& scratch, const DeltaProblem& p) {
    for (T** x : {&this->k, &this->q, &this->asks, &this->reads, &this->decay}) *x = scratch.take<T>(padded<T>(p.d));
    for (T** x : {&this->v, &this->o}) *x = scratch.take<T>(padded<T>(p.e));
  }
};

/// N vectors' columns of S (d, e), or in part the `left` columns of one.
template <int N, bool part, typename T>
TARNN_INLINE void step_columns(Index d, Index e, const DeltaToken<T>& at, const T* from, T* to, Index j) {
  const Index left = e - j;
  Vec<T> x[N], y[N];
  unrolled<N>([&](auto n) TARNN_LAMBDA { x[n] = y[n] = Vec<T>{}; });
  const auto row = [&](Index i, Index n) TARNN_LAMBDA {
    if (!from) return Vec<T>{};
    const T* source = from + i * e + j + n * width<T>;
    return part ? load_some<Same<T>>(source, 1, left) : load(source);
  };
  for (Index i = 0; from && i < d; ++i) {
    const Vec<T> k = broadcast<T>(at.asks[i]), q = broadcast<T>(at.reads[i]);
    unrolled<N>([&](auto n) TARNN_LAMBDA {
      const Vec<T> s = row(i, n);
      x[n] += s * k;
      y[n] += s * q;
    });
  }
  unrolled<N>([&](auto n) TARNN_LAMBDA {
    x[n] = (load(at.v + j + n * width<T>) - x[n]) * at.beta;
    store(at.o + j + n * width<T>, y[n] + x[n] * at.qk);
  });
  if (!to) return;
  for (Index i = 0; i < d; ++i)
    unrolled<N>([&](auto n) TARNN_LAMBDA {
      write(to + i * e + j + n * width<T>, row(i, n) * at.decay[i] + x[n] * at.k[i], part ? left : width<T>);
    });
}

template <typename T>
void step_head(const DeltaProblem& p, const DeltaHead& h, DeltaStepScratch<T>& at) {
  const Index ldd = padded<T>(p.d), lde = padded<T>(p.e), time = h.begin;
  T factor[1];
  load_delta_keys(p, h, time, 1, at.k, ldd, factor);
  load_delta_queries(p, h, time, 1, static_cast<T>(p.scale), at.q, ldd, factor);
  load_betas(p, h, time, 1, &at.beta);
  load_tile(p.v, h.row, h.v, time, 1, p.e, at.v, lde);
  load_decays(p, h, time, 1, at.decay, ldd);
  if (!p.channels) std::fill_n(at.decay, whole<T>(p.d), T(at.decay[0]));
  multiply(at.k, at.decay, ldd, 1, p.d, at.asks);
  multiply(at.q, at.decay, ldd, 1, p.d, at.reads);
  at.qk = dot(at.q, at.k, p.d);
  const T* from = state_of<T>(p, h, p.before);
  T* to = h.writes_state(p) ? state_of<T>(p, h, p.after) : nullptr;
  over_columns<T>(p.e, [&](auto n, auto part, Index j) TARNN_LAMBDA { step_columns<n, part>(p.d, p.e, at, from, to, j); });
  store_tile(at.o, lde, p.o, h.row, h.o, time, 1, p.e);
}

template <typename T>
void delta_step(const DeltaProblem& p) {
  // tasks of about 256 KB of states: less is done before another thread has woken; heads that share a state stay together
  const Index states = p.sequences * p.heads / p.v_share, bytes = p.d * p.e * static_cast<Index>(sizeof(T)) + 1;
  const Index each = (1 << 18) / bytes + 1, tasks = (states + each - 1) / each;
  parallel_with<DeltaStepScratch<T>>(p, tasks, [&](Index i, DeltaStepScratch<T>& at) {
    for (Index s = i * each * p.v_share; s < smaller(states, (i + 1) * each) * p.v_share; ++s)
      step_head(p, DeltaHead(p, s / p.heads, s % p.heads), at);
  }, p);
}

}  // namespace TARNN_ISA
}  // namespace tarnn
