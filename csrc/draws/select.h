// Where a row of numbers is cut so that the larger ones have a given mass: without sorting, in time that grows with their number
// alone, whatever they are.
#pragma once

#include <cstring>

#include "simd/vector.h"

namespace tarnn {
namespace TARNN_ISA {

/// The value at which the numbers, from the largest down, reach a mass; and the mass of those above it.
struct Cut {
  float value;
  double above;
};

/// Bits that ascend as the numbers do.
inline std::uint32_t ascending(float x) {
  const auto bits = bit_cast<std::uint32_t>(x);
  return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}

inline float from_ascending(std::uint32_t key) { return bit_cast<float>(key ^ (key >> 31 ? 0x80000000u : 0xFFFFFFFFu)); }

/// The largest x for which the mass of all numbers ≥ x, and `above`, are at least `wanted` > 0, or −∞: there is none. `mass` of a
/// number is not negative. Eight bits of the numbers at a time are looked at, and those that begin otherwise are dropped; `list` is written over.
template <typename Mass>
Cut cut_at(float* list, Index n, double above, double wanted, Mass mass) {
  std::uint32_t key = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    double masses[256] = {};
    for (Index i = 0; i < n; ++i) masses[ascending(list[i]) >> shift & 255] += mass(list[i]);
    int byte = 255, last = -1;  // last: the one above with numbers; where sums of sums fall short by their rounding, it is the one
    double before = above;
    for (; byte >= 0 && above + masses[byte] < wanted; above += masses[byte--])
      if (masses[byte] > 0) last = byte, before = above;
    if (byte < 0 && (shift == 24 || last < 0)) return {-__builtin_inff(), above};
    if (byte < 0) byte = last, above = before;
    key = key << 8 | static_cast<std::uint32_t>(byte);
    Index left = 0;
    for (Index i = 0; i < n; ++i) {
      const float x = list[i];
      list[left] = x;
      left += ascending(x) >> shift == key;
    }
    n = left;
  }
  return {from_ascending(key), above};
}

/// The k-th largest of n ≥ k numbers.
inline float largest_but(float* list, Index n, Index k) {
  return cut_at(list, n, 0, static_cast<double>(k), [](float) { return 1.0; }).value;
}

}  // namespace TARNN_ISA
}  // namespace tarnn
