// What the library hands to the kernels of linear attention.
#pragma once

#include "kernels.h"

namespace tarnn {

enum class Map { identity, elu, relu, squared_relu, exp };

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

/// Features that are made of a linear function of x (projection.h). Ω (rows × heads × f × d) and β (rows × heads × f) are
/// contiguous, in the wide type; rows and heads are 1 where all share one.
struct Projection {
  const void *omega = nullptr, *bias = nullptr;
  Index rows = 1, heads = 1;
  double factor = 1, square = 0, offset = 0, shift = 0;
  explicit operator bool() const { return omega != nullptr; }
};

struct Problem {
  // r = h/g query heads share a key/value head; h, g: heads; d: width of q and k; f: features, d without a projection;
  // e: width of a value. Where several heads of values share a head of q and k, g counts those of values, and `share` of the
  // views of q and k says how many
  Index g, r, d, f, e;
  Index chunk;         // positions per chunk
  Index block;         // causal: tokens whose features are made at a time (streamed.h)
  Index segment;       // positions per segment, whole chunks: the causal backward makes so many states at a time
  Index together = 1;  // backward: so many heads, of those that share a head of q and k, sum their gradients in one task
  Stretches keys;      // of the keys; where causal, of the queries too
  Stretches queries;   // of the queries, where not causal
  View q, k, v, o;     // o is written by forward, read by backward
  View log_decay;      // wide; its last axis has f entries if `channels`, else one
  View key_log_weight; // wide
  View mask;           // bool; the first and third strides count
  bool channels, causal, normalize;
  bool streamed;       // causal, backward: token by token (streamed_backward.h); else by chunks
  bool at_least_one = false;   // normalised by a denominator of at least 1, of whatever sign
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
  bool at_least_one = false;
  Map map;
  Projection projection;
  double eps;
  Sums before, after;
  Index threads = 1;
  Run run;
};

template <typename T>
struct LinearKernelsOf {
  void (*forward)(const Problem&);
  void (*backward)(const Problem&);
  void (*step)(const Step&);
};

struct LinearKernels : OfTypes<LinearKernelsOf> {};

}  // namespace tarnn
