// Mamba-2's mixing of tokens: rows of one sequence for one head, and what is done to each whole row behind it; see model_step/ssd.h.
#pragma once

#include "model_step/stack.h"
#include "runtime/rows.h"

namespace tarnn {
namespace TARNN_ISA {

struct SsdScratch {
  float *keep, *x, *y;
  SsdScratch(Scratch& scratch, Index n, Index p) : keep(scratch.take<float>(whole_panels(n))), x(scratch.take<float>(whole_panels(p))), y(scratch.take<float>(whole_panels(p))) {}
};

/// in: the first row of x, B, C, z and dt, filtered, rows ldx apart; out: (heads·p), rows ldo apart; S: of this sequence.
inline void scan_head(const Ssd& s, Index head, const float* in, Index ldx, Index rows, float* S, float* out, Index ldo, const SsdScratch& at) {
  const Index group = head / (s.heads / s.groups), b = s.inner() + group * s.n, c = b + s.groups * s.n, dt = s.filtered() + s.inner() + head;
  S += head * s.n * s.p, out += head * s.p;
  for (Index row = 0; row < rows; ++row, in += ldx, out += ldo) {
    const float* x = in + head * s.p;
    const float step = softplus(broadcast(in[dt] + s.bias[head]))[0];
    const Vec<float> keep = exp_nonpositive(broadcast(step * s.A[head]));
    for (Index i = 0; i < s.n; i += width<float>) store(at.keep + i, keep);
    for (Index i = 0; i < s.p; i += width<float>) store(at.x + i, read(x + i, s.p - i) * step);
    update_state(s.n, s.p, at.keep, in + b, at.x, in + c, S, S, at.y);
    for (Index i = 0; i < s.p; i += width<float>) write(out + i, load(at.y + i) + read(x + i, s.p - i) * s.D[head], s.p - i);
  }
}

/// y ← norm(y ⊙ silu(z)), of each group by itself.
inline void gate_and_norm(const Ssd& s, const float* z, float* y) {
  const Index n = s.inner() / s.groups;
  for (Index group = 0; group < s.groups; ++group, y += n, z += n) {
    for (Index i = 0; i < n; i += width<float>) write(y + i, read(y + i, n - i) * silu(read(z + i, n - i)), n - i);
    norm_head(y, n, s.gain + group * n, s.eps);
  }
}

}  // namespace TARNN_ISA
}  // namespace tarnn
