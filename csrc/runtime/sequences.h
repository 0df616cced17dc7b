// Where some sequences stand in a packed program: their states, with room that grows, as a value that can be copied and saved.
#pragma once

#include <span>

#include "runtime/packed_file.h"

namespace tarnn::runtime {

struct BadState : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Zeros at a multiple of 64 bytes. Throws std::bad_alloc where there is no memory.
class Zeros {
 public:
  Zeros() = default;
  explicit Zeros(std::size_t bytes);
  char* at() const { return at_.get(); }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> at_;
};

class Sequences {
 public:
  /// Of `count` sequences that have read nothing.
  Sequences(std::shared_ptr<const PackedFile> file, Index count);

  /// Throws BadState for bytes that `save` did not write, or not for this program.
  static Sequences load(std::shared_ptr<const PackedFile> file, std::span<const char> saved);
  std::size_t saved_bytes() const;
  void save(char* to) const;

  Sequences copy(std::span<const Index> which) const;

  /// counts: tokens of each sequence, none below 0; empty: one each. Throws before anything is written.
  void read(const Index* tokens, std::span<const Index> counts, Index threads, float* logits);

  const PackedFile& file() const { return *file_; }
  Index count() const { return static_cast<Index>(positions_.size()); }
  Index position(Index i) const { return positions_[static_cast<std::size_t>(i)]; }

 private:
  /// Keys or values of one sequence, (heads, capacity, size / heads).
  struct Cache {
    Zeros memory;
    Index capacity = 0;
  };
  /// A state's tensor: of all sequences together, or a cache of each.
  struct Part {
    Zeros memory;
    std::vector<Cache> caches;
  };

  const std::vector<State>& states() const { return file_->opened->program.states; }
  void make_room(const ProgramJob& job);
  static void grow(const State& state, Cache& cache, Index length, Index capacity);
  void give(ProgramJob& job, const Index* tokens, std::span<const Index> counts, std::vector<float>& extra, float* logits);

  std::shared_ptr<const PackedFile> file_;
  std::vector<Index> positions_;
  std::vector<Part> parts_;  // of each state
};

}  // namespace tarnn::runtime
