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
using tarnn::Type;

constexpr Index block = 1 << 14;  // numbers: about what a thread does while another wakes

// sums over rows are kept apart, each as long as a row: of fewer rows, or more of them, they would be as large as x
constexpr Index most_parts = 64, least_rows = 16;

template <typename T>
T* at(const Tensor& x, Index from = 0) {
  return static_cast<T*>(tarnn::data(x)) + from;
}

/// A tensor's numbers from number `from` on.
tarnn::Rows rows_of(const Tensor& x, Index from = 0) { return tarnn::Rows{tarnn::data(x)}.from(from, x.scalar_type()); }
tarnn::Rows rows_of(const tarnn::Maybe& x, Index from = 0) { return x ? rows_of(*x, from) : tarnn::Rows(); }

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

// A weight and all sums are of the type that is computed in: float32 for sixteen bits.

void rms_norm(Tensor x, Tensor weight, tarnn::Maybe gate, double eps, Tensor y, Tensor scale) {
  const Index n = weight.numel(), rows = scale.numel();
  by_dtype(weight.scalar_type(), *kernels().elementwise, [&](const auto& of, auto zero) {
    using T = decltype(zero);
    in_blocks(rows, rows_a_block(n), [&](Index, Index first, Index count) {
      of.rms_norm(x.scalar_type(), count, n, static_cast<T>(eps), rows_of(x, first * n), rows_of(gate, first * n), at<T>(weight),
                  rows_of(y, first * n), at<T>(scale, first));
    });
  });
}

void rms_norm_backward(Tensor grad, Tensor x, Tensor weight, tarnn::Maybe gate, Tensor scale, Tensor grad_x, Tensor grad_weight,
                       tarnn::Maybe grad_gate) {
  const Index n = weight.numel(), rows = scale.numel();
  const Index each = std::max({rows_a_block(n), (rows + most_parts - 1) / most_parts, least_rows}), blocks = (rows + each - 1) / each;
  by_dtype(weight.scalar_type(), *kernels().elementwise, [&](const auto& of, auto zero) {
    using T = decltype(zero);
    std::vector<T> parts(blocks * n);  // of grad_weight, a block after the other
    in_blocks(rows, each, [&](Index i, Index first, Index count) {
      of.rms_norm_backward(x.scalar_type(), count, n, rows_of(grad, first * n), rows_of(x, first * n), rows_of(gate, first * n),
                           at<T>(weight), at<T>(scale, first), rows_of(grad_x, first * n), rows_of(grad_gate, first * n),
                           parts.data() + i * n);
    });
    T* sums = at<T>(grad_weight);
    in_blocks(n, std::max<Index>(1, block / std::max<Index>(1, blocks)), [&](Index, Index first, Index count) {
      std::fill_n(sums + first, count, T(0));
      for (Index i = 0; i < blocks; ++i)
        for (Index j = first; j < first + count; ++j) sums[j] += parts[i * n + j];
    });
  });
}

/// As by_dtype, of the type in which numbers of type `stored` are computed.
template <typename F>
void by_stored(Type stored, F f) {
  by_dtype(stored == Type::float64 ? stored : Type::float32, *kernels().elementwise, [&](const auto& of, auto) { f(of); });
}

void swiglu(Tensor gate, Tensor up, Tensor y) {
  by_stored(gate.scalar_type(), [&](const auto& of) {
    in_blocks(gate.numel(), block, [&](Index, Index first, Index count) {
      of.swiglu(gate.scalar_type(), count, rows_of(gate, first), rows_of(up, first), rows_of(y, first));
    });
  });
}

void swiglu_backward(Tensor grad, Tensor gate, Tensor up, Tensor grad_gate, Tensor grad_up) {
  by_stored(gate.scalar_type(), [&](const auto& of) {
    in_blocks(gate.numel(), block, [&](Index, Index first, Index count) {
      of.swiglu_backward(gate.scalar_type(), count, rows_of(grad, first), rows_of(gate, first), rows_of(up, first),
                         rows_of(grad_gate, first), rows_of(grad_up, first));
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tarnn_cpu, m) {
  m.def("rms_norm(Tensor x, Tensor weight, Tensor? gate, float eps, Tensor(a!) y, Tensor(b!) scale) -> ()");
  m.def("rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor? gate, Tensor scale, Tensor(a!) grad_x, Tensor(b!) grad_weight, Tensor(c!)? grad_gate) -> ()");
  m.def("swiglu(Tensor gate, Tensor up, Tensor(a!) y) -> ()");
  m.def("swiglu_backward(Tensor grad, Tensor gate, Tensor up, Tensor(a!) grad_gate, Tensor(b!) grad_up) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tarnn_cpu, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
  m.impl("swiglu", TORCH_BOX(&swiglu));
  m.impl("swiglu_backward", TORCH_BOX(&swiglu_backward));
}
