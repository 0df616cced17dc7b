// How many threads a call of a program takes.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <string>
#include <string_view>

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

/// The first word of a text, which is cut off.
inline std::string_view word_of(std::string_view& text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \n"), text.size()));
  const std::string_view word = text.substr(0, text.find_first_of(" \n"));
  text.remove_prefix(word.size());
  return word;
}

/// A number written in digits alone; 0 for anything else.
inline double digits_of(std::string_view word) {
  unsigned long long x = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), x);
  return error == std::errc() && end == word.data() + word.size() ? static_cast<double>(x) : 0;
}

/// "200000 100000": 2 processors. Anything else: no quota.
inline double quota_of(std::string_view text) {
  const double time = digits_of(word_of(text)), period = digits_of(word_of(text));
  return time == 0 || period == 0 || !word_of(text).empty() ? no_quota : time / period;
}

/// What a file has; empty where it can't be read.
inline std::string text_of_file(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), [](std::FILE* f) { return f ? std::fclose(f) : 0; });
  std::string text;
  char piece[1024];
  for (std::size_t n; file && (n = std::fread(piece, 1, sizeof piece, file.get())) > 0;) text.append(piece, n);
  return text;
}

/// The least quota of this process's control group and of those around it (both versions), in processors. cli/threads.py reads them alike for
/// torch, before there is a library to ask.
inline double processors_allowed(const std::string& root = "") {
  double least = no_quota;
#ifdef __linux__
  const std::string groups = text_of_file(root + "/proc/self/cgroup");
  for (std::size_t begin = 0, end; begin < groups.size(); begin = end + 1) {
    end = std::min(groups.find('\n', begin), groups.size());
    const std::string line = groups.substr(begin, end - begin);
    const std::size_t kind = line.find(':'), group = kind == line.npos ? kind : line.find(':', kind + 1);
    if (group == line.npos) continue;
    const std::string kinds = line.substr(kind + 1, group - kind - 1), top = root + "/sys/fs/cgroup" + (kinds.empty() ? "" : "/cpu");
    if (!kinds.empty() && ("," + kinds + ",").find(",cpu,") == kinds.npos) continue;
    for (std::string at = line.substr(group + 1);;) {
      const std::string place = top + at + "/";
      least = std::min(least, quota_of(kinds.empty() ? text_of_file(place + "cpu.max") : text_of_file(place + "cpu.cfs_quota_us") + " " + text_of_file(place + "cpu.cfs_period_us")));
      const std::size_t cut = at.find_last_of('/');
      if (cut == at.npos) break;
      at.resize(cut);
    }
  }
#else
  (void)root;
#endif
  return least;
}

}  // namespace tarnn
