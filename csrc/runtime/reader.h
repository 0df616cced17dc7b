// The numbers of a planned program one after the other, each checked.
#pragma once

#include <stdexcept>
#include <string>

#include "runtime/program.h"

namespace tarnn::runtime {

class Reader {
 public:
  static constexpr Index largest = Index(1) << 28;  // of any size, so that a matrix has fewer than 2⁶³ bytes
  static constexpr Index most = 1 << 20;            // of any list
  static constexpr Index beyond = 4 * panel;        // bytes behind the last tensor of a block, which whole vectors may read

  Reader(const Index* numbers, Index count, const void* block, Index bytes)
      : begin_(numbers), at_(numbers), count_(count), block_(static_cast<const char*>(block)), bytes_(bytes) {
    constexpr Index header = 3;
    if (count < header) throw std::runtime_error("the program is cut short: it has no header.");
    if (*at_++ != program_version)
      throw std::runtime_error("the program has version " + std::to_string(numbers[0]) + ", and these compiled kernels read version " +
                               std::to_string(program_version) + ": compile them again, or pack the weights again.");
    if (*at_++ != count)
      throw std::runtime_error("the program is cut short or too long: it should have " + std::to_string(numbers[1]) + " numbers, and has " +
                               std::to_string(count) + ".");
    if (*at_++ != bytes)
      throw std::runtime_error("the program is for a block of " + std::to_string(numbers[2]) + " bytes; this block has " + std::to_string(bytes) + ".");
  }

  Index number(const char* what, Index least, Index greatest) {
    if (at_ == begin_ + count_) throw std::runtime_error(std::string("the program is cut short: it ends before ") + what + ".");
    const Index x = *at_++;
    if (x < least || x > greatest) fail(what, "must be from " + std::to_string(least) + " to " + std::to_string(greatest) + "; got " + std::to_string(x));
    return x;
  }

  /// `n` numbers of type T in the block.
  template <typename T>
  const T* place(const char* what, Index n, bool needed = true) {
    const Index at = number(what, -1, bytes_), length = n * static_cast<Index>(sizeof(T));
    if (at < 0) return needed ? fail(what, "is missing"), nullptr : nullptr;
    if (at % 64 || length < 0 || length > bytes_ - beyond - at)
      fail(what, std::to_string(length) + " bytes from byte " + std::to_string(at) + " on, do not lie in the block of " + std::to_string(bytes_));
    return reinterpret_cast<const T*>(block_ + at);
  }

  Vector vector() {
    const Index n = number("the length of a vector", 0, largest);
    return {place<float>("a vector", whole_panels(n), n > 0), n};
  }

  Matrix matrix() {
    Matrix w{};
    w.format = static_cast<Format>(number("a format", 0, 3));
    w.inputs = number("inputs", 1, largest), w.outputs = number("outputs", 1, 4 * largest);
    const Index panels = whole_panels(w.outputs);
    w.at = place<char>("a matrix", panels / panel * bytes_of_panel(w.format, w.inputs));
    w.bias = place<float>("a bias", panels);
    w.scale = place<float>("factors", panels, w.format == Format::int8);
    w.sums = place<float>("sums", panels, w.takes_bytes());
    if ((w.scale && w.format != Format::int8) || (w.sums && !w.takes_bytes())) fail("a matrix", "has what its format lacks");
    return w;
  }

  void end() const {
    if (at_ != begin_ + count_) throw std::runtime_error("the program is too long: " + std::to_string(begin_ + count_ - at_) + " numbers are left over.");
  }

  [[noreturn]] void fail(const char* what, const std::string& why) const {
    throw std::runtime_error("the program is damaged, at its number " + std::to_string(at_ - begin_ - 1) + ": " + what + " " + why + ".");
  }

 private:
  const Index *begin_, *at_;
  Index count_;
  const char* block_;
  Index bytes_;
};

}  // namespace tarnn::runtime
