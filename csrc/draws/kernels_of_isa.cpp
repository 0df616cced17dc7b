// Draws of tokens. Compiled once for each instruction set: see ../kernels_of_isa.cpp.
#include "draws/row.h"

namespace tarnn {
namespace TARNN_ISA {
namespace {

std::size_t room(Index v) {
  Scratch counting(nullptr);
  Row(counting, v);
  return counting.used();
}

void draw(const Draw& d, void* memory) {
  Scratch scratch(memory);
  Row row(scratch, d.v);
  const bool changed = d.had || d.bias;
  const bool is_distribution = changed ? row.read_penalized(d) : row.read(d.logits);
  *d.token = !is_distribution ? -1 : d.numbers[Column::temperature] == 0 ? row.greedy() : row.drawn(d);
  if (!d.logprob) return;
  *d.logprob = __builtin_nanf("");
  std::fill_n(d.likeliest, d.k, Index(-1));
  std::fill_n(d.likeliest_logprobs, d.k, __builtin_nanf(""));
  if (*d.token >= 0 && d.whole[Column::wanted] >= 0 && row.read(d.logits)) row.logarithms(d);
}

}  // namespace

extern const DrawKernels draw_kernels;
const DrawKernels draw_kernels = {room, draw};

}  // namespace TARNN_ISA
}  // namespace tarnn
