// What the library hands to the kernels, and the table of kernels that each instruction set has.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tarnn {

using Index = std::int64_t;

enum class Type { float32, float64, bfloat16, float16 };
enum class Map { identity, elu, relu, squared_relu, exp };

/// A tensor of up to four axes (row of the batch, head, time, channel) as it lies in memory; strides in elements.
struct View {
  void* data = nullptr;
  Type type = Type::float32;
  Index stride[4] = {0, 0, 0, 0};
  explicit operator bool() const { return data != nullptr; }
};

/// Consecutive positions begin … end − 1 of one sequence and one key/value head: what one task works on. The stretches of
/// a sequence and head follow one another.
struct Stretch {
  Index row;       // of q, k, v
  Index sequence;  // of the states; the row, unless sequences are packed
  Index head;      // key/value head
  Index begin, end;
  bool first, last;  // of their sequence
  Index slot;        // where the state behind it is kept for the next: counts stretches that are not last, or all
};

struct Stretches {
  const Stretch* at;
  Index count, slots;
};

/// Sums S (f × e), z (f) and their maximum M, contiguous, a sequence and key/value head after the other; in the wide type.
struct Sums {
  void *S = nullptr, *z = nullptr, *M = nullptr;
};

/// Features that are made of a linear function of x (projection.h). Ω (rows × heads × f × d) and β (rows × heads × f) are
/// contiguous, in the wide type; rows and heads are 1 where all share one.
struct Projection {
  const void *omega = nullptr, *bias = nullptr;
  Index rows = 1, heads = 1;
  double factor = 1, square = 0, offset = 0, shift = 0;
  explicit operator bool() const { return omega != nullptr; }
};

/// Runs all tasks, on so many threads at most, each with `bytes` of scratch of its own; throws OutOfMemory before the first
/// task.
using Run = void (*)(Index tasks, Index threads, std::size_t bytes, void (*task)(void* context, Index i, void* scratch),
                     void* context);

struct Problem {
  // r = h/g query heads share a key/value head; h, g: heads; d: width of q and k; f: features, d without a projection;
  // e: width of a value
  Index g, r, d, f, e;
  Index chunk;         // positions per chunk
  Index segment;       // positions per segment, whole chunks: the causal backward makes so many states at a time
  Stretches keys;      // of the keys; where causal, of the queries too
  Stretches queries;   // of the queries, where not causal
  View q, k, v, o;     // o is written by forward, read by backward
  View log_decay;      // wide; its last axis has f entries if `channels`, else one
  View key_log_weight; // wide
  View mask;           // bool; the first and third strides count
  bool channels, causal, normalize;
  bool weighted;       // keys have log-weights, so the sums have a running maximum
  Map map;
  Projection projection;
  double eps;
  View den;            // (b, h, t) wide, contiguous along t: written by forward if there is one, read by backward
  Sums before, after;  // the state before (null: none), and behind: read by backward where not causal
  View kept;           // causal: states that forward keeps for backward, one for each segment but the first; or none
  // backward
  View grad_o, grad_q, grad_k, grad_v;
  View grad_log_decay, grad_key_log_weight;  // wide; any strides, but channels side by side; null where not wanted
  Sums grad_after, grad_before;              // of S and z; M has none
  View grad_omega, grad_bias;                // of the projection's, as those lie; zeros to add to; null where not wanted
  // how many threads there are for it: they decide who does what, never what is computed
  Index threads = 1;
  Run run;
};

/// One token of every sequence and head; b·g states, one after the other, updated from `before` to `after` (which may be
/// the same).
struct Step {
  Index b, g, r, d, f, e;
  View q, k, v, o;  // time axis of one
  View log_decay, key_log_weight;
  bool channels, normalize, weighted;
  Map map;
  Projection projection;
  double eps;
  Sums before, after;
  Index threads = 1;
  Run run;
};

template <typename T>
struct KernelsOf {
  void (*forward)(const Problem&);
  void (*backward)(const Problem&);
  void (*step)(const Step&);
};

struct StackKernel;         // model_step/stack.h
struct ElementwiseKernels;  // elementwise/elementwise.h
struct HybridKernels;       // attention/hybrid_problem.h

struct Kernels {
  const char* isa;
  KernelsOf<float> of_float;
  KernelsOf<double> of_double;
  const StackKernel* stack;
  const ElementwiseKernels* elementwise;
  const HybridKernels* hybrid;
};

/// Those of the instruction set in use.
const Kernels& kernels();

}  // namespace tarnn

const tarnn::Kernels* tarnn_kernels_baseline();
const tarnn::Kernels* tarnn_kernels_avx2();
const tarnn::Kernels* tarnn_kernels_avx512();
