// Softmax attention over the keys of a sequence so far, in blocks counted from its first key.
#pragma once

#include "runtime/softmax.h"
#include "runtime/instructions/rows.h"

namespace tarnn::runtime {
namespace TARNN_ISA {

/// Inputs: q, k, v; without v values are the first channels of the keys, which alone are kept. numbers: what scores are multiplied with
/// beyond 1/√d. states: keys and values. Its units are the key heads; `first` is the first
/// of the two states, and `head` the one that the unit has in them.
class Softmax {
 public:
  struct Room {
    Index queries, ldx;
    float *x, *scores;
    ManyRoom many;
    Room(Scratch& scratch, const Instruction& of)
        : queries(tokens_at_once(of) * (of.in(0).heads / of.in(1).heads)), ldx(apart(of.in().width)), x(scratch.take<float>(queries * ldx)),
          scores(scratch.take<float>(queries * scores_apart)), many(scratch, queries, of.in().width, of.out().width) {}
  };

  /// As many as make a tile of queries that turned keys are worth.
  static Index tokens_at_once(const Instruction& x) { return std::max(rows_at_once, 64 / (x.in(0).heads / x.in(1).heads)); }

  Softmax(const Instruction& x, const View& at) : Softmax(x, at, 0, at.unit) {}
  Softmax(const Instruction& x, const View& at, Index first, Index head)
      : x_(x), at_(at), d_(x.in().width), e_(x.out().width), r_(x.in(0).heads / x.in(1).heads), first_(first), head_(head) {}

  /// The cache of a row's sequence as it is when the row comes.
  Cache cache(Index row) const {
    const Index i = at_.sequence(row);
    const auto grown = [&](Index state) { return at_.call().memories[x_.state(state)].grown[i]; };
    const Grown keys = grown(first_);
    return {keys.at, has_values() ? grown(first_ + 1).at : nullptr, keys.type, keys.capacity, at_.position(row)};
  }

  void put_key(Index row) const { append(cache(row), head_, d_, e_, at_.at(x_.in(1), row), has_values() ? at_.at(x_.in(2), row) : nullptr); }

  /// One block of keys, for rows of a sequence that follow on one another.
  void attend_part(Index row, Index rows, Index block) const {
    const Cache before = cache(row);
    if (block >= key_blocks(before.length + rows)) return;
    Scratch scratch(at_.own.scratch);
    const Room room(scratch, x_);
    for (Index i = 0; i < rows * r_; ++i) {
      float* q = room.x + i * room.ldx;
      std::fill(q + d_, q + room.ldx, 0.f);
      const float* from = at_.at(x_.in(0), row + i / r_) + i % r_ * d_;
      const float scale = x_.number(0);
      if (scale == 1.f) std::copy_n(from, d_, q);
      else for (Index c = 0; c < d_; ++c) q[c] = from[c] * scale;
    }
    const Queries queries = {rows, r_, room.ldx, parts(row, 1) - parts(row, 0), at_.frame.ld_parts, room.x, room.scores, parts(row, 0) + block * partial_size(e_), room.many};
    attend_block(before, head_, d_, e_, block, queries);
  }

  void join(Index row) const {
    for (Index r = 0; r < r_; ++r) join_blocks(parts(row, r), key_blocks(cache(row).length + 1), e_, at_.at(x_.out(), row) + r * e_);
  }

  /// Most blocks of a query in this call.
  static Index most_parts(const Call& c) {
    Index most = 0;
    for (Index i = 0; i < c.b; ++i) most = std::max(most, c.positions[i] + c.start(i + 1) - c.start(i));
    return key_blocks(most);
  }
  static Index parts_of_row(const Instruction& x, const Call& c) { return x.in(0).heads * most_parts(c) * partial_size(x.out().width); }

  /// Where the parts of a query lie.
  float* parts(Index row, Index r) const {
    const Index each = at_.frame.ld_parts / x_.in(0).heads;
    return at_.frame.parts + row * at_.frame.ld_parts + (at_.unit * r_ + r) * each;
  }

 private:
  bool has_values() const { return x_.inputs() > 2; }

  const Instruction& x_;
  const View& at_;
  const Index d_, e_, r_, first_, head_;
};

}  // namespace TARNN_ISA
}  // namespace tarnn::runtime
