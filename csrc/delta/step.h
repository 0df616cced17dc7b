// One token of the delta rule, in place if wanted: kᵀS and qᵀS in one pass over a panel of S, then S itself, which is in the cache by then. Of several
// tokens, one pass writes S and reads it for the next.
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

/// From kᵀS (x) and qᵀS (y) to δ (x) and o.
template <int N, typename T>
TARNN_INLINE void solve_token(const DeltaToken<T>& at, Index j, Vec<T> (&x)[N], const Vec<T> (&y)[N]) {
  unrolled<N>([&](auto n) TARNN_LAMBDA {
    x[n] = (load(at.v + j + n * width<T>) - x[n]) * at.beta;
    store(at.o + j + n * width<T>, y[n] + x[n] * at.qk);
  });
}

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
  solve_token<N>(at, j, x, y);
  if (!to) return;
  for (Index i = 0; i < d; ++i)
    unrolled<N>([&](auto n) TARNN_LAMBDA {
      write(to + i * e + j + n * width<T>, row(i, n) * at.decay[i] + rounded(x[n] * at.k[i]), part ? left : width<T>);
    });
}

/// The same of several tokens, whose states are of no interest but for the last one; S: d rows of N vectors, one behind the other.
template <int N, typename T>
TARNN_INLINE void step_tile(Index d, Index tokens, const DeltaToken<T>* at, T* S, Index j) {
  Vec<T> x[N]{}, y[N]{}, delta[N];
  const auto read = [&](const Vec<T>& s, auto n, const Vec<T>& ask, const Vec<T>& read) TARNN_LAMBDA { x[n] += s * ask, y[n] += s * read; };
  const auto write = [&](T* to, auto n, const Vec<T>& decay, const Vec<T>& k) TARNN_LAMBDA {
    const Vec<T> s = load(to + n * width<T>) * decay + rounded(delta[n] * k);
    store(to + n * width<T>, s);
    return s;
  };
  const auto solve = [&] TARNN_LAMBDA {
    solve_token<N>(*at, j, x, y);
    unrolled<N>([&](auto n) TARNN_LAMBDA { delta[n] = x[n], x[n] = y[n] = Vec<T>{}; });
  };
  for (Index i = 0; i < d; ++i) {
    const Vec<T> ask = broadcast<T>(at->asks[i]), of = broadcast<T>(at->reads[i]);
    unrolled<N>([&](auto n) TARNN_LAMBDA { read(load(S + (i * N + n) * width<T>), n, ask, of); });
  }
  for (; tokens > 1; --tokens, ++at) {
    solve();
    const T *k = at->k, *decay = at->decay, *asks = at[1].asks, *reads = at[1].reads;
    T* to = S;
    for (Index i = 0; i < d; ++i, to += N * width<T>) {
      const Vec<T> key = broadcast<T>(k[i]), keep = broadcast<T>(decay[i]), ask = broadcast<T>(asks[i]), of = broadcast<T>(reads[i]);
      unrolled<N>([&](auto n) TARNN_LAMBDA { read(write(to, n, keep, key), n, ask, of); });
    }
  }
  solve();
  for (Index i = 0; i < d; ++i) {
    const Vec<T> key = broadcast<T>(at->k[i]), keep = broadcast<T>(at->decay[i]);
    unrolled<N>([&](auto n) TARNN_LAMBDA { write(S + i * N * width<T>, n, keep, key); });
  }
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
