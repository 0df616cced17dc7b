// torch's operators for programs: open one, run it, close it. Each is checked when it is opened, and each call's states when they come.
#include <algorithm>
#include <map>
#include <mutex>
#include <string>

#include "common/operators.h"
#include "runtime/run.h"

namespace {

using namespace tarnn;
using namespace tarnn::runtime;

/// Programs by their handles, which Python holds.
class Registry {
 public:
  Index add(std::shared_ptr<const Opened> one) {
    const std::lock_guard<std::mutex> lock(mutex_);
    all_[++last_] = std::move(one);
    return last_;
  }
  std::shared_ptr<const Opened> get(Index handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = all_.find(handle);
    if (found == all_.end()) throw std::runtime_error("this program is closed.");
    return found->second;
  }
  void remove(Index handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    all_.erase(handle);
  }

 private:
  std::mutex mutex_;
  std::map<Index, std::shared_ptr<const Opened>> all_;
  Index last_ = 0;
};

Registry& registry() {
  static Registry* const one = new Registry;  // never destroyed: threads may still run when the process ends
  return *one;
}

Index program_open(Tensor numbers, Tensor block, std::vector<Tensor> tables) {
  if (!numbers.has_int64() || !numbers.is_contiguous() || !block.is_contiguous()) throw std::runtime_error("a program is int64 and contiguous, as is its block.");
  std::vector<Table> rows;
  for (const Tensor& x : tables) {
    if (x.dim() != 2 || x.stride(1) != 1 || x.stride(0) != x.size(1)) throw std::runtime_error("tables are contiguous, of rows and columns.");
    rows.push_back({x.const_data_ptr(), x.scalar_type(), x.size(0), x.size(1)});
    const Type type = x.scalar_type();
    if (!x.has_float32() && type != Type::bfloat16 && type != Type::float16) throw std::runtime_error("tables are float32, bfloat16 or float16.");
  }
  const auto* from = static_cast<const Index*>(numbers.const_data_ptr());
  const void* at = block.const_data_ptr();
  const Index bytes = block.numel();
  auto kept = std::make_shared<std::vector<Tensor>>(std::move(tables));
  kept->push_back(std::move(block));
  return registry().add(open_program(from, numbers.numel(), at, bytes, std::move(rows), std::move(kept)));
}

void program_close(Index handle) { registry().remove(handle); }

/// A tensor of (b) counts of tokens.
Index* counts_of(const Tensor& x, Index b) {
  if (x.numel() != b || !x.has_int64() || !x.is_contiguous()) return nullptr;
  auto* at = static_cast<Index*>(x.mutable_data_ptr());
  return std::all_of(at, at + b, [](Index n) { return n >= 0 && n < Index(1) << 62; }) ? at : nullptr;
}

/// The states' memory: one tensor (b, size), or of a state that grows b tensors (g, capacity, size / g), or (b) counts.
void give_states(const Program& p, Index b, const std::vector<Tensor>& states, ProgramJob& job) {
  const auto refuse = [] { throw std::runtime_error("the states are not those of the program."); };
  std::size_t at = 0;
  job.grown.reserve(p.states.size() * static_cast<std::size_t>(b));  // so that nothing moves
  for (const State& s : p.states) {
    Memory memory{};
    if (s.grows()) memory.grown = job.grown.data() + job.grown.size();
    for (Index i = 0; i < (s.grows() ? b : 1); ++i, ++at) {
      if (at == states.size()) refuse();
      const Tensor& x = states[at];
      const Type type = x.scalar_type();
      if (s.of == State::Of::counts) {
        memory.counts = counts_of(x, b);
        if (!memory.counts) refuse();
        continue;
      }
      if (!s.grows()) {
        if (x.numel() != b * s.size || !x.has_float32() || !x.is_contiguous()) refuse();
        memory.at = static_cast<float*>(x.mutable_data_ptr());
        continue;
      }
      if (x.dim() < 3 || !x.is_contiguous()) refuse();
      const Index capacity = x.size(x.dim() - 2), tokens = job.starts[static_cast<std::size_t>(i + 1)] - job.starts[static_cast<std::size_t>(i)];
      if (x.numel() % s.size || x.numel() / s.size != capacity || (!x.has_float32() && type != Type::bfloat16)) refuse();
      if (job.positions[static_cast<std::size_t>(i)] > capacity - tokens) throw std::runtime_error("a key/value cache is full.");
      job.grown.push_back({x.mutable_data_ptr(), type, capacity});
    }
    job.memories.push_back(memory);
  }
  if (at != states.size()) refuse();
}

/// The keys and values of a sequence are of one type, and have room for equally many tokens.
void check_pairs(const Program& p, const ProgramJob& job, Index b) {
  for (const Phase& phase : p.phases) {
    std::vector<const Grown*> grown;
    for (const Index state : phase.op.states)
      if (const Memory& m = job.memories[static_cast<std::size_t>(state)]; m.grown) grown.push_back(m.grown);
    for (std::size_t i = 1; i < grown.size(); i += 2)
      for (Index of = 0; of < b; ++of)
        if (grown[i][of].type != grown[i - 1][of].type || grown[i][of].capacity != grown[i - 1][of].capacity) throw std::runtime_error("keys and values have different types or room.");
  }
}

/// Which rows are of which sequence.
void give_rows(Index num_rows, Index b, const Maybe& starts, ProgramJob& job) {
  if (!starts) {
    if (b != num_rows) throw std::runtime_error("several tokens of a sequence come with starts.");
    for (Index i = 0; i <= b; ++i) job.starts.push_back(i);
    return;
  }
  if (starts->numel() != b + 1 || !starts->has_int64() || !starts->is_contiguous()) throw std::runtime_error("starts are one more than sequences, int64.");
  const auto* from = static_cast<const Index*>(starts->const_data_ptr());
  job.starts.assign(from, from + b + 1);
  if (job.starts.front() != 0 || job.starts.back() != num_rows || !std::is_sorted(job.starts.begin(), job.starts.end()))
    throw std::runtime_error("starts ascend from 0 to the number of tokens.");
  for (Index i = 0; i < b; ++i) job.sequences.insert(job.sequences.end(), static_cast<std::size_t>(from[i + 1] - from[i]), i);
}

bool fits(const Tensor& x, Index n) { return x.numel() == n && x.has_float32() && x.is_contiguous(); }

/// A call, but for what it does.
std::shared_ptr<ProgramJob> job_of(std::shared_ptr<const Opened> opened, const Tensor& ids, const Tensor& positions, const Maybe& starts, const std::vector<Tensor>& states) {
  const Program& p = opened->program;
  for (const Tensor* x : {&ids, &positions})
    if (!x->has_int64() || !x->is_contiguous()) throw std::runtime_error("ids and positions are int64 and contiguous.");
  const Index n = ids.numel(), b = positions.numel(), threads = std::max<Index>(1, get_num_threads());
  const auto job = new_job(opened, n, {static_cast<const Index*>(positions.const_data_ptr()), static_cast<std::size_t>(b)}, threads);
  give_rows(n, b, starts, *job);
  give_states(p, b, states, *job), check_pairs(p, *job, b);
  Call& c = job->call;
  c.b = b, c.most_rows = n > 0;
  c.ids = static_cast<const Index*>(ids.const_data_ptr()), c.positions = job->positions.data();
  c.sequences = starts ? job->sequences.data() : nullptr, c.starts = starts ? job->starts.data() : nullptr;
  for (Index i = 0; i < b; ++i) c.most_rows = std::max(c.most_rows, c.start(i + 1) - c.start(i));
  c.memories = job->memories.data();
  return job;
}

/// Runs a call that reads tokens. Positions stay as they are.
std::shared_ptr<ProgramJob> read_tokens(Index handle, const Tensor& ids, const Tensor& positions, const Maybe& starts, const std::vector<Tensor>& states, const Maybe& extra,
                                        bool every, const Tensor& out, const Tensor* hidden, const Tensor* log) {
  const auto opened = registry().get(handle);
  const Program& p = opened->program;
  const auto job = job_of(opened, ids, positions, starts, states);
  Call& c = job->call;
  const Index n = c.num_rows, b = c.b;
  c.all = every, c.out = static_cast<float*>(out.mutable_data_ptr());
  const Index width = p.phases[0].rows[0].out().size();  // of the embedding
  if (p.extra != extra.has_value() || (extra && (extra->numel() != n * width || !extra->has_float32() || !extra->is_contiguous()))) throw std::runtime_error("the rows to be added are not those of the tokens.");
  c.extra = extra ? static_cast<const float*>(extra->const_data_ptr()) : nullptr, c.extra_width = width;
  if (out.numel() != (every ? n : b) * p.num_outputs || !out.has_float32() || !out.is_contiguous()) throw std::runtime_error("the output has another size or type.");
  if (hidden) {
    if (!fits(*hidden, n * p.phases.back().op.in().size())) throw std::runtime_error("the rows that the head reads have no room.");
    c.hidden = static_cast<float*>(hidden->mutable_data_ptr());
  }
  if (log) {
    if (opened->layout.width < 0) throw std::runtime_error("this program has states that can't be kept as they are.");
    if (!fits(*log, n * opened->layout.width) || c.most_rows > most_logged) throw std::runtime_error("a log has a row per token, of few tokens of each sequence.");
    c.log = static_cast<float*>(log->mutable_data_ptr());
    job->rows_of_block = std::max<Index>(1, n);
  }
  check_tokens(*opened, c);
  const FlushDenormals flush;
  if (n > 0) run_blocks(job);
  return job;
}

void program_run(Index handle, Tensor ids, Tensor positions, Maybe starts, std::vector<Tensor> states, Maybe extra, bool every, Tensor out, Maybe hidden) {
  const auto job = read_tokens(handle, ids, positions, starts, states, extra, every, out, hidden ? &*hidden : nullptr, nullptr);
  auto* at = static_cast<Index*>(positions.mutable_data_ptr());
  for (Index i = 0; i < job->call.b; ++i) at[i] += job->tokens_of(i);
}

/// Reads tokens that may not stay.
void program_verify(Index handle, Tensor ids, Tensor positions, Maybe starts, std::vector<Tensor> states, Maybe extra, Tensor out, Tensor hidden, Tensor log) {
  read_tokens(handle, ids, positions, starts, states, extra, true, out, &hidden, &log);
}

/// Lets the first tokens of each sequence in that a call with this log has read.
void program_accept(Index handle, Tensor ids, Tensor positions, Maybe starts, std::vector<Tensor> states, Tensor log, Tensor counts) {
  const auto opened = registry().get(handle);
  const auto job = job_of(opened, ids, positions, starts, states);
  Call& c = job->call;
  const auto* keep = static_cast<const Index*>(counts.const_data_ptr());
  if (opened->layout.width < 0 || !fits(log, c.num_rows * opened->layout.width)) throw std::runtime_error("the log is not that of these tokens.");
  if (counts.numel() != c.b || !counts.has_int64() || !counts.is_contiguous()) throw std::runtime_error("counts are one a sequence, int64.");
  for (Index i = 0; i < c.b; ++i)
    if (keep[i] < 0 || keep[i] > std::min(job->tokens_of(i), most_logged)) throw std::runtime_error("a sequence can't have more tokens than were read.");
  job->kept.assign(keep, keep + c.b);
  c.log = static_cast<float*>(log.mutable_data_ptr()), c.keep = job->kept.data();
  job->rows_of_block = std::max<Index>(1, c.num_rows);
  const FlushDenormals flush;
  if (c.num_rows > 0 && opened->layout.width > 0) run_blocks(job);
  auto* at = static_cast<Index*>(positions.mutable_data_ptr());
  for (Index i = 0; i < c.b; ++i) at[i] += keep[i];
}

/// Numbers of a log per token; −1: this program has states that can't be kept as they are.
Index program_log_width(Index handle) { return registry().get(handle)->layout.width; }

Index program_version_read() { return program_version; }

std::string products(Index format) {
  if (format < 0 || format > static_cast<Index>(Format::int4)) throw std::runtime_error("a format is a number from 0 to 3.");
  return kernels().runtime->products(static_cast<Format>(format));
}

/// Threads of a call of one token of each sequence at these positions: what a test looks at.
Index program_threads(Index handle, Tensor positions, Index asked) {
  if (!positions.has_int64() || !positions.is_contiguous()) throw std::runtime_error("positions are int64 and contiguous.");
  const auto opened = registry().get(handle);
  const std::span at{static_cast<const Index*>(positions.const_data_ptr()), static_cast<std::size_t>(positions.numel())};
  return new_job(opened, positions.numel(), at, asked)->members;
}

/// Phases of a program: what a test counts.
Index program_phases(Index handle) { return static_cast<Index>(registry().get(handle)->program.phases.size()); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tarnn_cpu, m) {
  m.def("program_open(Tensor numbers, Tensor block, Tensor[] tables) -> int");
  m.def("program_close(int handle) -> ()");
  m.def("program_phases(int handle) -> int");
  m.def("program_threads(int handle, Tensor positions, int asked) -> int");
  m.def("program_version() -> int");
  m.def("products(int format) -> str");
  m.def("program_run(int handle, Tensor ids, Tensor(a!) positions, Tensor? starts, Tensor(b!)[] states, Tensor? extra, bool every, Tensor(c!) out, Tensor(d!)? hidden=None) -> ()");
  m.def("program_verify(int handle, Tensor ids, Tensor positions, Tensor? starts, Tensor(a!)[] states, Tensor? extra, Tensor(b!) out, Tensor(c!) hidden, Tensor(d!) log) -> ()");
  m.def("program_accept(int handle, Tensor ids, Tensor(a!) positions, Tensor? starts, Tensor(b!)[] states, Tensor(c!) log, Tensor counts) -> ()");
  m.def("program_log_width(int handle) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(tarnn_cpu, CompositeExplicitAutograd, m) {
  m.impl("program_version", TORCH_BOX(&program_version_read));
  m.impl("products", TORCH_BOX(&products));
  m.impl("program_close", TORCH_BOX(&program_close));
  m.impl("program_phases", TORCH_BOX(&program_phases));
  m.impl("program_log_width", TORCH_BOX(&program_log_width));
}

STABLE_TORCH_LIBRARY_IMPL(tarnn_cpu, CPU, m) {
  m.impl("program_open", TORCH_BOX(&program_open));
  m.impl("program_threads", TORCH_BOX(&program_threads));
  m.impl("program_run", TORCH_BOX(&program_run));
  m.impl("program_verify", TORCH_BOX(&program_verify));
  m.impl("program_accept", TORCH_BOX(&program_accept));
}
