// The C interface: no exception leaves it.
#include <vector>

#include "runtime/c_api.h"

namespace {

using namespace tarnn;
using namespace tarnn::runtime;

constexpr int most_threads = 1024;

void check_kernels() {
  try {
    kernels();
  } catch (const std::runtime_error& error) {
    throw NoProcessor(error.what());
  }
}

int read(tarnn_state* state, const std::int64_t* tokens, const std::int64_t* counts, bool one_each, int threads, float* logits) noexcept {
  return guarded([&] {
    need(state, "the state"), need(tokens, "tokens"), need(logits, "logits"), need(one_each || counts, "counts");
    if (threads < 1 || threads > most_threads) throw std::invalid_argument("threads are from 1 to " + std::to_string(most_threads) + "; got " + std::to_string(threads) + ".");
    Sequences& s = state->sequences;
    s.read(tokens, one_each ? std::span<const Index>() : std::span(counts, static_cast<std::size_t>(s.count())), threads, logits);
  });
}

}  // namespace

extern "C" {

const char* tarnn_error(void) { return sentence; }

int tarnn_open(const char* path, tarnn_program** program) {
  return guarded([&] {
    need(path, "the path"), need(program, "the place of the program");
    check_kernels();
    *program = new tarnn_program{std::make_shared<const PackedFile>(read_packed_file(path))};
  });
}

int tarnn_open_bytes(const void* bytes, size_t size, tarnn_program** program) {
  return guarded([&] {
    need(bytes, "the packed file"), need(program, "the place of the program");
    check_kernels();
    *program = new tarnn_program{std::make_shared<const PackedFile>(read_packed_bytes(std::span(static_cast<const char*>(bytes), size)))};
  });
}

void tarnn_close(tarnn_program* program) { delete program; }

int64_t tarnn_vocab_size(const tarnn_program* program) { return program->file->opened->program.num_tokens; }
int64_t tarnn_num_outputs(const tarnn_program* program) { return program->file->opened->program.num_outputs; }
int64_t tarnn_num_positions(const tarnn_program* program) { return program->file->opened->program.limit; }

int tarnn_new(const tarnn_program* program, int64_t sequences, tarnn_state** state) {
  return guarded([&] {
    need(program, "the program"), need(state, "the place of the state");
    *state = new tarnn_state{Sequences(program->file, sequences)};
  });
}

void tarnn_free(tarnn_state* state) { delete state; }

int64_t tarnn_sequences(const tarnn_state* state) { return state->sequences.count(); }

int64_t tarnn_position(const tarnn_state* state, int64_t sequence) {
  return sequence < 0 || sequence >= state->sequences.count() ? -1 : state->sequences.position(sequence);
}

int tarnn_read(tarnn_state* state, const int64_t* tokens, const int64_t* counts, int threads, float* logits) {
  return read(state, tokens, counts, false, threads, logits);
}

int tarnn_step(tarnn_state* state, const int64_t* tokens, int threads, float* logits) { return read(state, tokens, nullptr, true, threads, logits); }

int tarnn_fork(const tarnn_state* state, const int64_t* which, int64_t count, tarnn_state** copy) {
  return guarded([&] {
    need(state, "the state"), need(copy, "the place of the copy");
    std::vector<Index> all;
    for (Index i = 0; !which && i < state->sequences.count(); ++i) all.push_back(i);
    if (which && count < 1) throw std::invalid_argument("a copy has 1 sequence or more; got " + std::to_string(count) + ".");
    *copy = new tarnn_state{state->sequences.copy(which ? std::span(which, static_cast<std::size_t>(count)) : std::span<const Index>(all))};
  });
}

int tarnn_save(const tarnn_state* state, void* bytes, size_t room, size_t* size) {
  return guarded([&] {
    need(state, "the state"), need(size, "the place of the size");
    const std::size_t needed = state->sequences.saved_bytes();
    if (bytes && room < needed) throw std::invalid_argument("the state takes " + std::to_string(needed) + " bytes; got room for " + std::to_string(room) + ". Ask for the size first, with null bytes.");
    if (bytes) state->sequences.save(static_cast<char*>(bytes));
    *size = needed;
  });
}

int tarnn_load(const tarnn_program* program, const void* bytes, size_t size, tarnn_state** state) {
  return guarded([&] {
    need(program, "the program"), need(bytes, "the saved state"), need(state, "the place of the state");
    *state = new tarnn_state{Sequences::load(program->file, std::span(static_cast<const char*>(bytes), size))};
  });
}

}  // extern "C"
