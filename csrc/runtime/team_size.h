// How many threads a call of a program takes.
#pragma once

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>

#include "kernels.h"

namespace tarnn {

/// What a call is: phases, bytes of weights and states that they read, and tasks of the largest one.
struct CallSize {
  Index phases;
  double bytes;
  Index tasks;
};

constexpr Index phases_of_layer = 5;      // queries, keys and values; states; output; both halves of the MLP
constexpr Index worth_a_member = 1 << 18;  // bytes of a layer: one thread reads them in some 25 µs, in which it meets the others five times

/// The least of what the caller asks for, what the processors' quota allows, and what the call has work and tasks for.
inline Index team_size(Index asked, double processors, const CallSize& size, Index bytes_a_member = worth_a_member) {
  const double worth = size.bytes * phases_of_layer / static_cast<double>(std::max<Index>(1, size.phases) * std::max<Index>(1, bytes_a_member));
  const auto most = static_cast<double>(std::min(asked, size.tasks));
  return std::max<Index>(1, static_cast<Index>(std::min({most, worth, std::ceil(processors)})));
}

constexpr double no_quota = std::numeric_limits<double>::infinity();

/// "200000 100000": 2 processors. Anything else: no quota.
inline double quota_of(const std::string& text) {
  std::istringstream words(text);
  std::string time, period, more;
  const auto digits = [](const std::string& x) { return !x.empty() && x.find_first_not_of("0123456789") == x.npos; };
  if (!(words >> time >> period) || words >> more || !digits(time) || !digits(period) || std::stod(period) == 0) return no_quota;
  return std::stod(time) / std::stod(period);
}

/// The least quota of this process's control group and of those around it (both versions), in processors. cli/threads.py reads them alike for
/// torch, before there is a library to ask.
inline double processors_allowed(const std::string& root = "") {
  const auto read = [](const std::string& path) {
    std::ifstream file(path);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  double least = no_quota;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const std::size_t kind = line.find(':'), group = kind == line.npos ? kind : line.find(':', kind + 1);
    if (group == line.npos) continue;
    const std::string kinds = line.substr(kind + 1, group - kind - 1), top = root + "/sys/fs/cgroup" + (kinds.empty() ? "" : "/cpu");
    if (!kinds.empty() && ("," + kinds + ",").find(",cpu,") == kinds.npos) continue;
    for (std::string at = line.substr(group + 1);;) {
      const std::string place = top + at + "/";
      least = std::min(least, quota_of(kinds.empty() ? read(place + "cpu.max") : read(place + "cpu.cfs_quota_us") + " " + read(place + "cpu.cfs_period_us")));
      const std::size_t cut = at.find_last_of('/');
      if (cut == at.npos) break;
      at.resize(cut);
    }
  }
  return least;
}

}  // namespace tarnn
