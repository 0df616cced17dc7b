// The operator that draws a token of each row of logits: rows are shared out among the threads of a step.
#include <cstdint>
#include <memory>
#include <stdexcept>

#include "common/operators.h"
#include "draws/problem.h"
#include "runtime/team.h"

namespace {

using namespace tarnn;

constexpr Index worth_a_helper = 1 << 17;  // logits; about 50 microseconds

/// All rows; late threads may hold it when they are long drawn.
struct DrawJob : Job {
  DrawJob(Index num_phases, Index num_members) : Job(num_phases, num_members) {}
  Draw first{};
  Index b = 0;

  Draw row(Index i) const {
    Draw d = first;
    d.logits += i * d.v, d.numbers += i * Column::numbers, d.whole += i * Column::whole;
    const double* x = d.numbers;
    const bool penalizes = x[Column::repetition] != 1 || x[Column::frequency] != 0 || x[Column::presence] != 0;
    d.counts = penalizes && d.had ? d.counts + i * d.v : nullptr;
    d.had = penalizes && d.had ? d.had + i * d.v : nullptr;
    d.bias = d.bias && d.whole[Column::biased] ? d.bias + i * d.v : nullptr;
    d.token += i;
    if (d.logprob) d.logprob += i, d.likeliest += i * d.k, d.likeliest_logprobs += i * d.k;
    return d;
  }
};

template <typename T>
T* at(const Tensor& x) {
  return static_cast<T*>(const_cast<void*>(x.const_data_ptr()));
}
template <typename T>
T* at(const Maybe& x) {
  return x ? at<T>(*x) : nullptr;
}

/// Of tables all rows are there, of logits and results the first ones.
void draw(Tensor logits, Tensor numbers, Tensor whole, Maybe counts, Maybe had, Maybe bias, Tensor tokens, Maybe logprobs,
          Maybe likeliest, Maybe likeliest_logprobs) {
  const Index b = tokens.numel(), v = logits.size(1), rows = numbers.size(0), k = likeliest ? likeliest->size(1) : 0;
  const auto has = [](const Maybe& x, Index n) { return !x || x->numel() >= n; };
  if (logits.numel() != b * v || b > rows || numbers.numel() != rows * Column::numbers || whole.numel() != rows * Column::whole ||
      !has(counts, rows * v) || !has(had, rows * v) || !has(bias, rows * v) || !has(logprobs, b) || !has(likeliest, b * k) ||
      !has(likeliest_logprobs, b * k) || bool(counts) != bool(had) || bool(logprobs) != bool(likeliest) || bool(logprobs) != bool(likeliest_logprobs))
    throw std::runtime_error("the tables of these draws are not those of the logits.");
  if (b == 0 || v == 0) return;
  const DrawKernels& kernel = *kernels().draws;
  const Index threads = std::max<Index>(1, std::min({get_num_threads(), b, b * v / worth_a_helper}));
  const auto job = std::make_shared<DrawJob>(threads > 1, threads);
  job->first = {v, at<const float>(logits), at<const double>(numbers), at<const Index>(whole), at<const std::int32_t>(counts), at<const bool>(had),
                at<const float>(bias), at<Index>(tokens), at<float>(logprobs), at<Index>(likeliest), at<float>(likeliest_logprobs), k};
  job->b = b;
  const std::size_t own = kernel.room(v), bytes = own * static_cast<std::size_t>(threads);
  thread_local ThreadMemory memory;
  char* room = static_cast<char*>(memory.at_least(bytes));
  if (!room) throw OutOfMemory(bytes);
  job->work = [job = job.get(), &kernel, room, own](Index member, Team::Member team) {
    char* mine = room + own * static_cast<std::size_t>(member);
    team.phase(job->b, [&](Index i) { kernel.draw(job->row(i), mine); }, [] {});
  };
  const FlushDenormals flush;
  run_job(job);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tarnn_cpu, m) {
  m.def("draw(Tensor logits, Tensor numbers, Tensor whole, Tensor? counts, Tensor? had, Tensor? bias, Tensor(a!) tokens, "
        "Tensor(b!)? logprobs, Tensor(c!)? likeliest, Tensor(d!)? likeliest_logprobs) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tarnn_cpu, CPU, m) { m.impl("draw", TORCH_BOX(&draw)); }
