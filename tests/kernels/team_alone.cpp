// The helpers of a step without Python: two callers at once, jobs of several phases, each task once and in its phase; and for how
// long a step does with fewer threads. Built by itself, also with ThreadSanitizer (tests/sanitize.sh). Prints "fine".
#include "runtime/prudence.h"
#include "runtime/team.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

using namespace tarnn;
using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

void expect(bool holds, const char* what) {
  if (holds) return;
  std::printf("not so: %s\n", what);
  std::exit(1);
}

/// Each phase adds the sum of the one before to each of its numbers, which are plain memory.
void jobs(Index times, Index members) {
  constexpr Index phases = 5, tasks = 12;
  for (Index i = 0; i < times; ++i) {
    std::vector<long> numbers(tasks, 1);
    long total = 0;
    auto job = std::make_shared<Job>(phases, members);
    job->work = [&](Index, Team::Member at) {
      for (Index phase = 0; phase < phases; ++phase)
        at.phase(
            tasks,
            [&](Index task) {
              numbers[static_cast<std::size_t>(task)] += total;
              std::this_thread::sleep_for(std::chrono::microseconds(20));  // so that helpers find tasks
            },
            [&] {
              total = 0;
              for (const long x : numbers) total += x;
            });
    };
    run_job(job);
    expect(total == tasks * 28561, "every task ran once, in its phase");
  }
}

/// A job that goes through more phases than its team has ends in an error, on the caller's thread alone; the next is done.
void too_many_phases() {
  for (int again = 0; again < 20; ++again) {
    auto job = std::make_shared<Job>(2, 3);
    std::atomic<long> done{0};
    job->work = [&](Index, Team::Member at) {
      for (Index phase = 0; phase < 3; ++phase) at.phase(6, [&](Index) { ++done; }, [] {});
    };
    bool refused = false;
    try {
      run_job(job);
    } catch (const std::runtime_error&) {
      refused = true;
    }
    expect(refused, "a phase beyond the last is refused");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // for helpers that come late
    expect(done == 12, "no task of a phase that isn't there is run");
  }
}

/// Held up for a minute, it is back at all threads in about a second.
void a_long_stop() {
  Prudence prudence;
  Clock::time_point now{};
  expect(prudence.allowed(8, now) == 8, "all threads at first");
  for (int again = 0; again < 4; ++again) {
    now += seconds(60);
    prudence.learn(seconds(60), seconds(60), now);
    expect(prudence.allowed(8, now + milliseconds(10)) < 8, "fewer after a stop");
    expect(prudence.allowed(8, now + milliseconds(1001)) == 8, "all of them a second later");
  }
}

}  // namespace

int main() {
  a_long_stop();
  std::thread other(jobs, 100, 3);
  jobs(100, 4);
  other.join();
  too_many_phases();
  jobs(1, 4);
  std::puts("fine");
  return 0;
}
