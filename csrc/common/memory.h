// Memory of a call and of a task, and how tasks are run.
#pragma once

#include <cstdlib>

#include "common/threads.h"
#include "simd/vector.h"

namespace tarnn {
namespace TARNN_ISA {

TARNN_INLINE Index smaller(Index a, Index b) { return a < b ? a : b; }

/// Memory that is given back, at a multiple of 64 bytes; none for n = 0. Throws OutOfMemory.
template <typename T>
class Owned {
 public:
  explicit Owned(Index n) : data_(nullptr) {
    const std::size_t bytes = static_cast<std::size_t>(n) * sizeof(T);
    if (bytes && !(data_ = static_cast<T*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)))) throw OutOfMemory(bytes);
  }
  ~Owned() { std::free(data_); }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  T* get() { return data_; }
  const T* get() const { return data_; }

 private:
  T* data_;
};

/// The length of a tile's rows: whole vectors, and one more, so that rows don't fall on the same cache sets.
template <typename T>
constexpr Index padded(Index n) {
  return whole<T>(n) + width<T>;
}

/// Hands out pieces of a block of memory, each at a multiple of 64 bytes; without a block it only counts.
class Scratch {
 public:
  explicit Scratch(void* block) : begin_(static_cast<char*>(block)) {}
  template <typename T>
  T* take(Index n) {
    char* at = begin_ + used_;
    used_ += (static_cast<std::size_t>(n) * sizeof(T) + 63) / 64 * 64;
    return begin_ ? reinterpret_cast<T*>(at) : nullptr;
  }
  std::size_t used() const { return used_; }

 private:
  char* begin_;
  std::size_t used_ = 0;
};

/// What a task needs that works on a bundle of so many heads.
template <typename Layout, typename P, typename S>
std::size_t bytes_of(const P& p, const S& n, Index heads) {
  Scratch counting(nullptr);
  Layout layout(counting, p, n, heads);
  return counting.used();
}

/// f(i, scratch) for i = 0 … tasks − 1, on torch's threads.
template <typename P, typename F>
void parallel(const P& p, Index tasks, std::size_t bytes, F f) {
  p.run(tasks, p.threads, bytes, [](void* context, Index i, void* scratch) { (*static_cast<F*>(context))(i, scratch); }, &f);
}

}  // namespace TARNN_ISA
}  // namespace tarnn
