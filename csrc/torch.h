// torch's stable C interface: what these kernels use of it. torch promises that its functions stay as they were in 2.10
// (https://docs.pytorch.org/docs/stable/notes/libtorch_stable_abi.html), so the kernels are compiled without torch, once,
// for every torch from 2.10 on. Names are torch's own; tests/kernels/test_torch_interface.py holds them against its headers.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels.h"

struct AtenTensorOpaque;
struct StableListOpaque;
struct StringOpaque;
struct TorchLibraryOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
using StableListHandle = StableListOpaque*;
using StringHandle = StringOpaque*;
using TorchLibraryHandle = TorchLibraryOpaque*;
using StableIValue = std::uint64_t;  // an argument or a result: a number, a handle, or a pointer to one that may be missing
using ParallelFunc = void (*)(std::int64_t begin, std::int64_t end, void* context);

// name, parameters. All return int32: 0, or an error; but for types of elements, which return their number.
#define TARNN_TORCH(X)                                                                                                     \
  X(aoti_torch_delete_tensor_object, (AtenTensorHandle))                                                                   \
  X(aoti_torch_get_dim, (AtenTensorHandle, std::int64_t*))                                                                 \
  X(aoti_torch_get_numel, (AtenTensorHandle, std::int64_t*))                                                               \
  X(aoti_torch_get_size, (AtenTensorHandle, std::int64_t axis, std::int64_t*))                                             \
  X(aoti_torch_get_stride, (AtenTensorHandle, std::int64_t axis, std::int64_t*))                                           \
  X(aoti_torch_get_dtype, (AtenTensorHandle, std::int32_t*))                                                               \
  X(aoti_torch_dtype_int64, ())                                                                                            \
  X(aoti_torch_dtype_float32, ())                                                                                          \
  X(aoti_torch_dtype_float64, ())                                                                                          \
  X(aoti_torch_dtype_bfloat16, ())                                                                                         \
  X(aoti_torch_dtype_float16, ())                                                                                          \
  X(torch_get_const_data_ptr, (AtenTensorHandle, const void**))                                                            \
  X(torch_get_mutable_data_ptr, (AtenTensorHandle, void**))                                                                \
  X(torch_list_size, (StableListHandle, std::size_t*))                                                                     \
  X(torch_list_get_item, (StableListHandle, std::size_t i, StableIValue*))                                                 \
  X(torch_delete_list, (StableListHandle))                                                                                 \
  X(torch_new_string_handle, (const char*, std::size_t length, StringHandle*))                                             \
  X(torch_get_num_threads, (std::uint32_t*))                                                                               \
  X(torch_parallel_for, (std::int64_t begin, std::int64_t end, std::int64_t grain, ParallelFunc, void* context))           \
  X(aoti_torch_library_init_def, (const char* name, const char* file, std::uint32_t line, TorchLibraryHandle*))            \
  X(aoti_torch_library_init_fragment, (const char* name, const char* file, std::uint32_t line, TorchLibraryHandle*))       \
  X(aoti_torch_library_init_impl, (const char* name, const char* key, const char* file, std::uint32_t line, TorchLibraryHandle*)) \
  X(aoti_torch_library_def, (TorchLibraryHandle, const char* schema))                                                      \
  X(torch_library_impl, (TorchLibraryHandle, const char* name, void (*)(StableIValue*, std::uint64_t, std::uint64_t), std::uint64_t version)) \
  X(aoti_torch_delete_library_object, (TorchLibraryHandle))

#define TARNN_DECLARE(name, parameters) __attribute__((__visibility__("default"))) std::int32_t name parameters;
extern "C" {
TARNN_TORCH(TARNN_DECLARE)
}

namespace tarnn {

inline constexpr std::uint64_t torch_version = 0x020a000000000000;  // 2.10: the oldest torch that has all of this

inline void check(std::int32_t error, const char* what) {
  if (error) throw std::runtime_error(std::string("torch refused ") + what + ".");
}
#define TARNN_TORCH_CALL(name, ...) ::tarnn::check(name(__VA_ARGS__), #name)

/// A tensor that the caller handed over; freed with this object.
class Tensor {
 public:
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  Index dim() const { return ask<Index>(aoti_torch_get_dim, "aoti_torch_get_dim"); }
  Index numel() const { return ask<Index>(aoti_torch_get_numel, "aoti_torch_get_numel"); }
  Index size(Index axis) const { return ask<Index>(aoti_torch_get_size, "aoti_torch_get_size", axis); }
  Index stride(Index axis) const { return ask<Index>(aoti_torch_get_stride, "aoti_torch_get_stride", axis); }
  const void* const_data_ptr() const { return ask<const void*>(torch_get_const_data_ptr, "torch_get_const_data_ptr"); }
  bool has_int64() const { return ask<std::int32_t>(aoti_torch_get_dtype, "aoti_torch_get_dtype") == aoti_torch_dtype_int64(); }
  bool has_float32() const { return ask<std::int32_t>(aoti_torch_get_dtype, "aoti_torch_get_dtype") == aoti_torch_dtype_float32(); }
  bool is_contiguous() const {
    Index expected = 1;
    for (Index i = dim() - 1; i >= 0; expected *= size(i--))
      if (size(i) != 1 && stride(i) != expected) return numel() == 0;
    return true;
  }
  void* mutable_data_ptr() const { return ask<void*>(torch_get_mutable_data_ptr, "torch_get_mutable_data_ptr"); }

  /// float32 for all that is none of the other three: masks and lengths are read as what they are.
  Type scalar_type() const {
    const auto number = ask<std::int32_t>(aoti_torch_get_dtype, "aoti_torch_get_dtype");
    if (number == aoti_torch_dtype_float64()) return Type::float64;
    if (number == aoti_torch_dtype_bfloat16()) return Type::bfloat16;
    return number == aoti_torch_dtype_float16() ? Type::float16 : Type::float32;
  }

 private:
  template <typename T, typename F, typename... A>
  T ask(F function, const char* name, A... arguments) const {
    T answer{};
    check(function(handle_, arguments..., &answer), name);
    return answer;
  }
  AtenTensorHandle handle_;
};

inline Index get_num_threads() {
  std::uint32_t n = 1;
  TARNN_TORCH_CALL(torch_get_num_threads, &n);
  return n;
}

/// f(begin, end) on torch's threads, for parts of at least `grain` that together are begin … end − 1.
template <typename F>
void parallel_for(Index begin, Index end, Index grain, const F& f) {
  const ParallelFunc part = [](Index first, Index last, void* context) { (*static_cast<const F*>(context))(first, last); };
  TARNN_TORCH_CALL(torch_parallel_for, begin, end, grain, part, const_cast<void*>(static_cast<const void*>(&f)));
}

// --- arguments and results

template <typename T>
struct Unboxed {  // numbers, and handles
  static T from(StableIValue value) {
    static_assert(std::is_arithmetic_v<T> || std::is_pointer_v<T>);
    T out;  // the value's first bytes, on the little-endian processors that the kernels are for
    std::memcpy(&out, &value, sizeof out);
    return out;
  }
};

template <>
struct Unboxed<Tensor> {
  static Tensor from(StableIValue value) { return Tensor(Unboxed<AtenTensorHandle>::from(value)); }
};

template <typename T>
struct Unboxed<std::optional<T>> {
  static std::optional<T> from(StableIValue value) {
    auto* at = Unboxed<StableIValue*>::from(value);
    if (!at) return std::nullopt;
    std::optional<T> out(Unboxed<T>::from(*at));
    delete at;  // torch's `new`, which its callee deletes
    return out;
  }
};

template <typename T>
struct Unboxed<std::vector<T>> {
  static std::vector<T> from(StableIValue value) {
    auto list = Unboxed<StableListHandle>::from(value);
    std::size_t size = 0;
    TARNN_TORCH_CALL(torch_list_size, list, &size);
    std::vector<T> out;
    for (std::size_t i = 0; i < size; ++i) {
      StableIValue item = 0;
      TARNN_TORCH_CALL(torch_list_get_item, list, i, &item);
      out.push_back(Unboxed<T>::from(item));
    }
    TARNN_TORCH_CALL(torch_delete_list, list);
    return out;
  }
};

inline StableIValue boxed(Index number) { return static_cast<StableIValue>(number); }

inline StableIValue boxed(const std::string& text) {
  StringHandle handle = nullptr;
  TARNN_TORCH_CALL(torch_new_string_handle, text.data(), text.size(), &handle);
  return reinterpret_cast<StableIValue>(handle);
}

template <auto function>
struct Box;

/// What torch calls: takes the arguments from its stack, and leaves the result there.
template <typename R, typename... A, R (*function)(A...)>
struct Box<function> {
  static void call(StableIValue* stack, std::uint64_t arguments, std::uint64_t results) {
    if (arguments != sizeof...(A) || results != !std::is_void_v<R>)
      throw std::logic_error("a schema of tarnn_cpu differs from its function.");
    call(stack, std::index_sequence_for<A...>());
  }
  template <std::size_t... i>
  static void call(StableIValue* stack, std::index_sequence<i...>) {
    std::tuple<A...> values{Unboxed<A>::from(stack[i])...};
    if constexpr (std::is_void_v<R>) std::apply(function, std::move(values));
    else stack[0] = boxed(std::apply(function, std::move(values)));
  }
};
#define TORCH_BOX(function) (::tarnn::Box<function>::call)

// --- operators and their schemas

class Library {
 public:
  enum class Kind { DEF, FRAGMENT, IMPL };
  Library(Kind kind, const char* name, const char* key, const char* file, std::uint32_t line, void (*fill)(Library&)) {
    if (kind == Kind::IMPL) TARNN_TORCH_CALL(aoti_torch_library_init_impl, name, key, file, line, &handle_);
    else if (kind == Kind::DEF) TARNN_TORCH_CALL(aoti_torch_library_init_def, name, file, line, &handle_);
    else TARNN_TORCH_CALL(aoti_torch_library_init_fragment, name, file, line, &handle_);
    fill(*this);
  }
  Library(const Library&) = delete;
  ~Library() { aoti_torch_delete_library_object(handle_); }

  void def(const char* schema) { TARNN_TORCH_CALL(aoti_torch_library_def, handle_, schema); }
  void impl(const char* name, void (*function)(StableIValue*, std::uint64_t, std::uint64_t)) {
    TARNN_TORCH_CALL(torch_library_impl, handle_, name, function, torch_version);
  }

 private:
  TorchLibraryHandle handle_ = nullptr;
};

}  // namespace tarnn

// Each at most once in a file, before `{ m.def(…); }` or `{ m.impl(…); }`.
#define STABLE_TORCH_LIBRARY(name, m) TARNN_LIBRARY(DEF, name, nullptr, tarnn_definitions, m)
#define STABLE_TORCH_LIBRARY_FRAGMENT(name, m) TARNN_LIBRARY(FRAGMENT, name, nullptr, tarnn_definitions, m)
#define STABLE_TORCH_LIBRARY_IMPL(name, key, m) TARNN_LIBRARY(IMPL, name, #key, tarnn_functions_##key, m)
#define TARNN_LIBRARY(kind, name, key, fill, m)                                                                      \
  static void fill(::tarnn::Library&);                                                                              \
  static const ::tarnn::Library fill##_of_##name(::tarnn::Library::Kind::kind, #name, key, __FILE__, __LINE__, &fill); \
  static void fill(::tarnn::Library& m)
