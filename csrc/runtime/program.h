// A planned program: phases of instructions over slots of memory, with packed weights. It is data that anybody may have written:
// reader.cpp checks all of it before anything runs.
#pragma once

#include <span>
#include <vector>

#include "products/dots.h"
#include "products/matrix.h"

namespace tarnn::runtime {

/// What an instruction does. Those before `first_of_rows` spread over tasks, and each begins a phase; the others act on rows.
enum class Kind : Index {
  nothing, product, filter, softmax, linear, delta, low_rank_delta, mix, head, hybrid, experts, selective_scan, diagonal_scan,
  first_of_rows,
  embed = first_of_rows, angles, norm, combine, rotate, features, head_product, to_bytes, filter_rows, clamp, route, concat,
  count
};

/// Element by element.
enum class Function : Index { identity, silu, gelu, gelu_tanh, relu, squared_relu, sigmoid, tanh, softplus, exp, neg, log_sigmoid, count };

/// What a key head of hybrid attention sees beyond its window: features of the keys, nothing, or all keys.
enum class Reach : Index { features, window, exact };

/// Some numbers of each row in a slot: `heads` times `width`, side by side from `offset` on.
struct Operand {
  Index slot, offset, heads, width;
  Index size() const { return heads * width; }
};

/// n float32 numbers, with zeros up to a whole panel.
struct Vector {
  const float* at;
  Index n;
};

/// Registers that it writes come first among the operands, then those that it reads. The meaning of integers and numbers stands with each kind
/// in instructions/.
struct Instruction {
  Kind kind = Kind::nothing;
  Index outputs = 0;  // how many operands it writes
  std::vector<Operand> operands;
  std::vector<Matrix> matrices;
  std::vector<Vector> vectors;
  std::vector<Index> integers;
  std::span<const double> numbers;  // in the block
  std::vector<Index> states;
  Index queries_a_state = 1;        // delta: query heads that read one state, which scratch has room for

  const Operand& out(Index i = 0) const { return operands[static_cast<std::size_t>(i)]; }
  const Operand& in(Index i = 0) const { return operands[static_cast<std::size_t>(outputs + i)]; }
  Index inputs() const { return static_cast<Index>(operands.size()) - outputs; }
  Index integer(Index i) const { return integers[static_cast<std::size_t>(i)]; }
  float number(Index i) const { return static_cast<float>(numbers[static_cast<std::size_t>(i)]); }
  const float* vector(Index i) const { return i < static_cast<Index>(vectors.size()) ? vectors[static_cast<std::size_t>(i)].at : nullptr; }
  Index length(Index i) const { return i < static_cast<Index>(vectors.size()) ? vectors[static_cast<std::size_t>(i)].n : 0; }
  Index state(Index i) const { return states[static_cast<std::size_t>(i)]; }
};

/// One spreading instruction. `units` of heads are its tasks; of each, some rows at a time pass `before`, the instruction and `after`. Behind all
/// tasks each whole row passes `rows`.
struct Phase {
  Instruction op;
  Index units = 1;
  std::vector<Instruction> before, after, rows;
};

/// Room for `width` numbers of each row, which all threads see. own: of one unit and some rows, and each thread has its own. bytes: rows rounded to
/// levels, with a step and a least each, as products with whole numbers read them, or to bfloat16 numbers, of two bytes.
struct Slot {
  enum class Of : Index { all, own, bytes } of;
  Index width;
};

/// A tensor of the state. numbers: (b, size) float32. grows: (g, capacity, size / g) of each sequence, float32 or bfloat16, with as many
/// tokens there as the sequence's position says; size is that of one token. counts: (b) int64, the tokens that each sequence has had.
struct State {
  enum class Of : Index { numbers, grows, counts } of;
  Index size, heads;
  bool grows() const { return of == Of::grows; }
};

/// Where in an instruction stands what makes features: function, heads and rows of Ω, heads of a move; square, offset, gain, shift, number; parts,
/// centre, stretch, weight, constant; Ω.
struct MapPlaces {
  Index integer = 0, number = 0, vector = 0, matrix = 0;
};

struct Program {
  std::vector<Slot> slots;
  std::vector<State> states;
  std::vector<Phase> phases;
  Index num_outputs = 0, limit = 0;
  Index num_tokens = 0;  // rows of the table that `embed` reads
  bool extra = false;    // whether a call brings rows that `embed` adds
  Dots dots;             // of this processor
};

/// A table of rows that lies outside the block: the embeddings of tokens, of positions.
struct Table {
  const void* at;
  Type type;
  Index rows, width;
};

/// Checks and reads. Throws std::runtime_error with one sentence.
Program read_program(const Index* numbers, Index count, const void* block, Index bytes, const std::vector<Table>& tables);

constexpr Index program_version = 5;  // raise it with the order or the meaning of any number

}  // namespace tarnn::runtime
