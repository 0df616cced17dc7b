// Short convolution's operators: forward, backward and one token. Python (kernels/cpu/convolution.py) has checked shapes and dtypes, and
// allocates all results, those at masked tokens as zeros.
#include <vector>

#include "common/operators.h"
#include "convolution/problem.h"

namespace {

using namespace tarnn;

constexpr Index tokens_of_a_stretch = 1024;  // at most; sums over tokens are made stretch by stretch

/// (n, t, c) seen as (n, 1, t, c).
View in_time(const Tensor& x) {
  View out = view(x);
  out.stride[3] = out.stride[2];
  out.stride[2] = out.stride[1];
  out.stride[1] = 0;
  return out;
}

View in_time(const Maybe& x) { return x ? in_time(*x) : View(); }

#define CALL(X)                                                                                          \
  X(Tensor, x) X(Tensor, weight) X(Maybe, bias) X(Maybe, S) X(Maybe, key_mask) X(Maybe, bounds)          \
  X(Index, before) X(bool, silu)
struct Inputs {
  CALL(FIELD)
};

/// A call, and where its sequences lie.
struct Call {
  Convolution p;
  std::vector<Index> row, length, starts, times, cuts;
  std::vector<Piece> pieces;
};

/// Real tokens of all sequences, one after the other.
void find_tokens(const Inputs& in, Call& call) {
  const Index t = in.x.size(1);
  const bool packed = in.bounds.has_value();
  const Index sequences = packed ? in.bounds->size(0) - 1 : in.x.size(0);
  const auto bounds = static_cast<const Index*>(data(in.bounds));
  const auto real = static_cast<const bool*>(data(in.key_mask));
  for (Index s = 0; s < sequences; ++s) {
    const Index row = packed ? 0 : s, begin = packed ? bounds[s] : 0, end = packed ? bounds[s + 1] : t;
    call.row.push_back(row);
    call.starts.push_back(real ? static_cast<Index>(call.times.size()) : begin);
    if (real)
      for (Index i = begin; i < end; ++i)
        if (real[row * in.key_mask->stride(0) + i * in.key_mask->stride(1)]) call.times.push_back(i);
    call.length.push_back(real ? static_cast<Index>(call.times.size()) - call.starts.back() : end - begin);
  }
}

/// Stretches of so many tokens, cut from all sequences as they follow one another.
void cut(Call& call) {
  Index room = tokens_of_a_stretch;
  call.cuts.push_back(0);
  for (Index s = 0; s < static_cast<Index>(call.length.size()); ++s) {
    Index begin = 0;
    do {
      const Index end = std::min(call.length[s], begin + room);
      call.pieces.push_back({s, begin, end});
      room -= end - begin;
      begin = end;
      if (room == 0) {
        call.cuts.push_back(static_cast<Index>(call.pieces.size()));
        room = tokens_of_a_stretch;
      }
    } while (begin < call.length[s]);
  }
  if (call.cuts.back() < static_cast<Index>(call.pieces.size())) call.cuts.push_back(static_cast<Index>(call.pieces.size()));
}

void set_filters(const Inputs& in, Convolution& p) {
  p.channels = in.x.size(2);
  p.width = in.weight.size(1);
  p.before = in.before;
  p.silu = in.silu;
  p.x = in_time(in.x);
  p.S = in_time(in.S);
  p.weight = data(in.weight);
  p.bias = data(in.bias);
  p.run = run;
  p.threads = in.x.numel() * p.width < worth_a_thread ? 1 : get_num_threads();
}

void set_up(const Inputs& in, Call& call) {
  Convolution& p = call.p;
  set_filters(in, p);
  find_tokens(in, call);
  cut(call);
  p.row = call.row.data();
  p.length = call.length.data();
  p.starts = call.starts.data();
  p.times = in.key_mask ? call.times.data() : nullptr;
  p.pieces = call.pieces.data();
  p.cuts = call.cuts.data();
  p.stretches = static_cast<Index>(call.cuts.size()) - 1;
}

void forward(CALL(PARAMETER) Tensor o, Maybe S_after) {
  Call call;
  set_up({CALL(NAME)}, call);
  in_large_pages(o);
  call.p.o = in_time(o);
  call.p.S_after = in_time(S_after);
  by_dtype(x.scalar_type(), *kernels().convolution, [&](auto& of, auto) { of.forward(call.p); });
}

/// The sums of all stretches, in their order, to dweight (c × w) and dbias (c).
template <typename T>
void join(const Convolution& p, std::vector<T>& parts, T* weight, T* bias) {
  const Index n = (p.width + 1) * p.channels;
  if (!p.stretches) parts.assign(n, T(0));
  for (Index i = 1; i < p.stretches; ++i)
    for (Index j = 0; j < n; ++j) parts[j] += parts[i * n + j];
  for (Index j = 0; j < p.channels; ++j)
    for (Index l = 0; l < p.width; ++l) weight[j * p.width + l] = parts[l * p.channels + j];
  if (bias) std::copy_n(parts.data() + p.width * p.channels, p.channels, bias);
}

void backward(Tensor grad_o, Maybe grad_S, CALL(PARAMETER) Tensor grad_x, Tensor grad_weight, Maybe grad_bias, Maybe grad_S_before) {
  Call call;
  set_up({CALL(NAME)}, call);
  Convolution& p = call.p;
  in_large_pages(grad_x);
  p.grad_o = in_time(grad_o);
  p.grad_S = in_time(grad_S);
  p.grad_x = in_time(grad_x);
  p.grad_S_before = in_time(grad_S_before);
  by_dtype(x.scalar_type(), *kernels().convolution, [&](auto& of, auto zero) {
    using T = decltype(zero);
    std::vector<T> parts(p.stretches * (p.width + 1) * p.channels);
    p.parts = parts.data();
    of.backward(p);
    join(p, parts, static_cast<T*>(grad_weight.mutable_data_ptr()), static_cast<T*>(data(grad_bias)));
  });
}

void step(CALL(PARAMETER) Tensor o, Tensor S_after) {
  Convolution p;
  set_filters({CALL(NAME)}, p);
  p.o = in_time(o);
  p.S_after = in_time(S_after);
  by_dtype(x.scalar_type(), *kernels().convolution, [&](auto& of, auto) { of.step(p, x.size(0)); });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tarnn_cpu, m) {
  m.def("convolution_forward(" CALL(SCHEMA) "Tensor(a!) o, Tensor(b!)? S_after) -> ()");
  m.def("convolution_backward(Tensor grad_o, Tensor? grad_S, " CALL(SCHEMA)
        "Tensor(a!) grad_x, Tensor(b!) grad_weight, Tensor(c!)? grad_bias, Tensor(d!)? grad_S_before) -> ()");
  m.def("convolution_step(" CALL(SCHEMA) "Tensor(a!) o, Tensor(b!) S_after) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tarnn_cpu, CPU, m) {
  m.impl("convolution_forward", TORCH_BOX(&forward));
  m.impl("convolution_backward", TORCH_BOX(&backward));
  m.impl("convolution_step", TORCH_BOX(&step));
}
