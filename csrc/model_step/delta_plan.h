// What a plan says of a layer with the delta rule.
#pragma once

#include <algorithm>

#include "model_step/plan_reader.h"

namespace tarnn {

inline void read_delta(Plan& plan, const Stack& s, Layer& l) {
  constexpr Index most_taps = 64;
  DeltaLayer& x = l.delta;
  x.queries = plan.size("the query heads"), x.keys = plan.size("the key heads"), x.values = plan.size("the value heads");
  x.d = plan.size("the width of a key"), x.e = plan.size("the width of a value");
  const bool of_keys = (x.queries == x.keys || x.values == x.keys) && x.queries % x.keys == 0 && x.values % x.keys == 0;
  if (!of_keys || std::max(x.queries, x.values) > most_of_plan / 4 / std::max(x.d, x.e)) plan.fail("the heads", "do not fit each other");
  x.width = plan.number("the width of a filter", 1, most_taps), x.kept = plan.number("the inputs of a filter", x.width - 1, most_taps);
  x.taps = plan.place<float>("the filters", x.width * whole_panels(x.channels()), true);
  x.decay = l.decay = static_cast<Decay>(plan.number("a decay", 0, 3));
  const double* numbers = plan.place<double>("the numbers of a delta rule", 2, true);
  x.strength = static_cast<float>(numbers[0]), x.norm_eps = static_cast<float>(numbers[1]);
  x.gain = plan.vector("the norm of outputs", x.e, true);
  x.rate = plan.vector("the decays of states", x.values, x.decay == Decay::head);
  Index outputs = x.channels() + x.outputs() * x.e + x.values, rank = 0;
  if (x.decay == Decay::token) outputs += x.values;
  if (x.decay == Decay::channel) outputs += rank = std::max<Index>(1, plan.outputs_of_next("the projection of q, k and v") - outputs);
  l.qkv = plan.matrix("the projection of q, k and v", s.hidden, outputs);
  l.o = plan.matrix("the projection of outputs", x.outputs() * x.e, s.hidden);
  if (x.decay == Decay::channel) l.gate = plan.matrix("a gate", rank, x.values * whole_panels(x.d), true);
}

}  // namespace tarnn
