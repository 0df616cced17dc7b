// The operator for one token through a whole model: reads its plan (kernels/cpu/stack.py wrote it), and shares out the work.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "model_step/stack.h"
#include "threads.h"

namespace {

using namespace tarnn;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;

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

Layer read_layer(Plan& plan) {
  Layer l;
  l.map = static_cast<Map>(plan.number());
  l.attention_norm = plan.norm();
  l.mlp_norm = plan.norm();
  for (Matrix* w : {&l.qkv, &l.o, &l.up, &l.down}) *w = plan.matrix();
  for (const float** x : {&l.q_gain, &l.k_gain, &l.o_gain, &l.log_decay}) *x = plan.place<float>();
  return l;
}

/// All but what goes in and out.
Stack read_stack(Plan plan, std::vector<Layer>& layers) {
  Stack s{};
  for (Index* x : {&s.hidden, &s.h, &s.g, &s.d, &s.inner, &s.num_layers}) *x = plan.number();
  for (bool* x : {&s.pre_norm, &s.centred, &s.swiglu, &s.gated, &s.normalize}) *x = plan.number() != 0;
  for (Index l = 0; l < s.num_layers; ++l) layers.push_back(read_layer(plan));
  s.layers = layers.data();
  s.last = plan.norm();
  s.head = plan.matrix();
#ifdef __x86_64__
  s.dot_products = __builtin_cpu_supports("avx512vnni");
#endif
  return s;
}

/// Of one block at most: five products a layer, each followed by what its rows need; and both for embedding and head.
Index job_phases(const Stack& s) { return 10 * s.num_layers + 4; }

/// A step, and all that its threads look at outside of tasks: a late one does when the step is long over.
struct StackJob : Job {
  StackJob(const Stack& stack, std::vector<Layer> of_layers, Index num_phases)
      : Job(num_phases), layers(std::move(of_layers)), s(stack), kernel(*kernels().stack) {
    s.layers = layers.data();
  }
  std::vector<Layer> layers;
  Stack s;
  const StackKernel& kernel;
};

/// Runs blocks of rows one after the other, each through all layers by all threads together.
void run(const Stack& s, std::vector<Layer> layers, Index threads) {
  const Index each = std::min(s.b, most_rows * ((threads + 15) / 16)), blocks = (s.b + each - 1) / each;
  const auto job = std::make_shared<StackJob>(s, std::move(layers), threads > 1 ? blocks * job_phases(s) : 0);
  const std::size_t room = job->kernel.room(s, each), own = job->kernel.own_room(s);
  const std::size_t bytes = room + own * static_cast<std::size_t>(threads);
  thread_local ThreadMemory memory;
  char* block = static_cast<char*>(memory.at_least(bytes));
  if (!block) throw OutOfMemory(bytes);
  job->work = [job = job.get(), block, room, own, each](Index i, Team::Member member) {
    const Stack& s = job->s;
    char* mine = block + room + own * static_cast<std::size_t>(i);
    for (Index at = 0; at < s.b; at += each) job->kernel.run(s, at, std::min(each, s.b - at), block, mine, member);
  };
  run_job(job, threads);
}

const float* data(const Maybe& x) { return x ? static_cast<const float*>(x->const_data_ptr()) : nullptr; }

void stack(Tensor ids, Tensor positions, Tensor plan, Tensor weights, Tensor tokens, Maybe places, Maybe extra,
           std::vector<Tensor> S, std::vector<Tensor> z, std::vector<Tensor> M, Tensor out, int64_t limit, double norm_eps, double eps) {
  std::vector<Layer> layers;
  Stack s = read_stack(Plan(plan, weights), layers);
  s.norm_eps = norm_eps, s.eps = eps;
  for (std::size_t l = 0; l < layers.size(); ++l)
    layers[l].state = {S[l].mutable_data_ptr(), z[l].mutable_data_ptr(), M.empty() ? nullptr : M[l].mutable_data_ptr()};
  s.b = ids.size(0);
  s.num_tokens = tokens.size(0);
  s.num_places = places ? places->size(0) : 0;
  s.ids = static_cast<const Index*>(ids.const_data_ptr());
  s.positions = static_cast<const Index*>(positions.const_data_ptr());
  s.tokens = static_cast<const float*>(tokens.const_data_ptr());
  s.places = data(places), s.extra = data(extra);
  s.out = static_cast<float*>(out.mutable_data_ptr());
  for (Index i = 0; i < s.b; ++i)
    if (s.ids[i] < 0 || s.ids[i] >= s.num_tokens)
      throw std::runtime_error("a token must be from 0 to " + std::to_string(s.num_tokens - 1) + "; got " + std::to_string(s.ids[i]) + ".");
  if (s.b == 0) return;
  for (Index i = 0; i < s.b; ++i)
    if (s.positions[i] < 0 || s.positions[i] >= limit) throw std::runtime_error("there is no position " + std::to_string(s.positions[i]) + ".");
  const FlushDenormals flush;
  run(s, std::move(layers), std::max<Index>(1, torch::stable::get_num_threads()));
  Index* position = static_cast<Index*>(positions.mutable_data_ptr());
  for (Index i = 0; i < s.b; ++i) ++position[i];
}

/// Of bytes that are about to be written for the first time.
void large_pages(Tensor x) { ask_for_large_pages(x.const_data_ptr(), static_cast<std::size_t>(x.numel())); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tarnn_cpu, m) {
  m.def("stack(Tensor ids, Tensor(a!) positions, Tensor plan, Tensor weights, Tensor tokens, Tensor? places, Tensor? extra, "
        "Tensor(b!)[] S, Tensor(c!)[] z, Tensor(d!)[] M, Tensor(e!) out, int limit, float norm_eps, float eps) -> ()");
  m.def("large_pages(Tensor bytes) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tarnn_cpu, CPU, m) {
  m.impl("stack", TORCH_BOX(&stack));
  m.impl("large_pages", TORCH_BOX(&large_pages));
}
