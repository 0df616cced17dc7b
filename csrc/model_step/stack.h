// One token through all layers of a model: what the library hands to the kernel, and how threads share the work.
#pragma once

#include <atomic>
#include <thread>

#include "kernels.h"

namespace tarnn {

/// How weights are stored. int8: whole numbers from −127 to 127 and a factor per output.
enum class Format { float32, bfloat16, int8 };

constexpr Index panel = 64;  // outputs of a product that lie side by side in memory

/// y = W x + bias. W lies in panels of 64 outputs: input after input, of each input its 64 weights; of int8, four inputs
/// at a time, of each output the four weights side by side. Missing outputs and inputs are zeros.
struct Matrix {
  Format format;
  Index inputs, outputs;
  const void* at;
  const float* bias;   // of whole panels, as the next two
  const float* scale;  // int8: what each output's whole numbers are multiplied with
  const float* sums;   // int8: Σ of each output's weights, scale included
  Index panels() const { return (outputs + panel - 1) / panel; }
};

/// Gain and bias of a norm over the hidden channels, each with zeros up to a whole panel.
struct Norm {
  const float *gain, *bias;
};

struct Layer {
  Map map;
  Norm attention_norm, mlp_norm;
  Matrix qkv;  // of all query heads, of all key heads, of all value heads; then a gate per key head, where tokens decay
  Matrix o, up, down;  // up: of swiglu, panels of the gate and of what it gates take turns
  const float *q_gain, *k_gain, *o_gain;  // RMSNorms of a head's query, key, output; null: none
  const float* log_decay;                 // one per key head, for all tokens alike; null: none
  Sums state;
};

struct Stack {
  Index hidden, h, g, d, inner;  // h query heads and g key heads of d channels; inner: width of the MLP
  bool pre_norm, centred, swiglu, gated, normalize;
  bool dot_products;  // the processor has instructions for products of bytes (AVX-512 VNNI)
  double norm_eps, eps;
  const Layer* layers;
  Index num_layers;
  Norm last;     // pre-norm: the norm behind the last layer
  Matrix head;  // to what comes out
  // what goes in: the token's row + the row of its position + a row of the batch's own (null: none)
  Index b, num_tokens, num_places;
  const Index *ids, *positions;
  const float *tokens, *places, *extra;
  float* out;  // (b, head.outputs)
};

/// Threads that go through the same phases. Each phase is a number of tasks, which whoever is there takes; the last to
/// finish one does what follows, alone, and lets all go on. So it needs no particular number of threads: one that the
/// system holds up takes fewer tasks, and one that never comes is not missed.
class Team {
  struct alignas(64) Phase {
    std::atomic<Index> next{0}, done{0};
    std::atomic<bool> over{false};
  };

 public:
  Team() : phases_(nullptr) {}
  explicit Team(Index num_phases) : phases_(new Phase[static_cast<std::size_t>(num_phases)]) {}
  ~Team() { delete[] phases_; }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  /// One thread's way through the phases; without a team it does all tasks itself.
  class Member {
   public:
    explicit Member(Team& team) : at_(team.phases_) {}
    template <typename F, typename G>
    void phase(Index tasks, F task, G then) {
      if (!at_) {
        for (Index i = 0; i < tasks; ++i) task(i);
        return then();
      }
      Phase& p = *at_++;
      for (Index i; (i = p.next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
        task(i);
        if (p.done.fetch_add(1, std::memory_order_acq_rel) + 1 == tasks) {
          then();
          p.over.store(true, std::memory_order_release);
        }
      }
      for (int spins = 0; !p.over.load(std::memory_order_acquire); ++spins)
        spins < 4000 ? pause() : std::this_thread::yield();
    }

   private:
    static void pause() {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
    Phase* at_;
  };

 private:
  Phase* phases_;
};

struct StackKernel {
  std::size_t (*room)(const Stack&, Index rows);  // bytes that a team shares for its rows
  std::size_t (*own_room)(const Stack&);          // and that each member has for itself
  void (*run)(const Stack&, Index begin, Index count, void* shared, void* own, Team::Member);
};

}  // namespace tarnn
