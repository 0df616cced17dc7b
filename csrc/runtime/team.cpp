// The helpers of a step, and how many of them it gets.
#include "runtime/team.h"

#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#ifdef __linux__
#include <pthread.h>
#endif

#include "common/threads.h"
#include "runtime/prudence.h"

namespace tarnn {
namespace {

/// Threads that wait for jobs, awake for a moment and then asleep. They live as long as the process.
class Helpers {
 public:
  void offer(const std::shared_ptr<Job>& job, Index helpers) {
    const std::lock_guard<std::mutex> lock(mutex_);
    job_ = job;
    for (Index i = 0; i < helpers && seat(i); ++i) {
      seats_[static_cast<std::size_t>(i)]->fetch_add(1, std::memory_order_release);
      seats_[static_cast<std::size_t>(i)]->notify_one();
    }
  }

 private:
  using Seat = std::atomic<std::uint32_t>;  // counts the jobs that its helper was offered

  bool seat(Index i) {
    if (i < static_cast<Index>(seats_.size())) return true;
    auto made = std::make_unique<Seat>(0);
    try {
      std::thread(&Helpers::help, this, i + 1, made.get()).detach();
    } catch (const std::system_error&) {
      return false;  // the system has no more threads: fewer do it
    }
    seats_.push_back(std::move(made));
    return true;
  }

  void help(Index member, Seat* seat) {
    const FlushDenormals flush;
    for (std::uint32_t seen = 0;;) {
      wait_while(*seat, seen);
      seen = seat->load(std::memory_order_acquire);
      std::shared_ptr<Job> job;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        job = job_;
      }
      // woken for another job, of more members, this one may find a smaller one
      if (member < job->members) try {
        job->work(member, Team::Member(job->team, member));
      } catch (const NoPhaseLeft&) {  // the caller's thread says so
      }
    }
  }

  std::mutex mutex_;
  std::shared_ptr<Job> job_;
  std::vector<std::unique_ptr<Seat>> seats_;
};

Helpers& helpers() {
  // never destroyed: its threads wait in it until the process ends
  alignas(Helpers) static unsigned char room[sizeof(Helpers)];
  static Helpers* const made = [] {
#ifdef __linux__
    pthread_atfork(nullptr, nullptr, [] { new (room) Helpers; });  // a forked child has none of these threads
#endif
    return new (room) Helpers;
  }();
  return *made;
}

}  // namespace

void run_job(const std::shared_ptr<Job>& job) {
  thread_local Prudence prudence;
  const Clock::time_point began = Clock::now();
  const Index allowed = prudence.allowed(job->members, began);
  if (allowed > 1) helpers().offer(job, allowed - 1);
  job->work(0, Team::Member(job->team, 0));
  const Clock::time_point now = Clock::now();
  if (allowed > 1) prudence.learn(job->team.held_up(), now - began, now);
}

}  // namespace tarnn
