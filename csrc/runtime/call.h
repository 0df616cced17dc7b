// One call of a program: the tokens of some sequences, and their states. And the table of what each instruction set brings.
#pragma once

#include "runtime/log.h"
#include "runtime/team.h"

namespace tarnn::runtime {

/// Keys or values of one sequence (g, capacity, d).
struct Grown {
  void* at;
  Type type;
  Index capacity;
};

/// A state's tensor in a call: (b, size), or of each sequence its own, or (b) counts.
struct Memory {
  float* at = nullptr;
  const Grown* grown = nullptr;
  Index* counts = nullptr;  // before the call; a row's own is larger by those of its sequence before it
};

struct Call {
  const Program* program;
  const Table* tables;
  Index b, num_rows, most_rows;   // sequences; tokens of them all; of the longest
  const Index *ids, *positions;   // of each row; of each sequence's first row
  const Index *sequences, *starts;  // of each row its sequence, ascending; of each sequence its first row, and num_rows behind
  const float* extra;
  Index extra_width;
  const Memory* memories;
  bool all;  // out is (num_rows, outputs); else of each sequence's last row, (b, outputs)
  float* out;
  float* hidden = nullptr;        // (num_rows, n), if wanted: what the head reads
  float* log = nullptr;           // (num_rows, layout->width): states stay as they are
  const Index* keep = nullptr;    // of each sequence how many tokens of the log enter its states
  const LogLayout* layout = nullptr;

  bool writes() const { return !log || keep; }
  Index sequence(Index row) const { return sequences ? sequences[row] : row; }
  Index start(Index sequence) const { return starts ? starts[sequence] : sequence; }
  Index position(Index row) const { return positions[sequence(row)] + row - start(sequence(row)); }
};

}  // namespace tarnn::runtime

namespace tarnn {
struct RuntimeKernel {
  std::size_t (*room)(const runtime::Call&, Index rows);  // bytes that a team shares for its rows
  std::size_t (*own_room)(const runtime::Call&);          // and that each member has for itself
  void (*run)(const runtime::Call&, Index begin, Index count, void* shared, void* own, Team::Member&);
  const char* (*products)(Format);                        // what multiplies rows with weights of a format
};
}  // namespace tarnn
