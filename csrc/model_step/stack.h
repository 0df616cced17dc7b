// One token, or several, of each sequence through all layers of a model: what the library hands to the kernel.
#pragma once

#include "linear/problem.h"
#include "model_step/rwkv7.h"
#include "model_step/ssd.h"
#include "runtime/cache.h"
#include "runtime/feature_map.h"
#include "runtime/team.h"

namespace tarnn {

enum class Attention { linear, softmax, none, delta, ssd, rwkv7, hybrid, filters };
enum class Mlp { none, gelu, swiglu, squared_relu };
enum class Decay { none, head, token, channel };

/// A layer whose state the delta rule corrects (delta.h). Its first product puts out queries, keys and values, which are filtered along
/// time, a gate of the outputs, β of each state, and what decays of tokens or channels are made of.
struct DeltaLayer {
  Index queries, keys, values;  // heads: as many queries as keys, or as many values as keys, and multiples; each value head has a state
  Index d, e;                   // widths of a key and of a value
  Index width, kept;            // taps of a filter; inputs that the state keeps, width − 1 at least
  const float* taps;            // (width, channels), whole panels a row
  Decay decay;
  const float* rate;         // of each state: log_decay, or what −softplus(x) is multiplied with; null: 1
  const float* gain;         // of the RMSNorm of each output
  float strength, norm_eps;  // β = strength·σ(x)
  float *S, *tokens;         // (b, values, d, e); (b, kept, channels)
  Index outputs() const { return queries > values ? queries : values; }
  Index channels() const { return (queries + keys) * d + values * e; }
};

/// What a key head of hybrid attention sees beyond its window: features of the keys, nothing, or all keys.
enum class Reach { features, window, exact };

/// Sinks and a window of keys and values (b, heads, room, d) of those heads of hybrid attention that reach as far, with `count` (b)
/// tokens before, and the sums over the keys that have left it.
struct Ring {
  Index heads;
  float *k, *v;
  Index* count;
  Sums sums;
};

/// Hybrid attention: see window.h. Its queries' features are those of the layer; heads that reach all keys have the layer's cache.
struct Hybrid {
  Index room, sinks;      // sinks and window together
  Index far_until;        // the first place in a sequence whose query sees no features
  bool log_features;      // features are logarithms, and each has a maximum of its own
  const Index* reach;     // (g)  the `Reach` of each key head; lies in the plan, which a helper that comes late may outlive
  Index exact_heads;      // so many reach all keys
  FeatureMap of_keys;
  const float* far_bias;  // (h)
  Ring features, window;
  Index heads_with(Reach of, Index below) const {
    Index n = 0;
    for (Index i = 0; i < below; ++i) n += reach[i] == static_cast<Index>(of);
    return n;
  }
};

/// Rotary positions of one width: the frequencies of its pairs.
struct Rotation {
  Index width;
  const double* frequencies;  // width / 2
  bool single;                // angles are rounded to float32 before their cosine is taken, as transformers has them
};

constexpr Index most_filter_width = 32;

/// Filters along time of the first channels of `qkv`, or of what Attention::filters reads, each followed by silu: weights [width][channels], the oldest token's first, both
/// in whole panels, and the last tokens of each sequence, `kept` ≥ width − 1. Width 0: there are none.
struct Filters {
  Index width, kept, channels;
  const float *weights, *bias;
  float* tokens;  // (b, kept, channels)
};

struct Layer {
  Attention attention;
  Mlp mlp;
  Decay decay;
  Map map;
  FeatureMap features;
  Index rotation;          // which of the stack's; −1: none
  bool rotates_features;   // else q and k, or their first channels
  bool normed_inside;      // pre-norm: x + norm(f(x)) instead of x + f(norm x)
  bool gated;              // softmax: what comes out is multiplied with σ of as many outputs of the first product
  bool whole_norms;        // q_gain and k_gain are those of all heads together
  Norm attention_norm, mlp_norm;
  Matrix qkv;  // of all query heads, all key heads (of Attention::none neither), all value heads; behind them a gate per key head,
               // where tokens decay, or what `gate` reads, where channels do
  Matrix o, up, down;  // up: of swiglu, panels of the gate and of what it gates take turns; of Mlp::none neither it nor down
  Matrix gate;         // where channels decay; of each key head, beginning a panel
  const float *q_gain, *k_gain, *o_gain;  // RMSNorms of a head's query, key, output; null: none
  const float* log_decay;                 // one per key head, for all tokens alike; null: none
  Filters filters;
  Ssd ssd;                 // of Attention::ssd
  Rwkv7 rwkv7;
  const float* mixture;    // of what the MLP reads, with what it read before; null: none
  float* mlp_last;         // (b, hidden), likewise
  Sums state;
  Cache cache;
  DeltaLayer delta;
  Hybrid hybrid;
};

struct Stack {
  Index hidden, h, g, d;  // h query heads and g key heads of d channels, of layers with such
  bool pre_norm, centred, normalize;
  bool dot_products;  // the processor has instructions for products of bytes (AVX-512 VNNI)
  double norm_eps, eps;
  const Layer* layers;
  Index num_layers;
  const Rotation* rotations;
  Index num_rotations;
  Norm last;     // pre-norm: the norm behind the last layer
  Matrix head;  // to what comes out
  // what goes in: the token's row + the row of its position + a row of the batch's own (null: none)
  Index b, num_rows, num_tokens, num_places;  // b sequences, num_rows tokens of them all
  const Index* ids;                           // of each row
  const Index* positions;                     // of each sequence's first row
  const Index* sequences;                     // of each row, ascending; null: row i is of sequence i
  const Index* starts;                        // of each sequence its first row, and behind the last num_rows; null: likewise
  const Index* slots;                         // of each row: its place in the caches behind `length`; null: as it comes
  Index most_slots;                           // rows of the longest sequence, or one more than the largest slot
  const void* tokens;                         // (num_tokens, token_width), of token_type; what is missing to hidden channels are zeros
  Type token_type;
  Index token_width;
  float token_scale;                          // what is read of tokens is multiplied with
  const float *places, *extra;                // extra: (num_rows, hidden)
  bool all;                                   // out is (num_rows, head.outputs); else of each sequence's last row, (b, head.outputs)
  float* out;

  Index sequence(Index row) const { return sequences ? sequences[row] : row; }
  Index start(Index sequence) const { return starts ? starts[sequence] : sequence; }
  Index position(Index row) const { return positions[sequence(row)] + row - start(sequence(row)); }
  Index slot(Index row) const { return slots ? slots[row] : row - start(sequence(row)); }
};

struct StackKernel {
  std::size_t (*room)(const Stack&, Index rows);  // bytes that a team shares for its rows
  std::size_t (*own_room)(const Stack&);          // and that each member has for itself
  void (*run)(const Stack&, Index begin, Index count, void* shared, void* own, Team::Member&);
};

}  // namespace tarnn
