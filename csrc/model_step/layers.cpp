// One token through all layers. Compiled once for each instruction set, as attention/kernels_of_isa.cpp.
#include <cmath>

#include "model_step/rows.h"
#include "attention/step.h"

namespace tarnn {
namespace TARNN_ISA {

namespace {

constexpr Index states_a_task = 4;
constexpr Index rows_a_product = 36;
constexpr Index rows_alone = 4, rows_a_task = 4;  // up to so many rows, one thread does what whole rows need

Index whole_panels(Index n) { return (n + panel - 1) / panel * panel; }
// rows a power of two apart would all fall into the same few places of the cache
Index apart(Index n) { return whole_panels(n) + 16; }

/// The activations of some rows: x is what the residuals add up to.
struct Buffers {
  Index ld, ld_qkv, ld_heads, ld_inner, ld_both, ld_out, ld_levels;
  float *x, *normed, *y, *qkv, *heads, *inner, *both, *out, *step, *least;
  std::uint8_t* levels;
  Buffers(Scratch& scratch, const Stack& s, Index rows) {
    const Index widest = s.inner > s.h * s.d ? s.inner : s.h * s.d;
    ld = apart(s.hidden);
    ld_qkv = apart((s.h + 2 * s.g) * s.d + (s.gated ? s.g : 0));
    ld_heads = apart(s.h * s.d);
    ld_inner = apart(s.inner);
    ld_both = s.swiglu ? apart(2 * whole_panels(s.inner)) : 0;
    ld_out = apart(s.head.outputs);
    ld_levels = whole_panels(widest > s.hidden ? widest : s.hidden) + 64;
    for (float** at : {&x, &normed, &y}) *at = scratch.take<float>(rows * ld);
    qkv = scratch.take<float>(rows * ld_qkv);
    heads = scratch.take<float>(rows * ld_heads);
    inner = scratch.take<float>(rows * ld_inner);
    both = scratch.take<float>(rows * ld_both);
    out = scratch.take<float>(rows * ld_out);
    for (float** at : {&step, &least}) *at = scratch.take<float>(rows);
    levels = scratch.take<std::uint8_t>(rows * ld_levels);
  }
};

Step step_of(const Stack& s, const Layer* layer) {
  Step p{};
  p.b = s.b, p.g = s.g, p.r = s.h / s.g, p.d = p.f = p.e = s.d;
  p.normalize = s.normalize, p.eps = s.eps;
  if (layer) p.map = layer->map, p.weighted = layer->state.M != nullptr, p.before = p.after = layer->state;
  return p;
}

/// What one thread does for rows begin … begin + count − 1, together with the others of its team.
class Sweep {
 public:
  Sweep(const Stack& s, Index begin, Index count, const Buffers& at, StepScratch<float>& step, Team::Member& team)
      : s_(s), begin_(begin), count_(count), at_(at), step_(step), team_(team) {}

  void run() {
    phase(0, [](Index) {}, [&](Index i) { embed(i); });
    for (Index l = 0; l < s_.num_layers; ++l) layer(s_.layers[l], l + 1 < s_.num_layers ? &s_.layers[l + 1] : nullptr);
    multiply(s_.head, stream(), at_.ld, at_.out, at_.ld_out, [&](Index i) {
      const auto bytes = sizeof(float) * static_cast<std::size_t>(s_.head.outputs);
      std::memcpy(s_.out + (begin_ + i) * s_.head.outputs, at_.out + i * at_.ld_out, bytes);
    });
  }

 private:
  /// Post-norm: x ← norm(x + f(x)). Pre-norm: x ← x + f(norm x); the norm of what follows is taken at once.
  void layer(const Layer& l, const Layer* next) {
    multiply(l.qkv, stream(), at_.ld, at_.qkv, at_.ld_qkv, [](Index) {});
    const Index states = count_ * s_.g;
    phase((states + states_a_task - 1) / states_a_task, [&](Index task) {
      const Index end = smaller(states, (task + 1) * states_a_task);
      for (Index i = task * states_a_task; i < end; ++i) attend(l, i / s_.g, i % s_.g);
    }, [&](Index i) { to_bytes(l.o, at_.heads, at_.ld_heads, i); });
    const Norm& between = s_.pre_norm ? l.mlp_norm : l.attention_norm;
    multiply(l.o, at_.heads, at_.ld_heads, at_.y, at_.ld, [&](Index i) { add_and_norm(between, l.up, i); });
    expand(l);
    const Norm& after = !s_.pre_norm ? l.mlp_norm : next ? next->attention_norm : s_.last;
    multiply(l.down, at_.inner, at_.ld_inner, at_.y, at_.ld, [&](Index i) { add_and_norm(after, next ? next->qkv : s_.head, i); });
  }

  /// Tasks, and then what is to be done to each whole row: by one thread where they are few, else as tasks too.
  template <typename F, typename G>
  void phase(Index tasks, F task, G row) {
    if (count_ <= rows_alone) return team_.phase(std::max<Index>(1, tasks), [&](Index i) { if (i < tasks) task(i); }, [&] {
      for (Index i = 0; i < count_; ++i) row(i);
    });
    if (tasks) team_.phase(tasks, task, [] {});
    team_.phase((count_ + rows_a_task - 1) / rows_a_task, [&](Index task) {
      for (Index i = task * rows_a_task; i < smaller(count_, (task + 1) * rows_a_task); ++i) row(i);
    }, [] {});
  }

  /// task(panel, first row, rows): a panel's tasks follow one another, so that it is in cache for all but the first.
  template <typename F, typename G>
  void over_panels(Index panels, F task, G row) {
    const Index parts = (count_ + rows_a_product - 1) / rows_a_product, each = (count_ + parts - 1) / parts;
    phase(panels * parts, [&](Index i) {
      const Index first = i % parts * each;
      task(i / parts, first, smaller(each, count_ - first));
    }, row);
  }

  void embed(Index i) {
    const Index row = begin_ + i, n = s_.hidden, place = smaller(s_.positions[row], s_.num_places - 1);
    float* x = at_.x + i * at_.ld;
    clear(x, at_.ld);
    std::memcpy(x, s_.tokens + s_.ids[row] * n, sizeof(float) * static_cast<std::size_t>(n));
    if (s_.places) for (Index j = 0; j < n; ++j) x[j] += s_.places[place * n + j];
    if (s_.extra) for (Index j = 0; j < n; ++j) x[j] += s_.extra[row * n + j];
    if (s_.pre_norm) norm_row(x, n, first_norm(), s_.centred, s_.norm_eps, at_.normed + i * at_.ld);
    to_bytes(s_.num_layers ? s_.layers[0].qkv : s_.head, stream(), at_.ld, i);
  }

  const Norm& first_norm() const { return s_.num_layers ? s_.layers[0].attention_norm : s_.last; }

  /// One head of one row: the norms of its queries and key, its decay, its state and outputs.
  void attend(const Layer& l, Index row, Index head) {
    Step p = step_of(s_, &l);
    float *q = at_.qkv + row * at_.ld_qkv, *k = q + s_.h * s_.d, *gate = k + 2 * s_.g * s_.d, *o = at_.heads + row * at_.ld_heads;
    const auto heads = [&](float* x) { return View{x, Type::float32, {0, s_.d, 0, 1}}; };
    p.q = heads(q), p.k = heads(k), p.v = heads(k + s_.g * s_.d), p.o = heads(o);
    for (Index r = head * p.r; l.q_gain && r < (head + 1) * p.r; ++r) norm_head(q + r * s_.d, s_.d, l.q_gain, 1e-6f);
    if (l.k_gain) norm_head(k + head * s_.d, s_.d, l.k_gain, 1e-6f);
    if (s_.gated) gate[head] = -(gate[head] > 20.f ? gate[head] : std::log1p(std::exp(gate[head])));  // −softplus
    if (s_.gated || l.log_decay)
      p.log_decay = View{s_.gated ? gate : const_cast<float*>(l.log_decay), Type::float32, {0, 1, 0, 0}};
    const Index state = (begin_ + row) * s_.g;
    p.before.S = p.after.S = static_cast<float*>(l.state.S) + state * s_.d * s_.d;
    p.before.z = p.after.z = static_cast<float*>(l.state.z) + state * s_.d;
    if (l.state.M) p.before.M = p.after.M = static_cast<float*>(l.state.M) + state;
    step_one(p, Projected<float>(p.projection, p.map, p.f, p.d), 0, head, step_);
    for (Index r = head * p.r; l.o_gain && r < (head + 1) * p.r; ++r) norm_head(o + r * s_.d, s_.d, l.o_gain, 1e-6f);
  }

  /// inner ← gelu(W₁ x), or silu(W₁ x) ⊙ W₂ x, whose panels take turns.
  void expand(const Layer& l) {
    const Index turns = s_.swiglu ? 2 : 1, ld = s_.swiglu ? at_.ld_both : at_.ld_inner;
    const Rows in = rows(stream(), at_.ld);
    over_panels(l.up.panels() / turns, [&](Index i, Index row, Index n) {
      float *from = (s_.swiglu ? at_.both : at_.inner) + row * ld + i * turns * panel, *to = at_.inner + row * at_.ld_inner + i * panel;
      for (Index j = 0; j < turns; ++j) product(l.up, s_.dot_products, in.part(row, n), i * turns + j, from + j * panel, ld);
      for (; n > 0; --n, from += ld, to += at_.ld_inner)
        for (Index j = 0; j < panel; j += width<float>)
          store(to + j, s_.swiglu ? silu(load(from + j)) * load(from + panel + j) : gelu(load(from + j)));
    }, [&](Index i) { to_bytes(l.down, at_.inner, at_.ld_inner, i); });
  }

  template <typename G>
  void multiply(const Matrix& w, const float* x, Index ld, float* out, Index ldo, G then) {
    const Rows in = rows(x, ld);
    over_panels(w.panels(), [&](Index i, Index row, Index n) {
      product(w, s_.dot_products, in.part(row, n), i, out + row * ldo + i * panel, ldo);
    }, then);
  }

  void add_and_norm(const Norm& norm, const Matrix& next, Index i) {
    float *x = at_.x + i * at_.ld, *y = at_.y + i * at_.ld;
    for (Index j = 0; j < s_.hidden; j += width<float>) store(x + j, load(x + j) + load(y + j));
    norm_row(x, s_.hidden, norm, s_.centred, s_.norm_eps, stream() + i * at_.ld);
    to_bytes(next, stream(), at_.ld, i);
  }

  /// What the norms leave, and most products read: pre-norm, x itself is kept beside it.
  float* stream() const { return s_.pre_norm ? at_.normed : at_.x; }

  Rows rows(const float* x, Index ld) const { return {count_, ld, x, at_.levels, at_.ld_levels, at_.step, at_.least}; }

  /// For a product with int8 weights its rows become bytes.
  void to_bytes(const Matrix& next, const float* x, Index ld, Index i) {
    if (next.format == Format::int8)
      to_levels(x + i * ld, next.inputs, at_.levels + i * at_.ld_levels, at_.step[i], at_.least[i]);
  }

  const Stack& s_;
  const Index begin_, count_;
  const Buffers& at_;
  StepScratch<float>& step_;
  Team::Member& team_;
};

std::size_t room(const Stack& s, Index rows) {
  Scratch counting(nullptr);
  Buffers(counting, s, rows);
  return counting.used();
}

std::size_t own_room(const Stack& s) {
  Scratch counting(nullptr);
  StepScratch<float>(counting, step_of(s, nullptr));
  return counting.used();
}

void run(const Stack& s, Index begin, Index count, void* shared, void* own, Team::Member& team) {
  Scratch of_all(shared), of_one(own);
  const Buffers at(of_all, s, count);
  StepScratch<float> step(of_one, step_of(s, nullptr));
  Sweep(s, begin, count, at, step, team).run();
}

}  // namespace

extern const StackKernel stack_kernel;
const StackKernel stack_kernel = {room, own_room, run};

}  // namespace TARNN_ISA
}  // namespace tarnn
