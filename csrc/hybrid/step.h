// One token of hybrid attention, in place: the key that leaves the window enters the sums, the new one takes its room, and all
// are read with one denominator.
#pragma once

#include "common/one_token.h"
#include "hybrid/forward.h"

namespace tarnn {
namespace TARNN_ISA {

/// The key in this room of the store into the sums. M, keep (f): what S and z are multiplied with; phi_k: what is added.
template <typename T>
void leave(const HybridStep& p, Index b, Index g, Index room, T fade, T* M, HybridScratch<T>& at) {
  const T w = element<T>(p.weight, b, g, 0) + fade;
  load_tile(p.phi_k, b, g, 0, 1, p.f, at.phi_k, at.ldf);
  load_tile(p.store_v, b, g, room, 1, p.e, at.v, at.lde);
  if (p.log_features) {
    add_weight(at.phi_k, w, p.f, at.ldf);
    for (Index j = 0; j < p.f; ++j) at.keep[j] = raise_maximum(M[j], M[j] > at.phi_k[j] ? M[j] : at.phi_k[j]);
    return key_in_units(at.phi_k, M, at.ldf);
  }
  std::fill_n(at.keep, p.f, raise_maximum(*M, *M > w ? *M : w));
  scale(at.phi_k, at.ldf, exp_one<T>(w - finite(*M)));
}

template <typename T>
void hybrid_step_head(const HybridStep& p, Index b, Index g, HybridScratch<T>& at) {
  const Index count = p.count[b], state = b * p.g + g;
  const Index room = count < p.sinks ? count : p.sinks + (count - p.sinks) % (p.room - p.sinks);
  T* fade = static_cast<T*>(p.fade.data) + state * p.room;
  const Index maxima = p.log_features ? p.f : 1;
  T none = -INFINITY, *M = &none;
  if (p.f) {  // in rows of whole vectors
    M = at.units;
    clear(M, at.ldf);
    std::copy_n(static_cast<T*>(p.sums.M) + state * maxima, maxima, M);
  }
  if (p.decay) {
    const T decay = element<T>(p.decay, b, g, 0);
    for (Index j = 0; j < smaller(count, p.room); ++j) fade[j] += decay;
    for (Index j = 0; j < maxima; ++j) M[j] += decay;
  }
  T *S = static_cast<T*>(p.sums.S) + state * p.f * p.e, *z = static_cast<T*>(p.sums.z) + state * p.f;
  const bool leaves = p.f && count >= p.room;
  if (leaves) {
    leave(p, b, g, room, fade[room], M, at);
    for (Index i = 0; i < p.f; ++i) z[i] = z[i] * at.keep[i] + at.phi_k[i];
  }
  if (p.f) {
    std::copy_n(M, maxima, static_cast<T*>(p.sums.M) + state * maxima);
    read_rows(z, 1, p.f, at.z, at.ldf);
  }
  for (Index r = 0; p.f && r < p.r; ++r) {
    T* phi = at.phi_q + r * at.ldf;
    load_tile(p.phi_q, b, g * p.r + r, 0, 1, p.f, phi, at.ldf);
    at.unit[r] = finite(*M);
    if (p.log_features) {
      add_weight(phi, T(0), p.f, at.ldf);
      at.unit[r] = query_in_units(phi, M, at.ldf);
    }
    at.den[r] = dot(phi, at.z, at.ldf);
    if (r || !leaves) read_columns(p.f, p.e, S, phi, at.far + r * at.lde);
    else update_state(p.f, p.e, at.keep, at.phi_k, at.v, phi, S, S, at.far);
  }
  load_tile(p.k, b, g, 0, 1, p.d, at.sums, at.ldd);
  store_tile(at.sums, at.ldd, p.store_k, b, g, room, 1, p.d);
  load_tile(p.v, b, g, 0, 1, p.e, at.v, at.lde);
  store_tile(at.v, at.lde, p.store_v, b, g, room, 1, p.e);
  fade[room] = 0;
  const T factor = static_cast<T>(p.scale);
  for (Index r = 0; r < p.r; ++r)
    load_tile(p.q, b, g * p.r + r, 0, 1, p.d, at.q + r * at.ldd, at.ldd, [&](auto x) { return x * factor; });
  clear(at.o, at.m * at.lde);
  clear(at.total, at.m);
  std::fill_n(at.most, at.m, T(-INFINITY));
  const Index filled = smaller(count + 1, p.room);
  for (Index from = 0; from < filled; from += key_block) {
    const Index keys = smaller(key_block, filled - from);
    std::copy_n(fade + from, keys, at.fade);
    std::fill_n(at.fade + keys, key_block - keys, T(0));
    add_keys(p, p.store_k, p.store_v, b, g, from, keys, 1, at, [](Index) { return Index(0); }, [=](Index) { return keys; }, at.fade);
  }
  for (Index r = 0; r < p.r; ++r) {
    T *o = at.o + r * at.lde, share = 0;
    if (p.f) {
      const T a = element<T>(p.a, b, g * p.r + r, 0);
      join_far(a + at.unit[r], at.far + r * at.lde, at.den[r], at.lde, o, at.most[r], at.total[r], share);
    }
    const T inverse = T(1) / at.total[r];
    scale(o, at.lde, inverse);
    store_tile(o, at.lde, p.o, b, g * p.r + r, 0, 1, p.e);
    element<T>(p.share, b, g * p.r + r, 0) = share * inverse;
  }
}

template <typename T>
void hybrid_step(const HybridStep& p) {
  over_heads<HybridScratch<T>>(p, 1, [&](Index b, Index g, auto& at) { hybrid_step_head<T>(p, b, g, at); });
}

}  // namespace TARNN_ISA
}  // namespace tarnn
