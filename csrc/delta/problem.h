// What the library hands to the kernels of the delta rule.
#pragma once

#include "kernels.h"

namespace tarnn {

/// Output head i reads query head i / q_share, key head i / k_share, and value head, β, decay and state i / v_share.
struct DeltaProblem {
  Index heads, q_share, k_share, v_share;
  Index d, e;               // widths of keys and values
  Index sequences, t;       // t: positions of a row
  const Index* bounds;      // of sequences packed into row 0, one more than those; null: each row is a sequence
  Index segment;            // positions, whole blocks: backward starts from states so far apart
  View q, k, v, o;
  View beta, log_decay;     // wide; the last axis of decays has d entries if `channels`, else one
  View mask;                // bool; the first and third strides count
  bool channels;
  bool normalize;           // x/√(Σx² + norm_eps) instead of q and k
  double norm_eps, scale;
  const void* before;       // S (sequences, heads / v_share, d, e), contiguous, wide; null: zeros
  void* after;              // the same behind; null where not wanted; in a step it may be `before`
  View kept;                // the states before each segment of a sequence but its first: written by forward, read by backward
  // backward
  View grad_o, grad_q, grad_k, grad_v;  // grad_o may be none
  View grad_beta, grad_log_decay;       // wide
  const void* grad_after;               // as `after`
  void* grad_before;                    // null where not wanted
  // how many threads there are for it: they decide who does what, never what is computed
  Index threads = 1;
  Run run;
};

template <typename T>
struct DeltaKernelsOf {
  void (*forward)(const DeltaProblem&);
  void (*backward)(const DeltaProblem&);
  void (*step)(const DeltaProblem&);
};

struct DeltaKernels : OfTypes<DeltaKernelsOf> {};

/// The delta rule of low rank: a and b in the place of β, heads that share nothing, and nothing normalised.
struct LowRankProblem : DeltaProblem {
  View a, b, grad_a, grad_b;
};

template <typename T>
struct LowRankKernelsOf {
  void (*forward)(const LowRankProblem&);
  void (*backward)(const LowRankProblem&);
};

struct LowRankKernels : OfTypes<LowRankKernelsOf> {};

}  // namespace tarnn
