// Memory that the next chunk will want, asked for while this chunk is being computed: a few lines between two tiles of a
// product, so that they arrive behind it. (Rows of a chunk are too short for the processor to see them coming.)
#pragma once

#include "kernels.h"
#include "vector.h"

namespace tarnn {
namespace TARNN_ISA {

class Ahead {
 public:
  void clear() { from_ = to_ = 0; }

  /// Positions time … time + rows − 1 of a row and head, n channels; none where rows or time are below.
  void want(const View& x, Index row, Index head, Index time, Index rows, Index n) {
    if (time < 0 || rows <= 0 || n == 0 || x.stride[3] != 1 || to_ == most) return;
    const Index bytes = x.type == Type::float64 ? 8 : x.type == Type::float32 ? 4 : 2;
    const Index at = row * x.stride[0] + head * x.stride[1] + time * x.stride[2];
    regions_[to_++] = {static_cast<const char*>(x.data) + at * bytes, x.stride[2] * bytes, rows, n * bytes, 0};
  }

  /// Asks for the next lines.
  void some() {
    for (int budget = lines_at_once; budget > 0 && from_ < to_;) {
      Region& r = regions_[from_];
      for (; r.column < r.bytes && budget > 0; r.column += 64, --budget) __builtin_prefetch(r.at + r.column, 0, 2);
      if (r.column < r.bytes) return;
      r.column = 0;
      r.at += r.stride;
      if (--r.rows == 0) ++from_;
    }
  }

 private:
  static constexpr int most = 8, lines_at_once = 24;
  struct Region {
    const char* at;
    Index stride, rows, bytes, column;
  };
  Region regions_[most];
  int from_ = 0, to_ = 0;
};

}  // namespace TARNN_ISA
}  // namespace tarnn
