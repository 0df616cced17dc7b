// Picks the instruction set, once.
#include "isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

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
