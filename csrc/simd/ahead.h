// Memory that the next chunk will want, prefetched while this chunk is being computed: a line between every few
// multiplications of a product, so that it arrives behind them. (Asked for all at once, lines queue up and the processor
// waits; not asked for, they are only found missing when they are read.)
#pragma once

#include "kernels.h"
#include "simd/vector.h"

namespace tarnn {
namespace TARNN_ISA {

class Ahead {
 public:
  void clear() { from_ = to_ = 0, line_ = end_ = nullptr; }

  /// Positions time … time + rows − 1 of a row and head, n channels; none where rows or time are below.
  void want(const View& x, Index row, Index head, Index time, Index rows, Index n) {
    if (time < 0 || rows <= 0 || n == 0 || x.stride[3] != 1 || to_ == most) return;
    const Index bytes = x.type == Type::float64 ? 8 : x.type == Type::float32 ? 4 : 2;
    const Index at = row * x.stride[0] + head * x.stride[1] + time * x.stride[2];
    const bool gapless = x.stride[2] == n;
    regions_[to_++] = {static_cast<const char*>(x.data) + at * bytes, x.stride[2] * bytes, gapless ? 1 : rows,
                       n * bytes * (gapless ? rows : 1)};
    if (!line_) next();
  }

  /// Asks for the next line.
  TARNN_INLINE void one() {
    if (line_ >= end_) return;
    __builtin_prefetch(line_, 0, 2);
    line_ += 64;
    if (line_ >= end_) next();
  }

 private:
  static constexpr int most = 8;
  struct Region {
    const char* at;
    Index stride, rows, bytes;
  };

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
  Region regions_[most];
  int from_ = 0, to_ = 0;
};

}  // namespace TARNN_ISA
}  // namespace tarnn
