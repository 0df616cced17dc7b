// What checks of every kind of instruction ask: numbers in their range, operands and weights of one size.
#pragma once

#include <algorithm>

#include "linear/problem.h"
#include "runtime/checks.h"
#include "runtime/feature_map.h"

namespace tarnn::runtime {

class Expectations {
 protected:
  Expectations(const Program& p, const Reader& reader) : p_(p), reader_(reader) {}

  void counts(const Instruction& x, Index outputs, Index inputs, std::size_t integers = 0, std::size_t numbers = 0, std::size_t states = 0) const {
    need(x.outputs == outputs && x.inputs() == inputs, "it has another number of operands");
    need(x.integers.size() == integers && x.numbers.size() == numbers && x.states.size() == states, "it has other integers, numbers or states");
  }
  void need(bool fits, const char* why) const {
    if (!fits) wrong(why);
  }
  void same(const Operand& a, const Operand& b) const { need(a.heads == b.heads && a.width == b.width, "operands have different shapes"); }
  Index whole(Index integer, Index least, Index most) const {
    need(integer >= least && integer <= most, "an integer is out of its range");
    return integer;
  }
  void vector(const Instruction& x, Index i, Index n, bool needed) const {
    need(x.length(i) == n || (!needed && x.length(i) == 0), "a vector has another length");
  }
  void state(const Instruction& x, Index i, Index size, State::Of of = State::Of::numbers) const {
    const State& s = p_.states[static_cast<std::size_t>(x.state(i))];
    need(s.size == size && s.of == of, "a state has another size");
  }
  void cache(const Instruction& x, Index i, Index heads, Index width) const {
    state(x, i, heads * width, State::Of::grows);
    need(p_.states[static_cast<std::size_t>(x.state(i))].heads == heads, "a cache has other heads");
  }
  /// Keys and values of so many heads, which grow.
  void caches(const Instruction& x, Index first, Index heads) const {
    for (Index i = 0; i < 2; ++i) cache(x, first + i, heads, x.in(1 + i).width);
  }
  /// Room for whole panels behind an output of a product.
  void panels(const Operand& o, Index outputs) const {
    need(o.size() == outputs, "a product has another number of outputs");
    need(o.offset + whole_panels(outputs) <= whole_panels(p_.slots[static_cast<std::size_t>(o.slot)].width), "a product writes beyond its slot");
  }
  /// Where a product's rows are rounded; those of bfloat16 weights may stay as they are.
  void bytes(Index slot, const Matrix& w) const {
    if (w.format == Format::float32) return need(slot == -1, "a product of floats reads bytes");
    whole(slot, w.takes_bytes() ? 0 : -1, static_cast<Index>(p_.slots.size()) - 1);
    if (slot < 0) return;
    const Slot& of = p_.slots[static_cast<std::size_t>(slot)];
    need(of.of == Slot::Of::bytes && of.width >= bytes_of_inputs(w.format, w.inputs), "a product reads bytes that are not there");
  }
  static Index bytes_of_inputs(Format format, Index n) { return format == Format::bfloat16 ? 2 * n : n; }
  /// What makes f features of d channels, of so many heads. Returns how many matrices it has.
  Index map(const Instruction& x, MapPlaces at, Index heads, Index d, Index f) const {
    const auto integer = [&](Index i, Index least, Index most) { return whole(x.integer(at.integer + i), least, most); };
    const auto function = static_cast<tarnn::Function>(integer(0, 0, static_cast<Index>(tarnn::Function::log_softmax)));
    const Index of_omega = integer(1, 0, heads), m = integer(2, of_omega ? 1 : 0, of_omega ? Reader::largest / heads : 0);
    need(of_omega == 0 || heads % of_omega == 0, "Ω has other heads");
    need(!of_omega || at.matrix < static_cast<Index>(x.matrices.size()), "it has another matrix");
    if (of_omega) matrix(x.matrices[static_cast<std::size_t>(at.matrix)], d, of_omega * whole_panels(m));
    vector(x, at.vector, 6, function == tarnn::Function::pairs);
    const Index moves = integer(3, 0, heads);
    need(moves == 0 || heads % moves == 0, "its moves have other heads");
    for (Index i = 1; moves && i < 5; ++i) vector(x, at.vector + i, i < 4 ? moves * d : moves, true);
    need(f == features_of(x, at, function, of_omega ? m : d), "it has another number of features");
    return of_omega > 0;
  }
  static Index features_of(const Instruction& x, MapPlaces at, tarnn::Function function, Index n) {
    const double number = x.numbers[static_cast<std::size_t>(at.number + 4)];
    const bool omega = x.integer(at.integer + 1) != 0;
    switch (function) {
      case tarnn::Function::waves:
      case tarnn::Function::halves:
      case tarnn::Function::cosformer: return 2 * n;
      case tarnn::Function::dpfp: return number >= 1 && number <= 1 << 16 && !omega ? 2 * n * static_cast<Index>(number) : -1;
      case tarnn::Function::pairs: {
        const float* part = x.vector(at.vector);
        return omega ? -1 : n + n * (n - 1) / 2 + (part[0] != 0) + (part[1] != 0) * n + (part[4] != 0) * n + (part[5] != 0);
      }
      default: return n;
    }
  }
  void matrix(const Matrix& w, Index inputs, Index outputs) const { need(!w.takes_bytes() && w.inputs == inputs && w.outputs == outputs, "it has another matrix"); }

  [[noreturn]] void wrong(const char* why) const { reader_.fail("an instruction", std::string("is wrong: ") + why); }

  const Program& p_;
  const Reader& reader_;
};

}  // namespace tarnn::runtime
