// Positions of a sequence, tokens that are not masked, as rows of a tile: before the first ones there is the state, behind the last
// nothing.
#pragma once

#include "common/memory.h"
#include "convolution/problem.h"
#include "simd/tiles.h"

namespace tarnn {
namespace TARNN_ISA {

constexpr Index channels_together = 128;  // of a task: its tiles stay in the first-level cache

/// Some of the channels of a view.
inline View from_channel(View x, Index first) {
  x.data = x ? static_cast<char*>(x.data) + first * x.stride[3] * bytes_of(x.type) : nullptr;
  return x;
}

/// f(row of the positions, row of the batch, time, rows) for each run of tokens that follow one another, of count real tokens.
template <typename F>
TARNN_INLINE void over_runs(const Convolution& p, Index sequence, Index from, Index count, F f) {
  const Index row = p.row[sequence], start = p.starts[sequence];
  if (!p.times) return f(0, row, start + from, count);
  const Index* times = p.times + start + from;
  for (Index i = 0, j; i < count; i = j) {
    for (j = i + 1; j < count && times[j] == times[j - 1] + 1;) ++j;
    f(i, row, times[i], j - i);
  }
}

/// load_tile of head 0. Of a (b, c, t) tensor, whose channels lie apart and times side by side, in squares that are transposed.
template <typename T>
void load_times(const View& x, Index row, Index time, Index rows, Index n, T* to, Index ld) {
  if (x.stride[2] != 1 || x.stride[3] == 1) return load_tile(x, row, 0, time, rows, n, to, ld);
  at_position<T>(x, row, 0, time, [&](auto format, auto from) {
    using Format = decltype(format);
    constexpr Index w = width<T>;
    const Index step = x.stride[3], squares = rows / w * w, full = n / w * w;
    Vec<T> unused{};
    for (Index i = 0; i < squares; i += w)
      for (Index j = 0; j < full; j += w)
        transpose_mapped<Format>(from + j * step + i, step, to + i * ld + j, ld, unused, AsItIs());
    if (full < n) load_rows<Format>(from + full * step, 1, step, squares, n - full, to + full, ld, AsItIs());
    load_rows<Format>(from + squares, 1, step, rows - squares, n, to + squares * ld, ld, AsItIs());
  });
}

/// Positions from … from + count − 1 of a sequence as rows of a tile, n channels.
template <typename T>
void load_positions(const Convolution& p, const View& x, const View& S, Index sequence, Index from, Index count, Index n, T* to,
                    Index ld) {
  const Index length = p.length[sequence], past = std::clamp<Index>(-from, 0, count);
  if (past && S) load_tile(S, sequence, 0, from + p.width - 1, past, n, to, ld);
  else clear(to, past * ld);
  const Index real = std::clamp<Index>(length - from - past, 0, count - past);
  over_runs(p, sequence, from + past, real, [&](Index i, Index row, Index time, Index rows) TARNN_LAMBDA {
    load_times(x, row, time, rows, n, to + (past + i) * ld, ld);
  });
  clear(to + (past + real) * ld, (count - past - real) * ld);
}

/// Rows of a tile to these positions: those before the first to the state, if there is one.
template <typename T>
void store_positions(const Convolution& p, const View& x, const View& S, Index sequence, Index from, Index count, Index n,
                     const T* rows, Index ld) {
  const Index past = std::clamp<Index>(-from, 0, count);
  if (past && S) store_tile(rows, ld, S, sequence, 0, from + p.width - 1, past, n);
  over_runs(p, sequence, from + past, count - past, [&](Index i, Index row, Index time, Index run) TARNN_LAMBDA {
    store_tile(rows + (past + i) * ld, ld, x, row, 0, time, run, n);
  });
}

}  // namespace TARNN_ISA
}  // namespace tarnn
