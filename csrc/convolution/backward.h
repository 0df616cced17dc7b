// Short convolution backward. With d_i the gradient of the sum at i (of the output, times the derivative of silu at the sum, which is
// made again), p = `before`, and d = 0 outside of a sequence,
//
//     dx_j = Σ_l weight_l d_(j + p − l)          the same filter in the other direction, over rows j + p − (w − 1) … j + p of d
//     dweight_l = Σ_i d_i x_(i − p + l)          dbias = Σ_i d_i
//
// A state has the gradients of its tokens as tokens have them; what comes back to the state behind a sequence goes to its last w − 1.
#pragma once

#include "convolution/forward.h"

namespace tarnn {
namespace TARNN_ISA {

constexpr Index backward_rows = 16;  // of a tile, and w − 1 more

template <typename T>
struct BackwardTiles {
  Index ld = padded<T>(channels_together);
  T *taps, *turned, *bias, *zeros, *grad_taps, *grad_bias, *x, *d, *grad_S;
  BackwardTiles(Scratch& scratch, Index w)
      : taps(scratch.take<T>(w * ld)),
        turned(scratch.take<T>(w * ld)),
        bias(scratch.take<T>(ld)),
        zeros(scratch.take<T>(ld)),
        grad_taps(scratch.take<T>(w * ld)),
        grad_bias(scratch.take<T>(ld)),
        x(scratch.take<T>((std::max(backward_rows, w) + w - 1) * ld)),
        d(scratch.take<T>((backward_rows + w - 1) * ld)),
        grad_S(scratch.take<T>(ld)) {}
};

/// What a task reads and writes of these channels.
template <typename T>
struct BackwardTask {
  const Convolution& p;
  BackwardTiles<T>& tiles;
  Index n;
  View x, S, grad_o, grad_S, grad_x, grad_S_before;

  /// d at positions from … from + count − 1, as rows of a tile. A piece adds its own to the gradients of the filters.
  void sums(const Piece& piece, Index from, Index count, T* d) {
    const Index ld = tiles.ld, length = p.length[piece.sequence];
    load_positions(p, grad_o, View(), piece.sequence, from, count, n, d, ld);
    const auto some = [&](Index begin, Index end, bool inside) {
      begin = std::max(begin, from), end = std::min(end, from + count);
      if (begin >= end || !(inside || p.silu)) return;
      load_positions(p, x, S, piece.sequence, begin - p.before, end - begin + p.width - 1, n, tiles.x, ld);
      unfilter(tiles.x, d + (begin - from) * ld, ld, end - begin, n, p.width, tiles.taps, tiles.bias, p.silu, inside,
               tiles.grad_taps, tiles.grad_bias);
    };
    some(0, piece.begin, false);
    some(piece.begin, piece.end, true);
    some(piece.end, length, false);
  }

  /// What came back to the state behind a sequence is added to rows of gradients.
  void add_state(Index s, Index from, Index count, T* rows) {
    const Index ld = tiles.ld, first = p.length[s] - (p.width - 1);
    for (Index at = std::max(from, first); at < from + count; ++at) {
      load_tile(grad_S, s, 0, at - first, 1, n, tiles.grad_S, ld);
      T* row = rows + (at - from) * ld;
      for (Index j = 0; j < n; j += width<T>) store(row + j, load(row + j) + load(tiles.grad_S + j));
    }
  }

  void run(const Piece& piece) {
    const auto [s, begin, end] = piece;
    const Index ld = tiles.ld, halo = p.width - 1;
    const Index first = begin == 0 && grad_S_before ? -halo : begin;
    T* d = tiles.d;
    for (Index i = 0; i < halo; i += backward_rows)
      sums(piece, first + p.before - halo + i, std::min(backward_rows, halo - i), d + i * ld);
    for (Index at = first; at < end; at += backward_rows) {
      const Index rows = std::min(backward_rows, end - at);
      sums(piece, at + p.before, rows, d + halo * ld);
      filter(d, ld, rows, n, p.width, tiles.turned, tiles.zeros, false);
      if (grad_S) add_state(s, at, rows, d);
      store_positions(p, grad_x, grad_S_before, s, at, rows, n, d, ld);
      std::copy(d + rows * ld, d + (rows + halo) * ld, d);
    }
  }
};

template <typename T>
void convolution_backward(const Convolution& p) {
  using Tiles = BackwardTiles<T>;
  over_channels<Tiles>(p, p.stretches, [&](Index stretch, Index first, Index n, Tiles& tiles) {
    const Index ld = tiles.ld, w = p.width;
    BackwardTask<T> task = {p,
                            tiles,
                            n,
                            from_channel(p.x, first),
                            from_channel(p.S, first),
                            from_channel(p.grad_o, first),
                            from_channel(p.grad_S, first),
                            from_channel(p.grad_x, first),
                            from_channel(p.grad_S_before, first)};
    load_filters(p, first, n, false, tiles.taps, tiles.bias, ld);
    load_filters(p, first, n, true, tiles.turned, tiles.zeros, ld);
    clear(tiles.zeros, ld);
    clear(tiles.grad_taps, w * ld);
    clear(tiles.grad_bias, ld);
    for (Index i = p.cuts[stretch]; i < p.cuts[stretch + 1]; ++i) task.run(p.pieces[i]);
    T* parts = static_cast<T*>(p.parts) + stretch * (w + 1) * p.channels + first;
    for (Index l = 0; l < w; ++l) std::copy_n(tiles.grad_taps + l * ld, n, parts + l * p.channels);
    std::copy_n(tiles.grad_bias, n, parts + w * p.channels);
  });
}

}  // namespace TARNN_ISA
}  // namespace tarnn
