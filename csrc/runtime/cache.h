// Keys and values of sequences, kept for softmax.
#pragma once

#include "kernels.h"

namespace tarnn {

/// Keys and values of one sequence (g, capacity, d), with `length` of them there.
struct OwnCache {
  void *k, *v;
  Index capacity, length;
};

/// A cache of keys and values (b, g, capacity, d), float32 or bfloat16, with `length` of them there; mask (b, capacity) or null.
/// Or each sequence has its own: then `length` is that of the longest, and k, v, mask and capacity mean nothing.
struct Cache {
  void *k, *v;
  Type type;
  bool* mask;
  Index capacity, length;
  const OwnCache* own = nullptr;  // (b)

  /// What sequence i has, as the cache of one; behind `more` keys that came before.
  Cache of(Index i, Index g, Index d, Index more) const {
    Cache one = *this;
    one.own = nullptr;
    if (own) {
      one.k = own[i].k, one.v = own[i].v, one.capacity = own[i].capacity, one.length = own[i].length + more;
    } else {
      const Index at = i * g * capacity * d * bytes_of(type);
      one.k = static_cast<char*>(k) + at, one.v = static_cast<char*>(v) + at, one.length = length + more;
      if (mask) one.mask = mask + i * capacity;
    }
    return one;
  }
};

}  // namespace tarnn
