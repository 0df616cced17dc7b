// The scans, for some rows of a sequence and a block of channels, which are the lanes of vectors.
#pragma once

#include "runtime/instructions/rows.h"
#include "scan/blocks.h"

namespace tarnn::runtime {
namespace TARNN_ISA {

constexpr Index scan_rows = 16;                                        // that are in cache until all numbers of their channels are done
constexpr int scan_numbers = TARNN_VECTOR_BYTES == 64 ? 4 : 2;  // of a channel, for which there are registers

/// A block of up to a panel of channels, all of one head: the first among all channels, among those of its head, and how many.
struct ChannelBlock {
  Index head, of_all, of_head, n;
};

inline Index channel_blocks(const Operand& x) { return x.heads * ((x.width + panel - 1) / panel); }

inline ChannelBlock channel_block(const Operand& x, Index i) {
  const Index each = (x.width + panel - 1) / panel, head = i / each, first = i % each * panel;
  return {head, head * x.width + first, first, smaller(panel, x.width - first)};
}

/// A vector of channels: where the numbers of the first row stand, and how far apart rows are.
struct ScanLanes {
  const float *u, *dt, *B, *C;
  float* o;
  Index ldu, lddt, ldB, ldC, ldo, left;  // left: channels up to the end of the block
};

/// N of the numbers of these channels, for some rows: h ← 2^(dt A') h + dt u B, o += h C. first: o = h C.
template <int N>
TARNN_INLINE void scan_some(ScanLanes at, Index rows, const float* rates, Index ldr, float* state, Index lds, bool first) {
  Vec<float> a[N], h[N];
  unrolled<N>([&](auto k) TARNN_LAMBDA { a[k] = load(rates + k * ldr), h[k] = read(state + k * lds, at.left); });
  for (; rows > 0; --rows, at.u += at.ldu, at.dt += at.lddt, at.B += at.ldB, at.C += at.ldC, at.o += at.ldo) {
    const Vec<float> dt = read(at.dt, at.left), in = dt * read(at.u, at.left);
    Vec<float> o = first ? Vec<float>{} : read(at.o, at.left);
    unrolled<N>([&](auto k) TARNN_LAMBDA {
      h[k] = decay_of(dt * a[k]) * h[k] + in * at.B[k];
      o += h[k] * at.C[k];
    });
    write(at.o, o, at.left);
  }
  unrolled<N>([&](auto k) TARNN_LAMBDA { write(state + k * lds, h[k], at.left); });
}

/// h ← e^(dt A) h + dt u B, o = h·C. Inputs: u, dt, B, C. vectors: A log₂ e, of each head (n, whole panels of its channels). states: h (n, channels).
inline void selective_scan(const Instruction& x, const View& at, Index row, Index rows, Index block) {
  const Operand &u = x.in(0), &dt = x.in(1), &B = x.in(2), &C = x.in(3);
  const Index n = B.width, ldr = whole_panels(u.width), channels = u.size();
  const ChannelBlock of = channel_block(u, block);
  float* h = at.call().memories[x.state(0)].at + at.sequence(row) * n * channels + of.of_all;
  const float* rates = x.vector(0) + of.head * n * ldr + of.of_head;
  for (Index some; rows > 0; row += some, rows -= some) {
    some = smaller(rows, scan_rows);
    for (Index j = 0; j < of.n; j += width<float>) {
      const Index c = of.of_all + j;
      const auto numbers = [&](auto many, Index k) TARNN_LAMBDA {
        const ScanLanes lanes{at.at(u, row) + c, at.at(dt, row) + c, at.at(B, row) + of.head * n + k, at.at(C, row) + of.head * n + k, at.at(x.out(), row) + c,
                              at.ld(u), at.ld(dt), at.ld(B), at.ld(C), at.ld(x.out()), of.n - j};
        scan_some<many>(lanes, some, rates + k * ldr + j, ldr, h + k * channels + j, channels, k == 0);
      };
      Index k = 0;
      for (; k + scan_numbers <= n; k += scan_numbers) numbers(std::integral_constant<int, scan_numbers>(), k);
      for (; k < n; ++k) numbers(std::integral_constant<int, 1>(), k);
    }
  }
}

TARNN_INLINE Vec<float> root(Vec<float> x) {
  for (Index i = 0; i < width<float>; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
}

/// h ← e^a h + x, o = h, of n channels from the `first` on. Inputs: x, a. integers: whether x is multiplied by √(1 − e^2a), but for the first token of a
/// sequence. states: h.
inline void diagonal_scan(const Instruction& x, const View& at, Index row, Index rows, Index first, Index n) {
  const Operand &in = x.in(0), &decay = x.in(1);
  float* state = at.call().memories[x.state(0)].at + at.sequence(row) * in.size();
  for (Index c = first; c < first + n; c += width<float>) {
    const Index left = first + n - c;
    Vec<float> h = read(state + c, left);
    for (Index i = row; i < row + rows; ++i) {
      const Vec<float> keep = decay_of(read(at.at(decay, i) + c, left) * rate_unit<float>);
      Vec<float> y = read(at.at(in, i) + c, left);
      if (x.integer(0) && at.position(i) > 0) y = y * root(1.f - keep * keep);
      h = keep * h + y;
      write(at.at(x.out(), i) + c, h, left);
    }
    write(state + c, h, left);
  }
}

}  // namespace TARNN_ISA
}  // namespace tarnn::runtime
