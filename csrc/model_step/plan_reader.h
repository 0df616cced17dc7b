// Reads the numbers of a plan one after the other, and checks each: none that is wrong may lead a kernel out of its memory.
#pragma once

#include <stdexcept>
#include <string>

#include "model_step/plan.h"

namespace tarnn {

constexpr Index most_of_plan = Index(1) << 28;  // of any size, so that a matrix has fewer than 2⁶³ bytes

/// The numbers of a plan, in their order. A place is where in the block something begins, −1: nowhere.
class Plan {
 public:
  Plan(const Index* numbers, Index count, const void* block, Index bytes)
      : begin_(numbers), at_(numbers), count_(count), block_(static_cast<const char*>(block)), bytes_(bytes) {
    constexpr Index header = 3;
    if (count < header) throw std::runtime_error("the plan is cut short: it has no header.");
    if (*at_++ != plan_version)
      throw std::runtime_error("the plan has version " + std::to_string(numbers[0]) + ", and these compiled kernels read version " +
                               std::to_string(plan_version) + ": compile them again, or pack the weights again.");
    if (*at_++ != count)
      throw std::runtime_error("the plan is cut short or too long: it should have " + std::to_string(numbers[1]) +
                               " numbers, and has " + std::to_string(count) + ".");
    if (*at_++ != bytes)
      throw std::runtime_error("the plan is for a block of " + std::to_string(numbers[2]) + " bytes; this block has " +
                               std::to_string(bytes) + ".");
  }

  Index number(const char* what, Index least, Index largest) {
    if (at_ == begin_ + count_) throw std::runtime_error(std::string("the plan is cut short: it ends before ") + what + ".");
    const Index x = *at_++;
    if (x < least || x > largest)
      fail(what, least == largest ? "must be " + std::to_string(least) + "; got " + std::to_string(x) : "must be from " + std::to_string(least) + " to " + std::to_string(largest) + "; got " + std::to_string(x));
    return x;
  }
  /// n numbers, where they stand in the plan.
  const Index* numbers(const char* what, Index n, Index least, Index largest) {
    const Index* first = at_;
    for (Index i = 0; i < n; ++i) number(what, least, largest);
    return first;
  }
  Index size(const char* what) { return number(what, 1, most_of_plan); }
  bool flag(const char* what) { return number(what, 0, 1) != 0; }

  /// `n` numbers of type T; null: nowhere.
  template <typename T>
  const T* place(const char* what, Index n, bool needed) {
    const Index at = number(what, -1, bytes_);
    if (at < 0) return needed ? fail(what, "is missing"), nullptr : nullptr;
    const Index length = n * static_cast<Index>(sizeof(T));
    if (at % 64 || length < 0 || length > bytes_ - at)
      fail(what, std::to_string(length) + " bytes from byte " + std::to_string(at) + " on, do not lie in the block of " + std::to_string(bytes_));
    return reinterpret_cast<const T*>(block_ + at);
  }
  const float* vector(const char* what, Index n, bool needed) { return place<float>(what, whole_panels(n), needed); }

  Norm norm(const char* what, Index width, bool needed, bool bias) {
    const float* gain = vector(what, width, needed);
    return {gain, vector(what, width, needed && bias)};
  }

  /// of_floats: the rows that it is multiplied with are never rounded to bytes.
  Matrix matrix(const char* what, Index inputs, Index outputs, bool of_floats = false) {
    if (inputs > most_of_plan || outputs > 4 * most_of_plan) fail(what, "is too large");
    Matrix w{};
    w.format = static_cast<Format>(number(what, 0, of_floats ? 1 : 3));
    w.inputs = number(what, inputs, inputs), w.outputs = number(what, outputs, outputs);
    w.at = place<char>(what, whole_panels(outputs) / panel * bytes_of_panel(w.format, inputs), true);
    w.bias = vector(what, outputs, true);
    w.scale = vector(what, outputs, w.format == Format::int8);
    w.sums = vector(what, outputs, w.takes_bytes());
    return w;
  }
  /// The outputs that the next matrix says it has.
  Index outputs_of_next(const char* what) const {
    Plan ahead = *this;
    ahead.number(what, 0, 3), ahead.size(what);
    return ahead.size(what);
  }

  void end() const {
    if (at_ != begin_ + count_) throw std::runtime_error("the plan is too long: " + std::to_string(begin_ + count_ - at_) + " numbers are left over.");
  }

  [[noreturn]] void fail(const char* what, const std::string& why) const {
    throw std::runtime_error("the plan is damaged, at its number " + std::to_string(at_ - begin_ - 1) + ": " + what + " " + why + ".");
  }

 private:
  const Index *begin_, *at_;
  Index count_;
  const char* block_;
  Index bytes_;
};

}  // namespace tarnn
