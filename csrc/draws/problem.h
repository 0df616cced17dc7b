// A token of one row of logits: what the operator hands to the kernel. The definition is src/tarnn/decoding/draw_definition.py.
#pragma once

#include "kernels.h"

namespace tarnn {

/// Columns of the tables that Python writes (src/tarnn/decoding/draws.py), of which each row has a line.
struct Column {
  enum Number { temperature, top_p, min_p, repetition, frequency, presence, numbers };
  enum Whole { seed, choice, position, top_k, wanted, biased, whole };
};

struct Draw {
  Index v;
  const float* logits;      // (v)
  const double* numbers;    // a line of the first table
  const Index* whole;       // and one of the second
  // (v) each, or null: how often the answer has each token; whether answer or prompt have it; what is added to its logit
  const std::int32_t* counts;
  const bool* had;
  const float* bias;
  // results: of k likeliest tokens too, where the row wants logarithms (`wanted` ≥ 0, at most k)
  Index* token;
  float* logprob;           // null where no row wants them, as the next two
  Index* likeliest;
  float* likeliest_logprobs;
  Index k;
};

struct DrawKernels {
  std::size_t (*room)(Index v);  // bytes of scratch
  void (*draw)(const Draw&, void* scratch);
};

}  // namespace tarnn
