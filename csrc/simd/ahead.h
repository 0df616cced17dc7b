// Memory that the next chunk will want, prefetched while this chunk is being computed: a line between a few
// multiplications of the products, so that it arrives behind them. (Asked for all at once, lines queue up and the processor
// waits; not asked for, they are only found missing when they are read.)
#pragma once

#include "kernels.h"
#include "simd/vector.h"

namespace tarnn {
namespace TARNN_ISA {

/// A list of regions, and the pace at which their lines are asked for: as many per opportunity as get all of them through
/// by the end of the chunk. There are about as many opportunities as in the chunk before.
class Ahead {
 public:
  /// A new chunk begins: what has not been asked for by now is dropped.
  void clear() {
    from_ = to_ = 0, line_ = end_ = nullptr;
    expected_ = opportunities_, opportunities_ = 0;
    lines_ = pace_ = due_ = 0;
  }

  /// Positions time … time + rows − 1 of a row and head, n channels; none where rows or time are below. Inputs are named
  /// before outputs: an output that is missing delays nobody, an input does.
  void want(const View& x, Index row, Index head, Index time, Index rows, Index n) {
    if (time < 0 || rows <= 0 || n == 0 || x.stride[3] != 1 || to_ == most) return;
    const Index bytes = bytes_of(x.type);
    const Index at = row * x.stride[0] + head / x.share * x.stride[1] + time * x.stride[2];
    const bool gapless = x.stride[2] == n;
    const Region region = {static_cast<const char*>(x.data) + at * bytes, x.stride[2] * bytes, gapless ? 1 : rows,
                           n * bytes * (gapless ? rows : 1)};
    regions_[to_++] = region;
    lines_ += region.rows * ((region.bytes + 63) / 64);
    pace_ = expected_ ? lines_ * (whole_line + whole_line / 8) / expected_ + 1 : whole_line;
    if (!line_) next();
  }

  /// An opportunity: asks for the lines that are due.
  TARNN_INLINE void some() {
    for (due_ += pace_; due_ >= whole_line; due_ -= whole_line) one();
  }
  /// So many opportunities there were.
  TARNN_INLINE void passed(Index opportunities) { opportunities_ += opportunities; }

 private:
  static constexpr int most = 8;
  static constexpr Index whole_line = 256;  // in which pace and due count
  struct Region {
    const char* at;
    Index stride, rows, bytes;
  };

  TARNN_INLINE void one() {
    if (line_ >= end_) return;
    __builtin_prefetch(line_, 0, 2);
    line_ += 64;
    if (line_ >= end_) next();
  }

  /// On to the next row of the first region that has one.
  void next() {
    line_ = end_ = nullptr;
    if (from_ == to_) return;
    Region& r = regions_[from_];
    line_ = r.at;
    end_ = r.at + r.bytes;
    r.at += r.stride;
    if (--r.rows == 0) ++from_;
  }

  const char *line_ = nullptr, *end_ = nullptr;
  Index lines_ = 0, pace_ = 0, due_ = 0, expected_ = 0, opportunities_ = 0;
  Region regions_[most];
  int from_ = 0, to_ = 0;
};

}  // namespace TARNN_ISA
}  // namespace tarnn
