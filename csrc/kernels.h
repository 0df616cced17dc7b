// What all ops share: a tensor as it lies in memory, sums, tasks; and the table of kernels that each instruction set has.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tarnn {

using Index = std::int64_t;

enum class Type { float32, float64, bfloat16, float16 };

inline constexpr Index bytes_of(Type type) { return type == Type::float64 ? 8 : type == Type::float32 ? 4 : 2; }

/// A tensor of up to four axes (row of the batch, head, time, channel) as it lies in memory; strides in elements.
struct View {
  void* data = nullptr;
  Type type = Type::float32;
  Index stride[4] = {0, 0, 0, 0};
  Index share = 1;  // so many heads of a call, one after the other, have one head of this tensor
  explicit operator bool() const { return data != nullptr; }
};

/// Sums S (f × e), z (f) and their maximum M, contiguous, a sequence and key/value head after the other; in the wide type.
struct Sums {
  void *S = nullptr, *z = nullptr, *M = nullptr;
};

/// Runs all tasks, on so many threads at most, each with `bytes` of scratch of its own; throws OutOfMemory before the first
/// task.
using Run = void (*)(Index tasks, Index threads, std::size_t bytes, void (*task)(void* context, Index i, void* scratch),
                     void* context);

struct LinearKernels;       // linear/problem.h
struct HybridKernels;       // hybrid/problem.h
struct DeltaKernels;        // delta/problem.h
struct LowRankKernels;      // delta/problem.h
struct PackKernel;          // products/packing.h
struct RuntimeKernel;       // runtime/call.h
struct ElementwiseKernels;  // elementwise/elementwise.h
struct ConvolutionKernels;  // convolution/problem.h
struct ScanKernels;         // scan/problem.h
struct DrawKernels;         // draws/problem.h

struct Kernels {
  const char* isa;
  const LinearKernels* linear;
  const HybridKernels* hybrid;
  const DeltaKernels* delta;
  const LowRankKernels* low_rank;
  const PackKernel* pack;
  const RuntimeKernel* runtime;
  const ElementwiseKernels* elementwise;
  const ConvolutionKernels* convolution;
  const ScanKernels* scan;
  const DrawKernels* draws;
};

// What is there in the library of the tests alone, which they build with -DTARNN_FLOAT64=ON.
#ifdef TARNN_FLOAT64
#define FOR_DOUBLE(...) __VA_ARGS__
#else
#define FOR_DOUBLE(...)
#endif

/// Kernels for each type that they compute in; OF_TYPES makes them from a variable template.
template <template <typename> typename Of>
struct OfTypes {
  Of<float> of_float;
  FOR_DOUBLE(Of<double> of_double;)
};
#define OF_TYPES(of) {of<float> FOR_DOUBLE(, of<double>)}

/// Those of the instruction set in use.
const Kernels& kernels();

}  // namespace tarnn

const tarnn::Kernels* tarnn_kernels_baseline();
const tarnn::Kernels* tarnn_kernels_avx2();
const tarnn::Kernels* tarnn_kernels_avx512();
const tarnn::Kernels* tarnn_kernels_avx512bf16();
