// Linear attention of some rows of one unit's heads, one token after the other.
#pragma once

#include "linear/step.h"
#include "runtime/instructions/rows.h"

namespace tarnn::runtime {
namespace TARNN_ISA {

/// integers: map of q and k (`Map`), normalize (2: by at least one), which inputs are: the log-decay, the scales of q and of k, other q and k for the denominator
/// (−1: there are none), and whether z is kept. numbers: eps. vectors: a log-decay of each head. states: S, z, M.
class LinearHeads {
 public:
  struct Room {
    StepScratch<float> step;
    float *k, *keep, *v, *y;
    Room(Scratch& scratch, const Instruction& x) : step(scratch, widest(x)) {
      const Index f = apart(x.in(0).width), e = apart(x.in(2).width);
      k = scratch.take<float>(f), keep = scratch.take<float>(f);
      v = scratch.take<float>(e), y = scratch.take<float>(e);
    }
  };

  LinearHeads(const Instruction& x, const View& at) : x_(x), at_(at), scratch_(at.own.scratch), room_(scratch_, x) {}

  void run(Index row, Index rows) {
    const Part queries = at_.part(x_.in(0)), keys = at_.part(x_.in(1)), values = at_.part(x_.in(2));
    const Index states = std::max(keys.heads, values.heads);
    for (Index i = row; i < row + rows; ++i)
      for (Index s = 0; s < states; ++s) {
        const Index key = keys.heads < states ? s / (states / keys.heads) : s, value = values.heads < states ? s / (states / values.heads) : s;
        const Index each = std::max(queries.heads, states) / states, query = queries.heads < states ? s / (states / queries.heads) : s * each;
        if (has(1)) one(i, {s, key, value, query, each});
        else plain(i, {s, key, value, query, each});
      }
  }

 private:
  /// Of a unit's states one: its key head, value head, first query head, and how many of these.
  struct Heads {
    Index s, key, value, query, each;
  };

  bool has(std::size_t state) const { return state < x_.states.size(); }
  static Step widest(const Instruction& x) {
    Step p{};
    p.b = p.g = p.r = 1, p.f = x.in(0).width, p.d = p.f, p.e = x.in(2).width;
    return p;
  }
  static tarnn::View vectors(const float* at, Index stride) { return {const_cast<float*>(at), Type::float32, {0, stride, 0, 1}}; }
  Index states_of_all() const { return std::max(at_.heads(x_.in(1)), at_.heads(x_.in(2))); }
  Index units() const { return std::max<Index>(1, at_.units); }
  /// Number of a unit's s-th state among all.
  Index state_of(Index s) const { return at_.unit * (states_of_all() / units()) + s; }

  /// The log-decay: one number, or one a feature.
  tarnn::View log_decay(Index row, Index s, bool& channels) const {
    channels = false;
    if (x_.vector(0)) return {const_cast<float*>(x_.vector(0) + state_of(s)), Type::float32, {0, 0, 0, 0}};
    if (x_.integer(2) < 0) return {};
    const Operand& d = x_.in(x_.integer(2));
    channels = d.width > 1;
    return {at_.at(d, row) + s * d.width, Type::float32, {0, 0, 0, channels ? 1 : 0}};
  }

  void one(Index row, Heads h) {
    const Operand &q = x_.in(0), &k = x_.in(1), &v = x_.in(2);
    const Index f = q.width, e = v.width, all = states_of_all(), at_state = at_.sequence(row) * all + state_of(h.s);
    Step p = widest(x_);
    p.r = h.each, p.map = static_cast<Map>(x_.integer(0)), p.normalize = x_.integer(1), p.eps = x_.numbers[0];
    const float *of_q = at_.at(q, row) + h.query * f, *of_k = at_.at(k, row) + h.key * f;
    float* o = at_.at(x_.out(), row) + h.s * h.each * e;
    p.q = vectors(of_q, f), p.k = vectors(of_k, f), p.v = vectors(at_.at(v, row) + h.value * e, e), p.o = vectors(o, e);
    p.weighted = has(2);
    if (x_.integer(4) >= 0) p.key_log_weight = tarnn::View{at_.at(x_.in(x_.integer(4)), row) + h.key, Type::float32, {0, 0, 0, 0}};
    p.log_decay = log_decay(row, h.s, p.channels);
    p.before.S = at_.memory(x_, 0, at_state * f * e), p.before.z = at_.memory(x_, 1, at_state * f);
    if (has(2)) p.before.M = at_.memory(x_, 2, at_state);
    p.after = p.before;
    if (x_.integer(5) >= 0 || x_.integer(1) == 2) fraction(row, h, p);
    else step_one(p, Projected<float>(p.projection, p.map, p.f, p.d), 0, 0, room_.step);
    if (x_.integer(3) >= 0 && !p.normalize) {
      const float* scale = at_.at(x_.in(x_.integer(3)), row) + h.query;
      for (Index r = 0; r < h.each; ++r) {
        const float half = exp_one<float>(std::min(scale[r] / 2, 88.f));  // in two halves, which overflow later
        for (Index c = 0; c < e; ++c) o[r * e + c] = o[r * e + c] * half * half;
      }
    }
  }

  /// S of q and k, and z of the others if there are any, whose fraction comes out; 2: the denominator is max(|den|, e^−M) + eps.
  void fraction(Index row, Heads h, const Step& p) {
    const Index f = p.f, e = p.e;
    const Index others = std::max<Index>(0, x_.integer(5));
    const Operand &q = x_.in(0), &dq = x_.in(others), &dk = x_.in(others + 1);
    float* M = static_cast<float*>(p.before.M);
    float M_out = 0;
    const float enter = step_factors<float>(p, 0, 0, 0.f, M ? *M : 0.f, room_.step.d, room_.step.keep, M_out);
    if (M) *M = M_out;
    const bool at_least_one = x_.integer(1) == 2;
    const float least = M ? exp_one<float>(std::max(-M_out, -87.f)) : 1.f;
    float* z = static_cast<float*>(p.before.z);
    const float *k = at_.at(x_.in(1), row) + h.key * f, *k_below = at_.at(dk, row) + h.key * f;
    for (Index i = 0; i < f; i += width<float>) {
      write(z + i, read(z + i, f - i) * load(room_.step.keep + i) + read(k_below + i, f - i) * enter, f - i);
      store(room_.k + i, read(k + i, f - i) * enter);
    }
    load_value(row, h);
    for (Index r = 0; r < h.each; ++r) {
      const float *above = at_.at(q, row) + (h.query + r) * f, *below = at_.at(dq, row) + (h.query + r) * f;
      float* S = static_cast<float*>(p.before.S);
      if (r == 0) update_state(f, e, room_.step.keep, room_.k, room_.v, above, S, S, room_.y);
      else read_columns(f, e, S, above, room_.y);
      float den = summed(f, [&](Index i) TARNN_LAMBDA { return read(below + i, f - i) * read(z + i, f - i); });
      if (at_least_one) den = std::max(std::abs(den), least) + x_.number(0);
      float* o = at_.at(x_.out(), row) + (h.s * h.each + r) * e;
      for (Index c = 0; c < e; ++c) o[c] = den == 0 ? 0.f : room_.y[c] / den;
    }
  }

  void load_value(Index row, Heads h) {
    const Index e = x_.in(2).width;
    const float* v = at_.at(x_.in(2), row) + h.value * e;
    for (Index i = 0; i < e; i += width<float>) store(room_.v + i, read(v + i, e - i));
  }

  /// Without z: S ← e^d S + k vᵀ, o = Sᵀq.
  void plain(Index row, Heads h) {
    const Index f = x_.in(0).width, e = x_.in(2).width;
    bool channels = false;
    const tarnn::View d = log_decay(row, h.s, channels);
    const auto* numbers = static_cast<const float*>(d.data);
    for (Index i = 0; i < f; i += width<float>) store(room_.keep + i, !d ? broadcast(1.f) : exp_nonpositive(channels ? read(numbers + i, f - i) : broadcast(*numbers)));
    load_value(row, h);
    float* S = at_.memory(x_, 0, (at_.sequence(row) * states_of_all() + state_of(h.s)) * f * e);
    for (Index r = 0; r < h.each; ++r) {
      const float* q = at_.at(x_.in(0), row) + (h.query + r) * f;
      if (r == 0) update_state(f, e, room_.keep, at_.at(x_.in(1), row) + h.key * f, room_.v, q, S, S, room_.y);
      else read_columns(f, e, S, q, room_.y);
      float* o = at_.at(x_.out(), row) + (h.s * h.each + r) * e;
      for (Index i = 0; i < e; i += width<float>) write(o + i, load(room_.y + i), e - i);
    }
  }

  const Instruction& x_;
  const View& at_;
  Scratch scratch_;
  Room room_;
};

}  // namespace TARNN_ISA
}  // namespace tarnn::runtime
