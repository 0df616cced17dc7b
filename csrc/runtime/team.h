// Threads of our own for one step: they go through it together, and nobody waits for one that doesn't come.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>

#include "kernels.h"

namespace tarnn {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::microseconds spin{50};  // for so long a thread waits awake; then it sleeps

inline void pause_processor() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Returns when `at` is no longer `old`: awake for `spin`, then asleep, so that the processor is free for whom we wait for.
inline void wait_while(const std::atomic<std::uint32_t>& at, std::uint32_t old) {
  const Clock::time_point end = Clock::now() + spin;
  do {
    for (int i = 0; i < 32; ++i, pause_processor())
      if (at.load(std::memory_order_acquire) != old) return;
  } while (Clock::now() < end);
  at.wait(old, std::memory_order_acquire);
}

/// A team went through all of its phases and has still work to do: whoever counted them counted wrong.
struct NoPhaseLeft : std::runtime_error {
  NoPhaseLeft() : std::runtime_error("a step has more phases than its threads were given, which is an error in tarnn: please report it. torch.set_num_threads(1) avoids it.") {}
};

/// Threads that go through the same phases. Each phase is a number of tasks, which whoever is there takes; the last to
/// finish one does what follows, alone, and lets all go on. So it needs no particular number of threads: one that the
/// system holds up between two tasks is not missed. One that is held up within a task is waited for, and noticed.
class Team {
  struct alignas(64) Phase {
    std::atomic<Index> next{0}, done{0};
    std::atomic<std::uint32_t> over{0};
  };

 public:
  explicit Team(Index num_phases) : num_phases_(num_phases), phases_(num_phases ? new Phase[static_cast<std::size_t>(num_phases)] : nullptr) {}

  /// How long threads waited for those that the system held up: each time longer than their own part of the phase had taken.
  Clock::duration held_up() const { return Clock::duration(held_up_.load(std::memory_order_relaxed)); }

  /// One thread's way through the phases; in a team without phases it does all tasks itself. Behind the last one all throw NoPhaseLeft.
  class Member {
   public:
    Member(Team& team, Index number) : team_(&team), number_(number), at_(team.phases_.get()), end_(at_ + team.num_phases_) {}
    template <typename F, typename G>
    void phase(Index tasks, F task, G then) {
      if (!at_) {
        for (Index i = 0; i < tasks; ++i) task(i);
        return then();
      }
      if (at_ == end_) throw NoPhaseLeft();
      Phase& p = *at_++;
      const Clock::time_point began = Clock::now();
      bool worked = false;
      // of more members than tasks the last ones only wait: they would take the counters from those who work
      for (Index i; number_ < std::max<Index>(1, tasks) && (i = p.next.fetch_add(1, std::memory_order_relaxed)) < tasks; worked = true) {
        task(i);
        if (p.done.fetch_add(1, std::memory_order_acq_rel) + 1 == tasks) {
          then();
          p.over.store(1, std::memory_order_release);
          p.over.notify_all();
          return;
        }
      }
      if (p.over.load(std::memory_order_acquire)) return;
      const Clock::time_point waits = Clock::now();
      wait_while(p.over, 0);
      const Clock::duration waited = Clock::now() - waits;
      if (worked && waited > std::max<Clock::duration>(2 * spin, waits - began))
        team_->held_up_.fetch_add(waited.count(), std::memory_order_relaxed);
    }

   private:
    Team* team_;
    Index number_;
    Phase *at_, *end_;
  };

 private:
  Index num_phases_;
  std::unique_ptr<Phase[]> phases_;
  std::atomic<Clock::rep> held_up_{0};
};

/// What a team does. Helpers that come late find all tasks taken; they may still hold it when the step is long over, so
/// it owns all that is looked at outside of tasks. It has members 0 … members − 1: memory for no more of them.
struct Job {
  Job(Index num_phases, Index num_members) : team(num_phases), members(num_members) {}
  Team team;
  Index members;
  std::function<void(Index member, Team::Member)> work;
};

/// work(0) on this thread, and work(1), work(2) … on helpers, as far as they come: up to the job's members in all, fewer for a
/// while after one was held up. Returns when this thread is through.
void run_job(const std::shared_ptr<Job>& job);

}  // namespace tarnn
