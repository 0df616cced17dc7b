// Names the library. Operators are registered in the folder of each op (operators.cpp); torch.h makes one binary for every Python
// and every torch from 2.10 on.
#include <string>

#include "kernels.h"
#include "torch.h"

namespace {

std::string isa() { return tarnn::kernels().isa; }

/// Whether the kernels compute in float64, too: in the library that tests build.
bool float64() { return false FOR_DOUBLE(|| true); }

}  // namespace

STABLE_TORCH_LIBRARY(tarnn_cpu, m) {
  m.def("isa() -> str");
  m.def("float64() -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(tarnn_cpu, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&isa));
  m.impl("float64", TORCH_BOX(&float64));
}
