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

/// f(i, scratch) for i = 0 … tasks − 1, on torch's threads.
template <typename P, typename F>
void parallel(const P& p, Index tasks, std::size_t bytes, F f) {
  p.run(tasks, p.threads, bytes, [](void* context, Index i, void* scratch) { (*static_cast<F*>(context))(i, scratch); }, &f);
}

/// The same, f(i, layout): each task has a Layout(scratch, arguments…) of its own.
template <typename Layout, typename P, typename F, typename... A>
void parallel_with(const P& p, Index tasks, F f, const A&... arguments) {
  Scratch counting(nullptr);
  const Layout size_only(counting, arguments...);
  parallel(p, tasks, counting.used(), [&](Index i, void* memory) {
    Scratch scratch(memory);
    Layout at(scratch, arguments...);
    f(i, at);
  });
}

}  // namespace TARNN_ISA
}  // namespace tarnn
