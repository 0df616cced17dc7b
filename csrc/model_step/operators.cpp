// The operator for one token through a whole model: gives the plan's layers their states, and shares out the work.
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/operators.h"
#include "model_step/plan.h"

namespace {

using namespace tarnn;

constexpr Index most_rows = 64;   // at once: their activations stay in the second level of cache

/// Gives each layer its part of the states: S, z and, if it has one, M; k, v and, if it has one, a mask, with the number of
/// keys that are there. Throws where they are not those of the plan.
class States {
 public:
  States(const std::vector<Tensor>& tensors, const Tensor& lengths)
      : next_(tensors.begin()), end_(tensors.end()), length_(static_cast<const Index*>(lengths.const_data_ptr())),
        lengths_(lengths.numel()) {}

  void give(const Stack& s, std::vector<Layer>& layers) {
    for (Layer& l : layers) {
      if (l.attention == Attention::softmax) give_cache(s, l.cache);
      if (l.attention != Attention::linear) continue;
      const Index heads = s.b * s.g, f = l.features.f;
      l.state.S = take(heads * f * s.d), l.state.z = take(heads * f);
      if (l.features.log_scaled) l.state.M = take(heads);
    }
    if (next_ != end_ || lengths_ != 0) refuse();
  }

 private:
  void give_cache(const Stack& s, Cache& cache) {
    if (next_ == end_ || (lengths_ -= 2) < 0) refuse();
    cache.capacity = next_->dim() == 4 ? next_->size(2) : 0, cache.length = *length_++;
    cache.type = next_->scalar_type() == Type::bfloat16 ? Type::bfloat16 : Type::float32;
    const Index numbers = s.b * s.g * cache.capacity * s.d;
    cache.k = take(numbers, cache.type), cache.v = take(numbers, cache.type);
    if (cache.length < 0 || cache.length >= cache.capacity) refuse();
    if (*length_++) cache.mask = static_cast<bool*>(take(s.b * cache.capacity));
  }
  void* take(Index numbers, Type type = Type::float32) {
    if (next_ == end_ || next_->numel() != numbers || next_->scalar_type() != type) refuse();
    return (next_++)->mutable_data_ptr();
  }
  [[noreturn]] static void refuse() { throw std::runtime_error("the states are not those of the plan's layers."); }

  std::vector<Tensor>::const_iterator next_, end_;
  const Index* length_;
  Index lengths_;
};

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
  for (const Tensor* x : {&ids, &positions, &plan, &lengths})
    if (!x->has_int64()) throw std::runtime_error("ids, positions, the plan and lengths must be int64.");
  std::vector<Layer> layers;
  std::vector<Rotation> rotations;
  Stack s = read_plan(static_cast<const Index*>(plan.const_data_ptr()), plan.numel(), weights.const_data_ptr(), weights.numel(), layers, rotations);
  s.norm_eps = norm_eps, s.eps = eps;
  s.b = ids.size(0);
  States(states, lengths).give(s, layers);
  s.num_tokens = tokens.size(0);
  s.num_places = places ? places->size(0) : 0;
  s.ids = static_cast<const Index*>(ids.const_data_ptr());
  s.positions = static_cast<const Index*>(positions.const_data_ptr());
  s.tokens = static_cast<const float*>(tokens.const_data_ptr());
  s.places = floats(places), s.extra = floats(extra);
  s.out = static_cast<float*>(out.mutable_data_ptr());
  const bool no_places = places && (s.num_places < 1 || places->numel() != s.num_places * s.hidden);
  if (tokens.numel() != s.num_tokens * s.hidden || no_places || (extra && extra->numel() != s.b * s.hidden) ||
      positions.numel() != s.b || out.numel() != s.b * s.head.outputs)
    throw std::runtime_error("the tables of tokens and positions are not those of the plan's model.");
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

Index plan_version_read() { return plan_version; }

/// Of bytes that are about to be written for the first time.
void large_pages(Tensor x) { ask_for_large_pages(x.const_data_ptr(), static_cast<std::size_t>(x.numel())); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tarnn_cpu, m) {
  m.def("stack(Tensor ids, Tensor(a!) positions, Tensor plan, Tensor weights, Tensor tokens, Tensor? places, Tensor? extra, "
        "Tensor(b!)[] states, Tensor lengths, Tensor(c!) out, int limit, float norm_eps, float eps) -> ()");
  m.def("large_pages(Tensor bytes) -> ()");
  m.def("plan_version() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(tarnn_cpu, CompositeExplicitAutograd, m) { m.impl("plan_version", TORCH_BOX(&plan_version_read)); }

STABLE_TORCH_LIBRARY_IMPL(tarnn_cpu, CPU, m) {
  m.impl("stack", TORCH_BOX(&stack));
  m.impl("large_pages", TORCH_BOX(&large_pages));
}
