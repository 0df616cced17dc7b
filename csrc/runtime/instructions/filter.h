// Short filters along time, of each channel its own: the rows of one sequence.
#pragma once

#include "runtime/instructions/rows.h"

namespace tarnn::runtime {
namespace TARNN_ISA {

constexpr Index most_taps = 32;

/// n channels from `from` to `to` (they may be the same), rows ldf and ldt apart. tokens: the last width − 1 inputs of this sequence, `channels` apart, the
/// oldest first; weights: [width][ldw]. A row's output depends on what came before and not on how rows are shared out.
/// stay: whether these inputs become the last ones.
inline void filter_channels(Index n, Index rows, const float* from, Index ldf, float* to, Index ldt, float* tokens, Index channels, Index taps,
                            const float* weights, Index ldw, const float* bias, Function f, bool stay) {
  const Index kept = taps - 1;
  Vec<float> last[most_taps];
  for (Index c = 0; c < n; c += width<float>) {
    const Index left = n - c;
    // of the tokens that were seen and then these, the i-th
    const auto token = [&](Index i) TARNN_LAMBDA { return i < kept ? read(tokens + i * channels + c, left) : read(from + (i - kept) * ldf + c, left); };
    for (Index i = 0; i < kept; ++i) last[i] = token(rows + i);
    for (Index row = rows - 1; row >= 0; --row) {  // so that those before it are still what came in
      Vec<float> sum = bias ? read(bias + c, left) : Vec<float>{};
      for (Index i = 0; i < taps; ++i) sum += token(row + i) * read(weights + i * ldw + c, left);
      write(to + row * ldt + c, function_of(f, sum), left);
    }
    for (Index i = 0; stay && i < kept; ++i) write(tokens + i * channels + c, last[i], left);
  }
}

/// Some heads' channels. integers: taps, channels of the state, the first of them that the operand has, function. vectors: weights, bias.
inline void filter(const Instruction& x, const View& at, Index row, Index rows, Index first, Index n) {
  const Index taps = x.integer(0), channels = x.integer(1), ldw = whole_panels(channels), begin = x.integer(2) + first;
  const Operand &in = x.in(), &out = x.out();
  float* tokens = at.call().memories[x.state(0)].at + at.sequence(row) * (taps - 1) * channels + begin;
  const Index of_unit = at.part(in).first * in.width;
  filter_channels(n, rows, at.at(in, row) + first - of_unit, at.ld(in), at.at(out, row) + first - of_unit, at.ld(out), tokens, channels, taps, x.vector(0) + begin, ldw,
                  x.vector(1) ? x.vector(1) + begin : nullptr, static_cast<Function>(x.integer(3)), at.call().writes());
}

/// The channels of a unit.
inline void filter_rows(const Instruction& x, const View& at, Index row, Index rows) {
  filter(x, at, row, rows, at.part(x.in()).first * x.in().width, at.size(x.in()));
}

}  // namespace TARNN_ISA
}  // namespace tarnn::runtime
