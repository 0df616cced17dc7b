// One token: S ← keep·S + e^w φ(k) vᵀ, z likewise, o = φ(q)ᵀS / (φ(q)ᵀz + eps); the state is read and written once.
// (eq. 16–20 of Katharopoulos et al. 2020, arXiv 2006.16236)
#pragma once

#include "common/one_token.h"
#include "linear/keys.h"

namespace tarnn {
namespace TARNN_ISA {

template <typename T>
struct StepScratch {
  T *x, *q, *k, *v, *o, *d, *keep, *z;
  StepScratch(Scratch& scratch, const Step& p) {
    const Index ldf = whole<T>(p.f), lde = whole<T>(p.e);
    x = scratch.take<T>(padded<T>(p.d));
    q = scratch.take<T>(padded<T>(p.f));
    k = scratch.take<T>(padded<T>(p.f));
    v = scratch.take<T>(lde);
    o = scratch.take<T>(lde);
    d = scratch.take<T>(ldf);
    keep = scratch.take<T>(ldf);
    z = scratch.take<T>(ldf);
  }
};

/// keep (f), the key's factor, and M: what the step multiplies with. d: the log-decay, one or f.
template <typename T>
T step_factors(const Step& p, Index b, Index g, T scale, T M, T* d, T* keep, T& M_out) {
  const Index x = p.channels ? p.f : 1, ldf = whole<T>(p.f);
  if (p.log_decay) load_tile(p.log_decay, b, g, 0, 1, x, d, ldf);
  else d[0] = 0;
  M_out = M;
  T enter = 1;
  if (p.weighted) {
    T most = x ? d[0] : T(0), w = scale;
    for (Index i = 1; i < x; ++i) most = d[i] > most ? d[i] : most;
    if (p.key_log_weight) w += element<T>(p.key_log_weight, b, g, 0);
    M_out = M + most > w ? M + most : w;
    for (Index i = 0; i < x; ++i) d[i] = log_keep(d[i], M, M_out);
    enter = exp_one<T>(w - finite(M_out));
  }
  if (!p.channels)
    for (Index i = 1; i < ldf; ++i) d[i] = d[0];
  for (Index i = 0; i < ldf; i += width<T>) store(keep + i, exp_nonpositive(load(d + i)));
  return enter;
}

/// φ of one head's query or key, and the log-scale of exp features.
template <typename T>
void features_of(const Step& p, const Projected<T>& projected, const View& input, Index b, Index head, Index g, T* x, T* to, T* scale) {
  if (!projected) return load_features(p.map, input, b, head, 0, 1, p.f, to, whole<T>(p.f), scale);
  load_tile(input, b, head, 0, 1, p.d, x, projected.ldd);
  projected.features(b, g, 1, {x, projected.ldd}, to, scale, nullptr);
}

template <typename T>
void step_one(const Step& p, const Projected<T>& projected, Index b, Index g, StepScratch<T>& at) {
  const Index at_state = b * p.g + g, ldf = whole<T>(p.f), lde = whole<T>(p.e), size = p.f * p.e;
  T scale[1] = {0}, M = 0, M_out = 0;
  features_of(p, projected, p.k, b, g, g, at.x, at.k, scale);
  load_tile(p.v, b, g, 0, 1, p.e, at.v, lde);
  if (p.before.M) M = static_cast<const T*>(p.before.M)[at_state];
  const T enter = step_factors(p, b, g, p.map == Map::exp ? scale[0] : T(0), M, at.d, at.keep, M_out);
  scale_rows(at.k, ldf, 1, p.f, &enter);
  if (p.after.M) static_cast<T*>(p.after.M)[at_state] = M_out;
  T* z = static_cast<T*>(p.after.z) + at_state * p.f;
  const T* z_before = static_cast<const T*>(p.before.z) + at_state * p.f;
  for (Index i = 0; i < p.f; i += width<T>) {
    const Index there = p.f - i;
    const Vec<T> sum = read(z_before + i, there) * load(at.keep + i) + load(at.k + i);
    store(at.z + i, sum);
    write(z + i, sum, there);
  }
  T* S = static_cast<T*>(p.after.S) + at_state * size;
  const T* S_before = static_cast<const T*>(p.before.S) + at_state * size;
  const bool nobody = p.r == 0;  // no query head: the state is updated along with zeros for a query
  for (Index r = 0; r < p.r || (nobody && r == 0); ++r) {
    T q_scale[1] = {0};
    if (nobody) clear(at.q, ldf);
    else features_of(p, projected, p.q, b, g * p.r + r, g, at.x, at.q, q_scale);
    const T den = dot(at.q, at.z, p.f);
    if (r == 0) update_state(p.f, p.e, at.keep, at.k, at.v, at.q, S_before, S, at.o);
    else read_columns(p.f, p.e, S, at.q, at.o);
    if (nobody) return;
    const T factor = output_factor(p, den, finite(M_out), p.map == Map::exp ? q_scale[0] : T(0));
    scale_rows(at.o, lde, 1, p.e, &factor);
    store_tile(at.o, lde, p.o, b, g * p.r + r, 0, 1, p.e);
  }
}

template <typename T>
void step(const Step& p) {
  // tasks of about 256 KB of states: less is done before another thread has woken
  const Index states = p.b * p.g, bytes = p.f * p.e * static_cast<Index>(sizeof(T)) + 1;
  const Index each = (1 << 18) / bytes + 1, tasks = (states + each - 1) / each;
  const Projected<T> projected(p.projection, p.map, p.f, p.d);
  parallel_with<StepScratch<T>>(p, tasks, [&](Index i, StepScratch<T>& at) {
    for (Index s = i * each; s < smaller(states, (i + 1) * each); ++s) step_one(p, projected, s / p.g, s % p.g, at);
  }, p);
}

}  // namespace TARNN_ISA
}  // namespace tarnn
