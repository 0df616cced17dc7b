// A call of short convolution, as its operators hand it to the kernels of an instruction set.
#pragma once

#include "kernels.h"

namespace tarnn {

/// Real tokens begin … end − 1 of a sequence. Its first piece begins at 0, and an empty sequence has an empty one.
struct Piece {
  Index sequence, begin, end;
};

/// Views are (row, nothing, time, channel), of states (sequence, nothing, place, channel).
struct Convolution {
  Index channels = 0, width = 0;
  Index before = 0;  // so many tokens before its own does a filter reach
  bool silu = false;
  View x, o, S, S_after;  // S: none, zeros. S_after: none, not wanted
  const void *weight = nullptr, *bias = nullptr;  // (c, w) and (c) without gaps, in the wide type; no bias: zeros
  View grad_o, grad_S, grad_x, grad_S_before;
  void* parts = nullptr;  // of the gradients of weight and bias, (stretches, w + 1, c)

  // of sequence s: the row that it lies in, its real tokens, and their times: those from starts[s] on, or, without times, that of its
  // first token and those that follow
  const Index *row = nullptr, *length = nullptr, *starts = nullptr, *times = nullptr;
  // stretch i has the pieces from cuts[i] to cuts[i + 1]: as many tokens as make a task, whatever sequences they are of
  const Piece* pieces = nullptr;
  const Index* cuts = nullptr;
  Index stretches = 0;

  Index threads = 1;
  Run run = nullptr;
};

template <typename>
struct ConvolutionOf {
  void (*forward)(const Convolution&);
  void (*backward)(const Convolution&);
  /// One token: x and o (row, nothing, 0, channel), S and S_after, which may be the same.
  void (*step)(const Convolution&, Index rows);
};

struct ConvolutionKernels : OfTypes<ConvolutionOf> {};

}  // namespace tarnn
