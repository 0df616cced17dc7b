// One panel of weights in each format. Compiled once for each instruction set: see ../kernels_of_isa.cpp.
#include "products/packing.h"

#include <algorithm>
#include <type_traits>

#include "common/memory.h"
#include "common/one_token.h"

namespace tarnn {
namespace TARNN_ISA {
namespace {

constexpr int w = width<float>;

/// Inputs k … k + w − 1 of one output.
template <typename From>
TARNN_INLINE Vec<float> read_row(const void* row, Index k, Index inputs) {
  return read_as<From>(static_cast<const typename From::Stored*>(row) + k, inputs - k);
}

/// The same of w outputs, a vector per input.
template <typename From>
TARNN_INLINE void load_inputs(const void* const* rows, Index k, Index inputs, Vec<float> (&x)[w]) {
  unrolled<w>([&](auto i) TARNN_LAMBDA { x[i] = rows[i] ? read_row<From>(rows[i], k, inputs) : Vec<float>{}; });
  transpose_lanes<float>(x);
}

/// Words of 32 bits, or float32 numbers of another type, and zeros behind them up to `all`.
template <typename From>
void pack_words(Index inputs, Index all, const void* const* rows, char* at) {
  auto to = reinterpret_cast<float*>(at);
  for (Index o = 0; o < panel; o += w)
    for (Index k = 0; k < inputs; k += w) {
      Vec<float> x[w];
      load_inputs<From>(rows + o, k, inputs, x);
      for (Index i = 0, n = smaller(w, inputs - k); i < n; ++i) store(to + (k + i) * panel + o, x[i]);
    }
  std::fill_n(to + inputs * panel, (all - inputs) * panel, 0.f);
}

/// Two inputs are a word. Rows of bfloat16 numbers are words already.
template <typename From>
void pack_pairs(Index inputs, const void* const* rows, char* at, std::uint16_t* halves, Index ld) {
  const void* words[panel];
  for (Index o = 0; o < panel; ++o) {
    words[o] = rows[o];
    const bool aligned = reinterpret_cast<std::uintptr_t>(rows[o]) % 4 == 0;
    if (!rows[o] || (std::is_same_v<From, Bfloat16> && inputs % 2 == 0 && aligned)) continue;
    auto* to = halves + o * ld;
    for (Index k = 0; k < inputs; k += w) Bfloat16::store(to + k, read_row<From>(rows[o], k, inputs));
    words[o] = to;
  }
  pack_words<Same<float>>((inputs + 1) / 2, whole_steps(inputs) / 2, words, at);
}

/// A row as whole numbers from −127 to 127, zeros behind it; its factor, and the sum of what it stands for.
template <typename From>
void round_row(const void* row, Index inputs, std::int8_t* to, float& scale, float& total) {
  Vec<float> most{};
  for (Index k = 0; k < inputs; k += w) {
    const Vec<float> x = read_row<From>(row, k, inputs), size = x < 0 ? -x : x;
    most = size > most ? size : most;
  }
  scale = largest<float>(most) / 127.f;
  const float per_scale = scale > 0 ? 1.f / scale : 0.f;
  Integers<float> sum{};
  for (Index k = 0; k < inputs; k += w) {
    const Integers<float> whole = bit_cast<Integers<float>>(read_row<From>(row, k, inputs) * per_scale + 12582912.f) - 0x4B400000;
    typedef std::int8_t Narrow __attribute__((vector_size(TARNN_VECTOR_BYTES / 4)));
    const Narrow narrow = __builtin_convertvector(whole, Narrow);
    std::memcpy(to + k, &narrow, sizeof narrow);
    sum += whole;
  }
  Index all = 0;
  for (int i = 0; i < w; ++i) all += sum[i];
  total = static_cast<float>(all) * scale;
}

/// Four inputs are a word, and words lie as numbers of float32 do.
template <typename From>
void pack_int8(Index inputs, const void* const* rows, char* at, float* scale, float* sums, std::int8_t* bytes, Index ld) {
  const void* words[panel];
  for (Index o = 0; o < panel; ++o) {
    words[o] = rows[o] ? bytes + o * ld : nullptr;
    scale[o] = sums[o] = 0;
    if (rows[o]) round_row<From>(rows[o], inputs, bytes + o * ld, scale[o], sums[o]);
  }
  pack_words<Same<float>>((inputs + 3) / 4, bytes_of_panel(Format::int8, inputs) / (4 * panel), words, at);
}

/// The least and most of four bits.
TARNN_INLINE Vec<float> four_bits(Vec<float> x) {
  x = (x + 12582912.f) - 12582912.f;
  x = x < -8.f ? Vec<float>{} - 8.f : x;
  return x > 7.f ? Vec<float>{} + 7.f : x;
}

/// The factor, of bfloat16, of each of w groups: the largest number of a group becomes one of these in turn, and the factor with the
/// least squared error is taken.
TARNN_INLINE Vec<float> best_factor(const Vec<float> (&x)[group]) {
  Vec<float> largest{}, most{}, best{}, least = Vec<float>{} + __builtin_inff();
  for (const Vec<float>& y : x) {
    const Vec<float> size = y < 0 ? -y : y;
    largest = size > most ? y : largest, most = size > most ? size : most;
  }
  for (const float extreme : {-8.f, -7.5f, -7.f, -8.5f, -9.f, 7.f}) {
    const Vec<float> factor = from_bfloat16(to_bfloat16(largest / extreme));
    const Vec<float> per_factor = factor != 0 ? 1.f / factor : Vec<float>{};
    Vec<float> error{};
    for (const Vec<float>& y : x) {
      const Vec<float> off = four_bits(y * per_factor) * factor - y;
      error += off * off;
    }
    const auto better = error < least && factor != 0;
    best = better ? factor : best, least = better ? error : least;
  }
  return best;
}

template <typename From>
void pack_int4(Index inputs, const void* const* rows, char* at, float* sums) {
  for (Index o = 0; o < panel; o += w) {
    Vec<float> total{};
    char* to = at;
    for (Index k = 0; k < inputs; k += group, to += group_bytes) {
      Vec<float> x[group]{};
      for (Index i = 0; i < group && k + i < inputs; i += w) {
        Vec<float> some[w];
        load_inputs<From>(rows + o, k + i, inputs, some);
        unrolled<w>([&](auto j) TARNN_LAMBDA { x[i + j] = some[j]; });
      }
      const Vec<float> factor = best_factor(x), per_factor = factor != 0 ? 1.f / factor : Vec<float>{};
      Bfloat16::store(reinterpret_cast<std::uint16_t*>(to) + o, factor);
      Vec<float> sum{};
      Integers<float> words[group / 8]{};  // eight inputs each: those of the low halves of its bytes, and those of the high ones
      for (int i = 0; i < group; ++i) {
        const Vec<float> whole = four_bits(factor != 0 ? x[i] * per_factor : Vec<float>{});
        sum += whole;
        words[i / 8] |= (__builtin_convertvector(whole, Integers<float>) + 8) << (i % 4 * 8 + i % 8 / 4 * 4);
      }
      for (int i = 0; i < group / 8; ++i) std::memcpy(to + factor_bytes + (i * panel + o) * 4, &words[i], sizeof words[i]);
      total += sum * factor;
    }
    store(sums + o, total);
  }
}

/// Bytes of a row of whole numbers, or numbers of one of bfloat16, with room for a whole vector behind it.
Index length_of_row(Index inputs) { return whole<float>(inputs) + TARNN_VECTOR_BYTES; }

std::size_t room(Index inputs) { return sizeof(std::uint16_t) * static_cast<std::size_t>(panel * length_of_row(inputs)); }

template <typename From>
void pack_as(const Packing& p, Index index, void* scratch) {
  const void* const* rows = p.rows + index * panel;
  char* at = p.at + index * bytes_of_panel(p.format, p.inputs);
  float* sums = p.sums + index * panel;
  switch (p.format) {
    case Format::float32: return pack_words<From>(p.inputs, p.inputs, rows, at);
    case Format::bfloat16: return pack_pairs<From>(p.inputs, rows, at, static_cast<std::uint16_t*>(scratch), length_of_row(p.inputs));
    case Format::int8:
      return pack_int8<From>(p.inputs, rows, at, p.scale + index * panel, sums, static_cast<std::int8_t*>(scratch), length_of_row(p.inputs));
    case Format::int4: return pack_int4<From>(p.inputs, rows, at, sums);
  }
}

void pack(const Packing& p, Index index, void* scratch) {
  if (p.stored == Type::bfloat16) return pack_as<Bfloat16>(p, index, scratch);
  if (p.stored == Type::float16) return pack_as<Float16>(p, index, scratch);
  pack_as<Same<float>>(p, index, scratch);
}

}  // namespace

extern const PackKernel pack_kernel;
const PackKernel pack_kernel = {room, pack};

}  // namespace TARNN_ISA
}  // namespace tarnn
