// Softmax over a cache without torch: each width, length, number of queries and format against sums in float64.
//
//     g++ -std=c++20 -O2 -I csrc tests/kernels/softmax_alone.cpp -o alone && ./alone          (tests/aarch64.sh, for another processor)
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "runtime/softmax.h"

using namespace tarnn;
namespace isa = TARNN_ISA;

namespace {

std::mt19937 draw(1);

/// Numbers that bfloat16 has too.
std::vector<float> normal(Index n) {
  std::normal_distribution<float> one;
  std::vector<float> x;
  for (Index i = 0; i < n; ++i) x.push_back(isa::bit_cast<float>(isa::bit_cast<std::uint32_t>(one(draw)) & 0xFFFF0000u));
  return x;
}

std::vector<std::uint16_t> upper_halves(const std::vector<float>& x) {
  std::vector<std::uint16_t> y;
  for (const float one : x) y.push_back(static_cast<std::uint16_t>(isa::bit_cast<std::uint32_t>(one) >> 16));
  return y;
}

/// The largest error of a head's outputs, of `queries` over `length` keys of width d.
double error(bool sixteen_bits, Index d, Index length, Index queries) {
  const Index ld = isa::whole<float>(d), blocks = isa::key_blocks(length), size = isa::partial_size(d);
  std::vector<float> k = normal(length * d), v = normal(length * d), q = normal(queries * ld);
  for (Index i = 0; i < queries * ld; ++i) q[i] = i % ld < d ? q[i] : 0.f;
  std::vector<std::uint16_t> k_halves = upper_halves(k), v_halves = upper_halves(v);
  Cache cache{k.data(), v.data(), Type::float32, length, length - 1};
  if (sixteen_bits) cache.k = k_halves.data(), cache.v = v_halves.data(), cache.type = Type::bfloat16;
  std::vector<float> scores(queries * isa::keys_a_block), parts(queries * blocks * size), o(d);
  for (Index i = 0; i < blocks; ++i)
    isa::attend_block(cache, 0, d, d, i, {1, queries, ld, blocks * size, 0, q.data(), scores.data(), parts.data() + i * size});
  double worst = 0;
  for (Index r = 0; r < queries; ++r) {
    isa::join_blocks(parts.data() + r * blocks * size, blocks, d, o.data());
    std::vector<double> sums(d);
    double total = 0;
    for (Index j = 0; j < length; ++j) {
      double score = 0;
      for (Index c = 0; c < d; ++c) score += double(q[r * ld + c]) * k[j * d + c];
      const double weight = std::exp(score / std::sqrt(double(d)));
      total += weight;
      for (Index c = 0; c < d; ++c) sums[c] += weight * v[j * d + c];
    }
    for (Index c = 0; c < d; ++c) worst = std::max(worst, std::abs(sums[c] / total - o[c]));
  }
  return worst;
}

}  // namespace

int main() {
  bool right = true;
  for (const bool sixteen_bits : {false, true})
    for (const Index d : {1, 5, 16, 20, 64, 70})
      for (const Index length : {1, 15, 16, 17, 33, 511, 512, 513, 1030})
        for (const Index queries : {1, 3}) {
          const double worst = error(sixteen_bits, d, length, queries);
          if (worst < 2e-6) continue;
          right = false;
          std::printf("wrong by %.1e: %d keys of %d, %d queries%s\n", worst, int(length), int(d), int(queries), sixteen_bits ? ", bfloat16" : "");
        }
  std::printf("softmax %s\n", right ? "right" : "wrong");
  return right ? 0 : 1;
}
