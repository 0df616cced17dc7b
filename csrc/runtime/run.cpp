// Opens programs, and runs their calls in blocks of rows.
#include "runtime/run.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "common/threads.h"

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

namespace tarnn::runtime {
namespace {

constexpr Index least_rows = 64, most_rows = 256;  // at once
constexpr Index cache_a_row = 1 << 13;  // bytes of the second level of cache
constexpr Index most_spread = 16;  // times as many where experts share them out
constexpr double keys_a_task = 512;
constexpr double rows_as_long_as_reading = 16;  // so many rows are multiplied in the time that their weights take to come
constexpr std::size_t most_room = std::size_t(1) << 28;  // bytes for more rows than those of a block

/// How often threads of a team meet in one block: softmax twice, experts up to five times, a phase of many rows once more for its rows.
Index phases_of_block(const Program& p) {
  Index n = 0;
  for (const Phase& phase : p.phases) n += phase.op.kind == Kind::experts ? 6 : phase.op.kind == Kind::softmax ? 3 : 2;
  return n + 1;  // the head moves rows first
}

/// Experts for each that a row chooses: as many times more rows go at once, so that a panel of an expert is read for as many as another panel is.
Index spread_of(const Program& p) {
  Index most = 1;
  for (const Phase& phase : p.phases)
    if (phase.op.kind == Kind::experts) most = std::max(most, static_cast<Index>(phase.op.matrices.size()) / 2 / phase.op.in(1).size());
  return std::min(most, most_spread);
}

/// Bytes that calls read, and tasks of phases.
Work work_of(const Program& p) {
  Work work;
  for (const State& s : p.states) (s.grows() ? work.keys : work.states) += sizeof(float) * static_cast<double>(s.size);
  for (const Phase& phase : p.phases) {
    Index panels = 0;
    const bool experts = phase.op.kind == Kind::experts;
    for (const Matrix& x : phase.op.matrices) {
      panels += x.panels();
      (experts ? work.experts : work.weights) += static_cast<double>(x.panels() * bytes_of_panel(x.format, x.inputs));
    }
    if (experts) work.chosen = 2. * static_cast<double>(phase.op.in(1).size()) / static_cast<double>(phase.op.matrices.size());
    work.panels = std::max(work.panels, panels), work.units = std::max(work.units, phase.units);
  }
  return work;
}

/// Rows of a block: weights are read once for all of them, whose activations should stay in the second level of cache. TARNN_BLOCK_ROWS, for
/// tests: so many.
Index rows_of_block() {
  static const Index rows = [] {
    if (const char* text = std::getenv("TARNN_BLOCK_ROWS")) return std::max<Index>(1, std::atoll(text));
#if defined(_SC_LEVEL2_CACHE_SIZE)
    return std::clamp<Index>(sysconf(_SC_LEVEL2_CACHE_SIZE) / cache_a_row, least_rows, most_rows);
#else
    return least_rows;
#endif
  }();
  return rows;
}

/// TARNN_BYTES_A_THREAD, for tests: 0 lets small programs have as many threads as they are told.
Index bytes_a_member() {
  static const char* const text = std::getenv("TARNN_BYTES_A_THREAD");
  return text ? std::atoll(text) : worth_a_member;
}

}  // namespace

CallSize size_of(const Opened& opened, Index tokens, std::span<const Index> positions) {
  const Work& work = opened.work;
  const auto rows = static_cast<double>(std::min(tokens, rows_of_block())), sequences = static_cast<double>(positions.size());
  double keys = static_cast<double>(tokens), longest = 0;  // nobody has checked positions yet
  for (const Index x : positions) keys += static_cast<double>(x), longest = std::max(longest, static_cast<double>(x));
  const double bytes = work.weights + work.experts * std::min(1., rows * work.chosen) + work.states * sequences + work.keys * keys;
  const double of_units = static_cast<double>(work.units) * sequences * (1 + longest / keys_a_task), of_panels = 2. * static_cast<double>(work.panels);
  return {static_cast<Index>(opened.program.phases.size()), bytes * std::max(1., rows / rows_as_long_as_reading),
          static_cast<Index>(std::min(1e9, std::max({rows, of_units, of_panels})))};
}

std::shared_ptr<const Opened> open_program(const Index* numbers, Index count, const void* block, Index bytes, std::vector<Table> tables,
                                           std::shared_ptr<const void> kept) {
  auto opened = std::make_shared<Opened>();
  opened->tables = std::move(tables);
  opened->program = read_program(numbers, count, block, bytes, opened->tables);
  opened->phases_of_block = phases_of_block(opened->program), opened->spread = spread_of(opened->program);
  opened->layout = layout_of(opened->program);
  opened->processors = processors_allowed(), opened->work = work_of(opened->program);
  opened->kept = std::move(kept);
  return opened;
}

std::shared_ptr<ProgramJob> new_job(std::shared_ptr<const Opened> opened, Index tokens, std::span<const Index> positions, Index threads) {
  threads = team_size(threads, opened->processors, size_of(*opened, tokens, positions), bytes_a_member());
  const Index each = std::max<Index>(1, std::min(tokens, rows_of_block() * ((threads + 15) / 16))), blocks = (tokens + each - 1) / each;
  auto job = std::make_shared<ProgramJob>(threads > 1 ? blocks * opened->phases_of_block : 0, threads);
  job->rows_of_block = each, job->positions.assign(positions.begin(), positions.end());
  job->call.program = &opened->program, job->call.tables = opened->tables.data(), job->call.num_rows = tokens, job->call.layout = &opened->layout;
  job->opened = std::move(opened);
  return job;
}

void check_tokens(const Opened& opened, const Call& c) {
  const Program& p = opened.program;
  for (Index i = 0; i < c.num_rows; ++i)
    if (c.ids[i] < 0 || c.ids[i] >= p.num_tokens)
      throw BadToken("a token must be from 0 to " + std::to_string(p.num_tokens - 1) + "; got " + std::to_string(c.ids[i]) + ".");
  for (Index i = 0; i < c.b; ++i) {
    const Index tokens = c.start(i + 1) - c.start(i);
    if (c.positions[i] < 0 || c.positions[i] > p.limit - tokens)
      throw BadToken("a sequence has positions from 0 to " + std::to_string(p.limit - 1) + "; " + std::to_string(tokens) + " tokens came at position " + std::to_string(c.positions[i]) + ".");
  }
}

void run_blocks(const std::shared_ptr<ProgramJob>& job) {
  const RuntimeKernel& kernel = *kernels().runtime;
  Index each = std::min(job->call.num_rows, job->rows_of_block * job->opened->spread);
  while (each > job->rows_of_block && kernel.room(job->call, each) > most_room) each = std::max(job->rows_of_block, each / 2);
  const std::size_t room = kernel.room(job->call, each), own = kernel.own_room(job->call);
  const std::size_t bytes = room + own * static_cast<std::size_t>(job->members);
  thread_local ThreadMemory memory;
  char* block = static_cast<char*>(memory.at_least(bytes));
  if (!block) throw OutOfMemory(bytes);
  job->work = [job = job.get(), block, room, own, each, &kernel](Index i, Team::Member member) {
    char* mine = block + room + own * static_cast<std::size_t>(i);
    for (Index at = 0; at < job->call.num_rows; at += each) kernel.run(job->call, at, std::min(each, job->call.num_rows - at), block, mine, member);
  };
  run_job(job);
  for (const Memory& m : job->memories)
    for (Index i = 0; m.counts && i < job->call.b; ++i) m.counts[i] += job->tokens_of(i);
}

}  // namespace tarnn::runtime
