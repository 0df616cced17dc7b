// The delta rule for some rows of one unit's heads: several tokens of a state, one after the other, while its columns are in cache.
#pragma once

#include "delta/step.h"
#include "runtime/instructions/rows.h"

namespace tarnn::runtime {
namespace TARNN_ISA {

/// Inputs: q, k, v, β, and the log-decay if it is a register. vectors: a log-decay of each state. states: S.
class DeltaHeads {
  static constexpr int tile_vectors = many_registers ? 4 : 2;

 public:
  struct Room {
    Index ldd, lde;
    float *q, *k, *asks, *reads, *decay, *v, *o, *tile;
    DeltaToken<float>* tokens;
    Room(Scratch& scratch, const Instruction& x, Index n) : ldd(whole_panels(x.in(0).width) + width<float>), lde(padded<float>(x.in(2).width)) {
      const Index queries = x.queries_a_state;
      for (float** at : {&q, &reads}) *at = scratch.take<float>(queries * n * ldd);
      for (float** at : {&k, &asks, &decay}) *at = scratch.take<float>(n * ldd);
      v = scratch.take<float>(n * lde), o = scratch.take<float>(queries * n * lde);
      tile = scratch.take<float>(x.in(0).width * tile_vectors * width<float>), tokens = scratch.take<DeltaToken<float>>(n);
    }
  };

  DeltaHeads(const Instruction& x, const View& at) : x_(x), at_(at), scratch_(at.own.scratch), room_(scratch_, x, rows_at_once), d_(x.in(0).width), e_(x.in(2).width) {}

  void run(Index row, Index rows) {
    const Part queries = at_.part(x_.in(0)), keys = at_.part(x_.in(1)), values = at_.part(x_.in(2));
    const Index states = std::max(keys.heads, values.heads), shared = std::max<Index>(1, queries.heads / states);
    for (Index s = 0; s < states; ++s) {
      const Index key = s / (states / keys.heads), value = s / (states / values.heads);
      load_vectors(x_.in(1), key, row, rows, d_, room_.k, room_.ldd);
      load_vectors(x_.in(2), value, row, rows, e_, room_.v, room_.lde);
      make_decays(s, row, rows);
      multiply(room_.k, room_.decay, room_.ldd, rows, d_, room_.asks);
      for (Index r = 0; r < shared; ++r) {
        const Index head = queries.heads >= states ? s * shared + r : s / (states / queries.heads);
        float* q = room_.q + r * rows * room_.ldd;
        load_vectors(x_.in(0), head, row, rows, d_, q, room_.ldd);
        multiply(q, room_.decay, room_.ldd, rows, d_, room_.reads + r * rows * room_.ldd);
      }
      one_state(s, shared, row, rows);
    }
  }

 private:
  void load_vectors(const Operand& from, Index head, Index row, Index rows, Index n, float* to, Index ld) const {
    for (Index i = 0; i < rows; ++i) {
      std::fill(to + i * ld + n, to + i * ld + whole<float>(n), 0.f);
      std::copy_n(at_.at(from, row + i) + head * n, n, to + i * ld);
    }
  }

  /// e^log_decay of each channel of a key.
  void make_decays(Index s, Index row, Index rows) const {
    const bool given = x_.inputs() > 4;
    const Index width_of = given ? x_.in(4).width : 1, whole_d = whole<float>(d_);
    for (Index i = 0; i < rows; ++i) {
      float* to = room_.decay + i * room_.ldd;
      const float* from = given ? at_.at(x_.in(4), row + i) + s * width_of : x_.vector(0) ? x_.vector(0) + state_of(s) : nullptr;
      if (width_of > 1) for (Index c = 0; c < d_; c += width<float>) store(to + c, exp_nonpositive(read(from + c, d_ - c)));
      else std::fill_n(to, whole_d, from ? exp_nonpositive(broadcast(*from))[0] : 1.f);
    }
  }

  Index all_states() const { return std::max(at_.heads(x_.in(1)), at_.heads(x_.in(2))); }
  Index state_of(Index s) const { return at_.unit * (all_states() / at_.units) + s; }

  void one_state(Index s, Index shared, Index row, Index rows) const {
    float* S = at_.memory(x_, 0, (at_.sequence(row) * all_states() + state_of(s)) * d_ * e_);
    const bool in_tiles = rows > 1 && shared == 1;
    for (Index i = 0; in_tiles && i < rows; ++i) room_.tokens[i] = token(s, i, row, i);
    over_columns<float>(e_, [&](auto columns, auto part, Index j) TARNN_LAMBDA {
      if constexpr (!part && columns >= tile_vectors)
        if (in_tiles) return tiles<columns>(S, rows, j);
      for (Index i = 0; i < rows; ++i)
        for (Index r = 0; r < shared; ++r)
          step_columns<columns, part>(d_, e_, token(s, r * rows + i, row, i), S, r + 1 == shared ? S : nullptr, j);
    });
    for (Index i = 0; i < rows; ++i)
      for (Index r = 0; r < shared; ++r)
        std::copy_n(room_.o + (r * rows + i) * room_.lde, e_, at_.at(x_.out(), row + i) + (s * shared + r) * e_);
  }

  /// Columns j … of S for all rows, copied side by side: rows of S lie so far apart that their columns would share a few places of the cache.
  template <int N>
  void tiles(float* S, Index rows, Index j) const {
    constexpr Index wide = tile_vectors * width<float>;
    float* const tile = room_.tile;
    const Index d = d_, e = e_;
    for (const Index end = j + N * width<float>; j < end; j += wide) {
      for (Index i = 0; i < d; ++i) unrolled<tile_vectors>([&](auto n) TARNN_LAMBDA { store(tile + i * wide + n * width<float>, load(S + i * e + j + n * width<float>)); });
      step_tile<tile_vectors>(d, rows, room_.tokens, tile, j);
      for (Index i = 0; i < d; ++i) unrolled<tile_vectors>([&](auto n) TARNN_LAMBDA { store(S + i * e + j + n * width<float>, load(tile + i * wide + n * width<float>)); });
    }
  }

  DeltaToken<float> token(Index s, Index query, Index row, Index i) const {
    float *q = room_.q + query * room_.ldd, *k = room_.k + i * room_.ldd;
    const float beta = at_.at(x_.in(3), row + i)[s];
    return {k, q, room_.asks + i * room_.ldd, room_.reads + query * room_.ldd, room_.decay + i * room_.ldd, room_.v + i * room_.lde, room_.o + query * room_.lde, beta, dot(q, k, d_)};
  }

  const Instruction& x_;
  const View& at_;
  Scratch scratch_;
  Room room_;
  const Index d_, e_;
};

}  // namespace TARNN_ISA
}  // namespace tarnn::runtime
