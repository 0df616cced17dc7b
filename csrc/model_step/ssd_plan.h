// What a plan says of Mamba-2's layer.
#pragma once

#include "model_step/plan_reader.h"

namespace tarnn {

inline void read_ssd(Plan& plan, const Stack& s, Layer& l) {
  Ssd& x = l.ssd;
  x.heads = plan.size("the number of heads"), x.groups = plan.size("the number of groups");
  x.p = plan.size("the size of a head"), x.n = plan.size("the size of a state");
  if (x.heads % x.groups || x.heads > most_of_plan / x.p || x.groups > most_of_plan / x.n) plan.fail("the groups", "do not fit the heads");
  Filters& f = l.filters;
  f.channels = x.filtered(), f.width = plan.number("the width of filters", 1, most_filter_width);
  f.kept = plan.number("the inputs that filters keep", f.width - 1, most_filter_width);
  for (const float** y : {&x.bias, &x.A, &x.D}) *y = plan.vector("the numbers of heads", x.heads, true);
  x.gain = plan.vector("the gain of a norm", x.inner(), true);
  x.eps = static_cast<float>(*plan.place<double>("the eps of a norm", 1, true));
  f.weights = plan.place<float>("filters", f.width * whole_panels(f.channels), true);
  f.bias = plan.vector("filters", f.channels, true);
  l.qkv = plan.matrix("the projection of x, B, C, z and dt", s.hidden, x.filtered() + x.inner() + x.heads);
  l.o = plan.matrix("the projection of outputs", x.inner(), s.hidden);
}

}  // namespace tarnn
