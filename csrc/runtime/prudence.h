// How many threads a step takes, learnt from how long the last ones waited.
#pragma once

#include "runtime/team.h"

namespace tarnn {

/// How many threads take part. Where one was held up, another program wants its processor. Half of them go on then, for so
/// long that the wait is a small part of it; if it soon happens again, for longer, but never for long: a program that was
/// stopped for a minute is not slow for minutes.
class Prudence {
 public:
  Index allowed(Index threads, Clock::time_point now) {
    if (level_ < threads && now >= until_) level_ = threads, steps_ = 0;
    return level_ = std::min(threads, level_);
  }
  void learn(Clock::duration held_up, Clock::duration whole, Clock::time_point now) {
    ++steps_;
    if (3 * held_up <= whole) return;  // all of them are still faster than half
    rest_ = steps_ < few ? std::min(most, 2 * rest_) : least;
    until_ = now + std::min<Clock::duration>(longest, rest_ * std::min<Clock::duration>(longest, held_up));
    level_ = std::max<Index>(1, level_ / 2);
  }

 private:
  static constexpr int least = 8, most = 64;  // times as long as the wait
  static constexpr std::chrono::seconds longest{1};
  static constexpr Index few = 3;             // steps: so soon is at once
  Clock::time_point until_{};
  Index level_ = 1, steps_ = 0;
  int rest_ = least;
};

}  // namespace tarnn
