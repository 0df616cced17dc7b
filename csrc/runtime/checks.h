// Whether the parts of a phase fit each other, and the parts of a program.
#pragma once

#include "runtime/reader.h"

namespace tarnn::runtime {

/// Throws, by `reader.fail`, for a phase that would read or write what is not its own.
void check_phase(const Phase& phase, const Program& p, const std::vector<Table>& tables, const Reader& reader);

/// Throws for a phase of which one task writes what another one reads or writes.
void check_races(const Phase& phase, const Program& p, const Reader& reader);

/// Throws for a state that two instructions write; filters may share one, each with channels of its own.
void check_states(const Program& p, const Reader& reader);

/// Heads of all units: a thread's own slot holds those of one.
inline Index heads_of_all(const Operand& x, const Program& p, Index units) {
  return p.slots[static_cast<std::size_t>(x.slot)].of == Slot::Of::own ? x.heads * units : x.heads;
}

}  // namespace tarnn::runtime
