// What the library hands to the kernels of the scans.
#pragma once

#include "kernels.h"

namespace tarnn {

/// b rows of t tokens and c channels, or `sequences` packed into one row, whose bounds are `cuts`. Axes of views: row of the
/// batch, token, channel (or number n). States (sequence, c[, n]) are wide and contiguous; null: zeros before, not wanted behind.
/// `kept` has the states before all segments of a sequence but its first, sequence after sequence, as states are laid out.
struct ScanProblem {
  Index b, t, c, n = 1, segment;
  const Index* cuts = nullptr;  // null: a sequence is a row
  Index sequences;
  const bool* mask = nullptr;  // (b, t), contiguous
  const void *before = nullptr, *grad_behind = nullptr;
  void *behind = nullptr, *kept = nullptr, *grad_before = nullptr;
  View x, o, grad_o, grad_x;
  Index threads = 1;
  Run run;
};

/// h ← e^log_decay h + x, o = h.
struct DiagonalScan : ScanProblem {
  View log_decay, grad_log_decay;
};

/// h ← e^(dt A) h + dt x B, o = h·C + D x. A (c, n), D (c) or null, and their gradients, are wide and contiguous; those of A
/// and D are per sequence, (sequence, c[, n]).
struct SelectiveScan : ScanProblem {
  View dt, B, C, grad_dt;
  const void *A, *D = nullptr;
  void *grad_A = nullptr, *grad_D = nullptr;
  /// Gradients of B and C, wide and contiguous (b, t, n): sums over groups of `bundles` bundles of channels, kept apart in
  /// `parts` (group, 2, b, t, n) until all are there.
  void *grad_B = nullptr, *grad_C = nullptr, *parts = nullptr;
  Index bundles = 1;
};

/// Channels that lie together in memory and that a task computes together.
constexpr Index bundle = 64;

template <typename>
struct ScanKernelsOf {
  void (*diagonal)(const DiagonalScan&);
  void (*diagonal_backward)(const DiagonalScan&);
  void (*selective)(const SelectiveScan&);
  void (*selective_backward)(const SelectiveScan&);
};

struct ScanKernels : OfTypes<ScanKernelsOf> {};

}  // namespace tarnn
