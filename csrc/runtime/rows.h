// What is done to whole rows of activations between the products: norms, nonlinearities, rounding to bytes.
#pragma once

#include "common/one_token.h"
#include "products/products.h"

namespace tarnn {
namespace TARNN_ISA {

/// x where there is something, elsewhere `other`, in the vector that begins `left` before the end of its row.
TARNN_INLINE Vec<float> within(Index left, Vec<float> x, Vec<float> other = Vec<float>{}) {
  return left >= width<float> ? x : iota<float>() < static_cast<int>(left) ? x : other;
}

template <typename F>
TARNN_INLINE float summed(Index n, F f) {
  Vec<float> a{}, b{};
  for (Index j = 0; j < n; j += 2 * width<float>) {
    a += within(n - j, f(j));
    if (j + width<float> < n) b += within(n - j - width<float>, f(j + width<float>));
  }
  return sum<float>(a + b);
}

/// x·Φ(x), with Φ(−|x|) = erfc(|x|/√2)/2 within 1.2e-7 of itself (Numerical Recipes, erfcc).
TARNN_INLINE Vec<float> gelu(Vec<float> x) {
  const Vec<float> z = (x < 0 ? -x : x) * 0.707106781f, t = 1.f / (z * 0.5f + 1.f);
  Vec<float> p = t * 0.17087277f - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  const Vec<float> tail = t * exp_nonpositive(p - z * z) * 0.5f;
  return x * (x < 0 ? tail : 1.f - tail);
}

TARNN_INLINE Vec<float> squared_relu(Vec<float> x) {
  x = x > 0 ? x : Vec<float>{};
  return x * x;
}

/// x·σ(x).
TARNN_INLINE Vec<float> silu(Vec<float> x) {
  const Vec<float> e = exp_nonpositive(x < 0 ? x : -x);
  return x * (x < 0 ? e : Vec<float>{} + 1.f) / (e + 1.f);
}

/// log(1 + eˣ) = max(x, 0) + log(1 + e), e = e^−|x|, by the series of 2·artanh(e/(2 + e)), whose argument is at most 1/3.
TARNN_INLINE Vec<float> softplus(Vec<float> x) {
  const Vec<float> e = exp_nonpositive(x < 0 ? x : -x), s = e / (e + 2.f), square = s * s;
  Vec<float> p = square * (1.f / 15) + 1.f / 13;
  for (const float odd : {11.f, 9.f, 7.f, 5.f, 3.f, 1.f}) p = p * square + 1.f / odd;
  return (x > 0 ? x : Vec<float>{}) + s * p * 2.f;
}

/// A row as bytes: level = round((x − least)/step), with step = (most − least)/255.
inline void to_levels(const float* x, Index n, std::uint8_t* levels, float& step, float& least) {
  Vec<float> low = broadcast(x[0]), high = low, odd{};  // odd: 0, but NaN where something is no number
  for (Index j = 0; j < n; j += width<float>) {
    const Vec<float> y = within(n - j, load(x + j), broadcast(x[0]));
    low = y < low ? y : low, high = y > high ? y : high;
    odd += y - y;
  }
  least = sum<float>(odd) - largest<float>(-low);
  step = (largest<float>(high) - least) / 255.f;
  const float per_step = step > 0 ? 1.f / step : 0.f;
  for (Index j = 0; j < n; j += width<float>) {
    const Vec<float> shifted = (load(x + j) - least) * per_step + 12582912.f;  // rounds, to the lowest bits
    const Bits<float> whole = bit_cast<Bits<float>>(shifted) & 255;
    typedef std::uint8_t Narrow __attribute__((vector_size(TARNN_VECTOR_BYTES / 4)));
    const Narrow narrow = __builtin_convertvector(whole, Narrow);
    std::memcpy(levels + j, &narrow, sizeof narrow);
  }
}

}  // namespace TARNN_ISA
}  // namespace tarnn
