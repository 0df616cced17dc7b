// Short filters along time, of each channel its own, and silu behind them: the rows of one sequence in place.
#pragma once

#include "model_step/stack.h"
#include "runtime/rows.h"

namespace tarnn {
namespace TARNN_ISA {

/// Channels `begin` to `end`, from the first whole panel to any. x: the first row, rows ldx apart; tokens: of this sequence, the oldest
/// first. A row's output depends on what came before and not on how rows are shared out.
inline void filter_channels(const Filters& f, float* x, Index ldx, Index rows, float* tokens, Index begin, Index end) {
  const Index kept = f.kept, ld = whole_panels(f.channels), first = kept - (f.width - 1);
  Vec<float> last[most_filter_width];
  for (Index c = begin; c < end; c += width<float>) {
    // of the tokens that were seen and then these, the i-th
    const auto token = [&](Index i) TARNN_LAMBDA { return i < kept ? read(tokens + i * f.channels + c, end - c) : load(x + (i - kept) * ldx + c); };
    for (Index i = 0; i < kept; ++i) last[i] = token(rows + i);
    for (Index row = rows - 1; row >= 0; --row) {  // so that those before it are still what came in
      Vec<float> sum = load(f.bias + c);
      for (Index i = 0; i < f.width; ++i) sum += token(first + row + i) * load(f.weights + i * ld + c);
      write(x + row * ldx + c, silu(sum), end - c);
    }
    for (Index i = 0; i < kept; ++i) write(tokens + i * f.channels + c, last[i], end - c);
  }
}

}  // namespace TARNN_ISA
}  // namespace tarnn
