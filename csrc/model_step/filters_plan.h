// What a plan says of a layer that filters its input, each channel along time, and then mixes the channels.
#pragma once

#include "model_step/plan_reader.h"

namespace tarnn {

inline void read_filters(Plan& plan, const Stack& s, Layer& l) {
  Filters& f = l.filters;
  f.channels = s.hidden, f.width = plan.number("the width of filters", 1, most_filter_width), f.kept = f.width - 1;
  f.weights = plan.place<float>("filters", f.width * whole_panels(f.channels), true);
  f.bias = plan.vector("filters", f.channels, true);
  l.o = plan.matrix("the projection of outputs", s.hidden, s.hidden);
}

}  // namespace tarnn
