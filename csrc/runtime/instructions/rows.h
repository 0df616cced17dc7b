// Instructions that act on rows, alone or on the heads of one unit: what stands between the products and the states.
#pragma once

#include <cmath>

#include "runtime/frame.h"

namespace tarnn::runtime {
namespace TARNN_ISA {

/// eˣ for any x.
TARNN_INLINE Vec<float> exp_any(Vec<float> x) {
  const Vec<float> e = exp_nonpositive(x > 0 ? -x : x);
  return x > 0 ? 1.f / e : e;
}

TARNN_INLINE Vec<float> tanh_of(Vec<float> x) { return sigmoid<float>(x * 2.f) * 2.f - 1.f; }

TARNN_INLINE Vec<float> function_of(Function f, Vec<float> x) {
  switch (f) {
    case Function::silu: return silu(x);
    case Function::gelu: return gelu(x);
    case Function::gelu_tanh: return x * (tanh_of((x + x * x * x * 0.044715f) * 0.797884561f) + 1.f) * 0.5f;
    case Function::relu: return x > 0 ? x : Vec<float>{};
    case Function::squared_relu: return squared_relu(x);
    case Function::sigmoid: return sigmoid<float>(x);
    case Function::tanh: return tanh_of(x);
    case Function::softplus: return softplus(x);
    case Function::exp: return exp_any(x);
    case Function::neg: return -x;
    case Function::log_sigmoid: return -softplus(-x);
    default: return x;
  }
}

/// put(first channel, numbers, how many are left) over a row of a table.
template <typename F>
inline void row_of(const Table& table, Index index, F put) {
  const auto all = [&](auto format) {
    using Format = decltype(format);
    const auto* from = static_cast<const typename Format::Stored*>(table.at) + index * table.width;
    for (Index i = 0; i < table.width; i += width<float>) put(i, read_as<Format>(from + i, table.width - i), table.width - i);
  };
  if (table.type == Type::bfloat16) return all(Bfloat16());
  if (table.type == Type::float16) return all(Float16());
  all(Same<float>());
}

/// tokens[id]·scale + places[position] + extra. Narrower tokens fill the first channels, narrower places the last. integers: table of places or −1.
/// numbers: scale.
inline void embed(const Instruction& x, const View& at, Index row) {
  const Call& c = at.call();
  const Table& tokens = c.tables[0];
  const Index n = x.out().size(), of = at.begin + row;
  const float scale = x.number(0);
  float* to = at.at(x.out(), row);
  std::fill_n(to, n, 0.f);
  row_of(tokens, c.ids[of], [&](Index i, Vec<float> v, Index left) { write(to + i, scale == 1.f ? v : v * scale, left); });
  if (x.integer(0) >= 0) {
    const Table& places = c.tables[x.integer(0)];
    float* last = to + n - places.width;
    row_of(places, smaller(c.position(of), places.rows - 1), [&](Index i, Vec<float> v, Index left) { write(last + i, read(last + i, left) + v, left); });
  }
  if (c.extra) for (Index i = 0; i < n; ++i) to[i] += c.extra[of * n + i];
}

/// Cosines and sines of position·frequency. numbers: frequencies. integers: whether angles are rounded to float32 first.
inline void angles(const Instruction& x, const View& at, Index row) {
  const auto position = static_cast<double>(at.position(row));
  const Index half = static_cast<Index>(x.numbers.size());
  float* to = at.at(x.out(), row);
  for (Index c = 0; c < half; ++c) {
    double angle = position * x.numbers[static_cast<std::size_t>(c)];
    if (x.integer(0)) angle = static_cast<double>(static_cast<float>(angle));
    to[c] = static_cast<float>(std::cos(angle)), to[half + c] = static_cast<float>(std::sin(angle));
  }
}

enum class NormKind : Index { rms, layer, l2, length, count };

/// integers: kind, whether the gain is multiplied after the factor, as of whole rows. numbers: eps, scale. vectors: gain, bias; of one head or all.
inline void norm(const Instruction& x, const View& at, Index row) {
  const Operand& in = x.in();
  const Index n = in.width;
  const Part part = at.part(in);
  const auto kind = static_cast<NormKind>(x.integer(0));
  const bool whole = x.integer(1) != 0;
  for (Index head = 0; head < part.heads; ++head) {
    const float* from = at.at(in, row) + head * n;
    float* to = at.at(x.out(), row) + head * n;
    const auto of_head = [&](Index i) { return x.vector(i) ? x.vector(i) + (x.length(i) == n ? 0 : (part.first + head) * n) : nullptr; };
    const float *gain = of_head(0), *bias = of_head(1);
    const auto numbers = [&](Index i) TARNN_LAMBDA { return read(from + i, n - i); };
    const float mean = kind == NormKind::layer ? summed(n, numbers) / static_cast<float>(n) : 0.f;
    const float square = summed(n, [&](Index i) TARNN_LAMBDA { return (numbers(i) - mean) * (numbers(i) - mean); });
    const float eps = x.number(0), scale = x.number(1);
    const float length = __builtin_sqrtf(square);
    const float factor = scale / (kind == NormKind::length ? (length > eps ? length : eps) : __builtin_sqrtf((kind == NormKind::l2 ? square : square / static_cast<float>(n)) + eps));
    for (Index i = 0; i < n; i += width<float>) {
      Vec<float> y = numbers(i) - mean;
      if (!gain) y = y * factor;
      else if (whole) y = y * factor * read(gain + i, n - i);
      else y = y * (read(gain + i, n - i) * factor);
      write(to + i, bias ? y + read(bias + i, n - i) : y, n - i);
    }
  }
}

/// The inputs' heads side by side: of each head first those numbers of the first input, then of the next.
inline void concat(const Instruction& x, const View& at, Index row) {
  const Operand& out = x.out();
  const Index heads = at.part(out).heads;
  float* to = at.at(out, row);
  for (Index i = 0; i < x.inputs(); to += x.in(i).width, ++i) {
    const Index n = x.in(i).width;
    const float* from = at.at(x.in(i), row);
    for (Index head = 0; head < heads; ++head) std::copy_n(from + head * n, n, to + head * out.width);
  }
}

enum class Other : Index { none, same, per_head, channels, all, heads, number, count };
enum class Operation : Index { none, add, mul, count };

/// f(a), or f(a) + g(b), f(a)·g(b). integers: f, operation, g, what b is: a register of as many numbers, or of one a head; a vector of one head, of
/// all, of a number a head; a number.
inline void combine(const Instruction& x, const View& at, Index row) {
  const Operand& a = x.in();
  const Index n = a.width;
  const Part part = at.part(a);
  const auto f = static_cast<Function>(x.integer(0)), g = static_cast<Function>(x.integer(2));
  const auto operation = static_cast<Operation>(x.integer(1));
  const auto other = static_cast<Other>(x.integer(3));
  const float *from = at.at(a, row), *b = other == Other::same || other == Other::per_head ? at.at(x.in(1), row) : nullptr;
  float* to = at.at(x.out(), row);
  const auto loop = [&](Index m, auto b_of) TARNN_LAMBDA {
    for (Index i = 0; i < m; i += width<float>) {
      Vec<float> y = function_of(f, read(from + i, m - i));
      if (operation == Operation::add) y = y + function_of(g, b_of(i, m - i));
      else if (operation == Operation::mul) y = y * function_of(g, b_of(i, m - i));
      write(to + i, y, m - i);
    }
  };
  const auto constant = [&](float value) TARNN_LAMBDA { loop(n, [&](Index, Index) TARNN_LAMBDA { return broadcast(value); }); };
  const auto vector = [&](const float* v, Index m) TARNN_LAMBDA { loop(m, [&](Index i, Index left) TARNN_LAMBDA { return read(v + i, left); }); };
  switch (other) {
    case Other::none:
    case Other::number: return loop(part.heads * n, [&](Index, Index) TARNN_LAMBDA { return broadcast(x.number(0)); });
    case Other::same: return vector(b, part.heads * n);
    case Other::all: return vector(x.vector(0) + part.first * n, part.heads * n);
    default: break;
  }
  if (n == 1 && other != Other::channels) return vector(b ? b : x.vector(0) + part.first, part.heads);
  for (Index head = 0; head < part.heads; ++head, from += n, to += n) {
    if (other == Other::channels) vector(x.vector(0), n);
    else constant(b ? b[head] : x.vector(0)[part.first + head]);
  }
}

/// Numbers between two others. numbers: these.
inline void clamp(const Instruction& x, const View& at, Index row) {
  const float *from = at.at(x.in(), row), least = x.number(0), most = x.number(1);
  float* to = at.at(x.out(), row);
  for (Index i = 0, n = at.size(x.in()); i < n; ++i) to[i] = from[i] < least ? least : from[i] > most ? most : from[i];
}

/// Pairs of the first channels of each head turn by the row's angles. integers: pairs, whether they lie side by side.
inline void rotate(const Instruction& x, const View& at, Index row) {
  const Operand& in = x.in();
  const Index n = in.width, half = x.integer(0);
  const float *from = at.at(in, row), *turn = at.at(x.in(1), row);
  float* to = at.at(x.out(), row);
  for (Index heads = at.part(in).heads; heads > 0; --heads, from += n, to += n) {
    if (x.integer(1)) {
      for (Index c = 0; c < half; ++c) {
        const float a = from[2 * c], b = from[2 * c + 1], cos = turn[c], sin = turn[half + c];
        to[2 * c] = a * cos - b * sin, to[2 * c + 1] = b * cos + a * sin;
      }
    } else {
      for (Index c = 0; c < half; c += width<float>) {
        const Index there = half - c;
        const Vec<float> a = read(from + c, there), b = read(from + c + half, there), cos = read(turn + c, there), sin = read(turn + c + half, there);
        write(to + c, a * cos - b * sin, there), write(to + c + half, b * cos + a * sin, there);
      }
    }
    if (to != from) std::copy(from + 2 * half, from + n, to + 2 * half);
  }
}

/// Rounds a row for products: to bytes, for whole numbers, or to bfloat16 numbers, where the processor multiplies these. integers: the format
/// of the weights.
inline void to_bytes(const Instruction& x, const View& at, Index row) {
  const auto format = static_cast<Format>(x.integer(0));
  if (!rounds_rows(format, at.frame.program.dots)) return;
  at.frame.levels[static_cast<std::size_t>(x.out().slot)].round(format, at.at(x.in(), row), x.in().size(), row);
}

}  // namespace TARNN_ISA
}  // namespace tarnn::runtime
