// Reads a planned program, and checks all that could lead an instruction out of its memory.
#include "runtime/reader.h"

#include <algorithm>
#include <cstdint>

#include "runtime/checks.h"

namespace tarnn::runtime {
namespace {

constexpr Index most_of_a_row = Index(1) << 26;      // numbers of all slots together
constexpr Index most_of_a_phase = Index(1) << 10;    // instructions in one place, operands

Operand read_operand(Reader& reader, const Program& p) {
  Operand x{};
  x.slot = reader.number("a slot", 0, static_cast<Index>(p.slots.size()) - 1);
  const Index width = p.slots[static_cast<std::size_t>(x.slot)].width;
  x.offset = reader.number("an offset", 0, width), x.heads = reader.number("heads", 1, width), x.width = reader.number("a width", 1, width);
  if (x.size() > width - x.offset) reader.fail("an operand", "lies beyond its slot");
  return x;
}

Instruction read_instruction(Reader& reader, const Program& p) {
  Instruction x;
  x.kind = static_cast<Kind>(reader.number("a kind of instruction", 0, static_cast<Index>(Kind::count) - 1));
  x.outputs = reader.number("outputs", 0, reader.most);
  const auto list = [&](const char* what, Index most, auto& to, auto read) {
    for (Index n = reader.number(what, 0, most); n > 0; --n) to.push_back(read());
  };
  list("operands", most_of_a_phase, x.operands, [&] { return read_operand(reader, p); });
  if (x.outputs > static_cast<Index>(x.operands.size())) reader.fail("outputs", "are more than the operands");
  list("matrices", reader.most, x.matrices, [&] { return reader.matrix(); });
  list("vectors", reader.most, x.vectors, [&] { return reader.vector(); });
  list("integers", reader.most, x.integers, [&] { return reader.number("an integer", -reader.largest, reader.largest); });
  if (const Index n = reader.number("numbers", 0, reader.most); n > 0)
    x.numbers = {reader.place<double>("the numbers of an instruction", n), static_cast<std::size_t>(n)};
  list("states", reader.most, x.states, [&] { return reader.number("a state", 0, static_cast<Index>(p.states.size()) - 1); });
  return x;
}

Phase read_phase(Reader& reader, const Program& p, const std::vector<Table>& tables) {
  Phase phase;
  phase.op = read_instruction(reader, p);
  phase.units = reader.number("units", 1, reader.largest);
  for (auto* some : {&phase.before, &phase.after, &phase.rows})
    for (Index n = reader.number("the instructions of a phase", 0, most_of_a_phase); n > 0; --n) some->push_back(read_instruction(reader, p));
  check_phase(phase, p, tables, reader);
  check_races(phase, p, reader);
  if (phase.op.kind == Kind::delta) {
    const auto heads = [&](Index i) { return heads_of_all(phase.op.in(i), p, phase.units); };
    phase.op.queries_a_state = std::max<Index>(1, heads(0) / std::max(heads(1), heads(2)));
  }
  return phase;
}

void read_slots(Reader& reader, Program& p) {
  Index total = 0;
  for (Index n = reader.number("the slots", 1, reader.most); n > 0; --n) {
    const auto of = static_cast<Slot::Of>(reader.number("a slot", 0, 2));
    p.slots.push_back({of, reader.number("the width of a slot", 1, most_of_a_row)});
    total += p.slots.back().width;
    if (total > most_of_a_row) reader.fail("the slots", "have more than " + std::to_string(most_of_a_row) + " numbers of each row");
  }
}

void read_states(Reader& reader, Program& p) {
  for (Index n = reader.number("the states", 0, reader.most); n > 0; --n) {
    State s{};
    s.size = reader.number("the size of a state", 0, reader.largest), s.heads = reader.number("the heads of a state", 1, reader.largest);
    s.of = static_cast<State::Of>(reader.number("what a state has", 0, 2));
    if (s.size % s.heads || (s.grows() && s.size == 0)) reader.fail("a state", "does not have as much for each head");
    if (s.of == State::Of::counts && s.size != 1) reader.fail("a state", "has more than one count");
    p.states.push_back(s);
  }
}

/// The first phase begins with the only embedding, and the last has the only head.
void check_ends(const Program& p, const Reader& reader) {
  Index embeds = 0, heads = 0;
  for (const Phase& phase : p.phases) {
    heads += phase.op.kind == Kind::head;
    for (const Instruction& x : phase.rows) embeds += x.kind == Kind::embed;
  }
  const Phase &first = p.phases.front(), &last = p.phases.back();
  if (embeds != 1 || first.rows.empty() || first.rows[0].kind != Kind::embed) reader.fail("the first phase", "does not begin with the only embedding");
  if (heads != 1 || last.op.kind != Kind::head || !last.rows.empty() || last.op.matrices[0].outputs != p.num_outputs)
    reader.fail("the last phase", "is not the only head, of so many outputs");
}

}  // namespace

Program read_program(const Index* numbers, Index count, const void* block, Index bytes, const std::vector<Table>& tables) {
  Reader reader(numbers, count, block, bytes);
  if (reinterpret_cast<std::uintptr_t>(block) % 64) reader.fail("the block", "does not lie at a multiple of 64 bytes");
  Program p;
  p.num_outputs = reader.number("the number of outputs", 1, reader.largest), p.limit = reader.number("the positions", 1, Index(1) << 62);
  p.extra = reader.number("whether rows are added", 0, 1) != 0;
  if (tables.empty()) reader.fail("the table of tokens", "is missing");
  p.num_tokens = tables[0].rows;
  read_slots(reader, p), read_states(reader, p);
  for (Index n = reader.number("the phases", 1, reader.most); n > 0; --n) p.phases.push_back(read_phase(reader, p, tables));
  reader.end();
  check_ends(p, reader), check_states(p, reader);
  p.dots = dots_of_processor();
  return p;
}

}  // namespace tarnn::runtime
