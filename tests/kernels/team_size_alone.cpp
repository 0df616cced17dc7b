// How many threads a call takes, for tests: `quota ROOT` prints the processors that files below ROOT allow, and `size ASKED PROCESSORS PHASES BYTES
// TASKS` the threads of such a call.
#include "runtime/team_size.h"

#include <cstdio>
#include <cstdlib>

int main(int count, char** words) {
  if (count == 3) std::printf("%g\n", tarnn::processors_allowed(words[2]));
  if (count == 7) std::printf("%lld\n", static_cast<long long>(tarnn::team_size(std::atoll(words[2]), std::atof(words[3]), {std::atoll(words[4]), std::atof(words[5]), std::atoll(words[6])})));
  return 0;
}
