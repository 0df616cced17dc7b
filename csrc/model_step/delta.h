// Tokens of a layer with the delta rule: filters of q, k and v along time, gates, one token of a state after the other, norm and gate of
// what comes out. Some columns of a state stay in the first level of cache for some tokens.
#pragma once

#include "convolution/filter.h"
#include "delta/step.h"
#include "model_step/stack.h"
#include "runtime/rows.h"

namespace tarnn {
namespace TARNN_ISA {

constexpr Index delta_tokens = 12;  // of a head, whose vectors are made together

/// What each thread has for some tokens of a key head.
struct DeltaRoom {
  Index ldx = 0, ldd = 0, lde = 0;
  float *tile, *taps, *zeros, *q, *k, *asks, *reads, *decay, *v, *o;
  DeltaRoom(Scratch& scratch, const Stack& s) {
    const Index n = smaller(s.most_slots, delta_tokens);
    Index past = 0, queries = 0;
    for (Index i = 0; i < s.num_layers; ++i) {
      const DeltaLayer& l = s.layers[i].delta;
      if (s.layers[i].attention != Attention::delta) continue;
      queries = std::max(queries, l.queries / l.keys), past = std::max(past, l.width - 1);
      ldx = std::max({ldx, padded<float>(l.queries / l.keys * l.d), padded<float>(l.values / l.keys * l.e)});
      ldd = std::max(ldd, whole_panels(l.d) + width<float>), lde = std::max(lde, padded<float>(l.e));
    }
    tile = scratch.take<float>((n + past) * ldx);
    taps = scratch.take<float>((past + 1) * ldx);
    zeros = scratch.take<float>(ldx);
    for (float** x : {&q, &reads}) *x = scratch.take<float>(queries * n * ldd);
    for (float** x : {&k, &asks, &decay}) *x = scratch.take<float>(n * ldd);
    v = scratch.take<float>(n * lde);
    o = scratch.take<float>(queries * n * lde);
  }
};

/// Rows of a sequence for one key head, with its queries and states. x: what the layer's first product put out.
class DeltaRows {
 public:
  DeltaRows(const Layer& layer, Index sequence, Index head, float* x, Index ldx, float* out, Index ldo, DeltaRoom& at)
      : l_(layer.delta), gate_(layer.gate), sequence_(sequence), head_(head), shared_(l_.queries / l_.keys), own_(l_.values / l_.keys),
        ldx_(ldx), ldo_(ldo), x_(x), out_(out), at_(at) {
    clear(at.zeros, at.ldx);
  }

  void run(Index rows) {
    for (Index n; rows > 0; rows -= n, x_ += n * ldx_, out_ += n * ldo_) {
      n = smaller(rows, delta_tokens);
      filter_channels(head_ * shared_ * l_.d, n, shared_ * l_.d);
      filter_channels((l_.queries + head_) * l_.d, n, l_.d);
      filter_channels((l_.queries + l_.keys) * l_.d + head_ * own_ * l_.e, n, own_ * l_.e);
      for (Index r = 0; r < shared_; ++r)
        unit_vectors((head_ * shared_ + r) * l_.d, n, 1.f / __builtin_sqrtf(static_cast<float>(l_.d)), at_.q + r * n * at_.ldd);
      unit_vectors((l_.queries + head_) * l_.d, n, 1.f, at_.k);
      for (Index i = head_ * own_; i < (head_ + 1) * own_; ++i) one_state(i, n);
    }
  }

 private:
  /// Channels first … first + m − 1 of n rows, in place; and the last inputs that the state keeps.
  void filter_channels(Index first, Index n, Index m) {
    const Index past = l_.width - 1, channels = l_.channels(), size = sizeof(float) * m;
    float* state = l_.tokens + sequence_ * l_.kept * channels + first;
    const auto input = [&](Index i) { return i < l_.kept ? state + i * channels : x_ + (i - l_.kept) * ldx_ + first; };
    for (Index i = 0; i < past + n; ++i) std::memcpy(at_.tile + i * at_.ldx, input(l_.kept - past + i), size);
    for (Index i = 0; i < l_.kept; ++i) std::memcpy(state + i * channels, input(i + n), size);
    for (Index i = 0; i < l_.width; ++i) std::memcpy(at_.taps + i * at_.ldx, l_.taps + i * whole_panels(channels) + first, size);
    filter(at_.tile, at_.ldx, n, m, l_.width, at_.taps, at_.zeros, true);
    for (Index i = 0; i < n; ++i) std::memcpy(x_ + i * ldx_ + first, at_.tile + i * at_.ldx, size);
  }

  /// Vectors of d channels of length `scale`, with zeros up to whole vectors.
  void unit_vectors(Index first, Index n, float scale, float* to) const {
    for (Index i = 0; i < n; ++i, to += at_.ldd) {
      copy(first, i, l_.d, to);
      const float factor[] = {scale / __builtin_sqrtf(dot(to, to, l_.d) + 1e-6f)};
      scale_rows(to, at_.ldd, 1, l_.d, factor);
    }
  }

  void copy(Index first, Index row, Index m, float* to) const {
    clear(to + m, whole<float>(m) - m);
    std::memcpy(to, x_ + row * ldx_ + first, sizeof(float) * m);
  }

  /// n tokens of a state, all of its columns; then what comes out.
  void one_state(Index state, Index n) {
    float* S = l_.S + (sequence_ * l_.values + state) * l_.d * l_.e;
    make_decays(state, n);
    multiply(at_.k, at_.decay, at_.ldd, n, l_.d, at_.asks);
    for (Index r = 0; r < shared_; ++r) multiply(at_.q + r * n * at_.ldd, at_.decay, at_.ldd, n, l_.d, at_.reads + r * n * at_.ldd);
    for (Index i = 0; i < n; ++i) copy((l_.queries + l_.keys) * l_.d + state * l_.e, i, l_.e, at_.v + i * at_.lde);
    over_columns<float>(l_.e, [&](auto columns, auto part, Index j) TARNN_LAMBDA {
      for (Index i = 0; i < n; ++i)
        for (Index r = 0; r < shared_; ++r)
          step_columns<columns, part>(l_.d, l_.e, token(state, r, i, n), S, r + 1 == shared_ ? S : nullptr, j);
    });
    for (Index i = 0; i < n; ++i)
      for (Index r = 0; r < shared_; ++r) put_out(state * shared_ + r, i, at_.o + (r * n + i) * at_.lde);
  }

  DeltaToken<float> token(Index state, Index r, Index i, Index n) const {
    const Index of_key = i * at_.ldd, of_query = (r * n + i) * at_.ldd;
    float *q = at_.q + of_query, *k = at_.k + of_key;
    const float beta = l_.strength * sigmoid<float>(broadcast(gates(i)[l_.outputs() * l_.e + state]))[0];
    return {k, q, at_.asks + of_key, at_.reads + of_query, at_.decay + of_key, at_.v + i * at_.lde, at_.o + (r * n + i) * at_.lde, beta, dot(q, k, l_.d)};
  }

  /// e^log_decay of each channel of a key.
  void make_decays(Index state, Index n) {
    if (l_.decay == Decay::channel) {
      const Index panels = whole_panels(l_.d) / panel;
      for (Index j = 0; j < panels; ++j)
        product(gate_, false, {n, ldx_, raw_decays(0), nullptr, 0, nullptr, nullptr}, state * panels + j, at_.decay + j * panel, at_.ldd);
      for (Index i = 0; i < n; ++i)
        for (float *x = at_.decay + i * at_.ldd, *end = x + l_.d; x < end; x += width<float>)
          store(x, exp_nonpositive(softplus(-load(x)) * (-1.f / 16)));
      return;
    }
    for (Index i = 0; i < n; ++i) {
      const float rate = l_.rate ? l_.rate[state] : 1.f;
      float log_decay = 0;
      if (l_.decay == Decay::head) log_decay = rate;
      if (l_.decay == Decay::token) log_decay = -rate * softplus(broadcast(raw_decays(i)[state]))[0];
      std::fill_n(at_.decay + i * at_.ldd, whole<float>(l_.d), exp_nonpositive(broadcast(log_decay))[0]);
    }
  }

  /// norm(o) ⊙ silu(gate)
  void put_out(Index head, Index row, float* o) const {
    const float* gate = gates(row) + head * l_.e;
    float* to = out_ + row * ldo_ + head * l_.e;
    norm_head(o, l_.e, l_.gain, l_.norm_eps);
    for (Index c = 0; c < l_.e; c += width<float>) write(to + c, load(o + c) * silu(read(gate + c, l_.e - c)), l_.e - c);
  }

  /// Behind what is filtered: gates of the outputs, β of the states, what decays are made of.
  float* gates(Index row) const { return x_ + row * ldx_ + l_.channels(); }
  float* raw_decays(Index row) const { return gates(row) + l_.outputs() * l_.e + l_.values; }

  const DeltaLayer& l_;
  const Matrix& gate_;
  const Index sequence_, head_, shared_, own_;  // queries and states of the head
  const Index ldx_, ldo_;
  float *x_, *out_;
  DeltaRoom& at_;
};

}  // namespace TARNN_ISA
}  // namespace tarnn
