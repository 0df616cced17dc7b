// Sequences of a packed program: what they keep, and how they read.
#include "runtime/sequences.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>

#include "common/threads.h"

namespace tarnn::runtime {
namespace {

constexpr char magic[8] = {'t', 'a', 'r', 'n', 'n', 's', 't', '1'};
constexpr Index most_sequences = Index(1) << 20;
constexpr std::size_t identity_bytes = 64;

/// Bytes of n sequences in a state that does not grow, or of n tokens of one that does.
std::size_t bytes_of(const State& s, Index n) {
  const Index each = s.size * static_cast<Index>(s.of == State::Of::counts ? sizeof(Index) : sizeof(float));
  std::size_t bytes = 0;
  if (__builtin_mul_overflow(each, n, &bytes)) throw std::bad_alloc();
  return bytes;
}

/// FNV-1a, of eight bytes at a time where there are so many.
std::uint64_t hash_of(const char* at, std::size_t bytes) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (std::size_t n; bytes; at += n, bytes -= n) {
    std::uint64_t word = 0;
    std::memcpy(&word, at, n = std::min(bytes, sizeof word));
    hash = (hash ^ word) * 0x100000001b3;
    hash ^= hash >> 32;
  }
  return hash;
}

/// Saved bytes, one piece after the other.
class Saved {
 public:
  explicit Saved(std::span<const char> all) : left_(all) {}
  const char* take(std::size_t bytes) {
    if (bytes > left_.size()) throw BadState("the saved state is cut short; give all bytes that tarnn_save wrote.");
    const char* at = left_.data();
    left_ = left_.subspan(bytes);
    return at;
  }
  Index number() {
    Index x = 0;
    std::memcpy(&x, take(sizeof x), sizeof x);
    return x;
  }
  std::size_t left() const { return left_.size(); }

 private:
  std::span<const char> left_;
};

}  // namespace

Zeros::Zeros(std::size_t bytes) {
  if (!bytes) return;
  if (bytes > std::numeric_limits<std::size_t>::max() / 4) throw std::bad_alloc();
  const std::size_t whole = (bytes + 63) / 64 * 64;
  at_.reset(static_cast<char*>(std::aligned_alloc(64, whole)));
  if (!at_) throw std::bad_alloc();
  std::memset(at_.get(), 0, whole);
}

Sequences::Sequences(std::shared_ptr<const PackedFile> file, Index count) : file_(std::move(file)) {
  if (count < 1 || count > most_sequences) throw std::invalid_argument("a state has from 1 to " + std::to_string(most_sequences) + " sequences; got " + std::to_string(count) + ".");
  positions_.resize(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < states().size(); ++i) {
    const State& s = states()[i];
    Part& part = parts_.emplace_back();
    if (s.grows()) {
      part.caches.resize(positions_.size());
      continue;
    }
    part.memory = Zeros(bytes_of(s, count));
    if (s.of == State::Of::numbers && file_->fills[i] != 0) std::fill_n(reinterpret_cast<float*>(part.memory.at()), s.size * count, file_->fills[i]);
  }
}

/// A cache's tokens move, head by head, into one with room for more.
void Sequences::grow(const State& s, Cache& cache, Index length, Index capacity) {
  if (capacity <= cache.capacity) return;
  Cache larger{Zeros(bytes_of(s, capacity)), capacity};
  const std::size_t token = static_cast<std::size_t>(s.size / s.heads) * sizeof(float);
  for (Index h = 0; length && h < s.heads; ++h)
    std::memcpy(larger.memory.at() + static_cast<std::size_t>(h * capacity) * token, cache.memory.at() + static_cast<std::size_t>(h * cache.capacity) * token, static_cast<std::size_t>(length) * token);
  cache = std::move(larger);
}

/// Half as much again as is needed, so that a token seldom moves all others.
void Sequences::make_room(const ProgramJob& job) {
  for (std::size_t i = 0; i < states().size(); ++i)
    for (std::size_t j = 0; states()[i].grows() && j < positions_.size(); ++j) {
      const Index needed = positions_[j] + job.tokens_of(static_cast<Index>(j));
      Cache& cache = parts_[i].caches[j];
      if (needed > cache.capacity) grow(states()[i], cache, positions_[j], needed + std::min(needed / 2 + 16, file_->opened->program.limit - needed));
    }
}

void Sequences::give(ProgramJob& job, const Index* tokens, std::span<const Index> counts, std::vector<float>& extra, float* logits) {
  const Program& p = file_->opened->program;
  Call& c = job.call;
  c.b = count(), c.most_rows = 1, c.ids = tokens, c.out = logits;
  c.positions = job.positions.data();
  job.starts.push_back(0);
  for (Index i = 0; i < c.b; ++i) {
    const Index n = counts.empty() ? 1 : counts[static_cast<std::size_t>(i)];
    job.starts.push_back(job.starts.back() + n);
    c.most_rows = std::max(c.most_rows, n);
    if (!counts.empty()) job.sequences.insert(job.sequences.end(), static_cast<std::size_t>(n), i);
  }
  if (!counts.empty()) c.sequences = job.sequences.data(), c.starts = job.starts.data();
  check_tokens(*file_->opened, c);
  make_room(job);
  job.grown.reserve(parts_.size() * positions_.size());  // so that nothing moves
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    Memory memory{};
    if (states()[i].of == State::Of::counts) memory.counts = reinterpret_cast<Index*>(part.memory.at());
    else memory.at = reinterpret_cast<float*>(part.memory.at());
    if (!part.caches.empty()) memory.grown = job.grown.data() + job.grown.size();
    for (const Cache& x : part.caches) job.grown.push_back({x.memory.at(), Type::float32, x.capacity});
    job.memories.push_back(memory);
  }
  c.memories = job.memories.data(), c.extra_width = p.phases[0].rows[0].out().size();
  if (!p.extra) return;
  extra.resize(static_cast<std::size_t>(c.num_rows * c.extra_width));
  for (Index row = 0; row < c.num_rows; ++row) file_->positions(c.position(row), c.extra_width, extra.data() + row * c.extra_width);
  c.extra = extra.data();
}

void Sequences::read(const Index* tokens, std::span<const Index> counts, Index threads, float* logits) {
  Index total = counts.empty() ? count() : 0;
  for (const Index n : counts)
    if (n < 0 || __builtin_add_overflow(total, n, &total) || total > Index(1) << 40) throw std::invalid_argument("each sequence reads 0 tokens or more; got " + std::to_string(n) + ".");
  if (total == 0) return;
  const auto job = new_job(file_->opened, total, positions_, threads);
  std::vector<float> extra;
  give(*job, tokens, counts, extra, logits);
  const FlushDenormals flush;
  run_blocks(job);
  for (Index i = 0; i < count(); ++i) positions_[static_cast<std::size_t>(i)] += job->tokens_of(i);
}

Sequences Sequences::copy(std::span<const Index> which) const {
  Sequences other(file_, static_cast<Index>(which.size()));
  for (std::size_t j = 0; j < which.size(); ++j) {
    const Index from = which[j];
    if (from < 0 || from >= count()) throw std::invalid_argument("sequences are 0 to " + std::to_string(count() - 1) + "; got " + std::to_string(from) + ".");
    other.positions_[j] = position(from);
  }
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const State& s = states()[i];
    const std::size_t each = bytes_of(s, 1);
    for (std::size_t j = 0; j < which.size(); ++j) {
      const auto from = static_cast<std::size_t>(which[j]);
      if (!s.grows()) {
        if (each) std::memcpy(other.parts_[i].memory.at() + j * each, parts_[i].memory.at() + from * each, each);
        continue;
      }
      const Cache& cache = parts_[i].caches[from];
      Cache& to = other.parts_[i].caches[j];
      to = {Zeros(bytes_of(s, cache.capacity)), cache.capacity};
      if (cache.capacity) std::memcpy(to.memory.at(), cache.memory.at(), bytes_of(s, cache.capacity));
    }
  }
  return other;
}

// Saved: magic, the identity of the program, how many sequences, their positions; each state's numbers, or of one that grows each sequence's
// tokens, (heads, position, size / heads); and a hash of all that.

std::size_t Sequences::saved_bytes() const {
  std::size_t bytes = sizeof magic + identity_bytes + sizeof(Index) * (1 + positions_.size()) + sizeof(std::uint64_t);
  for (const State& s : states()) {
    Index n = s.grows() ? 0 : count();
    for (const Index position : positions_) n += s.grows() ? position : 0;
    bytes += bytes_of(s, n);
  }
  return bytes;
}

void Sequences::save(char* to) const {
  char* const begin = to;
  const auto put = [&](const void* from, std::size_t bytes) {
    if (bytes) std::memcpy(to, from, bytes);
    to += bytes;
  };
  const Index n = count();
  put(magic, sizeof magic), put(file_->identity.data(), identity_bytes), put(&n, sizeof n);
  put(positions_.data(), positions_.size() * sizeof(Index));
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const State& s = states()[i];
    if (!s.grows()) put(parts_[i].memory.at(), bytes_of(s, n));
    const std::size_t token = static_cast<std::size_t>(s.size / s.heads) * sizeof(float);
    for (std::size_t j = 0; s.grows() && j < positions_.size(); ++j) {
      const Cache& cache = parts_[i].caches[j];
      for (Index h = 0; positions_[j] && h < s.heads; ++h) put(cache.memory.at() + static_cast<std::size_t>(h * cache.capacity) * token, static_cast<std::size_t>(positions_[j]) * token);
    }
  }
  const std::uint64_t hash = hash_of(begin, static_cast<std::size_t>(to - begin));
  put(&hash, sizeof hash);
}

Sequences Sequences::load(std::shared_ptr<const PackedFile> file, std::span<const char> all) {
  Saved saved(all);
  if (std::memcmp(saved.take(sizeof magic), magic, sizeof magic)) throw BadState("these bytes are no saved state; give those that tarnn_save wrote.");
  if (file->identity.compare(0, identity_bytes, saved.take(identity_bytes), identity_bytes)) throw BadState("the saved state is of another program; open the packed file that it was made with.");
  const Index n = saved.number();
  if (n < 1 || n > most_sequences || static_cast<std::size_t>(n) > saved.left() / sizeof(Index)) throw BadState("the saved state is damaged: it has " + std::to_string(n) + " sequences. Make it anew.");
  Saved places = saved;  // sizes first: no memory is taken for a damaged state
  saved.take(static_cast<std::size_t>(n) * sizeof(Index));
  const Index limit = file->opened->program.limit;
  std::vector<Index> positions;
  for (Index i = 0; i < n; ++i)
    if (positions.push_back(places.number()); positions.back() < 0 || positions.back() > limit) throw BadState("the saved state is damaged: a sequence has " + std::to_string(positions.back()) + " tokens. Make it anew.");
  Saved sizes = saved;
  for (const State& s : file->opened->program.states)
    for (std::size_t i = 0; i < positions.size(); ++i) {
      const std::size_t each = bytes_of(s, 1), tokens = s.grows() ? static_cast<std::size_t>(positions[i]) : 1;
      if (each && tokens > sizes.left() / each) throw BadState("the saved state is cut short; give all bytes that tarnn_save wrote.");
      sizes.take(each * tokens);
    }
  std::uint64_t hash = 0;
  if (sizes.left() != sizeof hash) throw BadState("the saved state is cut short or too long; give all bytes that tarnn_save wrote, and no others.");
  std::memcpy(&hash, sizes.take(sizeof hash), sizeof hash);
  if (hash != hash_of(all.data(), all.size() - sizeof hash)) throw BadState("the saved state is damaged: its bytes are not those that were written. Make it anew.");
  Sequences made(std::move(file), n);
  made.positions_ = std::move(positions);
  for (std::size_t i = 0; i < made.parts_.size(); ++i) {
    const State& s = made.states()[i];
    if (const std::size_t bytes = s.grows() ? 0 : bytes_of(s, n)) std::memcpy(made.parts_[i].memory.at(), saved.take(bytes), bytes);
    if (s.of == State::Of::counts) {
      const auto* counts = reinterpret_cast<const Index*>(made.parts_[i].memory.at());
      if (!std::equal(counts, counts + n, made.positions_.begin())) throw BadState("the saved state is damaged: its counts are not those of its tokens. Make it anew.");
    }
    for (std::size_t j = 0; s.grows() && j < made.positions_.size(); ++j) {
      const Index length = made.positions_[j];
      Cache& cache = made.parts_[i].caches[j];
      cache = {Zeros(bytes_of(s, length)), length};
      if (length) std::memcpy(cache.memory.at(), saved.take(bytes_of(s, length)), bytes_of(s, length));
    }
  }
  return made;
}

}  // namespace tarnn::runtime
