// φ of some rows of one unit's heads, and products that each head has for itself.
#pragma once

#include "runtime/features.h"
#include "runtime/frame.h"

namespace tarnn::runtime {
namespace TARNN_ISA {

/// integers: function, heads and rows of Ω, heads of a move (0: none). numbers: square, offset, gain, shift, number. vectors: parts, centre,
/// stretch, weight, constant. matrices: Ω, if there is one.
inline FeatureMap map_of(const Instruction& x, MapPlaces at) {
  FeatureMap m{};
  m.function = static_cast<tarnn::Function>(x.integer(at.integer));
  m.heads = x.integer(at.integer + 1), m.m = x.integer(at.integer + 2);
  if (m.heads) m.omega = x.matrices[static_cast<std::size_t>(at.matrix)];
  m.square = x.number(at.number), m.offset = x.number(at.number + 1), m.gain = x.number(at.number + 2), m.shift = x.number(at.number + 3);
  m.number = x.numbers[static_cast<std::size_t>(at.number + 4)];
  m.parts = x.vector(at.vector);
  const auto move = [&](Index i) { return x.vector(at.vector + i); };
  if (const Index heads = x.integer(at.integer + 3)) m.queries = {heads, move(1), move(2), move(3), move(4)};
  return m;
}

struct FeatureRoom {
  Index ldx, ldf;
  float *x, *u, *to, *scale, *weight;
  FeatureRoom(Scratch& scratch, const Instruction& of, Index rows) {
    ldx = apart(of.in().width), ldf = apart(std::max(of.out().width, of.integer(2)));
    x = scratch.take<float>(rows * ldx), u = scratch.take<float>(rows * ldf), to = scratch.take<float>(rows * ldf);
    scale = scratch.take<float>(rows), weight = scratch.take<float>(rows);
  }
};

inline void features(const Instruction& x, const View& at, Index row, Index rows) {
  const FeatureMap map = map_of(x, {});
  const Operand& in = x.in();
  const Part part = at.part(in);
  Scratch scratch(at.own.scratch);
  const FeatureRoom room(scratch, x, rows);
  const Index f = x.out().width;
  for (Index head = 0; head < part.heads; ++head) {
    const Index all = at.heads(in), of = part.first + head;  // fewer heads of Ω or of a move serve several heads each
    for (Index i = 0; i < rows; ++i) room.weight[i] = move(map.queries, of * map.queries.heads / all, in.width, at.at(in, row + i) + head * in.width, room.x + i * room.ldx);
    Featurer(map, of * map.heads / all, in.width, rows, room.x, room.ldx, static_cast<double>(at.position(row)), 1, room.u, room.to, room.ldf, room.scale);
    for (Index i = 0; i < rows; ++i) {
      std::copy_n(room.to + i * room.ldf, f, at.at(x.out(), row + i) + head * f);
      at.at(x.out(1), row + i)[head] = room.scale[i] + room.weight[i];
    }
  }
}

/// Each head's own product; each head begins a panel. integers: whether all heads read the same.
inline void head_product(const Instruction& x, const View& at, Index row, Index rows) {
  const Operand &in = x.in(), &out = x.out();
  const Part part = at.part(out);
  const Index panels = whole_panels(out.width) / panel;
  Scratch scratch(at.own.scratch);
  float* to = scratch.take<float>(rows * panel);
  for (Index head = 0; head < part.heads; ++head) {
    const float* from = at.at(in, row) + (in.heads == 1 ? 0 : head * in.width);
    for (Index i = 0; i < panels; ++i) {
      product(x.matrices[0], {}, {rows, at.ld(in), from, nullptr, 0, nullptr, nullptr}, (part.first + head) * panels + i, to, panel);
      for (Index j = 0; j < rows; ++j) std::copy_n(to + j * panel, smaller(panel, out.width - i * panel), at.at(out, row + j) + head * out.width + i * panel);
    }
  }
}

}  // namespace TARNN_ISA
}  // namespace tarnn::runtime
