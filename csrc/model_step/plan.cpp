// Reads a plan: what each layer is made of.
#include "model_step/plan.h"

#include <algorithm>

#include "model_step/layer_plans.h"

namespace tarnn {
namespace {

Move read_move(Plan& plan, const Stack& s, Index g) {
  Move m{};
  m.heads = plan.number("the heads of a shift", 0, g);
  const bool there = m.heads > 0;
  if (there && m.heads != 1 && m.heads != g) plan.fail("the heads of a shift", "must be 1 or all");
  for (const float** x : {&m.centre, &m.stretch, &m.weight}) *x = plan.vector("a shift", m.heads * s.d, there);
  m.constant = plan.vector("a shift", m.heads, there);
  return m;
}

/// How many features a function makes of n channels.
Index features_of(const FeatureMap& m, Index n) {
  switch (m.function) {
    case Function::waves:
    case Function::halves:
    case Function::cosformer: return 2 * n;
    case Function::dpfp: return m.number >= 1 && m.number <= 1 << 16 ? 2 * n * static_cast<Index>(m.number) : -1;
    case Function::pairs: return n + n * (n - 1) / 2 + (m.parts[0] != 0) + (m.parts[1] != 0) * n + (m.parts[4] != 0) * n + (m.parts[5] != 0);
    default: return n;
  }
}

/// Of g key heads.
FeatureMap read_features(Plan& plan, const Stack& s, Index g) {
  FeatureMap m{};
  m.function = static_cast<Function>(plan.number("a function", 0, static_cast<Index>(Function::log_softmax)));
  m.made_here = plan.flag("where features are made"), m.log_scaled = plan.flag("whether a logarithm is kept apart");
  m.f = plan.size("the number of features");
  m.heads = plan.number("the heads of Ω", 0, g), m.m = plan.number("the rows of Ω", m.heads ? 1 : 0, m.heads ? most_of_plan / g - panel : 0);
  if (m.heads > 1 && m.heads != g) plan.fail("the heads of Ω", "must be 1 or all");
  if (m.heads) m.omega = plan.matrix("Ω", s.d, m.heads * whole_panels(m.m), true);
  const double* numbers = plan.place<double>("the numbers of a map", 5, true);
  for (float* x : {&m.square, &m.offset, &m.gain, &m.shift}) *x = static_cast<float>(*numbers++);
  m.number = *numbers;
  m.parts = plan.place<float>("the parts of a map", 6, m.function == Function::pairs);
  m.queries = read_move(plan, s, g), m.keys = read_move(plan, s, g);
  const bool by_attention = static_cast<Index>(m.function) <= static_cast<Index>(Map::exp) && !m.heads;
  if (!m.made_here && !by_attention) plan.fail("a function", "is none of those that attention's step computes");
  if (m.f != features_of(m, m.heads ? m.m : s.d)) plan.fail("the number of features", "is not that of their function");
  return m;
}

/// Hybrid attention, with the features of its queries and of its keys.
void read_hybrid(Plan& plan, const Stack& s, Layer& l) {
  Hybrid& x = l.hybrid;
  x.room = plan.size("the keys of a window"), x.sinks = plan.number("the number of sinks", 0, x.room - 1);
  x.far_until = *plan.place<Index>("where features end", 1, true);
  x.log_features = plan.flag("whether features are logarithms");
  x.reach = plan.numbers("how far a head reaches", s.g, 0, static_cast<Index>(Reach::exact));
  x.exact_heads = x.heads_with(Reach::exact, s.g);
  x.features.heads = x.heads_with(Reach::features, s.g), x.window.heads = x.heads_with(Reach::window, s.g);
  if (x.features.heads == 0) return;
  l.features = read_features(plan, s, x.features.heads), x.of_keys = read_features(plan, s, x.features.heads);
  if (l.features.f != x.of_keys.f || l.features.m != x.of_keys.m) plan.fail("the features of keys", "are not as many as those of queries");
  x.far_bias = plan.vector("the weights of far keys", s.h, true);
}

/// Attention of one of the first kinds, and what it is projected by.
void read_attention(Plan& plan, const Stack& s, const std::vector<Rotation>& rotations, Layer& l) {
  const bool linear = l.attention == Attention::linear, none = l.attention == Attention::none;
  l.decay = static_cast<Decay>(plan.number("a decay", 0, linear ? 3 : 0));
  l.rotation = plan.number("a rotation", -1, s.num_rotations - 1), l.rotates_features = plan.flag("what is rotated");
  if (linear) l.features = read_features(plan, s, s.g);
  if (l.attention == Attention::hybrid) read_hybrid(plan, s, l);
  if (l.attention == Attention::softmax) l.gated = plan.flag("the gate of outputs"), l.whole_norms = plan.flag("what is normed");
  const Index rotated = l.rotates_features ? l.features.f : s.d;
  if (l.rotates_features && (!linear || l.rotation < 0)) plan.fail("what is rotated", "is not there");
  if (const Index width = l.rotation < 0 || none ? rotated : rotations[static_cast<std::size_t>(l.rotation)].width; linear ? width != rotated : width > rotated)
    plan.fail("a rotation", "has another width than what it rotates");
  l.map = linear && !l.features.made_here ? static_cast<Map>(l.features.function) : Map::identity;
  Index outputs = none ? s.g * s.d : (s.h + 2 * s.g) * s.d, rank = 0;
  if (l.gated) outputs += s.h * s.d;
  if (l.decay == Decay::token) outputs += s.g;
  if (l.decay == Decay::channel) outputs += rank = std::max<Index>(1, plan.outputs_of_next("the projection of q, k and v") - outputs);
  l.qkv = plan.matrix("the projection of q, k and v", s.hidden, outputs);
  l.o = plan.matrix("the projection of outputs", s.h * s.d, s.hidden);
  if (l.decay == Decay::channel) l.gate = plan.matrix("a gate", rank, s.g * whole_panels(l.features.f), true);
  l.q_gain = plan.vector("the norm of queries", l.whole_norms ? s.h * s.d : s.d, false);
  l.k_gain = plan.vector("the norm of keys", l.whole_norms ? s.g * s.d : s.d, false);
  l.o_gain = plan.vector("the norm of outputs", s.d, false);
  l.log_decay = plan.vector("the decays of heads", s.g, l.decay == Decay::head);
}

void read_mlp(Plan& plan, const Stack& s, Layer& l) {
  l.mlp = static_cast<Mlp>(plan.number("a kind of MLP", 0, static_cast<Index>(Mlp::squared_relu)));
  if (l.mlp == Mlp::none) return;
  const Index inner = plan.size("the width of the MLP");
  l.mlp_norm = plan.norm("a norm", s.hidden, true, s.centred);
  l.up = plan.matrix("the first matrix of an MLP", s.hidden, l.mlp == Mlp::swiglu ? 2 * whole_panels(inner) : inner);
  l.down = plan.matrix("the second matrix of an MLP", inner, s.hidden);
  if (l.mlp == Mlp::squared_relu) l.mixture = plan.vector("a mixture", s.hidden, false);
  if (l.mixture && l.attention != Attention::rwkv7) plan.fail("a mixture", "has no state");
}

Layer read_layer(Plan& plan, const Stack& s, const std::vector<Rotation>& rotations) {
  Layer l{};
  l.attention = static_cast<Attention>(plan.number("a kind of attention", 0, static_cast<Index>(Attention::filters)));
  l.normed_inside = plan.flag("the place of a layer's norms");
  l.attention_norm = plan.norm("a norm", s.hidden, true, s.centred);
  read_mlp(plan, s, l);
  if (l.attention == Attention::delta) read_delta(plan, s, l);
  else if (l.attention == Attention::ssd) read_ssd(plan, s, l);
  else if (l.attention == Attention::rwkv7) read_rwkv7(plan, s, l);
  else if (l.attention == Attention::filters) read_filters(plan, s, l);
  else read_attention(plan, s, rotations, l);
  return l;
}

}  // namespace

Stack read_plan(const Index* numbers, Index count, const void* block, Index bytes, std::vector<Layer>& layers,
                std::vector<Rotation>& rotations) {
  Plan plan(numbers, count, block, bytes);
  Stack s{};
  s.hidden = plan.size("the hidden size"), s.h = plan.size("the number of heads"), s.g = plan.size("the number of key heads");
  s.d = plan.size("the size of a head");
  if (s.h % s.g || s.h > most_of_plan / s.d) plan.fail("the heads", "do not fit each other");
  s.num_layers = plan.number("the number of layers", 0, count), s.num_rotations = plan.number("the number of rotations", 0, count);
  s.pre_norm = plan.flag("the place of norms"), s.centred = plan.flag("the kind of norms");
  s.normalize = plan.flag("whether attention is normalised");
  for (Index i = 0; i < s.num_rotations; ++i) {
    const Index width = plan.size("the width of a rotation");
    const bool single = plan.flag("the precision of angles");
    rotations.push_back({width, plan.place<double>("frequencies", width / 2, true), single});
  }
  for (Index l = 0; l < s.num_layers; ++l) layers.push_back(read_layer(plan, s, rotations));
  s.last = plan.norm("the last norm", s.hidden, s.pre_norm, s.centred);
  s.head = plan.matrix("the head", s.hidden, plan.outputs_of_next("the head"));
  plan.end();
#ifdef __x86_64__
  s.dot_products = __builtin_cpu_supports("avx512vnni");
#endif
  return s;
}

}  // namespace tarnn
