// What the operators of all kinds of attention share: tensors as the kernels take them, tasks on torch's threads, and parameters
// that are listed once.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string_view>

#include "common/threads.h"
#include "torch.h"

namespace tarnn {

using Maybe = std::optional<Tensor>;

inline View view(const Tensor& x) {
  View out;
  out.data = const_cast<void*>(x.const_data_ptr());
  out.type = x.scalar_type();
  for (Index i = 0; i < x.dim(); ++i) out.stride[i] = x.stride(i);
  return out;
}

inline View view(const Maybe& x) { return x ? view(*x) : View(); }

inline void* data(const Tensor& x) { return const_cast<void*>(x.const_data_ptr()); }
inline void* data(const Maybe& x) { return x ? data(*x) : nullptr; }

/// Large pages for a result: by small ones, a fresh block of hundreds of megabytes costs a quarter of the kernel's time in
/// page faults. What is asked for stays with the addresses, whoever has them next: TARNN_LARGE_PAGES=off asks for none.
inline void in_large_pages(const Tensor& x) {
  static const char* wish = std::getenv("TARNN_LARGE_PAGES");
  static const bool off = wish && std::string_view(wish) == "off";
  if (off) return;
  const auto bytes = static_cast<std::size_t>(x.numel() * bytes_of(x.scalar_type()));
  if (bytes >= 4 * large_page) ask_for_large_pages(x.const_data_ptr(), bytes);
}

/// Products of features and values from which a call is worth waking a second thread: about 20 microseconds.
constexpr Index worth_a_thread = 1 << 20;

inline void run(Index tasks, Index threads, std::size_t bytes, void (*task)(void*, Index, void*), void* context) {
  if (tasks == 0) return;
  std::atomic<Index> next{0};
  const auto worker = [&](Index, Index) {
    thread_local ThreadMemory memory;
    FlushDenormals flush;
    void* scratch = memory.at_least(bytes);
    if (!scratch) return;  // the other threads take its tasks
    for (Index i; (i = next.fetch_add(1)) < tasks;) task(context, i, scratch);
    memory.shrink();
  };
  threads = std::min(threads, tasks);
  if (threads <= 1) worker(0, 1);
  else parallel_for(0, threads, 1, worker);
  if (next == 0) throw OutOfMemory(bytes);  // no thread had any: nothing is done
}

/// f(kernels for the dtype, a number of the type that they compute in).
template <template <typename> typename Of, typename F>
void by_dtype(Type dtype, const OfTypes<Of>& table, F f) {
  FOR_DOUBLE(if (dtype == Type::float64) return f(table.of_double, double());)
  if (dtype == Type::float64) throw std::invalid_argument("the compiled kernels don't compute in float64; plain PyTorch does");
  f(table.of_float, float());
}

}  // namespace tarnn

// The parameters of an operator as one table, X(type, name) after another: its function's parameters, the fields of a record, the
// arguments that fill it, and its schema come from there.
#define PARAMETER(type, name) type name,
#define FIELD(type, name) const type& name;
#define NAME(type, name) name,
#define SCHEMA(type, name) SCHEMA_##type " " #name ", "
#define SCHEMA_Tensor "Tensor"
#define SCHEMA_Maybe "Tensor?"
#define SCHEMA_Index "int"
#define SCHEMA_bool "bool"
#define SCHEMA_double "float"
