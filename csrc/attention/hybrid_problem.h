// What the library hands to the kernel of hybrid attention.
#pragma once

#include "kernels.h"

namespace tarnn {

/// Row b: count[b] tokens came before, length[b] are new. k, v hold `window` keys from before, then the new ones, so that
/// key j of the row leaves the window at new token j. phi_k and weight (the log of its scale, −∞ where it does not enter) are
/// those of the row's first t keys; a is the log of a query's scale and λ. Features and the sums are wide; f = 0: none.
struct HybridProblem {
  Index b, g, r, d, e, f, window, sinks;
  double scale;
  const Index *count, *length;
  View q, k, v, sink_k, sink_v, phi_q, a, phi_k, weight;
  View o, share;  // share: null where not asked for
  Sums before, after;
  Index threads = 1;
  Run run;
};

struct HybridKernels {
  void (*of_float)(const HybridProblem&);
  void (*of_double)(const HybridProblem&);
};

}  // namespace tarnn
