// SHA-256 (FIPS 180-4), with which a packed file is checked.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>

namespace tarnn::runtime {

class Sha256 {
 public:
  /// h: the first 32 bits of the fractional parts of √p of the first 8 primes; k: of ∛p of the first 64.
  Sha256() {
    int n = 0;
    for (int p = 2; n < 64; ++p) {
      bool prime = true;
      for (int d = 2; d * d <= p; ++d) prime = prime && p % d;
      if (!prime) continue;
      if (n < 8) h_[n] = fraction(p, 2);
      k_[n++] = fraction(p, 3);
    }
  }

  void add(const void* data, std::size_t size) {
    const auto* at = static_cast<const unsigned char*>(data);
    total_ += size;
    while (size) {
      const std::size_t n = size < 64 - used_ ? size : 64 - used_;
      std::memcpy(block_ + used_, at, n);
      at += n, size -= n;
      if ((used_ += n) == 64) mix(), used_ = 0;
    }
  }

  /// Of all that was added: 64 digits.
  std::string hex() {
    const std::uint64_t bits = 8 * total_;
    const unsigned char one = 0x80, zero = 0;
    add(&one, 1);
    while (used_ != 56) add(&zero, 1);
    for (int i = 7; i >= 0; --i) {
      const auto byte = static_cast<unsigned char>(bits >> 8 * i);
      add(&byte, 1);
    }
    std::string s;
    for (const std::uint32_t x : h_)
      for (int i = 28; i >= 0; i -= 4) s += "0123456789abcdef"[x >> i & 15];
    return s;
  }

 private:
  /// The largest x with (x / 2³²)^power ≤ p, without its whole part.
  static std::uint32_t fraction(int p, int power) {
    std::uint64_t x = 0;
    for (int bit = 36; bit >= 0; --bit) {
      const std::uint64_t y = x | std::uint64_t(1) << bit;
      __extension__ typedef unsigned __int128 Wide;
      // y < 2³⁷: y² < 2⁷⁴, y³ < 2¹¹¹
      const Wide of = power == 2 ? Wide(y) * y : Wide(y) * y * y;
      if (of <= Wide(static_cast<unsigned>(p)) << 32 * power) x = y;
    }
    return static_cast<std::uint32_t>(x);
  }

  void mix() {
    std::uint32_t w[64], s[8];
    for (int i = 0; i < 16; ++i) w[i] = std::uint32_t(block_[4 * i]) << 24 | std::uint32_t(block_[4 * i + 1]) << 16 | std::uint32_t(block_[4 * i + 2]) << 8 | block_[4 * i + 3];
    for (int i = 16; i < 64; ++i) {
      const std::uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) + w[i - 7] + (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
    }
    std::memcpy(s, h_, sizeof s);
    for (int i = 0; i < 64; ++i) {
      const std::uint32_t e = s[4], a = s[0];
      const std::uint32_t t = s[7] + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & s[5]) ^ (~e & s[6])) + k_[i] + w[i];
      const std::uint32_t u = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
      for (int j = 7; j > 0; --j) s[j] = s[j - 1];
      s[4] += t, s[0] = t + u;
    }
    for (int i = 0; i < 8; ++i) h_[i] += s[i];
  }

  std::uint32_t h_[8], k_[64];
  unsigned char block_[64];
  std::size_t used_ = 0;
  std::uint64_t total_ = 0;
};

}  // namespace tarnn::runtime
