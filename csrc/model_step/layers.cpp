// One token of each sequence, or several, through all layers. Compiled once for each instruction set: see ../kernels_of_isa.cpp.
#include <cmath>
#include <optional>

#include "linear/step.h"
#include "model_step/delta.h"
#include "model_step/filters.h"
#include "model_step/rwkv7_rows.h"
#include "model_step/ssd_rows.h"
#include "runtime/ring.h"

namespace tarnn {
namespace TARNN_ISA {

namespace {

constexpr Index tokens_at_once = 12;  // of a head, whose features are made together
constexpr Index rows_a_product = 36;
constexpr Index rows_alone = 4, rows_a_task = 4;  // up to so many rows, one thread does what whole rows need

// rows a power of two apart would all fall into the same few places of the cache
Index apart(Index n) { return whole_panels(n) + 16; }

template <typename F>
Index largest_of_layers(const Stack& s, F f) {
  Index most = 0;
  for (Index l = 0; l < s.num_layers; ++l) most = f(s.layers[l]) > most ? f(s.layers[l]) : most;
  return most;
}

/// How many parts a query has at most; most_slots: of new keys.
Index most_parts(const Layer& l, Index most_slots) {
  const bool hybrid = l.attention == Attention::hybrid;
  const bool keeps_all = l.attention == Attention::softmax || (hybrid && l.hybrid.exact_heads);
  return std::max(keeps_all ? key_blocks(l.cache.length + most_slots) : 0, hybrid ? parts_of_ring(l.hybrid.room) : 0);
}

/// Parts of a query in the layer that has most, the new keys included.
Index most_parts_of_all(const Stack& s) {
  return largest_of_layers(s, [&](const Layer& l) { return most_parts(l, s.most_slots); });
}

/// The activations of some rows: x is what the residuals add up to.
struct Buffers {
  Index ld, ld_qkv, ld_heads, ld_first, ld_inner, ld_both, ld_out, ld_levels, ld_turns, ld_parts;
  float *x, *normed, *y, *qkv, *heads, *inner, *both, *out, *step, *least, *turns, *parts, *mixed, *first;
  std::uint8_t* levels;
  Buffers(Scratch& scratch, const Stack& s, Index rows) {
    const auto of_matrix = [&](auto matrix) { return largest_of_layers(s, [&](const Layer& l) { return (l.*matrix).inputs; }); };
    const Index of_heads = of_matrix(&Layer::o), of_mlp = of_matrix(&Layer::down), widest = of_heads > of_mlp ? of_heads : of_mlp;
    ld = apart(s.hidden);
    ld_qkv = apart(largest_of_layers(s, [](const Layer& l) { return l.attention == Attention::rwkv7 ? l.rwkv7.at_low(Rwkv7::num_low) : l.qkv.outputs; }));
    ld_first = apart(largest_of_layers(s, [](const Layer& l) { return l.rwkv7.width(); }));
    ld_heads = apart(of_heads);
    ld_inner = apart(of_mlp);
    ld_both = apart(largest_of_layers(s, [](const Layer& l) { return l.mlp == Mlp::swiglu ? l.up.outputs : 0; }));
    ld_out = apart(s.head.outputs);
    ld_levels = whole_panels(widest > s.hidden ? widest : s.hidden) + 64;
    ld_turns = 0;
    for (Index i = 0; i < s.num_rotations; ++i) ld_turns += s.rotations[i].width;
    ld_parts = most_parts_of_all(s) * partial_size(s.d) * s.h;
    for (float** at : {&x, &normed, &y}) *at = scratch.take<float>(rows * ld);
    qkv = scratch.take<float>(rows * ld_qkv);
    heads = scratch.take<float>(rows * ld_heads);
    inner = scratch.take<float>(rows * ld_inner);
    both = scratch.take<float>(rows * ld_both);
    out = scratch.take<float>(rows * ld_out);
    turns = scratch.take<float>(rows * ld_turns);
    parts = scratch.take<float>(rows * ld_parts);
    const Index mixtures = 6 * largest_of_layers(s, [](const Layer& l) -> Index { return l.attention == Attention::rwkv7; });
    mixed = scratch.take<float>(rows * mixtures * ld);
    first = scratch.take<float>(rows * ld_first);
    for (float** at : {&step, &least}) *at = scratch.take<float>(rows * (mixtures ? 3 : 1));
    levels = scratch.take<std::uint8_t>(rows * ld_levels * (mixtures ? 3 : 1));
  }
};

/// The widest step of attention among the layers.
Step widest_step(const Stack& s) {
  Step p{};
  p.b = p.g = 1, p.r = s.h / s.g, p.d = p.e = s.d;
  p.f = largest_of_layers(s, [&](const Layer& l) { return l.features.f > s.d ? l.features.f : s.d; });
  p.normalize = s.normalize, p.eps = s.eps;
  return p;
}

/// What each thread has for some tokens of one head at a time: of each token r queries and, behind them, the key.
struct OwnBuffers {
  Index ldx, ldf;
  StepScratch<float> step;
  DeltaRoom delta;
  SsdScratch ssd;
  Rwkv7Room rwkv7;
  float *x, *u, *features, *turned, *scale, *weight, *gate, *scores;
  std::optional<FarRoom> far;
  OwnBuffers(Scratch& scratch, const Stack& s)
      : step(scratch, widest_step(s)),
        delta(scratch, s),
        ssd(scratch, largest_of_layers(s, [](const Layer& l) { return l.ssd.n; }), largest_of_layers(s, [](const Layer& l) { return l.ssd.p; })),
        rwkv7(scratch, s) {
    const Index each = s.h / s.g + 1, n = each * smaller(s.most_slots, tokens_at_once), f = widest_step(s).f, m = largest_of_layers(s, [](const Layer& l) { return l.features.m; });
    ldx = apart(s.d), ldf = apart(f > m ? f : m);
    x = scratch.take<float>(n * ldx);
    for (float** at : {&u, &features}) *at = scratch.take<float>(n * ldf);
    turned = scratch.take<float>(each * ldf);
    for (float** at : {&scale, &weight}) *at = scratch.take<float>(n);
    gate = scratch.take<float>((n / each + 2) * ldf);
    scores = scratch.take<float>((n - n / each) * keys_a_block);
    if (largest_of_layers(s, [](const Layer& l) { return l.hybrid.room; })) far.emplace(scratch, s.h / s.g, s.d, ldx, ldf);
  }
};

/// What one thread does for rows begin … begin + count − 1, together with the others of its team.
class Sweep {
 public:
  Sweep(const Stack& s, Index begin, Index count, const Buffers& at, OwnBuffers& own, Team::Member& team)
      : s_(s), begin_(begin), count_(count), r_(s.h / s.g), at_(at), own_(own), team_(team) {}

  void run() {
    phase(0, [](Index) {}, [&](Index i) { embed(i); });
    for (Index l = 0; l < s_.num_layers; ++l) layer(s_.layers[l], l + 1 < s_.num_layers ? &s_.layers[l + 1] : nullptr);
    put_out();
  }

 private:
  /// Post-norm: x ← norm(x + f(x)). Pre-norm: x ← x + f(norm x), or x + norm(f(x)); the norm of what follows is taken at once.
  void layer(const Layer& l, const Layer* next) {
    if (l.attention == Attention::rwkv7) make_of_mixtures(l.rwkv7);
    else if (l.attention != Attention::filters) multiply(l.qkv, stream(), at_.ld, at_.qkv, at_.ld_qkv, [&](Index i) {
      if (l.whole_norms && l.q_gain) norm_head(query(i, 0), s_.h * s_.d, l.q_gain, 1e-6f);
      if (l.whole_norms && l.k_gain) norm_head(key(i, 0), s_.g * s_.d, l.k_gain, 1e-6f);
    });
    const auto then = [&](Index i) { to_bytes(l.o, at_.heads, at_.ld_heads, i); };
    if (l.attention == Attention::filters) filter(l, at_.heads, at_.ld_heads, then);
    else if (l.attention == Attention::softmax) attend_cache(l, then);
    else if (l.attention == Attention::delta) over_states(l.delta.keys, [&](Index row, Index rows, Index head) { correct(l, row, rows, head); }, then);
    else if (l.attention == Attention::hybrid) over_states(s_.g, [&](Index row, Index rows, Index head) { attend_hybrid(l, row, rows, head); }, then, 1);
    else if (l.attention == Attention::ssd) scan(l, then);
    else if (l.attention == Attention::rwkv7) over_states(l.rwkv7.heads, [&](Index row, Index rows, Index head) {
      float* S = l.rwkv7.S + (s_.sequence(begin_ + row) * l.rwkv7.heads + head) * l.rwkv7.d * l.rwkv7.d;
      rwkv7_head(l.rwkv7, head, qkv(row), at_.ld_qkv, rows, at_.first + row * at_.ld_first, at_.ld_first, S, at_.heads + row * at_.ld_heads, at_.ld_heads, own_.rwkv7);
    }, then);
    else over_states(s_.g, [&](Index row, Index rows, Index head) { attend(l, row, rows, head); }, then);
    const auto inside = [&](const Norm& norm) { return l.normed_inside ? &norm : nullptr; };
    const Norm* behind = first_norm(next);
    const Matrix& reads = next ? next->qkv : s_.head;
    const bool whole = l.mlp == Mlp::none;
    const Norm* between = !s_.pre_norm ? &l.attention_norm : whole ? behind : l.normed_inside ? nullptr : &l.mlp_norm;
    multiply(l.o, at_.heads, at_.ld_heads, at_.y, at_.ld, [&](Index i) { add_and_norm(inside(l.attention_norm), between, whole ? reads : l.mixture ? l.qkv : l.up, i); });
    if (whole) return;
    if (l.mixture) mix(l.mixture, 1, l.mlp_last, [&](Index i) { to_bytes(l.up, at_.mixed, at_.ld, i); });
    expand(l);
    const Norm* after = s_.pre_norm ? behind : &l.mlp_norm;
    multiply(l.down, at_.inner, at_.ld_inner, at_.y, at_.ld, [&](Index i) { add_and_norm(inside(l.mlp_norm), after, reads, i); });
  }

  /// Of each row, mixtures of its input and the one before, behind one another. last: of each sequence, the input before.
  template <typename G>
  void mix(const float* mixtures, Index count, float* last, G then) {
    const Index n = s_.hidden;
    team_.phase(count_, [&](Index i) {
      const bool begins = i == 0 || s_.sequence(begin_ + i) != s_.sequence(begin_ + i - 1);
      const float *x = stream() + i * at_.ld, *before = begins ? last + s_.sequence(begin_ + i) * n : x - at_.ld;
      for (Index j = 0; j < count; ++j) mix_row(x, before, mixtures + j * whole_panels(n), n, at_.mixed + (i * count + j) * at_.ld);
      then(i);
    }, [&] {
      for (Index i = 0; i < count_; ++i) std::memcpy(last + s_.sequence(begin_ + i) * n, stream() + i * at_.ld, bytes(n));
    });
  }

  /// r, k, v and what products of low rank begin with, each of its own mixture.
  void make_of_mixtures(const Rwkv7& l) {
    struct Made {
      const Matrix* w;
      Index mixture, to, levels;  // levels: which of the rows of bytes
    } all[3 + Rwkv7::num_low] = {{&l.made[0], 0, l.at(0), 0}, {&l.made[1], 2, l.at(1), 1}, {&l.made[2], 3, l.at(2), 2}};
    Index panels = 0;
    for (Index i = 0; i < Rwkv7::num_low; ++i) all[3 + i] = {&l.down[i], i == Rwkv7::w ? 1 : i == Rwkv7::v ? 3 : i + 3, l.at_low(i), 0};
    for (const Made& x : all) panels += x.w->panels();
    const auto part = [&](const Made& x) {
      const Index at = x.levels * count_;
      return Rows{count_, 6 * at_.ld, at_.mixed + x.mixture * at_.ld, at_.levels + at * at_.ld_levels, at_.ld_levels, at_.step + at, at_.least + at};
    };
    mix(l.mixtures, 6, l.last, [&](Index i) {
      for (Index j = 0; j < 3; ++j) to_bytes(*all[j].w, at_.mixed + all[j].mixture * at_.ld, 6 * at_.ld, i, j * count_);
    });
    over_panels(panels, [&](Index i, Index row, Index n) {
      const Made* x = all;
      for (; i >= x->w->panels(); ++x) i -= x->w->panels();
      product(*x->w, s_.dot_products, part(*x).part(row, n), i, qkv(row) + x->to + i * panel, at_.ld_qkv);
    }, [&](Index i) {
      const auto each = [&](Index low, auto f) {
        float* x = qkv(i) + l.at_low(low);
        for (Index c = 0; c < l.down[low].outputs; c += width<float>) store(x + c, f(load(x + c)));
      };
      each(Rwkv7::w, [](Vec<float> x) TARNN_LAMBDA { return sigmoid<float>(x * 2.f) * 2.f - 1.f; });  // tanh
      each(Rwkv7::g, [](Vec<float> x) TARNN_LAMBDA { return sigmoid<float>(x); });
    });
  }

  /// Rows of `x` in place; of a layer that filters its own input, these are put there first.
  template <typename G>
  void filter(const Layer& l, float* x, Index ld, G then) {
    const Filters& f = l.filters;
    over_states((f.channels + panel - 1) / panel, [&](Index row, Index rows, Index i) {
      const Index begin = i * panel, end = smaller(begin + panel, f.channels);
      for (Index j = row; l.attention == Attention::filters && j < row + rows; ++j)
        std::memcpy(x + j * ld + begin, stream() + j * at_.ld + begin, bytes(end - begin));
      filter_channels(f, x + row * ld, ld, rows, f.tokens + s_.sequence(begin_ + row) * f.kept * f.channels, begin, end);
    }, then);
  }

  template <typename G>
  void scan(const Layer& l, G then) {
    const Ssd& x = l.ssd;
    filter(l, at_.qkv, at_.ld_qkv, [](Index) {});
    over_states(x.heads, [&](Index row, Index rows, Index head) {
      float* S = x.S + s_.sequence(begin_ + row) * x.inner() * x.n;
      scan_head(x, head, qkv(row), at_.ld_qkv, rows, S, at_.heads + row * at_.ld_heads, at_.ld_heads, own_.ssd);
    }, [&](Index i) {
      gate_and_norm(x, qkv(i) + x.filtered(), at_.heads + i * at_.ld_heads);
      then(i);
    });
  }

  /// Tasks, and then what is to be done to each whole row: by one thread where they are few, else as tasks too.
  template <typename F, typename G>
  void phase(Index tasks, F task, G row) {
    if (count_ <= rows_alone) return team_.phase(std::max<Index>(1, tasks), [&](Index i) { if (i < tasks) task(i); }, [&] {
      for (Index i = 0; i < count_; ++i) row(i);
    });
    if (tasks) team_.phase(tasks, task, [] {});
    team_.phase((count_ + rows_a_task - 1) / rows_a_task, [&](Index task) {
      for (Index i = task * rows_a_task; i < smaller(count_, (task + 1) * rows_a_task); ++i) row(i);
    }, [] {});
  }

  /// task(first row, rows, head): the rows of one sequence for one of some heads; several such are a task where rows are few.
  template <typename F, typename G>
  void over_states(Index heads, F task, G row, Index states_a_task = 4) {
    const Index first = s_.sequence(begin_), sequences = s_.sequence(begin_ + count_ - 1) - first + 1;
    const Index states = sequences * heads, each = std::max<Index>(1, states_a_task * sequences / count_);
    phase((states + each - 1) / each, [&](Index i) {
      for (Index state = i * each; state < smaller(states, (i + 1) * each); ++state) {
        const Index sequence = first + state / heads, at = std::max<Index>(0, s_.start(sequence) - begin_);
        const Index rows = smaller(s_.start(sequence + 1) - begin_, count_) - at;
        if (rows > 0) task(at, rows, state % heads);  // some sequences may have none here
      }
    }, row);
  }

  /// task(panel, first row, rows): a panel's tasks follow one another, so that it is in cache for all but the first.
  template <typename F, typename G>
  void over_panels(Index panels, F task, G row) {
    const Index parts = (count_ + rows_a_product - 1) / rows_a_product, each = (count_ + parts - 1) / parts;
    phase(panels * parts, [&](Index i) {
      const Index first = i % parts * each;
      task(i / parts, first, smaller(each, count_ - first));
    }, row);
  }

  template <typename Format>
  void read_token(Index id, float* x) {
    const auto* from = static_cast<const typename Format::Stored*>(s_.tokens) + id * s_.token_width;
    for (Index j = 0; j < s_.token_width; j += width<float>) store(x + j, read_as<Format>(from + j, s_.token_width - j) * s_.token_scale);
  }

  void embed(Index i) {
    const Index row = begin_ + i, n = s_.hidden, position = s_.position(row), place = smaller(position, s_.num_places - 1);
    float* x = at_.x + i * at_.ld;
    clear(x, at_.ld);
    if (s_.token_type == Type::bfloat16) read_token<Bfloat16>(s_.ids[row], x);
    else if (s_.token_type == Type::float16) read_token<Float16>(s_.ids[row], x);
    else read_token<Same<float>>(s_.ids[row], x);
    if (s_.places) for (Index j = 0; j < n; ++j) x[j] += s_.places[place * n + j];
    if (s_.extra) for (Index j = 0; j < n; ++j) x[j] += s_.extra[row * n + j];
    if (s_.pre_norm) put_stream(first_norm(s_.num_layers ? &s_.layers[0] : nullptr), i);
    to_bytes(s_.num_layers ? s_.layers[0].qkv : s_.head, stream(), at_.ld, i);
    float* turn = at_.turns + i * at_.ld_turns;
    for (Index j = 0; j < s_.num_rotations; turn += s_.rotations[j++].width)
      for (Index c = 0, half = s_.rotations[j].width / 2; c < half; ++c) {
        double angle = static_cast<double>(position) * s_.rotations[j].frequencies[c];
        if (s_.rotations[j].single) angle = static_cast<double>(static_cast<float>(angle));
        turn[c] = static_cast<float>(std::cos(angle)), turn[half + c] = static_cast<float>(std::sin(angle));
      }
  }

  /// What a layer, or the head, reads first through; null: nothing.
  const Norm* first_norm(const Layer* l) const { return !l ? &s_.last : l->normed_inside ? nullptr : &l->attention_norm; }

  /// One key head of some rows of a sequence, and its queries: norms, rotation, decay, state and outputs.
  void attend(const Layer& l, Index row, Index rows, Index head) {
    for (; l.attention == Attention::none && rows > 0; ++row, --rows)
      for (Index r = 0; r < r_; ++r) std::memcpy(output(row, head) + r * s_.d, qkv(row) + head * s_.d, bytes(s_.d));
    for (Index n; rows > 0; row += n, rows -= n) {
      n = smaller(rows, tokens_at_once);
      for (Index i = 0; i < n; ++i) place(l, row + i, head);
      if (makes_features(l)) make_features(l, row, n, head);
      if (l.decay == Decay::channel) make_gates(l, row, n, head);
      for (Index i = 0; i < n; ++i) attend_linear(l, row + i, head, i);
    }
  }

  /// Some rows of a sequence, by the delta rule.
  void correct(const Layer& l, Index row, Index rows, Index head) {
    float* out = at_.heads + row * at_.ld_heads;
    if (rows > 0) DeltaRows(l, s_.sequence(begin_ + row), head, qkv(row), at_.ld_qkv, out, at_.ld_heads, own_.delta).run(rows);
  }

  static bool makes_features(const Layer& l) { return l.features.made_here || l.rotates_features; }

  /// Keys and values get their places, and then each row reads those up to its own. Of a long cache the blocks are tasks.
  template <typename G>
  void attend_cache(const Layer& l, G then) {
    const Index blocks = key_blocks(l.cache.length + s_.most_slots);
    const auto join_all = [&](Index row, Index head) {
      for (Index r = 0; r < r_; ++r) join(l, row, head, r);
    };
    if (blocks == 1 && s_.most_slots == 1) return over_states(s_.g, [&](Index row, Index, Index head) {
      put_key(l, row, head);
      attend_part(l, row, 1, head, 0);
      join_all(row, head);
    }, then);
    team_.phase(count_ * s_.g, [&](Index i) { put_key(l, i / s_.g, i % s_.g); }, [] {});
    const Index together = smaller(s_.most_slots, tokens_at_once), groups = (count_ + together - 1) / together;
    phase(groups * s_.g * blocks, [&](Index i) {
      const Index begin = i / blocks / s_.g * together, end = smaller(count_, begin + together);
      for (Index row = begin, n; row < end; row += n) {
        for (n = 1; row + n < end && !s_.slots && s_.sequence(begin_ + row + n) == s_.sequence(begin_ + row);) ++n;
        attend_part(l, row, n, i / blocks % s_.g, i % blocks);
      }
    }, [&](Index row) {
      for (Index head = 0; head < s_.g; ++head) join_all(row, head);
      then(row);
    });
  }

  void put_key(const Layer& l, Index row, Index head) {
    place(l, row, head);
    append(cache(l, row), head_of_cache(l, head), s_.d, s_.d, key(row, head), value(row, head));
  }

  /// A layer's cache of a row's sequence as it is when the row comes.
  Cache cache(const Layer& l, Index row) const {
    return l.cache.of(s_.sequence(begin_ + row), head_of_cache(l, s_.g), s_.d, s_.slot(begin_ + row));
  }

  /// Which of its heads a layer's cache has for this one.
  static Index head_of_cache(const Layer& l, Index head) {
    return l.attention == Attention::hybrid ? l.hybrid.heads_with(Reach::exact, head) : head;
  }

  /// Hybrid attention of one key head, for rows of a sequence.
  void attend_hybrid(const Layer& l, Index row, Index rows, Index head) {
    const Reach reach = static_cast<Reach>(l.hybrid.reach[head]);
    if (reach == Reach::exact) return attend_all(l, row, rows, head);
    const Ring& ring = reach == Reach::features ? l.hybrid.features : l.hybrid.window;
    const Index f = reach == Reach::features ? l.features.f : 0, i = l.hybrid.heads_with(reach, head), maxima = l.hybrid.log_features ? f : 1;
    const RingKind kind = {ring.heads, l.hybrid.room, l.hybrid.sinks, s_.d, s_.d, f, l.hybrid.log_features, static_cast<double>(l.hybrid.far_until), &l.features, &l.hybrid.of_keys};
    for (const Index end = row + rows; row < end; ++row) {
      place(l, row, head);
      copy_queries(row, 1, head);
      const Index of = s_.sequence(begin_ + row), count = ring.count[of] + begin_ + row - s_.start(of), at = of * ring.heads + i;
      const auto sums = [&](const void* x, Index n) { return static_cast<float*>(const_cast<void*>(x)) + at * n; };
      const RingState state = {ring.k + at * kind.room * s_.d, ring.v + at * kind.room * s_.d, sums(ring.sums.S, f * s_.d), sums(ring.sums.z, f), sums(ring.sums.M, maxima)};
      const RingToken token = {count, r_, own_.ldx, own_.x, query(row, head), key(row, head), value(row, head), l.hybrid.far_bias ? l.hybrid.far_bias + head * r_ : nullptr};
      float* to = parts(l, row, head, 0);
      const Index each = parts(l, row, head, 1) - to;
      const Index n = RingHead(kind, state, i, token, *own_.far).attend(own_.scores, to, each);
      for (Index r = 0; r < r_; ++r) join_blocks(to + r * each, n, s_.d, output(row, head) + r * s_.d);
    }
  }

  /// Softmax over all keys, for rows of a sequence.
  void attend_all(const Layer& l, Index row, Index rows, Index head) {
    for (Index i = 0; i < rows; ++i) put_key(l, row + i, head);
    for (Index n; rows > 0; row += n, rows -= n) {
      n = s_.slots ? 1 : smaller(rows, tokens_at_once);
      for (Index block = 0; block < key_blocks(cache(l, row).length + n); ++block) attend_part(l, row, n, head, block);
      for (Index i = 0; i < n * r_; ++i) join(l, row + i / r_, head, i % r_);
    }
  }

  /// One block of keys, for rows of a sequence that follow on one another.
  void attend_part(const Layer& l, Index row, Index rows, Index head, Index block) {
    const Cache before = cache(l, row);
    if (block >= key_blocks(before.length + rows)) return;
    copy_queries(row, rows, head);
    float* partial = parts(l, row, head, 0) + block * partial_size(s_.d);
    const Queries queries = {rows, r_, own_.ldx, parts(l, row, head, 1) - parts(l, row, head, 0), at_.ld_parts, own_.x, own_.scores, partial};
    attend_block(before, head_of_cache(l, head), s_.d, s_.d, block, queries);
  }

  /// The queries of a head behind one another, each with zeros behind it.
  void copy_queries(Index row, Index rows, Index head) {
    for (Index i = 0; i < rows * r_; ++i) {
      float* q = own_.x + i * own_.ldx;
      clear(q, own_.ldx);
      std::memcpy(q, query(row + i / r_, head) + i % r_ * s_.d, bytes(s_.d));
    }
  }

  void join(const Layer& l, Index row, Index head, Index r) {
    float* o = output(row, head) + r * s_.d;
    join_blocks(parts(l, row, head, r), key_blocks(cache(l, row).length + 1), s_.d, o);
    const float* gate = gates(row) + (head * r_ + r) * s_.d;
    for (Index c = 0, n = s_.d; l.gated && c < n; c += width<float>) write(o + c, read(o + c, n - c) * sigmoid<float>(read(gate + c, n - c)), n - c);
  }

  /// Where the parts of a query lie.
  float* parts(const Layer& l, Index row, Index head, Index r) const {
    return at_.parts + row * at_.ld_parts + (head * r_ + r) * most_parts(l, s_.most_slots) * partial_size(s_.d);
  }

  /// q and k, normed and rotated.
  void place(const Layer& l, Index row, Index head) {
    float *q = query(row, head), *k = key(row, head);
    for (Index r = 0; l.q_gain && !l.whole_norms && r < r_; ++r) norm_head(q + r * s_.d, s_.d, l.q_gain, 1e-6f);
    if (l.k_gain && !l.whole_norms) norm_head(k, s_.d, l.k_gain, 1e-6f);
    if (l.rotation < 0 || l.rotates_features) return;
    const Index rotated = s_.rotations[l.rotation].width;
    for (Index r = 0; r < r_; ++r) rotate(q + r * s_.d, rotated, turn(l, row));
    rotate(k, rotated, turn(l, row));
  }

  /// Cosines and sines for a layer.
  const float* turn(const Layer& l, Index row) const {
    const float* at = at_.turns + row * at_.ld_turns;
    for (Index i = 0; i < l.rotation; ++i) at += s_.rotations[i].width;
    return at;
  }

  /// A row's state and outputs; it is the i-th of those whose features were made.
  void attend_linear(const Layer& l, Index row, Index head, Index i) {
    const FeatureMap& map = l.features;
    Step p = widest_step(s_);
    p.f = map.f, p.map = l.map, p.weighted = map.log_scaled;
    const auto vectors = [](float* x, Index stride) { return View{x, Type::float32, {0, stride, 0, 1}}; };
    const float* scale = own_.scale + i * (r_ + 1);
    float *o = output(row, head), *fq = own_.features + i * (r_ + 1) * own_.ldf, *fk = fq + r_ * own_.ldf;
    p.q = vectors(query(row, head), s_.d), p.k = vectors(key(row, head), s_.d), p.v = vectors(value(row, head), s_.d), p.o = vectors(o, s_.d);
    if (makes_features(l)) {
      p.q = vectors(fq, own_.ldf), p.k = vectors(fk, own_.ldf);
      if (map.log_scaled) p.key_log_weight = View{const_cast<float*>(scale) + r_, Type::float32, {0, 0, 0, 0}};
      p.map = Map::identity;
    }
    if (l.decay != Decay::none) p.log_decay = log_decay(l, row, head, i), p.channels = l.decay == Decay::channel;
    const Index state = s_.sequence(begin_ + row) * s_.g + head;
    p.before.S = static_cast<float*>(l.state.S) + state * map.f * s_.d;
    p.before.z = static_cast<float*>(l.state.z) + state * map.f;
    if (l.state.M) p.before.M = static_cast<float*>(l.state.M) + state;
    p.after = p.before;
    if (l.rotates_features && s_.normalize) step_of_fraction(l, row, fq, p);
    else step_one(p, Projected<float>(p.projection, p.map, p.f, p.d), 0, 0, own_.step);
    for (Index r = 0; r < r_; ++r) {
      if (map.made_here && map.log_scaled && !s_.normalize) {
        const float half = exp_one<float>(std::min(scale[r] / 2, 88.f));  // in two halves, which overflow later
        for (Index c = 0; c < s_.d; ++c) o[r * s_.d + c] = o[r * s_.d + c] * half * half;
      }
      if (l.o_gain) norm_head(o + r * s_.d, s_.d, l.o_gain, 1e-6f);
    }
  }

  /// φ of the queries and of the key of each row, behind one another, and their log-scales.
  void make_features(const Layer& l, Index row, Index rows, Index head) {
    const FeatureMap& map = l.features;
    const Index each = r_ + 1, n = rows * each;
    const auto weight = [&](Index i) {
      const Index of = row + i / each, r = i % each;
      const float* from = r == r_ ? key(of, head) : query(of, head) + r * s_.d;
      return move(r == r_ ? map.keys : map.queries, head, s_.d, from, own_.x + i * own_.ldx);
    };
    for (Index i = 0; i < n; ++i) own_.weight[i] = weight(i);
    const double position = static_cast<double>(s_.position(begin_ + row));
    Featurer(map, head, s_.d, n, own_.x, own_.ldx, position, each, own_.u, own_.features, own_.ldf, own_.scale);
    for (Index i = 0; i < n; ++i) own_.scale[i] += own_.weight[i];
    if (l.rotates_features && !s_.normalize)
      for (Index i = 0; i < n; ++i) rotate(own_.features + i * own_.ldf, map.f, turn(l, row + i / each));
  }

  /// Rotated features above, plain ones below: S of the former, z of the latter.
  void step_of_fraction(const Layer& l, Index row, const float* features, Step& p) {
    const Index f = p.f, n = (r_ + 1) * own_.ldf;
    std::memcpy(own_.turned, features, bytes(n));
    for (Index r = 0; r <= r_; ++r) rotate(own_.turned + r * own_.ldf, f, turn(l, row));
    p.q.data = own_.turned, p.k.data = own_.turned + r_ * own_.ldf;
    float* z = static_cast<float*>(p.before.z);
    float* unused = own_.u;
    clear(unused, f);
    p.before.z = p.after.z = unused, p.normalize = false;
    const float keep = p.log_decay ? std::exp(*static_cast<const float*>(p.log_decay.data)) : 1.f;
    const float* k = features + r_ * own_.ldf;
    for (Index i = 0; i < f; i += width<float>) write(z + i, read(z + i, f - i) * keep + read(k + i, f - i), f - i);
    step_one(p, Projected<float>(p.projection, p.map, p.f, p.d), 0, 0, own_.step);
    float* o = static_cast<float*>(p.o.data);
    for (Index r = 0; r < r_; ++r) {
      const float* q = features + r * own_.ldf;
      const float den = summed(f, [&](Index i) TARNN_LAMBDA { return read(q + i, f - i) * read(z + i, f - i); });
      for (Index c = 0; c < s_.d; ++c) o[r * s_.d + c] = den == 0 ? 0.f : o[r * s_.d + c] / den;
    }
  }

  /// log_decay of one head of a row, the i-th whose gates were made: one number, or one for each feature.
  View log_decay(const Layer& l, Index row, Index head, Index i) {
    if (l.decay == Decay::head) return View{const_cast<float*>(l.log_decay + head), Type::float32, {0, 0, 0, 0}};
    if (l.decay == Decay::channel) return View{own_.gate + i * own_.ldf, Type::float32, {0, 0, 0, 1}};
    own_.gate[0] = -softplus(broadcast(gates(row)[head]))[0];
    return View{own_.gate, Type::float32, {0, 0, 0, 0}};
  }

  /// The log-decay of each feature of a head, of each row.
  void make_gates(const Layer& l, Index row, Index rows, Index head) {
    const Index f = l.features.f, panels = (f + panel - 1) / panel;
    for (Index i = 0; i < panels; ++i)
      product(l.gate, false, {rows, at_.ld_qkv, gates(row), nullptr, 0, nullptr, nullptr}, head * panels + i, own_.gate + i * panel, own_.ldf);
    for (Index i = 0; i < rows; ++i)
      for (float *x = own_.gate + i * own_.ldf, *end = x + f; x < end; x += width<float>) store(x, softplus(-load(x)) * (-1.f / 16));
  }

  float* qkv(Index row) const { return at_.qkv + row * at_.ld_qkv; }
  float* query(Index row, Index head) const { return qkv(row) + head * r_ * s_.d; }
  float* key(Index row, Index head) const { return qkv(row) + (s_.h + head) * s_.d; }
  float* value(Index row, Index head) const { return qkv(row) + (s_.h + s_.g + head) * s_.d; }
  float* gates(Index row) const { return value(row, 0) + s_.g * s_.d; }
  float* output(Index row, Index head) const { return at_.heads + row * at_.ld_heads + head * r_ * s_.d; }
  static std::size_t bytes(Index floats) { return sizeof(float) * static_cast<std::size_t>(floats); }

  /// inner ← gelu(W₁ x), or silu(W₁ x) ⊙ W₂ x, whose panels take turns.
  void expand(const Layer& l) {
    const bool swiglu = l.mlp == Mlp::swiglu;
    const Index turns = swiglu ? 2 : 1, ld = swiglu ? at_.ld_both : at_.ld_inner;
    const Rows in = rows(l.mixture ? at_.mixed : stream(), at_.ld);
    over_panels(l.up.panels() / turns, [&](Index i, Index row, Index n) {
      float *from = (swiglu ? at_.both : at_.inner) + row * ld + i * turns * panel, *to = at_.inner + row * at_.ld_inner + i * panel;
      for (Index j = 0; j < turns; ++j) product(l.up, s_.dot_products, in.part(row, n), i * turns + j, from + j * panel, ld);
      for (; n > 0; --n, from += ld, to += at_.ld_inner)
        for (Index j = 0; j < panel; j += width<float>)
          store(to + j, swiglu ? silu(load(from + j)) * load(from + panel + j) : l.mlp == Mlp::gelu ? gelu(load(from + j)) : squared_relu(load(from + j)));
    }, [&](Index i) { to_bytes(l.down, at_.inner, at_.ld_inner, i); });
  }

  template <typename G>
  void multiply(const Matrix& w, const float* x, Index ld, float* out, Index ldo, G then) {
    const Rows in = rows(x, ld);
    over_panels(w.panels(), [&](Index i, Index row, Index n) {
      product(w, s_.dot_products, in.part(row, n), i, out + row * ldo + i * panel, ldo);
    }, then);
  }

  /// The head, of all rows or of each sequence's last: these are moved to the front first.
  void put_out() {
    const bool all = s_.all || !s_.starts;
    Index wanted = all ? count_ : 0;
    for (Index i = 0; !all && i < count_; ++i) wanted += is_last(i);
    if (wanted == 0) return;
    const Index rows = count_;
    if (wanted < rows) {
      team_.phase(1, [&](Index) {
        for (Index i = 0, to = 0; i < rows; ++i) {
          if (!is_last(i)) continue;
          std::memmove(stream() + to * at_.ld, stream() + i * at_.ld, bytes(at_.ld));
          to_bytes(s_.head, stream(), at_.ld, to++);
        }
      }, [] {});
      count_ = wanted;
    }
    multiply(s_.head, stream(), at_.ld, at_.out, at_.ld_out, [&](Index i) {
      Index to = begin_ + i;
      if (!all) {
        Index row = 0;
        for (Index before = i; !is_last(row) || before-- > 0;) ++row;
        to = s_.sequence(begin_ + row);
      }
      std::memcpy(s_.out + to * s_.head.outputs, at_.out + i * at_.ld_out, bytes(s_.head.outputs));
    });
  }

  bool is_last(Index row) const { return s_.start(s_.sequence(begin_ + row) + 1) == begin_ + row + 1; }

  /// x ← x + y, or x + inside(y); then norm(x), or x, for what is next.
  void add_and_norm(const Norm* inside, const Norm* norm, const Matrix& next, Index i) {
    float *x = at_.x + i * at_.ld, *y = at_.y + i * at_.ld;
    if (inside) norm_row(y, s_.hidden, *inside, s_.centred, s_.norm_eps, y);
    for (Index j = 0; j < s_.hidden; j += width<float>) store(x + j, load(x + j) + load(y + j));
    put_stream(norm, i);
    to_bytes(next, stream(), at_.ld, i);
  }

  void put_stream(const Norm* norm, Index i) {
    const float* x = at_.x + i * at_.ld;
    if (norm) norm_row(x, s_.hidden, *norm, s_.centred, s_.norm_eps, stream() + i * at_.ld);
    else std::memcpy(stream() + i * at_.ld, x, bytes(at_.ld));
  }

  /// What the norms leave, and most products read: pre-norm, x itself is kept beside it.
  float* stream() const { return s_.pre_norm ? at_.normed : at_.x; }

  Rows rows(const float* x, Index ld) const { return {count_, ld, x, at_.levels, at_.ld_levels, at_.step, at_.least}; }

  /// For a product with whole numbers its rows become bytes.
  void to_bytes(const Matrix& next, const float* x, Index ld, Index i, Index first = 0) {
    if (next.takes_bytes())
      to_levels(x + i * ld, next.inputs, at_.levels + (first + i) * at_.ld_levels, at_.step[first + i], at_.least[first + i]);
  }

  const Stack& s_;
  const Index begin_;
  Index count_;
  const Index r_;
  const Buffers& at_;
  OwnBuffers& own_;
  Team::Member& team_;
};

std::size_t room(const Stack& s, Index rows) {
  Scratch counting(nullptr);
  Buffers(counting, s, rows);
  return counting.used();
}

std::size_t own_room(const Stack& s) {
  Scratch counting(nullptr);
  OwnBuffers(counting, s);
  return counting.used();
}

void run(const Stack& s, Index begin, Index count, void* shared, void* own, Team::Member& team) {
  Scratch of_all(shared), of_one(own);
  const Buffers at(of_all, s, count);
  OwnBuffers mine(of_one, s);
  Sweep(s, begin, count, at, mine, team).run();
}

}  // namespace

extern const StackKernel stack_kernel;
const StackKernel stack_kernel = {room, own_room, run};

}  // namespace TARNN_ISA
}  // namespace tarnn
