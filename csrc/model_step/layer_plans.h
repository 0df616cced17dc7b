// What a plan says of the layers that are not attention over features or a cache: filters, Mamba-2's, RWKV-7's, the delta rule's.
#pragma once

#include <algorithm>

#include "model_step/plan_reader.h"

namespace tarnn {

/// A layer that filters its input, each channel along time, and then mixes the channels.
inline void read_filters(Plan& plan, const Stack& s, Layer& l) {
  Filters& f = l.filters;
  f.channels = s.hidden, f.width = plan.number("the width of filters", 1, most_filter_width), f.kept = f.width - 1;
  f.weights = plan.place<float>("filters", f.width * whole_panels(f.channels), true);
  f.bias = plan.vector("filters", f.channels, true);
  l.o = plan.matrix("the projection of outputs", s.hidden, s.hidden);
}

/// Mamba-2's layer.
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

/// RWKV-7's layer.
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

/// A layer with the delta rule.
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
