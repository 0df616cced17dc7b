// Hybrid attention of one token and one key head: softmax over sinks and a ring of keys, and features of the keys that have left it.
// What the features see is one part more beside those of the ring's blocks (softmax.h): a logarithm, a sum of weights, a sum of
// values. Keys are summed in the order in which they came, wherever in the ring they lie.
#pragma once

#include "hybrid/units.h"
#include "runtime/features.h"
#include "runtime/softmax.h"

namespace tarnn {

/// What all heads of one reach have alike. f: features; 0: what has left the window is not seen, and there are no maps.
struct RingKind {
  Index heads;        // of one sequence
  Index room, sinks;  // room: for sinks and window together
  Index d, e, f;      // channels of a key, of a value
  bool log_features;  // features are logarithms, and each has a maximum of its own
  double far_until;   // the first place in a sequence whose query sees no features
  const FeatureMap *of_queries, *of_keys;
};

/// Keys (room, d) and values (room, e) of one head of one sequence, and the sums over those that have left: S (f, e), z and M.
struct RingState {
  float *k, *v, *S, *z, *M;
};

/// One token of a key head: `count` of its sequence came before. q: its r queries, ldq apart, with zeros up to whole vectors, as
/// the ring's keys meet them; far_q: as features are made of them, one behind the other; far_bias: of each, or null.
struct RingToken {
  Index count, r, ldq;
  const float *q, *far_q, *k, *v, *far_bias;
};

namespace TARNN_ISA {

/// Features that have underflowed beyond this say nothing; as csrc/hybrid/forward.h has it.
constexpr float least_sum_of_weights = 1e-30f;

/// What a thread has for the features of r queries and of the key that leaves the window, and for the sums they meet.
struct FarRoom {
  Index ldx, ldf;
  float *x, *u, *phi_q, *phi_k, *keep, *z, *units, *scale, *far, *v;
  FarRoom(Scratch& scratch, Index r, Index e, Index ldx, Index ldf) : ldx(ldx), ldf(ldf) {
    x = scratch.take<float>(r * ldx);
    for (float** at : {&u, &phi_q}) *at = scratch.take<float>(r * ldf);
    for (float** at : {&phi_k, &keep, &z, &units}) *at = scratch.take<float>(ldf);
    scale = scratch.take<float>(r);
    for (float** at : {&far, &v}) *at = scratch.take<float>(whole<float>(e));
  }
};

/// Parts that a query has at most.
inline Index parts_of_ring(Index room) { return key_blocks(room) + 1; }

class RingHead {
 public:
  /// index: of this head among those of its reach.
  RingHead(const RingKind& kind, const RingState& state, Index index, const RingToken& token, FarRoom& at)
      : x_(kind), s_(state), i_(index), t_(token), at_(at), window_(kind.room - kind.sinks) {
    place_ = t_.count < x_.sinks ? t_.count : x_.sinks + (t_.count - x_.sinks) % window_;
  }

  /// Key and value take their place, and the key that stood there enters the sums. The parts of each query come to `partial`, ldp
  /// apart; returns how many there are. scores: room for a block of each query.
  Index attend(float* scores, float* partial, Index ldp) const {
    const Index filled = t_.count < x_.room ? t_.count + 1 : x_.room, blocks = key_blocks(filled), size = partial_size(x_.e);
    const bool leaves = x_.f > 0 && t_.count >= x_.room, sees = leaves && static_cast<double>(t_.count) < x_.far_until;
    if (leaves) {
      clear(at_.v, whole<float>(x_.e));  // in whole vectors, as a row of the ring is not
      std::copy_n(s_.v + place_ * x_.e, x_.e, at_.v);
      leave();
      if (sees) see_far(partial + blocks * size, ldp);
      else update_state(x_.f, x_.e, at_.keep, at_.phi_k, at_.v, at_.phi_k, s_.S, s_.S, at_.far);
    }
    std::copy_n(t_.k, x_.d, s_.k + place_ * x_.d);
    std::copy_n(t_.v, x_.e, s_.v + place_ * x_.e);
    for (Index block = 0; block < blocks; ++block) attend_block(filled, block, scores, partial + block * size, ldp);
    return blocks + sees;
  }

 private:
  /// Which of so many heads of Ω or of a move is this one's.
  Index of(Index heads) const { return i_ * heads / x_.heads; }

  /// f(place in the ring, keys, number of the first in the block): a block of keys in the order in which they came.
  template <typename F>
  void over_runs(Index filled, Index block, F f) const {
    const Index first = block * keys_a_block, end = smaller(filled, first + keys_a_block);
    const Index turned = filled < x_.room ? 0 : (place_ + 1 - x_.sinks) % window_;  // of the oldest key in the window
    for (Index i = first, n; i < end; i += n) {
      Index at = i;
      n = end - i;
      if (turned && i < x_.sinks) n = smaller(n, x_.sinks - i);
      if (turned && i >= x_.sinks) at = x_.sinks + (i - x_.sinks + turned) % window_, n = smaller(n, x_.room - at);
      f(at, n, i - first);
    }
  }

  void attend_block(Index filled, Index block, float* scores, float* partial, Index ldp) const {
    const Index n = smaller(keys_a_block, filled - block * keys_a_block), tile = t_.r > 1 ? keys_a_tile : n;
    // the processor sees long runs coming; of short ones, the first query asks for the values
    const bool asks = filled <= keys_a_block;
    const auto tiles = [&](auto f) {
      over_runs(filled, block, [&](Index at, Index keys, Index number) {
        for (Index j = 0; j < keys; j += tile)
          for (Index r = 0; r < t_.r; ++r) f(at + j, smaller(tile, keys - j), scores + r * keys_a_block + number + j, r);
      });
    };
    tiles([&](Index at, Index keys, float* to, Index r) {
      score_keys<Same<float>>(s_.k + at * x_.d, asks && r == 0 ? s_.v + at * x_.e : nullptr, asks || r > 0, t_.q + r * t_.ldq, x_.d, keys, to);
    });
    for (Index r = 0; r < t_.r; ++r) weigh(scores + r * keys_a_block, n, partial + r * ldp), clear(partial + r * ldp + 2, whole<float>(x_.e));
    tiles([&](Index at, Index keys, float* weights, Index r) {
      const float* next = asks && r == 0 ? s_.k + (x_.room + at) * x_.d : nullptr;  // the next head's keys
      sum_values<Same<float>>(s_.v + at * x_.e, x_.e, next, weights, x_.e, keys, partial + r * ldp + 2);
    });
  }

  /// phi_k: the features of the key in its place, in units of e^M, which is raised to them; keep: what S and z are multiplied with.
  /// z takes them in.
  void leave() const {
    const Index n = whole<float>(x_.f);
    float *phi = at_.phi_k, *M = at_.units;
    const FeatureMap& map = *x_.of_keys;
    const float weight = move(map.keys, of(map.keys.heads), x_.d, s_.k + place_ * x_.d, at_.x);
    Featurer(map, of(map.heads), x_.d, 1, at_.x, at_.ldx, 0, 1, at_.u, phi, at_.ldf, at_.scale);
    const float w = weight + at_.scale[0];
    if (x_.log_features) {
      clear(M, n);
      std::copy_n(s_.M, x_.f, M);
      add_weight(phi, w, x_.f, n);
      for (Index j = 0; j < n; j += width<float>) {
        const Vec<float> before = load(M + j), next = load(phi + j) > before ? load(phi + j) : before;
        store(at_.keep + j, next > before ? exp_nonpositive(before - next) : broadcast(1.f));
        store(M + j, next);
      }
      std::copy_n(M, x_.f, s_.M);
      key_in_units(phi, M, n);
    } else {
      const float keep = raise_maximum(*s_.M, *s_.M > w ? *s_.M : w), factor = exp_one<float>(w - finite(*s_.M));
      std::fill(phi + x_.f, phi + n, 0.f);
      for (Index j = 0; j < n; j += width<float>) store(at_.keep + j, broadcast(keep)), store(phi + j, load(phi + j) * factor);
    }
    clear(at_.z, n);
    for (Index j = 0; j < x_.f; ++j) at_.z[j] = s_.z[j] = s_.z[j] * at_.keep[j] + phi[j];
  }

  /// The far part of each query, and S as the key that leaves makes it.
  void see_far(float* partial, Index ldp) const {
    const Index n = whole<float>(x_.f);
    const FeatureMap& map = *x_.of_queries;
    for (Index r = 0; r < t_.r; ++r) partial[r * ldp] = move(map.queries, of(map.queries.heads), x_.d, t_.far_q + r * x_.d, at_.x + r * at_.ldx);
    Featurer(map, of(map.heads), x_.d, t_.r, at_.x, at_.ldx, 0, 1, at_.u, at_.phi_q, at_.ldf, at_.scale);
    for (Index r = 0; r < t_.r; ++r, partial += ldp) {
      float *phi = at_.phi_q + r * at_.ldf, unit = finite(*s_.M);
      if (x_.log_features) add_weight(phi, 0.f, x_.f, n), unit = query_in_units(phi, at_.units, n);
      else std::fill(phi + x_.f, phi + n, 0.f);
      partial[0] += at_.scale[r] + (t_.far_bias ? t_.far_bias[r] : 0.f) + unit, partial[1] = dot(phi, at_.z, n);
      if (r) read_columns(x_.f, x_.e, s_.S, phi, partial + 2);
      else update_state(x_.f, x_.e, at_.keep, at_.phi_k, at_.v, phi, s_.S, s_.S, partial + 2);
      if (!(partial[1] <= least_sum_of_weights)) continue;  // a NaN goes on
      partial[0] = minus_infinity<float>, partial[1] = 0;
      clear(partial + 2, whole<float>(x_.e));
    }
  }

  const RingKind& x_;
  const RingState& s_;
  const Index i_;
  const RingToken& t_;
  FarRoom& at_;
  const Index window_;
  Index place_;
};

}  // namespace TARNN_ISA
}  // namespace tarnn
