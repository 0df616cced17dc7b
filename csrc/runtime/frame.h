// Where registers lie while a block of rows goes through a program.
#pragma once

#include "runtime/rows.h"
#include "runtime/call.h"

namespace tarnn::runtime {
namespace TARNN_ISA {

using namespace tarnn::TARNN_ISA;

constexpr Index rows_at_once = 12;  // of a unit, which pass `before`, the instruction and `after` together

// rows a power of two apart would all fall into the same few places of the cache
inline Index apart(Index n) { return whole_panels(n) + 16; }

/// Rounded rows, `ld` bytes apart: bytes, with `step` and `least` of each row, or bfloat16 numbers.
struct Levels {
  float *step, *least;
  std::uint8_t* at;
  Index ld;

  void round(Format format, const float* x, Index n, Index row) const {
    std::uint8_t* to = at + row * ld;
    if (format == Format::bfloat16) to_halves(x, n, reinterpret_cast<std::uint16_t*>(to));
    else to_levels(x, n, to, step[row], least[row]);
  }
};

/// The part of an operand that belongs to one of some units: its own heads, or the one that it shares.
struct Part {
  Index first, heads;
};

inline Part part_of(const Operand& x, Index unit, Index units) {
  if (x.heads < units) return {unit / (units / x.heads), 1};
  return {unit * (x.heads / units), x.heads / units};
}

/// Shared memory of a team for a block of rows, laid out once a call.
struct Frame {
  const Call& call;
  const Program& program;
  std::vector<float*> at;      // of each slot that all see, its first row; null for others
  std::vector<Index> ld;
  std::vector<Levels> levels;  // of each slot
  float* parts = nullptr;      // softmax: parts of each query, `ld_parts` a row
  Index ld_parts = 0;
  char* experts = nullptr;     // places of rows by expert

  Frame(Scratch& scratch, const Call& call, Index rows);
};

/// Numbers of a state from the `first` on, where a thread finds them: the call's own, or a copy for the unit that it is at.
struct StateMemory {
  float* at;
  Index first;
};

/// What one thread has: slots of its own, and scratch of whichever instruction it is at.
struct Own {
  std::vector<float*> at;
  char *scratch = nullptr, *copies = nullptr;
  std::vector<StateMemory> memories;  // of each state
};

/// A thread's view of the frame while it does some rows of one unit, or whole rows.
struct View {
  const Frame& frame;
  const Own& own;
  Index begin;             // the block's first row among the call's
  Index first = 0;         // row of the block that lies first in `own`
  Index unit = 0, units = 1;

  const Call& call() const { return frame.call; }
  bool is_own(const Operand& x) const { return frame.program.slots[static_cast<std::size_t>(x.slot)].of == Slot::Of::own; }
  Index ld(const Operand& x) const { return frame.ld[static_cast<std::size_t>(x.slot)]; }
  /// The unit's heads among all; a slot of a thread's own holds no others.
  Part part(const Operand& x) const { return is_own(x) ? Part{unit * x.heads, x.heads} : part_of(x, unit, units); }
  /// Heads of all units.
  Index heads(const Operand& x) const { return is_own(x) ? units * x.heads : x.heads; }
  /// The first of them, in a row of the block.
  float* at(const Operand& x, Index row) const {
    const auto slot = static_cast<std::size_t>(x.slot);
    if (is_own(x)) return own.at[slot] + (row - first) * frame.ld[slot] + x.offset;
    return frame.at[slot] + row * frame.ld[slot] + x.offset + part(x).first * x.width;
  }
  /// Numbers of the unit in a row.
  Index size(const Operand& x) const { return part(x).heads * x.width; }
  /// The numbers of an instruction's i-th state from `offset` on.
  float* memory(const Instruction& x, Index i, Index offset) const {
    const StateMemory& m = own.memories[static_cast<std::size_t>(x.state(i))];
    return m.at + (offset - m.first);
  }
  Index sequence(Index row) const { return call().sequence(begin + row); }
  Index position(Index row) const { return call().position(begin + row); }
};

inline Frame::Frame(Scratch& scratch, const Call& c, Index rows) : call(c), program(*c.program) {
  for (const Slot& slot : program.slots) {
    const bool bytes = slot.of == Slot::Of::bytes;
    ld.push_back(bytes ? whole_panels(slot.width) + 64 : slot.of == Slot::Of::own ? whole_panels(slot.width) + 16 : apart(slot.width));
    at.push_back(slot.of == Slot::Of::all ? scratch.take<float>(rows * ld.back()) : nullptr);
    Levels x{};
    if (bytes) {
      x.step = scratch.take<float>(rows), x.least = scratch.take<float>(rows);
      x.at = scratch.take<std::uint8_t>(rows * ld.back()), x.ld = ld.back();
    }
    levels.push_back(x);
  }
}

}  // namespace TARNN_ISA
}  // namespace tarnn::runtime
