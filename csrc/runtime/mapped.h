// A file's bytes, mapped into memory.
#pragma once

#include <cerrno>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>

#ifndef __wasm__
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace tarnn::runtime {

struct NotMapped : std::runtime_error {
  using std::runtime_error::runtime_error;
};

#ifdef __wasm__
/// There are no files: programs are opened from memory.
struct Mapped {
  explicit Mapped(const char*) { throw NotMapped("can't be opened: there are no files here; give its bytes"); }
  std::span<const char> bytes() const { return {}; }
};
#else
/// A file's bytes, read only.
class Mapped {
 public:
  explicit Mapped(const char* path) {
    const int file = ::open(path, O_RDONLY | O_CLOEXEC);
    struct stat about {};
    if (file < 0 || fstat(file, &about)) {
      const int error = errno;
      if (file >= 0) ::close(file);
      throw NotMapped(std::string("can't be opened: ") + std::strerror(error));
    }
    size_ = S_ISREG(about.st_mode) ? static_cast<std::size_t>(about.st_size) : 0;
    void* at = size_ ? mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
    ::close(file);
    if (at == MAP_FAILED) throw NotMapped("is empty, or no file that can be mapped");
    at_ = static_cast<const char*>(at);
  }
  ~Mapped() { munmap(const_cast<char*>(at_), size_); }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;
  std::span<const char> bytes() const { return {at_, size_}; }

 private:
  const char* at_;
  std::size_t size_;
};
#endif

}  // namespace tarnn::runtime
