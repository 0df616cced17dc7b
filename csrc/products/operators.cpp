// The operators that make a program's block of weights.
#include <stdexcept>
#include <vector>

#include "common/operators.h"
#include "products/packing.h"

namespace {

using namespace tarnn;

constexpr Index worth_a_packer = 1 << 18;  // weights

/// Where the weights of each output lie: one matrix after the other, or, in turns, a panel of each.
std::vector<const void*> rows_of(const std::vector<Tensor>& weights, Type stored, Index inputs, bool turns) {
  std::vector<const void*> rows;
  Index most = 0;
  for (const Tensor& x : weights) {
    if (x.dim() != 2 || x.size(1) != inputs || x.scalar_type() != stored || stored == Type::float64 || (inputs > 1 && x.stride(1) != 1))
      throw std::runtime_error("weights to be packed must be float32, bfloat16 or float16, all of one type, of as many inputs each, side by side.");
    most = std::max(most, x.size(0));
  }
  const Index each = turns ? panel : most;
  for (Index begin = 0; begin < most; begin += each)
    for (const Tensor& x : weights)
      for (Index i = begin; i < (turns ? begin + each : x.size(0)); ++i)
        rows.push_back(i < x.size(0) ? static_cast<const char*>(x.const_data_ptr()) + i * x.stride(0) * bytes_of(stored) : nullptr);
  rows.resize(static_cast<std::size_t>(whole_panels(static_cast<Index>(rows.size()))));
  return rows;
}

/// at, scale, sums: bytes from the block's beginning; the last two count only in formats that have them.
void pack(std::vector<Tensor> weights, bool turns, Index format, Tensor block, Index at, Index scale, Index sums) {
  if (weights.empty() || format < 0 || format > static_cast<Index>(Format::int4)) throw std::runtime_error("there is nothing to be packed.");
  const Index inputs = weights[0].size(1), bytes = block.numel();
  const Type stored = weights[0].scalar_type();
  const std::vector<const void*> rows = rows_of(weights, stored, inputs, turns);
  const Index panels = static_cast<Index>(rows.size()) / panel, vector = panels * panel * static_cast<Index>(sizeof(float));
  char* begin = static_cast<char*>(block.mutable_data_ptr());
  const auto place = [&](Index from, Index size) {
    if (from < 0 || from % 64 || size > bytes - from) throw std::runtime_error("the block has no room for these weights.");
    return begin + from;
  };
  Packing p{static_cast<Format>(format), stored, inputs, rows.data(), nullptr, nullptr, nullptr};
  p.at = place(at, panels * bytes_of_panel(p.format, inputs));
  if (p.format == Format::int8) p.scale = reinterpret_cast<float*>(place(scale, vector));
  if (p.format == Format::int8 || p.format == Format::int4) p.sums = reinterpret_cast<float*>(place(sums, vector));
  const PackKernel& kernel = *kernels().pack;
  const auto task = [&](Index i, void* scratch) { kernel.pack(p, i, scratch); };
  const auto call = [](void* context, Index i, void* scratch) { (*static_cast<const decltype(task)*>(context))(i, scratch); };
  run(panels, std::min(get_num_threads(), 1 + panels * panel * inputs / worth_a_packer), kernel.room(inputs), call, const_cast<void*>(static_cast<const void*>(&task)));
}

/// Of bytes that are about to be written for the first time.
void large_pages(Tensor x) { ask_for_large_pages(x.const_data_ptr(), static_cast<std::size_t>(x.numel())); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tarnn_cpu, m) {
  m.def("pack(Tensor[] weights, bool turns, int format, Tensor(a!) block, int at, int scale, int sums) -> ()");
  m.def("large_pages(Tensor bytes) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tarnn_cpu, CPU, m) {
  m.impl("pack", TORCH_BOX(&pack));
  m.impl("large_pages", TORCH_BOX(&large_pages));
}
