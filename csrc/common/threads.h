// What a thread has while it works for a kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace tarnn {

/// While a task runs, numbers below the smallest normal one count as zero: a decaying state reaches them, and they are
/// slow by a factor of a hundred.
class FlushDenormals {
 public:
#if defined(__x86_64__) && !defined(TARNN_KEEP_DENORMALS)
  FlushDenormals() : before_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(before_ | 0x8040); }
  ~FlushDenormals() { __builtin_ia32_ldmxcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(before_ | (1ull << 24)));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" ::"r"(before_)); }

 private:
  unsigned long long before_;
#else
  FlushDenormals() {}  // WebAssembly has nothing for it
#endif
};

constexpr std::size_t large_page = 1 << 21;

/// Asks for large pages, where the system has them, for memory that is about to be written for the first time: only whole
/// ones within it.
inline void ask_for_large_pages(const void* at, std::size_t bytes) {
#ifdef __linux__
  const std::uintptr_t begin = (reinterpret_cast<std::uintptr_t>(at) + large_page - 1) / large_page * large_page;
  const std::uintptr_t end = (reinterpret_cast<std::uintptr_t>(at) + bytes) / large_page * large_page;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)at, (void)bytes;
#endif
}

/// A kernel found no memory to work with. It is thrown on the thread that called the operator, before anything is written in place.
struct OutOfMemory : std::runtime_error {
  explicit OutOfMemory(std::size_t bytes)
      : std::runtime_error("out of memory: the compiled kernels asked for " + std::to_string(bytes) +
                           " bytes to work with, and there are none; take a smaller batch or shorter sequences.") {}
};

/// Memory of a thread, kept from call to call while it is small, so that a call does not begin with page faults.
class ThreadMemory {
 public:
  /// Null where there is no memory: a thread of the pool must not throw.
  void* at_least(std::size_t bytes) {
    if (bytes > size_) {
      size_ = 0;
      block_.reset(static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)));
      if (block_) size_ = bytes;
    }
    return block_.get();
  }
  void shrink() {
    if (size_ > (1 << 20)) block_.reset(), size_ = 0;
  }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> block_;
  std::size_t size_ = 0;
};

}  // namespace tarnn
