// The products of the fused step without torch: y = W x + bias in each format against sums in float64, with the largest
// numbers that bytes can hold too, and by each instruction that the processor has for bytes: the same bits. Pairs of bfloat16 numbers: sums as near,
// and each row alone has the bits that it has among others. And sums of lanes, of many vectors at once and of one: the same bits.
//
//     g++ -std=c++20 -O2 -I csrc tests/kernels/products_alone.cpp -o alone && ./alone          (tests/aarch64.sh, for another processor)
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "products/products.h"

using namespace tarnn;
namespace isa = TARNN_ISA;

namespace {

std::mt19937 draw(1);

/// W and x as drawn, and as a product takes them.
struct Case {
  Format format;
  Index inputs, outputs, rows, ld_levels;
  std::vector<float> weight, factor, x, bias, scale, sums, step, least;  // factor: of each output and 32 inputs
  std::vector<std::uint8_t> packed, levels;

  Case(Format format, Index inputs, Index outputs, Index rows, bool extreme)
      : format(format), inputs(inputs), outputs(outputs), rows(rows), ld_levels(2 * whole_panels(inputs) + 64) {
    const Index whole = (outputs + panel - 1) / panel * panel;
    std::normal_distribution<float> normal;
    std::uniform_int_distribution<int> level(0, 255), number(most_negative(), -most_negative() - (format == Format::int4));
    for (Index i = 0; i < outputs * inputs; ++i) weight.push_back(floats() ? rounded(normal(draw)) : extreme ? most_negative() : number(draw));
    for (Index i = 0; i < whole * groups(); ++i) factor.push_back(rounded(normal(draw)));
    for (Index i = 0; i < rows * ld_levels; ++i) x.push_back(i % ld_levels < inputs ? normal(draw) : NAN), levels.push_back(extreme ? 255 : level(draw));
    if (format == Format::bfloat16)
      for (Index i = 0; i < rows; ++i) isa::to_halves(x.data() + i * ld_levels, inputs, reinterpret_cast<std::uint16_t*>(levels.data() + i * ld_levels));
    for (Index i = 0; i < whole; ++i) bias.push_back(normal(draw)), scale.push_back(normal(draw));
    for (Index i = 0; i < rows; ++i) step.push_back(0.01f), least.push_back(normal(draw));
    sums.assign(whole, 0.f);
    for (Index o = 0; o < outputs; ++o) {
      double all = 0;
      for (Index i = 0; i < inputs; ++i) all += double(weight[o * inputs + i]) * factor_of(o, i);
      sums[o] = static_cast<float>(all);
    }
    packed.assign((whole * (inputs + 64) * 4) + 8192, format == Format::int4 ? 0x88 : 0);
    for (Index o = 0; o < outputs; ++o)
      for (Index i = 0; i < inputs; ++i) put(o, i);
    for (Index o = 0; o < whole; ++o)
      for (Index i = 0; format == Format::int4 && i < inputs; i += 32) put_bits(packed.data() + group_at(o, i) + 2 * (o % panel), factor[o * groups() + i / 32]);
  }

  bool floats() const { return format == Format::float32 || format == Format::bfloat16; }
  int most_negative() const { return format == Format::int4 ? -8 : -127; }
  Index groups() const { return (inputs + 31) / 32; }
  float factor_of(Index o, Index i) const { return format == Format::int8 ? scale[o] : format == Format::int4 ? factor[o * groups() + i / 32] : 1.f; }
  static float rounded(float x) { return isa::bit_cast<float>(isa::bit_cast<std::uint32_t>(x) & 0xFFFF0000u); }
  static void put_bits(std::uint8_t* at, float x) { std::memcpy(at, reinterpret_cast<const char*>(&x) + 2, 2); }

  Index group_at(Index o, Index i) const { return (o / panel * groups() + i / 32) * (128 + 1024); }
  /// Of words of so many numbers.
  Index at_word(Index o, Index i, Index of) const { return o / panel * bytes_of_panel(format, inputs) + i / of * 4 * panel + o % panel * 4 + i % of * (4 / of); }

  void put(Index o, Index i) {
    const float w = weight[o * inputs + i];
    if (format == Format::float32) std::memcpy(packed.data() + at_word(o, i, 1), &w, 4);
    if (format == Format::bfloat16) put_bits(packed.data() + at_word(o, i, 2), w);
    if (format == Format::int8) packed[at_word(o, i, 4)] = static_cast<std::uint8_t>(static_cast<int>(w));
    if (format != Format::int4) return;
    std::uint8_t& byte = packed[group_at(o, i) + 128 + i % 32 / 8 * 4 * panel + o % panel * 4 + i % 4];
    const int four = static_cast<int>(w) + 8, shift = i % 8 >= 4 ? 4 : 0;
    byte = static_cast<std::uint8_t>((byte & (0xF0 >> shift)) | four << shift);
  }

  /// Whether rows are rounded to pairs before.
  bool pairs(Dots dots) const { return format == Format::bfloat16 && isa::rounds_rows(format, dots); }
  float left(Index row, Index i, Dots dots) const {
    const float y = x[row * ld_levels + i];
    if (!pairs(dots)) return y;
    std::uint16_t half;
    std::memcpy(&half, levels.data() + row * ld_levels + 2 * i, 2);
    return isa::bit_cast<float>(std::uint32_t(half) << 16);
  }

  /// A row at a time: the same bits.
  bool alone(Dots dots, const std::vector<float>& all) const {
    const Matrix w = matrix();
    std::vector<float> out(w.panels() * panel);
    for (Index r = 0; r < rows; ++r) {
      for (Index i = 0; i < w.panels(); ++i) isa::product(w, dots, given().part(r, 1), i, out.data() + i * panel, w.panels() * panel);
      if (std::memcmp(out.data(), all.data() + r * w.panels() * panel, out.size() * sizeof(float))) return false;
    }
    return true;
  }

  Matrix matrix() const { return {format, inputs, outputs, packed.data(), bias.data(), scale.data(), floats() ? nullptr : sums.data()}; }
  isa::Rows given() const { return {rows, ld_levels, x.data(), levels.data(), ld_levels, step.data(), least.data()}; }

  std::vector<float> product(Dots dots) const {
    const Matrix w = matrix();
    const isa::Rows in = given();
    std::vector<float> out(rows * w.panels() * panel);
    for (Index i = 0; i < w.panels(); ++i) isa::product(w, dots, in, i, out.data() + i * panel, w.panels() * panel);
    return out;
  }

  /// The largest error, as a share of what is added up.
  double error(const std::vector<float>& out, Dots dots) const {
    const Index ld = (outputs + panel - 1) / panel * panel;
    double worst = 0;
    for (Index r = 0; r < rows; ++r)
      for (Index o = 0; o < outputs; ++o) {
        double exact = bias[o], size = std::abs(exact);
        for (Index i = 0; i < inputs; ++i) {
          const double left = floats() ? this->left(r, i, dots) : double(step[r]) * levels[r * ld_levels + i] + least[r];
          const double term = left * weight[o * inputs + i] * factor_of(o, i);
          exact += term, size += std::abs(term) + (floats() ? 0 : std::abs(least[r] * weight[o * inputs + i] * factor_of(o, i)));
        }
        worst = std::max(worst, std::abs(exact - out[r * ld + o]) / size);
      }
    return worst;
  }
};

/// Whether many vectors' lanes are summed to the very numbers that each alone is summed to.
bool same_sums() {
  constexpr int w = isa::width<float>;
  std::normal_distribution<float> normal;
  isa::Vec<float> x[w];
  for (int i = 0; i < w; ++i)
    for (int l = 0; l < w; ++l) x[i][l] = normal(draw);
  const isa::Vec<float> sums = isa::sums<float>(x);
  for (int i = 0; i < w; ++i)
    if (sums[i] != isa::sum<float>(x[i])) return std::printf("the lanes of vector %d have another sum\n", i), false;
  return true;
}

/// The ways to multiply bytes here: the plainest first.
std::vector<Dots> ways() {
  Dots has = dots_of_processor();
#ifdef TARNN_VPDPBUSD
  has.avx_vnni |= has.vnni;  // the 256-bit form of AVX-512 VNNI, for that of AVX-VNNI
#endif
  std::vector<Dots> all{{}};
  const auto add = [&](bool there, Dots one) {
    if (there) all.push_back(one);
  };
#if defined(__AVX512F__)
  add(has.vnni, {.vnni = true}), add(has.bfloat16, {.bfloat16 = true}), add(has.amx, {.vnni = true, .amx = true});
#elif defined(__AVX2__)
  add(has.avx_vnni, {.avx_vnni = true});
#endif
  add(has.sdot, {.sdot = true}), add(has.usdot, {.usdot = true});
  return all;
}

const char* name(Dots dots) {
  if (dots.amx) return "amx";
  return dots.bfloat16 ? "vdpbf16ps" : isa::with_dots<isa::BytesOfAll>(dots, [](auto dot) { return decltype(dot)::name; });
}

}  // namespace

int main() {
  bool right = same_sums();
  const std::vector<Dots> all = ways();
  for (const Format format : {Format::float32, Format::bfloat16, Format::int8, Format::int4})
    for (const Index inputs : {1, 20, 32, 70, 129, 1100})
      for (const Index outputs : {5, 64, 130})
        for (const Index rows : {1, 2, 3, 4, 5, 7, 11, 13, 16, 17, 32, 36})
          for (const bool extreme : {false, true}) {
            const Case one(format, inputs, outputs, rows, extreme);
            const std::vector<float> plain = one.product({});
            for (const Dots dots : all) {
              const std::vector<float> y = one.product(dots);
              const double error = one.error(y, dots);
              if (error < 2e-6 && (one.pairs(dots) || y == plain) && one.alone(dots, y)) continue;
              right = false;
              std::printf("wrong by %.1e or by %s: format %d, %d × %d, %d rows\n", error, name(dots), int(format), int(outputs), int(inputs), int(rows));
            }
          }
  std::printf("products %s", right ? "right" : "wrong");
  for (const Dots dots : all) std::printf(", %s", name(dots));
  std::puts("");
  return right ? 0 : 1;
}
