// A program that is open, and a call of it on a team of threads; nothing of torch.
#pragma once

#include <memory>
#include <span>

#include "runtime/call.h"
#include "runtime/team_size.h"

namespace tarnn::runtime {

/// What calls of a program have to do. Bytes: weights of all rows, of all experts, states of a sequence, keys and values of a token; chosen: the share of
/// the experts that a row reads. Tasks of the largest phases: panels of weights, units of heads.
struct Work {
  double weights = 0, experts = 0, chosen = 0, states = 0, keys = 0;
  Index panels = 0, units = 0;
};

/// A program, its tables, and whatever keeps their memory.
struct Opened {
  Program program;
  std::vector<Table> tables;
  std::shared_ptr<const void> kept;
  Index phases_of_block = 0;
  Index spread = 1;  // times as many rows go at once as without experts
  double processors = 1;  // that this process was allowed when the program was opened
  Work work;
  LogLayout layout;
};

/// Checks and reads a program. Throws std::runtime_error with one sentence.
std::shared_ptr<const Opened> open_program(const Index* numbers, Index count, const void* block, Index bytes, std::vector<Table> tables,
                                           std::shared_ptr<const void> kept);

/// A call, and all that its threads look at outside of tasks: a late one does when the call is long over.
struct ProgramJob : Job {
  ProgramJob(Index num_phases, Index num_members) : Job(num_phases, num_members) {}
  std::shared_ptr<const Opened> opened;
  Index rows_of_block = 1;  // at least so many, if there are as many
  Call call{};
  std::vector<Index> sequences, starts, positions, kept;
  std::vector<Memory> memories;
  std::vector<Grown> grown;

  /// Tokens of a sequence in this call.
  Index tokens_of(Index i) const { return starts[static_cast<std::size_t>(i + 1)] - starts[static_cast<std::size_t>(i)]; }
};

/// A call of some tokens in all, of sequences at these positions, by so many threads at most; their states have still to be given.
std::shared_ptr<ProgramJob> new_job(std::shared_ptr<const Opened> opened, Index tokens, std::span<const Index> positions, Index threads);

/// What such a call is.
CallSize size_of(const Opened& opened, Index tokens, std::span<const Index> positions);

/// A token that is not there, or one beyond the last position.
struct BadToken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Throws BadToken.
void check_tokens(const Opened& opened, const Call& c);

/// Runs blocks of rows one after the other, each through all phases by all threads together, and adds the tokens to the states' counts. Throws OutOfMemory
/// before anything is written.
void run_blocks(const std::shared_ptr<ProgramJob>& job);

}  // namespace tarnn::runtime
