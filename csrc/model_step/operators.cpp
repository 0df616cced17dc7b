// The operator for one token, or several, of each sequence through a whole model: gives the plan's layers their states, and shares out the work.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/operators.h"
#include "model_step/plan.h"

namespace {

using namespace tarnn;

constexpr Index most_tokens = Index(1) << 40;  // of a sequence in one call
constexpr Index by_position = -1;  // in place of a cache's length: each sequence has its own cache
constexpr Index most_rows = 64;   // at once: their activations stay in the second level of cache

/// Gives each layer its part of the states: S, z and, if it has one, M; k, v and, if it has one, a mask, with the number of
/// keys that are there; or k and v of each sequence, with as many keys as its position says. Throws where they are not those of
/// the plan.
class States {
 public:
  States(const std::vector<Tensor>& tensors, const Tensor& lengths)
      : next_(tensors.begin()), end_(tensors.end()), length_(static_cast<const Index*>(lengths.const_data_ptr())),
        lengths_(lengths.numel()) {}

  /// own: what layers point to where each sequence has a cache of its own, a layer's after another's.
  void give(const Stack& s, std::vector<Layer>& layers, std::vector<OwnCache>& own) {
    own.reserve(layers.size() * static_cast<std::size_t>(s.b));  // so that nothing moves
    for (Layer& l : layers) {
      if (l.attention == Attention::softmax) give_cache(s, s.g, l.cache, own);
      if (l.attention == Attention::delta) give_delta(s, l.delta);
      if (l.attention == Attention::hybrid) give_hybrid(s, l, own);
      if (l.attention == Attention::ssd) l.ssd.S = floats(s.b * l.ssd.inner() * l.ssd.n);
      if (l.attention == Attention::rwkv7) l.rwkv7.S = floats(s.b * l.rwkv7.width() * l.rwkv7.d), l.rwkv7.last = floats(s.b * s.hidden);
      if (l.mixture) l.mlp_last = floats(s.b * s.hidden);
      if (l.filters.width) l.filters.tokens = floats(s.b * l.filters.kept * l.filters.channels);
      if (l.attention != Attention::linear) continue;
      const Index heads = s.b * s.g, f = l.features.f;
      l.state.S = take(heads * f * s.d), l.state.z = take(heads * f);
      if (l.features.log_scaled) l.state.M = take(heads);
    }
    if (next_ != end_ || lengths_ != 0) refuse();
  }

 private:
  /// In the order of `Reach`: of both rings k, v, S, z, M and count, and a cache.
  void give_hybrid(const Stack& s, Layer& l, std::vector<OwnCache>& own) {
    Hybrid& x = l.hybrid;
    for (Ring* ring : {&x.features, &x.window}) {
      if (ring->heads == 0) continue;
      const Index heads = s.b * ring->heads, keys = heads * x.room, f = ring == &x.features ? l.features.f : 0;
      ring->k = static_cast<float*>(take(keys * s.d)), ring->v = static_cast<float*>(take(keys * s.d));
      ring->sums.S = take(heads * f * s.d), ring->sums.z = take(heads * f), ring->sums.M = take(x.log_features && f ? heads * f : heads);
      if (next_ == end_ || !next_->has_int64() || next_->numel() != s.b) refuse();
      ring->count = static_cast<Index*>((next_++)->mutable_data_ptr());
      if (std::any_of(ring->count, ring->count + s.b, [](Index count) { return count < 0; })) refuse();
    }
    if (const Index exact = x.heads_with(Reach::exact, s.g)) give_cache(s, exact, l.cache, own);
  }
  void give_cache(const Stack& s, Index g, Cache& cache, std::vector<OwnCache>& own) {
    if ((lengths_ -= 2) < 0 || (next_ == end_ && s.b > 0)) refuse();
    cache.length = *length_++, cache.mask = nullptr, cache.own = nullptr;
    if (next_ != end_) cache.type = next_->scalar_type() == Type::bfloat16 ? Type::bfloat16 : Type::float32;
    if (cache.length == by_position) return give_own_caches(s, g, cache, own);
    if (next_ == end_) refuse();
    cache.capacity = next_->dim() == 4 ? next_->size(2) : 0;
    const Index numbers = s.b * g * cache.capacity * s.d;
    cache.k = take(numbers, cache.type), cache.v = take(numbers, cache.type);
    if (cache.length < 0 || cache.length > cache.capacity - s.most_slots) refuse();
    if (*length_++) cache.mask = static_cast<bool*>(take(s.b * cache.capacity));
    if (s.slots ? !cache.mask : s.num_rows != s.b * s.most_slots) throw std::runtime_error("a cache without a mask has no gaps.");
  }
  void give_delta(const Stack& s, DeltaLayer& l) {
    l.S = static_cast<float*>(take(s.b * l.values * l.d * l.e));
    l.tokens = static_cast<float*>(take(s.b * l.kept * l.channels()));
  }
  void give_own_caches(const Stack& s, Index g, Cache& cache, std::vector<OwnCache>& own) {
    if (*length_++ || s.slots) throw std::runtime_error("sequences with caches of their own have no masks.");
    cache.length = 0, cache.own = own.data() + own.size();
    for (Index i = 0; i < s.b; ++i) {
      OwnCache one;
      one.capacity = next_ != end_ && next_->dim() == 4 ? next_->size(2) : 0, one.length = s.positions[i];
      const Index numbers = g * one.capacity * s.d, count = s.start(i + 1) - s.start(i);
      one.k = take(numbers, cache.type), one.v = take(numbers, cache.type);
      if (one.length < 0 || one.length > one.capacity - count) throw std::runtime_error("a key/value cache is full.");
      cache.length = std::max(cache.length, one.length);
      own.push_back(one);
    }
  }
  float* floats(Index numbers) { return static_cast<float*>(take(numbers)); }
  void* take(Index numbers, Type type = Type::float32) {
    if (next_ == end_ || next_->numel() != numbers || next_->scalar_type() != type) refuse();
    return (next_++)->mutable_data_ptr();
  }
  [[noreturn]] static void refuse() { throw std::runtime_error("the states are not those of the plan's layers."); }

  std::vector<Tensor>::const_iterator next_, end_;
  const Index* length_;
  Index lengths_;
};

/// Of one block at most: five products a layer and a cache's blocks, each followed by what its rows need; embedding and head
/// with what is before and behind them.
Index job_phases(const Stack& s) { return 12 * s.num_layers + 6; }

/// The lists that a Stack points to.
struct Lists {
  std::vector<Layer> layers;
  std::vector<Rotation> rotations;
  std::vector<Index> sequences, starts;
  std::vector<OwnCache> own_caches;
};

/// A step, and all that its threads look at outside of tasks: a late one does when the step is long over.
struct StackJob : Job {
  StackJob(const Stack& stack, Lists of_stack, Index num_phases, Index num_members)
      : Job(num_phases, num_members), lists(std::move(of_stack)), s(stack), kernel(*kernels().stack) {
    s.layers = lists.layers.data(), s.rotations = lists.rotations.data();
    if (s.starts) s.sequences = lists.sequences.data(), s.starts = lists.starts.data();
  }
  Lists lists;
  Stack s;
  const StackKernel& kernel;
};

/// Runs blocks of rows one after the other, each through all layers by all threads together.
void run_stack(const Stack& s, Lists lists, Index threads) {
  const Index each = std::min(s.num_rows, most_rows * ((threads + 15) / 16)), blocks = (s.num_rows + each - 1) / each;
  const Index num_phases = threads > 1 ? blocks * job_phases(s) : 0;
  const auto job = std::make_shared<StackJob>(s, std::move(lists), num_phases, threads);
  const std::size_t room = job->kernel.room(job->s, each), own = job->kernel.own_room(job->s);
  const std::size_t bytes = room + own * static_cast<std::size_t>(threads);
  thread_local ThreadMemory memory;
  char* block = static_cast<char*>(memory.at_least(bytes));
  if (!block) throw OutOfMemory(bytes);
  job->work = [job = job.get(), block, room, own, each](Index i, Team::Member member) {
    const Stack& s = job->s;
    char* mine = block + room + own * static_cast<std::size_t>(i);
    for (Index at = 0; at < s.num_rows; at += each) job->kernel.run(s, at, std::min(each, s.num_rows - at), block, mine, member);
  };
  run_job(job);
}

const float* floats(const Maybe& x) { return x ? static_cast<const float*>(x->const_data_ptr()) : nullptr; }
const Index* integers(const Maybe& x) { return x ? static_cast<const Index*>(x->const_data_ptr()) : nullptr; }

/// Which rows are of which sequence, where there are more than one of each. Throws where they don't fit.
void give_rows(Stack& s, const Maybe& starts, const Maybe& slots, Lists& lists) {
  s.most_slots = s.num_rows > 0;
  if (!starts) {
    if (slots || s.b != s.num_rows) throw std::runtime_error("several tokens of a sequence come with starts.");
    return;
  }
  if (starts->numel() != s.b + 1 || (slots && slots->numel() != s.num_rows + 1))
    throw std::runtime_error("starts and slots are one more than sequences and tokens.");
  lists.starts.assign(integers(starts), integers(starts) + s.b + 1);
  s.starts = lists.starts.data(), s.slots = integers(slots);
  if (s.starts[0] != 0 || s.starts[s.b] != s.num_rows) throw std::runtime_error("starts are from 0 to the number of tokens.");
  if (s.slots) s.most_slots = s.slots[s.num_rows];
  if (s.most_slots < 0 || s.most_slots > most_tokens) throw std::runtime_error("there are no so many slots.");
  for (Index i = 0; i < s.b; ++i) {
    const Index begin = s.starts[i], end = s.starts[i + 1];
    if (end < begin || end > s.num_rows) throw std::runtime_error("starts ascend.");
    lists.sequences.insert(lists.sequences.end(), static_cast<std::size_t>(end - begin), i);
    if (!s.slots) s.most_slots = std::max(s.most_slots, end - begin);
    else for (Index j = begin, least = 0; j < end; least = s.slots[j++] + 1)
      if (s.slots[j] < least || s.slots[j] >= s.most_slots) throw std::runtime_error("the slots of a sequence ascend.");
  }
  s.sequences = lists.sequences.data();
}

/// Of sequences with gaps: no key is attended to that none of their tokens writes, and none holds a NaN.
void clear_slots(const Stack& s, const std::vector<Layer>& layers) {
  for (const Layer& l : layers) {
    const Cache& cache = l.cache;
    const Index heads = l.attention == Attention::softmax ? s.g : l.attention == Attention::hybrid ? l.hybrid.heads_with(Reach::exact, s.g) : 0;
    if (heads == 0) continue;
    const auto size = static_cast<std::size_t>(s.most_slots * s.d * bytes_of(cache.type));
    for (Index i = 0; i < s.b * heads; ++i)
      for (void* x : {cache.k, cache.v})
        std::memset(static_cast<char*>(x) + (i * cache.capacity + cache.length) * s.d * bytes_of(cache.type), 0, size);
    for (Index i = 0; i < s.b; ++i)
      std::memset(cache.mask + i * cache.capacity + cache.length, 0, static_cast<std::size_t>(s.most_slots));
  }
}

constexpr const char* other_tables = "the tables of tokens and positions are not those of the plan's model.";

/// The table of embeddings: float32, bfloat16 or float16, and not wider than what enters the first layer.
void give_tokens(Stack& s, const Tensor& tokens, double scale) {
  if (tokens.dim() != 2) throw std::runtime_error(other_tables);
  s.tokens = tokens.const_data_ptr(), s.token_type = tokens.scalar_type(), s.token_scale = static_cast<float>(scale);
  s.num_tokens = tokens.size(0), s.token_width = tokens.size(1);
  const bool in_a_row = (s.token_width < 2 || tokens.stride(1) == 1) && (s.num_tokens < 2 || tokens.stride(0) == s.token_width);
  if (s.token_width > s.hidden || s.token_type == Type::float64 || !in_a_row) throw std::runtime_error(other_tables);
}

void stack(Tensor ids, Tensor positions, Tensor plan, Tensor weights, Tensor tokens, Maybe places, Maybe extra,
           std::vector<Tensor> states, Tensor lengths, Tensor out, int64_t limit, double norm_eps, double eps, double scale, Maybe starts, Maybe slots, bool every) {
  for (const Tensor* x : {&ids, &positions, &plan, &lengths, starts ? &*starts : &ids, slots ? &*slots : &ids})
    if (!x->has_int64()) throw std::runtime_error("ids, positions, the plan, lengths, starts and slots must be int64.");
  Lists lists;
  std::vector<Layer>& layers = lists.layers;
  Stack s = read_plan(static_cast<const Index*>(plan.const_data_ptr()), plan.numel(), weights.const_data_ptr(), weights.numel(), layers, lists.rotations);
  s.norm_eps = norm_eps, s.eps = eps;
  s.b = positions.numel(), s.num_rows = ids.numel();
  s.positions = static_cast<const Index*>(positions.const_data_ptr());
  give_rows(s, starts, slots, lists);
  States(states, lengths).give(s, layers, lists.own_caches);
  give_tokens(s, tokens, scale);
  s.num_places = places ? places->size(0) : 0;
  s.ids = static_cast<const Index*>(ids.const_data_ptr());
  s.places = floats(places), s.extra = floats(extra);
  s.out = static_cast<float*>(out.mutable_data_ptr());
  s.all = every;
  const bool no_places = places && (s.num_places < 1 || places->numel() != s.num_places * s.hidden);
  if (no_places || (extra && extra->numel() != s.num_rows * s.hidden) ||
      out.numel() != (every ? s.num_rows : s.b) * s.head.outputs)
    throw std::runtime_error(other_tables);
  for (Index i = 0; i < s.num_rows; ++i)
    if (s.ids[i] < 0 || s.ids[i] >= s.num_tokens)
      throw std::runtime_error("a token must be from 0 to " + std::to_string(s.num_tokens - 1) + "; got " + std::to_string(s.ids[i]) + ".");
  for (Index i = 0; i < s.b; ++i) {
    const Index last = s.positions[i] + s.start(i + 1) - s.start(i) - 1;
    if (s.positions[i] < 0 || last >= limit) throw std::runtime_error("there is no position " + std::to_string(last) + ".");
  }
  if (slots) clear_slots(s, layers);
  if (s.num_rows == 0) return;
  const FlushDenormals flush;
  std::vector<Index*> counted = {static_cast<Index*>(positions.mutable_data_ptr())};
  for (const Layer& l : layers)
    for (const Ring* ring : {&l.hybrid.features, &l.hybrid.window})
      if (ring->count) counted.push_back(ring->count);
  std::vector<Index> counts;
  for (Index i = 0; i < s.b; ++i) counts.push_back(s.start(i + 1) - s.start(i));
  run_stack(s, std::move(lists), std::max<Index>(1, get_num_threads()));
  for (Index* count : counted)
    for (Index i = 0; i < s.b; ++i) count[i] += counts[static_cast<std::size_t>(i)];
}

Index plan_version_read() { return plan_version; }

/// Of bytes that are about to be written for the first time.
void large_pages(Tensor x) { ask_for_large_pages(x.const_data_ptr(), static_cast<std::size_t>(x.numel())); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tarnn_cpu, m) {
  m.def("stack(Tensor ids, Tensor(a!) positions, Tensor plan, Tensor weights, Tensor tokens, Tensor? places, Tensor? extra, "
        "Tensor(b!)[] states, Tensor lengths, Tensor(c!) out, int limit, float norm_eps, float eps, float scale, Tensor? starts, Tensor? slots, bool every) -> ()");
  m.def("large_pages(Tensor bytes) -> ()");
  m.def("plan_version() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(tarnn_cpu, CompositeExplicitAutograd, m) { m.impl("plan_version", TORCH_BOX(&plan_version_read)); }

STABLE_TORCH_LIBRARY_IMPL(tarnn_cpu, CPU, m) {
  m.impl("stack", TORCH_BOX(&stack));
  m.impl("large_pages", TORCH_BOX(&large_pages));
}
