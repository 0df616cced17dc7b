// The C interface, from texts to tokens and back.
#include <algorithm>

#include "draws/problem.h"
#include "runtime/c_api.h"

namespace {

using namespace tarnn;
using namespace tarnn::runtime;

Tokenizer tokenizer_of(const PackedFile& file) {
  const std::string_view text = file.file("tokenizer.json");
  if (text.empty() && file.opened->program.num_tokens == 256) return {};
  if (text.empty()) throw NoTokenizer("the packed file has no tokenizer; give the ids of tokens.");
  try {
    return {text, file.file("tokenizer_config.json")};
  } catch (const NoTokenizer&) {
    throw;
  } catch (const std::runtime_error& error) {
    throw NoTokenizer("its tokenizer can't be read (" + std::string(error.what()).substr(0, 200) + "); give the ids of tokens.");
  }
}

void check(const tarnn_sampling& x) {
  const auto bad = [](const char* name, const char* range, double value) { throw std::invalid_argument(std::string(name) + " must be " + range + "; got " + std::to_string(value) + "."); };
  if (!(x.temperature >= 0 && x.temperature < 1e30)) bad("temperature", "0 (greedy) or above, and finite", x.temperature);
  if (!(x.top_p > 0 && x.top_p <= 1)) bad("top_p", "above 0 and at most 1", x.top_p);
  if (!(x.min_p >= 0 && x.min_p <= 1)) bad("min_p", "from 0 (off) to 1", x.min_p);
  if (x.top_k < 0) bad("top_k", "0 (off) or above", static_cast<double>(x.top_k));
}

}  // namespace

extern "C" {

int tarnn_open_tokenizer(const tarnn_program* program, tarnn_tokenizer** tokenizer) {
  return guarded([&] {
    need(program, "the program"), need(tokenizer, "the place of the tokenizer");
    *tokenizer = new tarnn_tokenizer{tokenizer_of(*program->file)};
  });
}

void tarnn_close_tokenizer(tarnn_tokenizer* tokenizer) { delete tokenizer; }

int tarnn_encode(const tarnn_tokenizer* tokenizer, const char* text, size_t bytes, int starts, int64_t* tokens, size_t room, size_t* count) {
  return guarded([&] {
    need(tokenizer, "the tokenizer"), need(text || !bytes, "the text"), need(count, "the place of the count");
    const std::vector<Index> ids = tokenizer->tokenizer.encode({text, bytes}, starts != 0);
    if (tokens && room < ids.size()) throw std::invalid_argument("the text has " + std::to_string(ids.size()) + " tokens; got room for " + std::to_string(room) + ". Ask for the count first, with null tokens.");
    if (tokens) std::copy(ids.begin(), ids.end(), tokens);
    *count = ids.size();
  });
}

const char* tarnn_bytes_of(const tarnn_tokenizer* tokenizer, int64_t token, size_t* bytes) {
  const std::string_view text = tokenizer->tokenizer.bytes_of(token);
  *bytes = text.size();
  return text.data();
}

int tarnn_is_end(const tarnn_program* program, int64_t token) {
  const std::vector<Index>& ends = program->file->ends;
  return std::find(ends.begin(), ends.end(), token) != ends.end();
}

void tarnn_default_sampling(const tarnn_program* program, tarnn_sampling* sampling) {
  const PackedFile::Sampling& x = program->file->sampling;
  *sampling = {x.temperature, x.top_p, x.min_p, x.top_k, 0};
}

int tarnn_draw(const tarnn_program* program, const tarnn_sampling* sampling, int64_t position, const float* logits, int64_t* token) {
  return guarded([&] {
    need(program, "the program"), need(sampling, "the sampling"), need(logits, "logits"), need(token, "the place of the token");
    check(*sampling);
    const Index v = program->file->opened->program.num_outputs;
    const double numbers[Column::numbers] = {sampling->temperature, sampling->top_p, sampling->min_p, 1, 0, 0};
    const Index whole[Column::whole] = {static_cast<Index>(sampling->seed), 0, position, std::min(sampling->top_k, v), -1, 0};
    const DrawKernels& kernel = *kernels().draws;
    thread_local ThreadMemory memory;
    const std::size_t bytes = kernel.room(v);
    void* scratch = memory.at_least(bytes);
    if (!scratch) throw OutOfMemory(bytes);
    Draw draw{};
    Index drawn = -1;
    draw.v = v, draw.logits = logits, draw.numbers = numbers, draw.whole = whole, draw.token = &drawn;
    kernel.draw(draw, scratch);
    if (drawn < 0) throw std::runtime_error("the logits are no distribution (NaN or infinite): the weights or the state have diverged.");
    *token = drawn;
  });
}

}  // extern "C"
