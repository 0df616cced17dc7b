// Reads a planned program, and checks all that could lead an instruction out of its memory.
#include "runtime/reader.h"

#include <algorithm>

#include "runtime/checks.h"

namespace tarnn::runtime {
namespace {

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
  const auto list = [&](const char* what, auto& to, auto read) {
    for (Index n = reader.number(what, 0, reader.most); n > 0; --n) to.push_back(read());
  };
  list("operands", x.operands, [&] { return read_operand(reader, p); });
  if (x.outputs > static_cast<Index>(x.operands.size())) reader.fail("outputs", "are more than the operands");
  list("matrices", x.matrices, [&] { return reader.matrix(); });
  list("vectors", x.vectors, [&] { return reader.vector(); });
  list("integers", x.integers, [&] { return reader.number("an integer", -reader.largest, reader.largest); });
  list("numbers", x.numbers, [&] { return 0.0; });
  if (!x.numbers.empty()) {
    const double* from = reader.place<double>("the numbers of an instruction", static_cast<Index>(x.numbers.size()));
    std::copy_n(from, x.numbers.size(), x.numbers.begin());
  }
  list("states", x.states, [&] { return reader.number("a state", 0, static_cast<Index>(p.states.size()) - 1); });
  return x;
}

Phase read_phase(Reader& reader, const Program& p, const std::vector<Table>& tables) {
  Phase phase;
  phase.op = read_instruction(reader, p);
  phase.units = reader.number("units", 1, reader.largest);
  for (auto* some : {&phase.before, &phase.after, &phase.rows})
    for (Index n = reader.number("the instructions of a phase", 0, reader.most); n > 0; --n) some->push_back(read_instruction(reader, p));
  check_phase(phase, p, tables, reader);
  return phase;
}

}  // namespace

Program read_program(const Index* numbers, Index count, const void* block, Index bytes, const std::vector<Table>& tables) {
  Reader reader(numbers, count, block, bytes);
  Program p;
  p.num_outputs = reader.number("the number of outputs", 1, reader.largest), p.limit = reader.number("the positions", 1, Index(1) << 62);
  p.extra = reader.number("whether rows are added", 0, 1) != 0;
  if (tables.empty()) reader.fail("the table of tokens", "is missing");
  p.num_tokens = tables[0].rows;
  for (Index n = reader.number("the slots", 1, reader.most); n > 0; --n) {
    const auto of = static_cast<Slot::Of>(reader.number("a slot", 0, 2));
    p.slots.push_back({of, reader.number("the width of a slot", 1, reader.largest)});
  }
  for (Index n = reader.number("the states", 0, reader.most); n > 0; --n) {
    State s{};
    s.size = reader.number("the size of a state", 0, reader.largest), s.heads = reader.number("the heads of a state", 1, reader.largest);
    s.grows = reader.number("whether a state grows", 0, 1) != 0;
    if (s.size % s.heads) reader.fail("a state", "does not have as much for each head");
    p.states.push_back(s);
  }
  for (Index n = reader.number("the phases", 1, reader.most); n > 0; --n) p.phases.push_back(read_phase(reader, p, tables));
  reader.end();
  if (p.phases.back().op.kind != Kind::head || p.phases.back().op.matrices[0].outputs != p.num_outputs) reader.fail("the last phase", "is not the head of so many outputs");
#ifdef __x86_64__
  p.dot_products = __builtin_cpu_supports("avx512vnni");
#endif
  return p;
}

}  // namespace tarnn::runtime
