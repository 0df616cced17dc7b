// Hybrid attention of some rows of one key head: softmax over near keys, and beyond them what the head reaches.
#pragma once

#include "runtime/instructions/features.h"
#include "runtime/instructions/softmax.h"
#include "runtime/ring.h"

namespace tarnn::runtime {
namespace TARNN_ISA {

/// Inputs: q, k, v. Its units are the key heads. integers: room for sinks and window, sinks, features, whether these are logarithms,
/// the `Reach` of each key head; where some reach features, of queries and then of keys function, heads and rows of Ω, heads of a move.
/// numbers: what scores are multiplied with beyond 1/√d, the first place that sees no features; square, offset, gain, shift and number of
/// both maps. vectors: a logarithm added to those of each query head's features; parts, centre, stretch, weight and constant of both.
/// matrices: Ω of each map that has one. states: k, v, S, z, M and counts of the heads that reach features, then of those with a
/// window alone; keys and values of those that reach all.
class HybridHead {
 public:
  struct Room {
    Index ldx;
    float *x, *scores;
    FarRoom far;
    Room(Scratch& scratch, const Instruction& of)
        : ldx(apart(of.in().width)),
          x(scratch.take<float>(shared(of) * ldx)),
          scores(scratch.take<float>(shared(of) * keys_a_block)),
          far(scratch, shared(of), of.in(2).width, ldx, apart(most_features(of))) {}
  };

  HybridHead(const Instruction& x, const View& at) : x_(x), at_(at), r_(shared(x)), reach_(static_cast<Reach>(x.integer(first_reach + at.unit))) {
    for (Index i = 0; i < at.units; ++i) {
      const bool mine = x.integer(first_reach + i) == static_cast<Index>(reach_);
      kind_.heads += mine, index_ += mine && i < at.unit;
    }
    if (reach_ == Reach::exact) return;
    kind_.room = x.integer(0), kind_.sinks = x.integer(1), kind_.d = x.in().width, kind_.e = x.in(2).width;
    kind_.log_features = x.integer(3), kind_.far_until = x.numbers[1];
    if (reach_ == Reach::window) return;
    kind_.f = x.integer(2);
    for (Index side = 0; side < 2; ++side) maps_[side] = map_of(x, of_side(x, side));
    maps_[1].keys = maps_[1].queries;
    kind_.of_queries = &maps_[0], kind_.of_keys = &maps_[1];
  }
  HybridHead(const HybridHead&) = delete;

  void run(Index row, Index rows) const {
    if (reach_ == Reach::exact) return all_keys(row, rows);
    for (Index i = row; i < row + rows; ++i) one(i);
  }

  static Index parts_of_row(const Instruction& x, const Call& c) {
    const Index ring = parts_of_ring(x.integer(0)), all = exact_state(x) < 0 ? 0 : Softmax::most_parts(c);
    return x.in(0).heads * std::max(ring, all) * partial_size(x.in(2).width);
  }

 private:
  static constexpr Index first_reach = 4, tensors_of_ring = 6;

  static Index shared(const Instruction& x) { return x.in(0).heads / x.in(1).heads; }
  static bool has_features(const Instruction& x) { return x.integer(2) > 0; }
  static Index most_features(const Instruction& x) {
    Index n = x.integer(2);
    for (Index side = 0; side < 2 && has_features(x); ++side) n = std::max(n, x.integer(of_side(x, side).integer + 2));
    return n;
  }
  /// Where the numbers of queries' or keys' features begin.
  static MapPlaces of_side(const Instruction& x, Index side) {
    const Index integer = first_reach + x.in(1).heads;
    return {integer + 4 * side, 2 + 5 * side, 1 + 5 * side, side && x.integer(integer + 1) ? 1 : 0};
  }
  /// The first of the two states that grow; −1: there are none.
  static Index exact_state(const Instruction& x) {
    const auto n = static_cast<Index>(x.states.size());
    return n % tensors_of_ring ? n - 2 : -1;
  }

  void all_keys(Index row, Index rows) const {
    const Softmax head(x_, at_, exact_state(x_), index_);
    for (Index i = row; i < row + rows; ++i) head.put_key(i);
    for (Index block = 0; block < key_blocks(head.cache(row).length + rows); ++block) head.attend_part(row, rows, block);
    for (Index i = row; i < row + rows; ++i) head.join(i);
  }

  void one(Index row) const {
    Scratch scratch(at_.own.scratch);
    Room room(scratch, x_);
    const Index d = kind_.d, e = kind_.e, of = at_.sequence(row);
    const float *q = at_.at(x_.in(0), row), scale = x_.number(0);
    for (Index r = 0; r < r_; ++r) {
      float* to = room.x + r * room.ldx;
      for (Index c = 0; c < d; ++c) to[c] = scale == 1.f ? q[r * d + c] : q[r * d + c] * scale;
      std::fill(to + d, to + room.ldx, 0.f);
    }
    const Index first = reach_ == Reach::window && has_features(x_) ? tensors_of_ring : 0, head = of * kind_.heads + index_;
    const auto memory = [&](Index i) -> const Memory& { return at_.call().memories[x_.state(first + i)]; };
    const Index maxima = reach_ == Reach::features && kind_.log_features ? kind_.f : 1;
    const RingState state = {memory(0).at + head * kind_.room * d, memory(1).at + head * kind_.room * e, memory(2).at + head * kind_.f * e,
                             memory(3).at + head * kind_.f, memory(4).at + head * maxima};
    const Index count = memory(5).counts[of] + at_.begin + row - at_.call().start(of);
    const float* bias = x_.vector(0) ? x_.vector(0) + at_.unit * r_ : nullptr;
    const RingToken token = {count, r_, room.ldx, room.x, q, at_.at(x_.in(1), row), at_.at(x_.in(2), row), bias};
    const Softmax parts(x_, at_);
    float* to = parts.parts(row, 0);
    const Index each = parts.parts(row, 1) - to, n = RingHead(kind_, state, index_, token, room.far).attend(room.scores, to, each);
    for (Index r = 0; r < r_; ++r) join_blocks(to + r * each, n, e, at_.at(x_.out(), row) + r * e);
  }

  const Instruction& x_;
  const View& at_;
  const Index r_;
  const Reach reach_;
  RingKind kind_{};
  FeatureMap maps_[2]{};
  Index index_ = 0;
};

}  // namespace TARNN_ISA
}  // namespace tarnn::runtime
