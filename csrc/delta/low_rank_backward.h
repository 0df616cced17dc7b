// The delta rule of low rank, backward, one token after the other from the last. With R the gradient of S_t, and S of S_{t−1},
//
//     R += q doᵀ      dq = S_t do      dk = R v      dv = Rᵀk      db = R z      dz = Rᵀb      da = S dz      dg = e ⊙ rowsum(R ⊙ S)
//     R ← Diag(e) R + a dzᵀ
//
// where q has the scale of the outputs. The states of tokens can't be had by going back: decays have forgotten. They are made
// again: in a segment, from the state that forward kept, one for each stretch of 16 tokens; in a stretch all of them, for a panel
// of columns at a time. Nothing is divided, so decays may be as strong as they like.
#pragma once

#include "delta/low_rank.h"

namespace tarnn {
namespace TARNN_ISA {

constexpr Index low_rank_stretch = 16;
enum LowRankGradient { of_q, of_k, of_a, of_b, of_decay, low_rank_gradients };

template <typename T>
struct LowRankBackward : LowRankTokens<T> {
  Index matrix, panel;  // numbers of S, and of a panel
  T *R, *starts, *states, *z, *grad_o, *grad_v, *grads[low_rank_gradients], *lanes[low_rank_gradients];
  LowRankBackward(Scratch& scratch, const LowRankProblem& p)
      : LowRankTokens<T>(scratch, p, low_rank_stretch), matrix(p.d * whole<T>(p.e)), panel(p.d * pair_vectors * width<T>) {
    R = scratch.take<T>(matrix);
    starts = scratch.take<T>(p.segment / low_rank_stretch * matrix);
    states = scratch.take<T>(low_rank_stretch * panel);
    z = scratch.take<T>(low_rank_stretch * pair_vectors * width<T>);
    grad_o = scratch.take<T>(low_rank_stretch * this->lde);
    grad_v = scratch.take<T>(low_rank_stretch * this->lde);
    for (T*& x : grads) x = scratch.take<T>(low_rank_stretch * this->ldd);
    for (T*& x : lanes) x = scratch.take<T>(whole<T>(p.d) * width<T>);
  }
};

/// to ← Diag(decay) from + b zᵀ + k vᵀ, and next: aᵀ of that.
template <int N, typename T>
TARNN_INLINE void next_state(const T* from, T* to, Index d, const T* decay, const T* b, const T* k, const T* a, const Vec<T> (&z)[N],
                             const Vec<T> (&v)[N], Vec<T> (&next)[N]) {
  unrolled<N>([&](auto n) TARNN_LAMBDA { next[n] = Vec<T>{}; });
  for (Index i = 0; i < d; ++i)
    unrolled<N>([&](auto n) TARNN_LAMBDA {
      const Index at = (i * N + n) * width<T>;
      const Vec<T> s = (load(from + at) * decay[i] + broadcast<T>(b[i]) * z[n]) + broadcast<T>(k[i]) * v[n];
      store(to + at, s);
      next[n] += broadcast<T>(a[i]) * s;
    });
}

/// All tokens of a stretch, from the state before it: `to(t)` is where that behind token t goes; z is kept where wanted.
template <int N, typename T, typename F>
TARNN_INLINE void states_of_stretch(const LowRankProblem& p, Index j, Index rows, const T* from, F to, const LowRankBackward<T>& at) {
  Vec<T> z[N], v[N], next[N] = {};
  for (Index i = 0; i < p.d; ++i)
    unrolled<N>([&](auto n) TARNN_LAMBDA { next[n] += broadcast<T>(at.a[i]) * load(from + (i * N + n) * width<T>); });
  for (Index t = 0; t < rows; ++t) {
    unrolled<N>([&](auto n) TARNN_LAMBDA {
      z[n] = next[n];
      v[n] = load(at.v + t * at.lde + j + n * width<T>);
      store(at.z + (t * N + n) * width<T>, z[n]);
    });
    const Index row = t * at.ldd;
    const T* a = at.a + (t + 1 < rows ? row + at.ldd : row);
    next_state<N>(from, to(t), p.d, at.decay + row, at.b + row, at.k + row, a, z, v, next);
    from = to(t);
  }
}

/// One token; S and after: the states before and behind it.
template <int N, typename T>
TARNN_INLINE void back_over_token(const LowRankProblem& p, Index t, Index j, const T* S, const T* after, T* R, const LowRankBackward<T>& at) {
  const Index row = t * at.ldd;
  const T *q = at.q + row, *k = at.k + row, *a = at.a + row, *b = at.b + row, *decay = at.decay + row;
  Vec<T> g[N], v[N], z[N], dv[N] = {}, dz[N] = {};
  unrolled<N>([&](auto n) TARNN_LAMBDA {
    g[n] = load(at.grad_o + t * at.lde + j + n * width<T>);
    v[n] = load(at.v + t * at.lde + j + n * width<T>);
    z[n] = load(at.z + (t * N + n) * width<T>);
  });
  for (Index i = 0; i < p.d; ++i) {
    Vec<T> dq{}, dk{}, db{}, ddecay{};
    unrolled<N>([&](auto n) TARNN_LAMBDA {
      const Index to = (i * N + n) * width<T>;
      const Vec<T> r = load(R + to) + broadcast<T>(q[i]) * g[n];
      store(R + to, r);
      dq += load(after + to) * g[n];
      dk += r * v[n];
      db += r * z[n];
      ddecay += r * load(S + to);
      dv[n] += broadcast<T>(k[i]) * r;
      dz[n] += broadcast<T>(b[i]) * r;
    });
    store(at.lanes[of_q] + i * width<T>, dq);
    store(at.lanes[of_k] + i * width<T>, dk);
    store(at.lanes[of_b] + i * width<T>, db);
    store(at.lanes[of_decay] + i * width<T>, ddecay);
  }
  for (Index i = 0; i < p.d; ++i) {
    Vec<T> da{};
    unrolled<N>([&](auto n) TARNN_LAMBDA {
      const Index to = (i * N + n) * width<T>;
      da += load(S + to) * dz[n];
      store(R + to, load(R + to) * decay[i] + broadcast<T>(a[i]) * dz[n]);
    });
    store(at.lanes[of_a] + i * width<T>, da);
  }
  unrolled<N>([&](auto n) TARNN_LAMBDA { store(at.grad_v + t * at.lde + j + n * width<T>, dv[n]); });
  for (int which = 0; which < low_rank_gradients; ++which)
    for (Index i = 0; i < p.d; i += width<T>) {
      T* to = at.grads[which] + row + i;
      store(to, load(to) + sums_at(at.lanes[which] + i * width<T>));
    }
}

/// The gradients of a stretch, of which `start` is the state before; R: before and behind.
template <typename T>
void back_over_stretch(const LowRankProblem& p, const DeltaHead& h, Index time, Index rows, const T* start, const LowRankBackward<T>& at) {
  load_low_rank(p, h, time, rows, at);
  load_scaled_queries(p, h, time, rows, at.q, at.ldd);
  if (p.grad_o) load_tile(p.grad_o, h.row, h.o, time, rows, p.e, at.grad_o, at.lde);
  else clear(at.grad_o, rows * at.lde);
  for (T* x : at.grads) clear(x, rows * at.ldd);
  over_panels<T>(p, {0, whole<T>(p.e)}, [&]<int N>(std::integral_constant<int, N>, Index j) {
    const T* from = start + j * p.d;
    const auto state = [&](Index t) TARNN_LAMBDA { return at.states + t * at.panel; };
    states_of_stretch<N>(p, j, rows, from, state, at);
    for (Index t = rows - 1; t >= 0; --t)
      back_over_token<N>(p, t, j, t ? static_cast<const T*>(state(t - 1)) : from, static_cast<const T*>(state(t)), at.R + j * p.d, at);
  });
  scale(at.grads[of_q], rows * at.ldd, static_cast<T>(p.scale));
  multiply(at.grads[of_decay], at.decay, at.ldd, rows, p.d, at.grads[of_decay]);
  const auto give = [&](const View& to, T* x, Index n, Index ld) {
    clear_masked(p, h, time, rows, x, ld, n);
    store_tile(x, ld, to, h.row, h.k, time, rows, n);
  };
  store_tile(at.grads[of_q], at.ldd, p.grad_q, h.row, h.q, time, rows, p.d);
  give(p.grad_k, at.grads[of_k], p.d, at.ldd);
  give(p.grad_a, at.grads[of_a], p.d, at.ldd);
  give(p.grad_b, at.grads[of_b], p.d, at.ldd);
  give(p.grad_v, at.grad_v, p.e, at.lde);
  if (p.grad_log_decay && p.channels) give(p.grad_log_decay, at.grads[of_decay], p.d, at.ldd);
  if (!p.grad_log_decay || p.channels) return;
  for (Index i = 0; i < rows; ++i) {
    T total = 0;
    for (Index l = 0; l < p.d; ++l) total += at.grads[of_decay][i * at.ldd + l];
    element<T>(p.grad_log_decay, h.row, h.v, time + i) = is_masked(p, h, time + i) ? T(0) : total;
  }
}

template <typename T>
void low_rank_backward_head(const LowRankProblem& p, const DeltaHead& h, const LowRankBackward<T>& at) {
  const Columns all = {0, whole<T>(p.e)};
  read_panels(p, all, state_of<T>(p, h, p.grad_after), at.R);
  for (T* x : at.lanes) clear(x, whole<T>(p.d) * width<T>);
  const Index length = h.end - h.begin, segments = (length + p.segment - 1) / p.segment;
  for (Index segment = segments - 1; segment >= 0; --segment) {
    const Index begin = h.begin + segment * p.segment, rows = smaller(p.segment, h.end - begin);
    const T* before = segment ? kept_state_of<T>(p, h, begin) : state_of<T>(p, h, p.before);
    read_panels(p, all, before, at.starts);
    const Index stretches = (rows + low_rank_stretch - 1) / low_rank_stretch;
    for (Index i = 0; i + 1 < stretches; ++i) {
      const T* from = at.starts + i * at.matrix;
      load_low_rank(p, h, begin + i * low_rank_stretch, low_rank_stretch, at);
      over_panels<T>(p, all, [&]<int N>(std::integral_constant<int, N>, Index j) {
        T* to = at.starts + (i + 1) * at.matrix + j * p.d;
        states_of_stretch<N>(p, j, low_rank_stretch, from + j * p.d, [&](Index) TARNN_LAMBDA { return to; }, at);
      });
    }
    for (Index i = stretches - 1; i >= 0; --i) {
      const Index time = begin + i * low_rank_stretch;
      back_over_stretch(p, h, time, smaller(low_rank_stretch, begin + rows - time), at.starts + i * at.matrix, at);
    }
  }
  if (p.grad_before) write_panels(p, all, at.R, state_of<T>(p, h, p.grad_before));
}

template <typename T>
void low_rank_backward(const LowRankProblem& p) {
  parallel_with<LowRankBackward<T>>(p, p.sequences * p.heads, [&](Index i, LowRankBackward<T>& at) {
    low_rank_backward_head(p, DeltaHead(p, i / p.heads, i % p.heads), at);
  }, p);
}

}  // namespace TARNN_ISA
}  // namespace tarnn
