// Packed programs by the C interface: two callers at once, each with several threads, give the bits of one thread. Built by itself, also with
// ThreadSanitizer (tests/sanitize.sh). Usage: threads_alone [.SUFFIX] FILE...; prints "fine". With a suffix it writes the logits of each file beside it
// (tests/aarch64.sh).
#include "runtime/tarnn.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace {

using Logits = std::vector<float>;

void check(int code) {
  if (code == TARNN_OK) return;
  std::printf("%d: %s\n", code, tarnn_error());
  std::exit(1);
}

/// A prompt of several blocks of rows, single tokens, a fork, and a prompt for some of the sequences: what all of them put out.
Logits read(const tarnn_program* program, int threads) {
  const bool is_long = tarnn_num_positions(program) > 1200;  // then keys are in several blocks
  const std::int64_t lengths[] = {is_long ? 1100 : 33, 2, is_long ? 530 : 19}, later[] = {0, 5, 1}, which[] = {2, 0, 2};
  const std::int64_t vocabulary = tarnn_vocab_size(program), outputs = tarnn_num_outputs(program);
  std::vector<std::int64_t> tokens;
  for (std::int64_t i = 0; i < lengths[0] + lengths[1] + lengths[2]; ++i) tokens.push_back((7 * i * i + 3 * i) % vocabulary);
  tarnn_state *state = nullptr, *fork = nullptr;
  Logits all;
  const auto keep = [&](auto call) {
    Logits logits(static_cast<std::size_t>(3 * outputs));
    check(call(logits.data()));
    all.insert(all.end(), logits.begin(), logits.end());
  };
  check(tarnn_new(program, 3, &state));
  keep([&](float* to) { return tarnn_read(state, tokens.data(), lengths, threads, to); });
  for (int i = 0; i < 3; ++i) keep([&](float* to) { return tarnn_step(state, tokens.data() + i, threads, to); });
  check(tarnn_fork(state, which, 3, &fork));
  keep([&](float* to) { return tarnn_read(fork, tokens.data() + 5, later, threads, to); });
  keep([&](float* to) { return tarnn_step(state, tokens.data() + 9, threads, to); });
  tarnn_free(state), tarnn_free(fork);
  return all;
}

}  // namespace

int main(int count, char** files) {
  if (count < 2) return 2;
  const bool writes = files[1][0] == '.';
  for (int i = 1 + writes; i < count; ++i) {
    tarnn_program* program = nullptr;
    check(tarnn_open(files[i], &program));
    const Logits expected = read(program, 1);
    if (writes) {
      std::ofstream to(std::string(files[i]) + files[1], std::ios::binary);
      to.write(reinterpret_cast<const char*>(expected.data()), static_cast<std::streamsize>(sizeof(float) * expected.size()));
    }
    for (int round = 0; round < 3; ++round) {
      Logits other, mine;
      std::thread second([&] { other = read(program, 3); });
      mine = read(program, 4);
      second.join();
      const auto same = [&](const Logits& x) { return std::memcmp(x.data(), expected.data(), sizeof(float) * expected.size()) == 0; };
      if (!same(mine) || !same(other)) return std::printf("not so: %s differs by threads\n", files[i]), 1;
    }
    tarnn_close(program);
  }
  std::puts("fine");
}
