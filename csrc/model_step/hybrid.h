// Hybrid attention of one token: softmax over sinks and a ring of keys, and features of the keys that have left it. What the
// features see is one part more beside those of the ring's blocks (softmax.h): a logarithm, a sum of weights, a sum of values.
#pragma once

#include "hybrid/units.h"
#include "model_step/stack.h"
#include "runtime/features.h"
#include "runtime/softmax.h"

namespace tarnn {
namespace TARNN_ISA {

/// Features that have underflowed beyond this say nothing; as csrc/hybrid/forward.h has it.
constexpr float least_sum_of_weights = 1e-30f;

/// How many parts a query has at most; most_slots: of new keys.
inline Index most_parts(const Layer& l, Index most_slots) {
  const bool hybrid = l.attention == Attention::hybrid;
  const bool keeps_all = l.attention == Attention::softmax || (hybrid && l.hybrid.exact_heads);
  const Index of_cache = keeps_all ? key_blocks(l.cache.length + most_slots) : 0, of_ring = hybrid ? key_blocks(l.hybrid.room) + 1 : 0;
  return of_cache > of_ring ? of_cache : of_ring;
}

/// What a thread has for the features of r queries and of the key that leaves the window, and for the sums they meet.
struct FarBuffers {
  Index ldx, ldf;
  float *x, *u, *phi_q, *phi_k, *keep, *z, *units, *scale, *far, *v;
  FarBuffers(Scratch& scratch, Index r, Index d, Index ldx, Index ldf) : ldx(ldx), ldf(ldf) {
    x = scratch.take<float>(r * ldx);
    for (float** at : {&u, &phi_q}) *at = scratch.take<float>(r * ldf);
    for (float** at : {&phi_k, &keep, &z, &units}) *at = scratch.take<float>(ldf);
    scale = scratch.take<float>(r);
    for (float** at : {&far, &v}) *at = scratch.take<float>(whole<float>(d));
  }
};

/// One token of a key head: its r queries (d each, ldq apart, with zeros up to whole vectors), of which the first is number `query`
/// of all; key and value; and how many tokens of its sequence came before.
struct RingToken {
  Index sequence, count, r, d, ldq, query;
  const float *q, *k, *v;
};

class RingHead {
 public:
  /// The `index`-th head of a ring.
  RingHead(const Layer& l, const Ring& ring, Index index, const RingToken& token, FarBuffers& at)
      : l_(l), x_(l.hybrid), i_(index), t_(token), at_(at), f_(&ring == &l.hybrid.features ? l.features.f : 0) {
    const Index head = token.sequence * ring.heads + index, maxima = x_.log_features ? f_ : 1;
    keys_ = ring.k + head * x_.room * t_.d, values_ = ring.v + head * x_.room * t_.d;
    S_ = static_cast<float*>(ring.sums.S) + head * f_ * t_.d, z_ = static_cast<float*>(ring.sums.z) + head * f_;
    M_ = static_cast<float*>(ring.sums.M) + head * maxima;
    room_ = t_.count < x_.sinks ? t_.count : x_.sinks + (t_.count - x_.sinks) % (x_.room - x_.sinks);
  }

  /// Key and value take their place, and the key that stood there enters the sums. The parts of each query come to `partial`, ldp
  /// apart; returns how many there are. scores: room for a block of each query.
  Index attend(float* scores, float* partial, Index ldp) const {
    const Index filled = smaller(t_.count + 1, x_.room), blocks = key_blocks(filled), size = partial_size(t_.d);
    const bool leaves = f_ > 0 && t_.count >= x_.room, sees = leaves && t_.count < x_.far_until;
    if (leaves) {
      clear(at_.v + t_.d, whole<float>(t_.d) - t_.d);  // in whole vectors, as a row of the ring is not
      std::memcpy(at_.v, values_ + room_ * t_.d, sizeof(float) * static_cast<std::size_t>(t_.d));
      leave();
      if (sees) see_far(partial + blocks * size, ldp);
      else update_state(f_, t_.d, at_.keep, at_.phi_k, at_.v, at_.phi_k, S_, S_, at_.far);
    }
    std::memcpy(keys_ + room_ * t_.d, t_.k, sizeof(float) * static_cast<std::size_t>(t_.d));
    std::memcpy(values_ + room_ * t_.d, t_.v, sizeof(float) * static_cast<std::size_t>(t_.d));
    const Cache cache{keys_, values_, Type::float32, nullptr, x_.room, filled - 1};
    for (Index block = 0; block < blocks; ++block)
      attend_block(cache, 0, t_.d, t_.d, block, {1, t_.r, t_.ldq, ldp, 0, t_.q, scores, partial + block * size});
    return blocks + sees;
  }

 private:
  /// phi_k: the features of the key in the room, in units of e^M, which is raised to them; keep: what S and z are multiplied with.
  /// z takes them in.
  void leave() const {
    const Index n = whole<float>(f_);
    float *phi = at_.phi_k, *M = at_.units;
    const float weight = move(x_.of_keys.keys, i_, t_.d, keys_ + room_ * t_.d, at_.x);
    Featurer(x_.of_keys, i_, t_.d, 1, at_.x, at_.ldx, 0, 1, at_.u, phi, at_.ldf, at_.scale);
    const float w = weight + at_.scale[0];
    if (x_.log_features) {
      clear(M, n);
      std::memcpy(M, M_, sizeof(float) * static_cast<std::size_t>(f_));
      add_weight(phi, w, f_, n);
      for (Index j = 0; j < n; j += width<float>) {
        const Vec<float> before = load(M + j), next = load(phi + j) > before ? load(phi + j) : before;
        store(at_.keep + j, next > before ? exp_nonpositive(before - next) : broadcast(1.f));
        store(M + j, next);
      }
      std::memcpy(M_, M, sizeof(float) * static_cast<std::size_t>(f_));
      key_in_units(phi, M, n);
    } else {
      const float keep = raise_maximum(*M_, *M_ > w ? *M_ : w), factor = exp_one<float>(w - finite(*M_));
      std::fill(phi + f_, phi + n, 0.f);
      for (Index j = 0; j < n; j += width<float>) store(at_.keep + j, broadcast(keep)), store(phi + j, load(phi + j) * factor);
    }
    clear(at_.z, n);
    for (Index j = 0; j < f_; ++j) at_.z[j] = z_[j] = z_[j] * at_.keep[j] + phi[j];
  }

  /// The far part of each query, and S as the key that leaves makes it.
  void see_far(float* partial, Index ldp) const {
    const Index n = whole<float>(f_);
    for (Index r = 0; r < t_.r; ++r) partial[r * ldp] = move(l_.features.queries, i_, t_.d, t_.q + r * t_.ldq, at_.x + r * at_.ldx);
    Featurer(l_.features, i_, t_.d, t_.r, at_.x, at_.ldx, 0, 1, at_.u, at_.phi_q, at_.ldf, at_.scale);
    for (Index r = 0; r < t_.r; ++r, partial += ldp) {
      float *phi = at_.phi_q + r * at_.ldf, unit = finite(*M_);
      if (x_.log_features) add_weight(phi, 0.f, f_, n), unit = query_in_units(phi, at_.units, n);
      else std::fill(phi + f_, phi + n, 0.f);
      partial[0] += at_.scale[r] + x_.far_bias[t_.query + r] + unit, partial[1] = dot(phi, at_.z, n);
      if (r) read_columns(f_, t_.d, S_, phi, partial + 2);
      else update_state(f_, t_.d, at_.keep, at_.phi_k, at_.v, phi, S_, S_, partial + 2);
      if (!(partial[1] <= least_sum_of_weights)) continue;  // a NaN goes on
      partial[0] = minus_infinity<float>, partial[1] = 0;
      clear(partial + 2, whole<float>(t_.d));
    }
  }

  const Layer& l_;
  const Hybrid& x_;
  const Index i_;
  const RingToken& t_;
  FarBuffers& at_;
  const Index f_;
  float *keys_, *values_, *S_, *z_, *M_;
  Index room_;
};

}  // namespace TARNN_ISA
}  // namespace tarnn
