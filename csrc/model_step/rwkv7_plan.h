// What a plan says of RWKV-7's layer.
#pragma once

#include "model_step/plan_reader.h"

namespace tarnn {

inline void read_rwkv7(Plan& plan, const Stack& s, Layer& l) {
  Rwkv7& x = l.rwkv7;
  x.heads = plan.size("the number of heads"), x.d = plan.size("the size of a head");
  if (x.heads > most_of_plan / whole_panels(x.d)) plan.fail("the heads", "are too many");
  x.mixtures = plan.place<float>("mixtures", 6 * whole_panels(s.hidden), true);
  for (const float** y : {&x.k_k, &x.k_a, &x.r_k, &x.gain, &x.bias}) *y = plan.vector("a vector of channels", x.width(), true);
  x.eps = static_cast<float>(*plan.place<double>("the eps of a norm", 1, true));
  for (Matrix& y : x.made) y = plan.matrix("the projection of r, k or v", s.hidden, x.width());
  for (Index i = 0; i < Rwkv7::num_low; ++i) {
    const Index rank = plan.number("a rank", i == Rwkv7::v ? 0 : 1, most_of_plan);
    if (rank == 0) continue;
    x.down[i] = plan.matrix("a product of low rank", s.hidden, rank, true);
    x.up[i] = plan.matrix("a product of low rank", rank, x.heads * whole_panels(x.d), true);
  }
  l.o = plan.matrix("the projection of outputs", x.width(), s.hidden);
}

}  // namespace tarnn
