// Short convolution forward, and one token: a task is a stretch of tokens and some channels, which pass through a tile.
#pragma once

#include "convolution/filter.h"
#include "convolution/positions.h"

namespace tarnn {
namespace TARNN_ISA {

constexpr Index forward_rows = 32;  // of a tile, and w − 1 more

template <typename T>
struct ForwardTiles {
  Index ld = padded<T>(channels_together);
  T *taps, *bias, *x;
  ForwardTiles(Scratch& scratch, Index w)
      : taps(scratch.take<T>(w * ld)), bias(scratch.take<T>(ld)), x(scratch.take<T>((forward_rows + w - 1) * ld)) {}
};

/// The filters of channels first … first + n − 1.
template <typename T>
void load_filters(const Convolution& p, Index first, Index n, bool backward, T* taps, T* bias, Index ld) {
  load_taps(static_cast<const T*>(p.weight) + first * p.width, p.width, n, backward, taps, ld);
  clear(bias, ld);
  if (p.bias) std::copy_n(static_cast<const T*>(p.bias) + first, n, bias);
}

/// f(stretch, first channel, how many) as tasks, each with tiles of its own.
template <typename Tiles, typename F>
void over_channels(const Convolution& p, Index stretches, F f) {
  const Index blocks = (p.channels + channels_together - 1) / channels_together;
  parallel_with<Tiles>(
      p, stretches * blocks,
      [&](Index i, Tiles& tiles) {
        const Index first = i % blocks * channels_together;
        f(i / blocks, first, std::min(channels_together, p.channels - first), tiles);
      },
      p.width);
}

template <typename T>
void convolution_forward(const Convolution& p) {
  using Tiles = ForwardTiles<T>;
  over_channels<Tiles>(p, p.stretches, [&](Index stretch, Index first, Index n, Tiles& tiles) {
    const View x = from_channel(p.x, first), o = from_channel(p.o, first), S = from_channel(p.S, first);
    const View S_after = from_channel(p.S_after, first);
    const Index ld = tiles.ld, halo = p.width - 1;
    load_filters(p, first, n, false, tiles.taps, tiles.bias, ld);
    for (Index i = p.cuts[stretch]; i < p.cuts[stretch + 1]; ++i) {
      const auto [s, begin, end] = p.pieces[i];
      load_positions(p, x, S, s, begin - p.before, halo, n, tiles.x, ld);
      for (Index at = begin; at < end; at += forward_rows) {
        const Index rows = std::min(forward_rows, end - at);
        load_positions(p, x, S, s, at - p.before + halo, rows, n, tiles.x + halo * ld, ld);
        filter(tiles.x, ld, rows, n, p.width, tiles.taps, tiles.bias, p.silu);
        store_positions(p, o, View(), s, at, rows, n, tiles.x, ld);
        std::copy(tiles.x + rows * ld, tiles.x + (rows + halo) * ld, tiles.x);
      }
      if (!S_after || end < p.length[s]) continue;
      load_positions(p, x, S, s, end - halo, halo, n, tiles.x, ld);
      store_tile(tiles.x, ld, S_after, s, 0, 0, halo, n);
    }
  });
}

template <typename T>
void convolution_step(const Convolution& p, Index rows) {
  using Tiles = ForwardTiles<T>;
  over_channels<Tiles>(p, rows, [&](Index row, Index first, Index n, Tiles& tiles) {
    const View x = from_channel(p.x, first), o = from_channel(p.o, first), S = from_channel(p.S, first);
    const View S_after = from_channel(p.S_after, first);
    const Index ld = tiles.ld, halo = p.width - 1;
    load_filters(p, first, n, false, tiles.taps, tiles.bias, ld);
    load_tile(S, row, 0, 0, halo, n, tiles.x, ld);
    load_tile(x, row, 0, 0, 1, n, tiles.x + halo * ld, ld);
    store_tile(tiles.x + ld, ld, S_after, row, 0, 0, halo, n);
    filter(tiles.x, ld, 1, n, p.width, tiles.taps, tiles.bias, p.silu);
    store_tile(tiles.x, ld, o, row, 0, 0, 1, n);
  });
}

}  // namespace TARNN_ISA
}  // namespace tarnn
