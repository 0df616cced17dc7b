// Whether the parts of a phase fit each other.
#pragma once

#include "runtime/reader.h"

namespace tarnn::runtime {

/// Throws, by `reader.fail`, for a phase that would read or write what is not its own.
void check_phase(const Phase& phase, const Program& p, const std::vector<Table>& tables, const Reader& reader);

}  // namespace tarnn::runtime
