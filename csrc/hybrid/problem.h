// What the library hands to the kernels of hybrid attention.
#pragma once

#include "kernels.h"

namespace tarnn {

/// Row b: count[b] tokens came before, length[b] are new. k, v hold `window` keys from before, then the new ones.
///
/// Causal: phi_k and weight (the log of its scale, −∞ where it does not enter) are those of the row's first t keys, so that
/// number j leaves the window at new token j. To both sides: those of the new keys. a is the log of a query's scale and λ.
/// Features and the sums are wide; f = 0: none.
///
/// Keys that all queries see stand among the sinks: the first so many of the sequence, or, to both sides, where there is
/// `barred`, num_sinks[b] of the row, those at which barred (b, 1, window + t) is −∞ and not 0.
struct HybridProblem {
  Index b, g, r, d, e, f, window, sinks;
  bool causal = true;
  double scale, softcap = 0;  // 0: none
  bool log_features = false;  // phi_q and phi_k are logarithms, and M is (b, g, f)
  const Index *count, *length, *num_sinks = nullptr;
  View q, k, v, sink_k, sink_v, phi_q, a, phi_k, weight, barred;
  View o, share, log_total;  // the last two: null where not asked for; ℓ: the log of a query's denominator
  View behind;               // to both sides: (b, h, t, e + 2), room for what the sums of later keys give
  Sums before, after;
  View joined;               // to both sides: (b, h, t, 2), 1 where the sums of earlier, and those of later keys, count; or null
  // backward, of `length` tokens that nothing came before: gradients but that of q are wide, with channels in a row, and zeros to
  // add to. a_behind: to both sides, a for the sums of later keys
  View a_behind, grad_o, grad_q, grad_k, grad_v, grad_sink_k, grad_sink_v, grad_phi_q, grad_phi_k;
  Index t = 0;
  Index threads = 1;
  Run run;
};

/// One token: the store of `room` exact keys and values (b, g, room, ·), and the sums, are written in place. fade (b, g, room)
/// is added to products with the keys; phi_k, weight: of the key that leaves the window, if the window is full.
struct HybridStep {
  Index b, g, r, d, e, f, room, sinks;
  double scale, softcap = 0;
  bool log_features = false;
  const Index* count;
  View q, k, v, phi_q, a, phi_k, weight, decay;
  View store_k, store_v, fade, o, share;
  Sums sums;
  Index threads = 1;
  Run run;
};

template <typename T>
struct HybridKernelsOf {
  void (*forward)(const HybridProblem&);
  void (*backward)(const HybridProblem&);
  void (*step)(const HybridStep&);
};

struct HybridKernels : OfTypes<HybridKernelsOf> {};

}  // namespace tarnn
