// Philox4x32-10 (Salmon et al. 2011): a random number as a function of a key and a counter.
#pragma once

#include <cstdint>

namespace tarnn {

/// A number from [0, 1) of 53 bits. The key is the seed; the counter is the position and, above it, the choice.
inline double uniform(std::uint64_t seed, std::uint64_t choice, std::uint64_t position) {
  using Word = std::uint32_t;
  const auto lower = [](std::uint64_t x) { return static_cast<Word>(x); };
  const auto upper = [](std::uint64_t x) { return static_cast<Word>(x >> 32); };
  Word a = lower(position), b = upper(position), c = lower(choice), d = upper(choice);
  Word left = lower(seed), right = upper(seed);
  for (int i = 0; i < 10; ++i, left += 0x9E3779B9u, right += 0xBB67AE85u) {
    const std::uint64_t first = std::uint64_t(0xD2511F53u) * a, second = std::uint64_t(0xCD9E8D57u) * c;
    a = upper(second) ^ b ^ left, b = lower(second), c = upper(first) ^ d ^ right, d = lower(first);
  }
  return static_cast<double>((std::uint64_t(a >> 5) << 26) + (b >> 6)) * 0x1p-53;
}

}  // namespace tarnn
