// The operator for one token through a whole model: reads its plan (kernels/cpu/stack.py wrote it), and shares out the work.
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/operators.h"
#include "model_step/stack.h"

namespace {

using namespace tarnn;

constexpr Index most_rows = 64;   // at once: their activations stay in the second level of cache

/// The numbers of a plan, in their order; a place is where in the block of weights something begins, −1: nowhere.
class Plan {
 public:
  Plan(const Tensor& numbers, const Tensor& weights)
      : at_(static_cast<const Index*>(numbers.const_data_ptr())), block_(static_cast<const char*>(weights.const_data_ptr())) {}
  Index number() { return *at_++; }
  template <typename T>
  const T* place() {
    const Index at = number();
    return at < 0 ? nullptr : reinterpret_cast<const T*>(block_ + at);
  }
  Norm norm() {
    const float* gain = place<float>();
    return {gain, place<float>()};
  }
  Matrix matrix() {
    Matrix w;
    w.format = static_cast<Format>(number());
    w.inputs = number();
    w.outputs = number();
    w.at = place<void>();
    w.bias = place<float>();
    w.scale = place<float>();
    w.sums = place<float>();
    return w;
  }

 private:
  const Index* at_;
  const char* block_;
};

Move read_move(Plan& plan) {
  Move m{};
  m.heads = plan.number();
  for (const float** x : {&m.centre, &m.stretch, &m.weight, &m.constant}) *x = plan.place<float>();
  return m;
}

FeatureMap read_features(Plan& plan) {
  FeatureMap m{};
  m.function = static_cast<Function>(plan.number());
  m.made_here = plan.number() != 0, m.log_scaled = plan.number() != 0;
  for (Index* x : {&m.f, &m.heads, &m.m}) *x = plan.number();
  if (m.heads) m.omega = plan.matrix();
  const double* numbers = plan.place<double>();
  for (float* x : {&m.square, &m.offset, &m.gain, &m.shift}) *x = static_cast<float>(*numbers++);
  m.number = *numbers;
  m.parts = plan.place<float>();
  m.queries = read_move(plan), m.keys = read_move(plan);
  return m;
}

Layer read_layer(Plan& plan) {
  Layer l{};
  l.attention = static_cast<Attention>(plan.number());
  l.decay = static_cast<Decay>(plan.number());
  l.rotation = plan.number(), l.rotates_features = plan.number() != 0;
  if (l.attention == Attention::linear) l.features = read_features(plan);
  l.map = l.features.made_here ? Map::identity : static_cast<Map>(l.features.function);
  l.attention_norm = plan.norm();
  l.mlp_norm = plan.norm();
  for (Matrix* w : {&l.qkv, &l.o, &l.up, &l.down}) *w = plan.matrix();
  if (l.decay == Decay::channel) l.gate = plan.matrix();
  for (const float** x : {&l.q_gain, &l.k_gain, &l.o_gain, &l.log_decay}) *x = plan.place<float>();
  return l;
}

/// All but what goes in and out.
Stack read_stack(Plan plan, std::vector<Layer>& layers, std::vector<Rotation>& rotations) {
  Stack s{};
  for (Index* x : {&s.hidden, &s.h, &s.g, &s.d, &s.inner, &s.num_layers, &s.num_rotations}) *x = plan.number();
  for (bool* x : {&s.pre_norm, &s.centred, &s.swiglu, &s.normalize}) *x = plan.number() != 0;
  for (Index i = 0; i < s.num_rotations; ++i) {
    const Index width = plan.number();
    rotations.push_back({width, plan.place<double>()});
  }
  for (Index l = 0; l < s.num_layers; ++l) layers.push_back(read_layer(plan));
  s.last = plan.norm();
  s.head = plan.matrix();
#ifdef __x86_64__
  s.dot_products = __builtin_cpu_supports("avx512vnni");
#endif
  return s;
}

/// Gives each layer its part of the states: S, z and, if it has one, M; k, v and, if it has one, a mask, with the number of
/// keys that are there.
void read_states(std::vector<Layer>& layers, const std::vector<Tensor>& states, const Tensor& lengths) {
  auto next = states.begin();
  const auto* length = static_cast<const Index*>(lengths.const_data_ptr());
  for (Layer& l : layers) {
    if (l.attention == Attention::softmax) {
      l.cache.capacity = next->size(2), l.cache.length = *length++;
      l.cache.type = next->scalar_type() == Type::bfloat16 ? Type::bfloat16 : Type::float32;
      l.cache.k = (next++)->mutable_data_ptr(), l.cache.v = (next++)->mutable_data_ptr();
      if (*length++) l.cache.mask = static_cast<bool*>((next++)->mutable_data_ptr());
    } else if (l.attention == Attention::linear) {
      l.state.S = (next++)->mutable_data_ptr(), l.state.z = (next++)->mutable_data_ptr();
      if (l.features.log_scaled) l.state.M = (next++)->mutable_data_ptr();
    }
  }
}

/// Of one block at most: five products a layer and a cache's blocks, each followed by what its rows need; and both for embedding
/// and head.
Index job_phases(const Stack& s) { return 12 * s.num_layers + 4; }

/// A step, and all that its threads look at outside of tasks: a late one does when the step is long over.
struct StackJob : Job {
  StackJob(const Stack& stack, std::vector<Layer> of_layers, std::vector<Rotation> of_rotations, Index num_phases,
           Index num_members)
      : Job(num_phases, num_members), layers(std::move(of_layers)), rotations(std::move(of_rotations)), s(stack), kernel(*kernels().stack) {
    s.layers = layers.data(), s.rotations = rotations.data();
  }
  std::vector<Layer> layers;
  std::vector<Rotation> rotations;
  Stack s;
  const StackKernel& kernel;
};

/// Runs blocks of rows one after the other, each through all layers by all threads together.
void run_stack(const Stack& s, std::vector<Layer> layers, std::vector<Rotation> rotations, Index threads) {
  const Index each = std::min(s.b, most_rows * ((threads + 15) / 16)), blocks = (s.b + each - 1) / each;
  const Index num_phases = threads > 1 ? blocks * job_phases(s) : 0;
  const auto job = std::make_shared<StackJob>(s, std::move(layers), std::move(rotations), num_phases, threads);
  const std::size_t room = job->kernel.room(job->s, each), own = job->kernel.own_room(job->s);
  const std::size_t bytes = room + own * static_cast<std::size_t>(threads);
  thread_local ThreadMemory memory;
  char* block = static_cast<char*>(memory.at_least(bytes));
  if (!block) throw OutOfMemory(bytes);
  job->work = [job = job.get(), block, room, own, each](Index i, Team::Member member) {
    const Stack& s = job->s;
    char* mine = block + room + own * static_cast<std::size_t>(i);
    for (Index at = 0; at < s.b; at += each) job->kernel.run(s, at, std::min(each, s.b - at), block, mine, member);
  };
  run_job(job);
}

const float* floats(const Maybe& x) { return x ? static_cast<const float*>(x->const_data_ptr()) : nullptr; }

void stack(Tensor ids, Tensor positions, Tensor plan, Tensor weights, Tensor tokens, Maybe places, Maybe extra,
           std::vector<Tensor> states, Tensor lengths, Tensor out, int64_t limit, double norm_eps, double eps) {
  std::vector<Layer> layers;
  std::vector<Rotation> rotations;
  Stack s = read_stack(Plan(plan, weights), layers, rotations);
  s.norm_eps = norm_eps, s.eps = eps;
  read_states(layers, states, lengths);
  s.b = ids.size(0);
  s.num_tokens = tokens.size(0);
  s.num_places = places ? places->size(0) : 0;
  s.ids = static_cast<const Index*>(ids.const_data_ptr());
  s.positions = static_cast<const Index*>(positions.const_data_ptr());
  s.tokens = static_cast<const float*>(tokens.const_data_ptr());
  s.places = floats(places), s.extra = floats(extra);
  s.out = static_cast<float*>(out.mutable_data_ptr());
  for (Index i = 0; i < s.b; ++i)
    if (s.ids[i] < 0 || s.ids[i] >= s.num_tokens)
      throw std::runtime_error("a token must be from 0 to " + std::to_string(s.num_tokens - 1) + "; got " + std::to_string(s.ids[i]) + ".");
  if (s.b == 0) return;
  for (Index i = 0; i < s.b; ++i)
    if (s.positions[i] < 0 || s.positions[i] >= limit) throw std::runtime_error("there is no position " + std::to_string(s.positions[i]) + ".");
  const FlushDenormals flush;
  run_stack(s, std::move(layers), std::move(rotations), std::max<Index>(1, get_num_threads()));
  Index* position = static_cast<Index*>(positions.mutable_data_ptr());
  for (Index i = 0; i < s.b; ++i) ++position[i];
}

/// Of bytes that are about to be written for the first time.
void large_pages(Tensor x) { ask_for_large_pages(x.const_data_ptr(), static_cast<std::size_t>(x.numel())); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tarnn_cpu, m) {
  m.def("stack(Tensor ids, Tensor(a!) positions, Tensor plan, Tensor weights, Tensor tokens, Tensor? places, Tensor? extra, "
        "Tensor(b!)[] states, Tensor lengths, Tensor(c!) out, int limit, float norm_eps, float eps) -> ()");
  m.def("large_pages(Tensor bytes) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tarnn_cpu, CPU, m) {
  m.impl("stack", TORCH_BOX(&stack));
  m.impl("large_pages", TORCH_BOX(&large_pages));
}
