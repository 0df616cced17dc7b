// Names the library, and picks the instruction set (isa.h). Operators are registered in the folder of each op (operators.cpp); torch.h
// makes one binary for every Python and every torch from 2.10 on.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "isa.h"
#include "torch.h"

const tarnn::Kernels& tarnn::kernels() {
  static const tarnn::Kernels* table = [] {
    const char* set = std::getenv("TARNN_ISA");
    const std::string wish = set ? set : "";
    const tarnn::Kernels* best = tarnn::table_of(wish);
    if (!best)
      throw std::runtime_error(wish.empty() ? "tarnn's kernels were compiled for other instruction sets than this processor's."
                                            : "TARNN_ISA=" + wish + " is not an instruction set of this processor and build.");
    return best;
  }();
  return *table;
}

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
