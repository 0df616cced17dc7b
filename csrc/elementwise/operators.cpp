// The elementwise layers as operators of torch: rows shared out among threads in blocks that depend on the shape alone, so
// that sums over them give the same bits on any number of threads.
#include <algorithm>
#include <vector>

#include "common/operators.h"
#include "elementwise/elementwise.h"

namespace {

using tarnn::Index;
using tarnn::kernels;
using tarnn::Tensor;

constexpr Index block = 1 << 14;  // numbers: about what a thread does while another wakes

// sums over rows are kept apart, each as long as a row: of fewer rows, or more of them, they would be as large as x
constexpr Index most_parts = 64, least_rows = 16;

template <typename T>
const T* in(const Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}

template <typename T>
T* out(Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}

/// f(block, first, count) for each block of `each` among `count`.
template <typename F>
void in_blocks(Index count, Index each, F f) {
  const auto work = [&](Index begin, Index end) {
    for (Index i = begin; i < end; ++i) f(i, i * each, std::min(each, count - i * each));
  };
  const Index blocks = (count + each - 1) / each;
  if (blocks <= 1) work(0, blocks);
  else tarnn::parallel_for(0, blocks, 1, work);
}

Index rows_a_block(Index n) { return std::max<Index>(1, block / std::max<Index>(1, n)); }

void rms_norm(Tensor x, Tensor weight, double eps, Tensor y, Tensor scale) {
  const Index n = weight.numel(), rows = scale.numel();
  by_dtype(x.scalar_type(), *kernels().elementwise, [&](const auto& of, auto zero) {
    using T = decltype(zero);
    in_blocks(rows, rows_a_block(n), [&](Index, Index first, Index count) {
      of.rms_norm(count, n, static_cast<T>(eps), in<T>(x) + first * n, in<T>(weight), out<T>(y) + first * n, out<T>(scale) + first);
    });
  });
}

void rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor scale, Tensor grad_x, Tensor grad_weight) {
  const Index n = weight.numel(), rows = scale.numel();
  const Index each = std::max({rows_a_block(n), (rows + most_parts - 1) / most_parts, least_rows}), blocks = (rows + each - 1) / each;
  by_dtype(x.scalar_type(), *kernels().elementwise, [&](const auto& of, auto zero) {
    using T = decltype(zero);
    std::vector<T> parts(blocks * n);  // of grad_weight, a block after the other
    in_blocks(rows, each, [&](Index i, Index first, Index count) {
      of.rms_norm_backward(count, n, in<T>(grad) + first * n, in<T>(x) + first * n, in<T>(weight), in<T>(scale) + first,
                           out<T>(grad_x) + first * n, parts.data() + i * n);
    });
    T* sums = out<T>(grad_weight);
    in_blocks(n, std::max<Index>(1, block / std::max<Index>(1, blocks)), [&](Index, Index first, Index count) {
      std::fill_n(sums + first, count, T(0));
      for (Index i = 0; i < blocks; ++i)
        for (Index j = first; j < first + count; ++j) sums[j] += parts[i * n + j];
    });
  });
}

void swiglu(Tensor gate, Tensor up, Tensor y) {
  by_dtype(gate.scalar_type(), *kernels().elementwise, [&](const auto& of, auto zero) {
    using T = decltype(zero);
    in_blocks(gate.numel(), block, [&](Index, Index first, Index count) {
      of.swiglu(count, in<T>(gate) + first, in<T>(up) + first, out<T>(y) + first);
    });
  });
}

void swiglu_backward(Tensor grad, Tensor gate, Tensor up, Tensor grad_gate, Tensor grad_up) {
  by_dtype(gate.scalar_type(), *kernels().elementwise, [&](const auto& of, auto zero) {
    using T = decltype(zero);
    in_blocks(gate.numel(), block, [&](Index, Index first, Index count) {
      of.swiglu_backward(count, in<T>(grad) + first, in<T>(gate) + first, in<T>(up) + first, out<T>(grad_gate) + first,
                         out<T>(grad_up) + first);
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tarnn_cpu, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps, Tensor(a!) y, Tensor(b!) scale) -> ()");
  m.def("rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor scale, Tensor(a!) grad_x, Tensor(b!) grad_weight) -> ()");
  m.def("swiglu(Tensor gate, Tensor up, Tensor(a!) y) -> ()");
  m.def("swiglu_backward(Tensor grad, Tensor gate, Tensor up, Tensor(a!) grad_gate, Tensor(b!) grad_up) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tarnn_cpu, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
  m.impl("swiglu", TORCH_BOX(&swiglu));
  m.impl("swiglu_backward", TORCH_BOX(&swiglu_backward));
}
