// What the states of a program take in per token: kept while it is open whether the token stays.
//
// A call with a log leaves the states as they are. Each unit works on a copy of its own in its thread's memory, and what a phase reads before it
// changes a state is noted, a row per token. A second call, which reads no weights of products, lets so many of these tokens in as stay.
#pragma once

#include "runtime/program.h"

namespace tarnn::runtime {

constexpr Index most_logged = 12;  // tokens of a sequence

/// Numbers of a slot, and where the slot lies in a row of the log.
struct Logged {
  Index slot, offset, size, at;
};

struct LogLayout {
  std::vector<std::vector<Logged>> phases;  // of each phase
  Index width = 0;                          // of a row; −1: a state can't be kept out of
};

LogLayout layout_of(const Program& p);

}  // namespace tarnn::runtime
