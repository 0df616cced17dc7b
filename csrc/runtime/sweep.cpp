// One block of rows through the phases of a program. Compiled once for each instruction set: see ../kernels_of_isa.cpp.
#include "runtime/instructions/delta.h"
#include "runtime/instructions/experts.h"
#include "runtime/instructions/features.h"
#include "runtime/instructions/filter.h"
#include "runtime/instructions/hybrid.h"
#include "runtime/instructions/linear.h"
#include "runtime/instructions/low_rank_delta.h"
#include "runtime/instructions/scan.h"
#include "runtime/instructions/softmax.h"

namespace tarnn::runtime {
namespace TARNN_ISA {
namespace {

constexpr Index rows_a_product = 36;
constexpr Index rows_alone = 4, rows_a_task = 4;  // up to so many rows, one thread does what whole rows need

void run_rows(const Instruction& x, const View& at, Index row, Index rows) {
  if (x.kind == Kind::features) return features(x, at, row, rows);
  if (x.kind == Kind::head_product) return head_product(x, at, row, rows);
  if (x.kind == Kind::filter_rows) return filter_rows(x, at, row, rows);
  for (Index i = row; i < row + rows; ++i) switch (x.kind) {
    case Kind::embed: embed(x, at, i); break;
    case Kind::angles: angles(x, at, i); break;
    case Kind::norm: norm(x, at, i); break;
    case Kind::combine: combine(x, at, i); break;
    case Kind::rotate: rotate(x, at, i); break;
    case Kind::clamp: clamp(x, at, i); break;
    case Kind::concat: concat(x, at, i); break;
    case Kind::to_bytes: to_bytes(x, at, i); break;
    case Kind::route: route(x, at, i); break;
    default: break;
  }
}

/// Calls f with each instruction of a program.
template <typename F>
void each_instruction(const Program& p, F f) {
  for (const Phase& phase : p.phases) {
    f(phase.op);
    for (const auto* some : {&phase.before, &phase.after, &phase.rows})
      for (const Instruction& x : *some) f(x);
  }
}

/// Scratch that an instruction needs of its thread.
std::size_t scratch_of(const Instruction& x) {
  Scratch counting(nullptr);
  switch (x.kind) {
    case Kind::softmax: Softmax::Room(counting, x); break;
    case Kind::linear: LinearHeads::Room(counting, x); break;
    case Kind::delta: DeltaHeads::Room(counting, x, rows_at_once); break;
    case Kind::low_rank_delta: LowRankToken(counting, x.in().width); break;
    case Kind::hybrid: HybridHead::Room(counting, x), Softmax::Room(counting, x); break;
    case Kind::features: FeatureRoom(counting, x, rows_at_once); break;
    case Kind::head_product: counting.take<float>(rows_at_once * panel); break;
    case Kind::route: RouteRoom(counting, x); break;
    case Kind::experts:
    case Kind::product: counting.take<float>(2 * rows_a_product * panel); break;
    default: break;
  }
  return counting.used();
}

/// Copies of the states of one unit.
std::size_t copies_of(const Phase& phase, const Program& p) {
  Scratch counting(nullptr);
  for (const Index i : phase.op.states) counting.take<float>(p.states[static_cast<std::size_t>(i)].size / phase.units);
  return counting.used();
}

void lay_out_own(Scratch& scratch, const Call& c, const std::vector<Index>& ld, Own& own) {
  const Program& p = *c.program;
  for (std::size_t i = 0; i < p.slots.size(); ++i)
    own.at.push_back(p.slots[i].of == Slot::Of::own ? scratch.take<float>(rows_at_once * ld[i]) : nullptr);
  std::size_t most = 0;
  each_instruction(p, [&](const Instruction& x) { most = std::max(most, scratch_of(x)); });
  own.scratch = scratch.take<char>(static_cast<Index>(most));
  for (std::size_t i = 0; i < p.states.size(); ++i) own.memories.push_back({c.memories[i].at, 0});
  if (c.writes()) return;
  std::size_t copies = 0;
  for (const Phase& phase : p.phases) copies = std::max(copies, copies_of(phase, p));
  own.copies = scratch.take<char>(static_cast<Index>(copies));
}

/// Memory that the frame shares besides its slots: the parts of softmax, and the places of rows by expert.
void lay_out_parts(Scratch& scratch, const Call& c, Index rows, Frame& frame) {
  each_instruction(*c.program, [&](const Instruction& x) {
    if (x.kind == Kind::softmax) frame.ld_parts = std::max(frame.ld_parts, Softmax::parts_of_row(x, c));
    if (x.kind == Kind::hybrid) frame.ld_parts = std::max(frame.ld_parts, HybridHead::parts_of_row(x, c));
  });
  frame.parts = scratch.take<float>(rows * frame.ld_parts);
  std::size_t most = 0;
  each_instruction(*c.program, [&](const Instruction& x) {
    Scratch counting(nullptr);
    if (x.kind == Kind::experts) Places(counting, x, rows, c.program->dots), most = std::max(most, counting.used());
  });
  frame.experts = scratch.take<char>(static_cast<Index>(most));
}

/// What one thread does for rows begin … begin + count − 1, together with the others of its team.
class Sweep {
 public:
  Sweep(Frame& frame, Own& own, Index begin, Index count, Team::Member& team)
      : call_(frame.call), frame_(frame), own_(own), begin_(begin), count_(count), team_(team) {}

  void run() {
    const auto& phases = frame_.program.phases;
    for (std::size_t i = 0; i < phases.size(); ++i)
      if (!call_.keep) run_phase(phases[i], i);
      else if (!call_.layout->phases[i].empty()) keep(phases[i], call_.layout->phases[i]);
  }

 private:
  View whole() const { return {frame_, own_, begin_}; }

  void run_phase(const Phase& p, std::size_t number) {
    const auto then = [&](Index i) {
      for (const Instruction& x : p.rows) run_rows(x, whole(), i, 1);
      if (number + 1 < frame_.program.phases.size()) note(number + 1, i);
    };
    switch (p.op.kind) {
      case Kind::nothing: return phase(0, [](Index) {}, then);
      case Kind::product: return products(p.op, then);
      case Kind::softmax: return attend(p, then);
      case Kind::mix: return mix(p.op, then);
      case Kind::experts: return experts(p.op, then);
      case Kind::head: return put_out(p.op);
      case Kind::filter: return filter_all(p.op, then);
      case Kind::selective_scan: return over_states(channel_blocks(p.op.in()), [&](Index row, Index rows, Index i) { selective_scan(p.op, whole(), row, rows, i); }, then);
      case Kind::diagonal_scan: {
        const Index n = p.op.in().size();
        return over_states((n + panel - 1) / panel, [&](Index row, Index rows, Index i) {
          diagonal_scan(p.op, whole(), row, rows, i * panel, smaller(panel, n - i * panel));
        }, then);
      }
      default: return over_states(p.units, [&](Index row, Index rows, Index unit) { run_unit(p, row, rows, unit); }, then, p.op.kind == Kind::hybrid ? 1 : 4);
    }
  }

  template <typename G>
  void filter_all(const Instruction& x, G then) {
    const Index n = x.in().size();
    over_states((n + panel - 1) / panel, [&](Index row, Index rows, Index i) {
      filter(x, whole(), row, rows, i * panel, smaller(panel, n - i * panel));
    }, then);
  }

  /// What a phase's states will take in of a row, and what the head will read.
  void note(std::size_t phase, Index row) {
    const Index of = begin_ + row;
    if (call_.log)
      for (const Logged& l : call_.layout->phases[phase]) {
        const auto slot = static_cast<std::size_t>(l.slot);
        std::copy_n(frame_.at[slot] + row * frame_.ld[slot] + l.offset, l.size, call_.log + of * call_.layout->width + l.at + l.offset);
      }
    const Instruction& x = frame_.program.phases[phase].op;
    if (call_.hidden && x.kind == Kind::head) std::copy_n(whole().at(x.in(), row), x.in().size(), call_.hidden + of * x.in().size());
  }

  /// Lets the tokens that stay into the states of a phase: its slots lie in the log meanwhile.
  void keep(const Phase& p, const std::vector<Logged>& logged) {
    const std::vector<float*> at = frame_.at;
    const std::vector<Index> ld = frame_.ld;
    for (const Logged& l : logged) frame_.at[static_cast<std::size_t>(l.slot)] = call_.log + l.at, frame_.ld[static_cast<std::size_t>(l.slot)] = call_.layout->width;
    const auto nothing = [](Index) {};
    if (p.op.kind == Kind::filter) filter_all(p.op, nothing);
    else if (p.op.kind == Kind::mix) team_.phase(1, [&](Index) { keep_last(p.op); }, [] {});
    else over_states(p.units, [&](Index row, Index rows, Index unit) { run_unit(p, row, rows, unit); }, nothing);
    frame_.at = at, frame_.ld = ld;
  }

  void keep_last(const Instruction& x) {
    const Index n = x.in().size();
    for (Index i = 0; i < call_.b; ++i)
      if (call_.keep[i]) std::copy_n(whole().at(x.in(), call_.start(i) + call_.keep[i] - 1), n, call_.memories[x.state(0)].at + i * n);
  }

  /// Copies of the states of one unit, for rows that may not stay.
  void borrow(const Phase& p, Index sequence, Index unit) {
    Scratch scratch(own_.copies);
    for (const Index i : p.op.states) {
      const Index n = frame_.program.states[static_cast<std::size_t>(i)].size / p.units, first = (sequence * p.units + unit) * n;
      float* to = scratch.take<float>(n);
      std::copy_n(call_.memories[i].at + first, n, to);
      own_.memories[static_cast<std::size_t>(i)] = {to, first};
    }
  }

  /// Rows of one sequence for one unit, some at a time.
  void run_unit(const Phase& p, Index row, Index rows, Index unit) {
    if (!call_.writes()) borrow(p, call_.sequence(begin_ + row), unit);
    View at{frame_, own_, begin_, row, unit, p.units};
    for (Index n; rows > 0; row += n, rows -= n) {
      n = smaller(rows, rows_at_once);
      at.first = row;
      for (const Instruction& x : p.before) run_rows(x, at, row, n);
      switch (p.op.kind) {
        case Kind::linear: LinearHeads(p.op, at).run(row, n); break;
        case Kind::delta: DeltaHeads(p.op, at).run(row, n); break;
        case Kind::low_rank_delta: low_rank_delta(p.op, at, row, n); break;
        case Kind::hybrid: HybridHead(p.op, at).run(row, n); break;
        default: break;
      }
      if (!call_.keep)
        for (const Instruction& x : p.after) run_rows(x, at, row, n);
    }
  }

  /// Keys and values get their places, and then each row reads those up to its own. The blocks of a long cache are tasks.
  template <typename G>
  void attend(const Phase& p, G then) {
    const Index blocks = Softmax::most_parts(call_), units = p.units;
    const auto view = [&](Index row, Index unit) { return View{frame_, own_, begin_, row, unit, units}; };
    const auto place = [&](Index row, Index unit) {
      const View at = view(row, unit);
      for (const Instruction& x : p.before) run_rows(x, at, row, 1);
      Softmax(p.op, at).put_key(row);
    };
    const auto finish = [&](Index row, Index unit) {
      const View at = view(row, unit);
      Softmax(p.op, at).join(row);
      for (const Instruction& x : p.after) run_rows(x, at, row, 1);
    };
    if (blocks == 1 && call_.most_rows == 1) return over_states(units, [&](Index row, Index, Index unit) {
      place(row, unit);
      Softmax(p.op, view(row, unit)).attend_part(row, 1, 0);
      finish(row, unit);
    }, then);
    team_.phase(count_ * units, [&](Index i) { place(i / units, i % units); }, [] {});
    const Index together = smaller(call_.most_rows, Softmax::tokens_at_once(p.op)), groups = (count_ + together - 1) / together;
    phase(groups * units * blocks, [&](Index i) {
      const Index begin = i / blocks / units * together, end = smaller(count_, begin + together);
      for (Index row = begin, n; row < end; row += n) {
        for (n = 1; row + n < end && call_.sequence(begin_ + row + n) == call_.sequence(begin_ + row);) ++n;
        Softmax(p.op, view(row, i / blocks % units)).attend_part(row, n, i % blocks);
      }
    }, [&](Index row) {
      for (Index unit = 0; unit < units; ++unit) finish(row, unit);
      then(row);
    });
  }

  /// Mixtures of each row and the one before. vectors: a mixture for each output. states: the last row of each sequence.
  template <typename G>
  void mix(const Instruction& x, G then) {
    const Index n = x.in().size();
    float* last = call_.memories[x.state(0)].at;
    const View at = whole();
    team_.phase(count_, [&](Index i) {
      const Index of = call_.sequence(begin_ + i);
      const bool begins = i == 0 || of != call_.sequence(begin_ + i - 1);
      const float *row = at.at(x.in(), i), *before = begins ? last + of * n : at.at(x.in(), i - 1);
      for (Index j = 0; j < x.outputs; ++j) {
        float* to = at.at(x.out(j), i);
        const float* mixture = x.vector(j);
        for (Index c = 0; c < n; c += width<float>) {
          const Vec<float> y = read(row + c, n - c);
          write(to + c, y + (read(before + c, n - c) - y) * load(mixture + c), n - c);
        }
      }
      then(i);
    }, [&] {
      for (Index i = 0; i < count_ && call_.writes(); ++i) std::copy_n(at.at(x.in(), i), n, last + call_.sequence(begin_ + i) * n);
    });
  }

  /// Several matrices, each of its own input and to its own output: input i and output i are matrix i's. integers, of each: its function, whether the panels
  /// of two take turns, the first of which passes the function and multiplies the second, and which slot has its rows as bytes.
  template <typename G>
  void products(const Instruction& x, G then) {
    Index panels = 0;
    for (Index j = 0; j < x.outputs; ++j) panels += panels_of(x, j);
    over_panels(panels, [&](Index i, Index row, Index rows) {
      Index j = 0;
      for (; i >= panels_of(x, j); ++j) i -= panels_of(x, j);
      one_panel(x, j, i, row, rows);
    }, then);
  }

  static Index panels_of(const Instruction& x, Index j) {
    return x.matrices[static_cast<std::size_t>(j)].panels() / (x.integer(3 * j + 1) ? 2 : 1);
  }

  void one_panel(const Instruction& x, Index j, Index i, Index row, Index rows) {
    const Matrix& w = x.matrices[static_cast<std::size_t>(j)];
    const auto f = static_cast<Function>(x.integer(3 * j));
    const View at = whole();
    const Rows in = rows_of(x.in(j), x.integer(3 * j + 2), w.format).part(row, rows);
    const Operand& out = x.out(j);
    const Index ld = at.ld(out);
    float* to = at.at(out, row) + i * panel;
    panel_of(w, f, x.integer(3 * j + 1) != 0, in, i, to, ld);
  }

  /// Panel i of f(W x), or where the panels of two take turns of f(W x) ⊙ V x.
  void panel_of(const Matrix& w, Function f, bool in_turns, const Rows& in, Index i, float* to, Index ld) {
    const Dots dots = frame_.program.dots;
    Index rows = in.count;
    if (!in_turns) {
      product(w, dots, in, i, to, ld);
      if (f == Function::identity) return;
      for (; rows > 0; --rows, to += ld)
        for (Index c = 0; c < panel; c += width<float>) store(to + c, function_of(f, load(to + c)));
      return;
    }
    auto* both = reinterpret_cast<float*>(own_.scratch);
    for (Index half = 0; half < 2; ++half) product(w, dots, in, 2 * i + half, both + half * panel, 2 * panel);
    for (; rows > 0; --rows, both += 2 * panel, to += ld)
      for (Index c = 0; c < panel; c += width<float>) store(to + c, function_of(f, load(both + c)) * load(both + panel + c));
  }

  /// Products of the experts that rows chose: rows are sorted by expert, so that each panel is read once for all of its rows, and what an expert makes
  /// of a row is added in the order of the experts' numbers. operands: output, rows, numbers of their experts (ascending), their weights. matrices: of each
  /// expert one behind the other: what makes its inner numbers, what makes its outputs. integers: a function, whether panels of two take turns in the first
  /// matrices, which slot has the rows as bytes.
  template <typename G>
  void experts(const Instruction& x, G then) {
    const View at = whole();
    Scratch memory(frame_.experts);
    const Places places(memory, x, count_, frame_.program.dots);
    const Rows given = rows_of(x.in(), x.integer(2), x.matrices[0].format);
    const bool few = count_ <= rows_alone;
    const auto gather = [&](Index place) { places.gather(place, given, x.in().size()); };
    if (count_ > 1) {
      team_.phase(1, [&](Index) {
        places.sort(x, at);
        for (Index i = 0; few && i < places.count(); ++i) gather(i);
      }, [] {});
      if (!few) over_places(places.count(), gather);
    }
    const auto matrix = [&](const Group& g, Index which) -> const Matrix& { return x.matrices[static_cast<std::size_t>(2 * g.expert + which)]; };
    const bool in_turns = x.integer(1) != 0;
    const Index panels = x.matrices[0].panels() / (in_turns ? 2 : 1);
    team_.phase(places.most_groups() * panels, [&](Index i) {
      if (i / panels >= places.groups()) return;
      const Group g = places.group(i / panels, x, at);
      over_parts(g.rows, [&](Index row, Index rows) {
        float* to = places.inner(g.first + row) + i % panels * panel;
        panel_of(matrix(g, 0), static_cast<Function>(x.integer(0)), in_turns, places.in(g, row, rows, given), i % panels, to, places.ld());
      });
    }, [&] {
      for (Index i = 0; few && places.rounds() && i < places.count(); ++i) places.round(i);
    });
    if (!few && places.rounds()) over_places(places.count(), [&](Index i) { places.round(i); });
    const Index ld = at.ld(x.out());
    phase(x.matrices[1].panels(), [&](Index i) {
      float *out = at.at(x.out(), 0) + i * panel, *made = reinterpret_cast<float*>(own_.scratch);
      for (Index row = 0; row < count_; ++row) std::fill_n(out + row * ld, panel, 0.f);
      for (Index j = 0; j < places.groups(); ++j) {
        const Group g = places.group(j, x, at);
        over_parts(g.rows, [&](Index row, Index rows) {
          product(matrix(g, 1), frame_.program.dots, places.between(g, row, rows), i, made, panel);
          for (Index r = 0; r < rows; ++r) {
            const Index place = g.first + row + r;
            const float weight = places.weight(place, x, at);
            float *to = out + places.row(place) * ld, *from = made + r * panel;
            for (Index c = 0; c < panel; c += width<float>) store(to + c, load(to + c) + load(from + c) * weight);
          }
        });
      }
    }, then);
  }

  /// f(first row, rows), of rows that are multiplied with a panel one part after the other.
  template <typename F>
  static void over_parts(Index all, F f) {
    const Index parts = (all + rows_a_product - 1) / rows_a_product, each = (all + parts - 1) / parts;
    for (Index row = 0; row < all; row += each) f(row, smaller(each, all - row));
  }

  /// f(place), some to a task.
  template <typename F>
  void over_places(Index places, F f) {
    team_.phase((places + rows_a_task - 1) / rows_a_task, [&](Index task) {
      for (Index i = task * rows_a_task; i < smaller(places, (task + 1) * rows_a_task); ++i) f(i);
    }, [] {});
  }

  /// The rows of a product with weights of a format, rounded too where it wants them so.
  Rows rows_of(const Operand& x, Index bytes, Format format) const {
    const View at = whole();
    Rows in{count_, at.ld(x), at.at(x, 0), nullptr, 0, nullptr, nullptr};
    if (bytes >= 0 && rounds_rows(format, frame_.program.dots)) {
      const Levels& levels = frame_.levels[static_cast<std::size_t>(bytes)];
      in.levels = levels.at, in.ld_levels = levels.ld, in.step = levels.step, in.least = levels.least;
    }
    return in;
  }

  /// The head, of all rows or of each sequence's last: these are moved to the front first. integers: which slot has its rows as bytes. numbers: c, if outputs
  /// are c tanh(y/c); else 0.
  void put_out(const Instruction& x) {
    const View at = whole();
    const Operand& in = x.in();
    const bool all = call_.all || !call_.starts;
    Index wanted = all ? count_ : 0;
    for (Index i = 0; !all && i < count_; ++i) wanted += is_last(i);
    if (wanted == 0) return;
    const Index rows = count_, bytes = x.integer(0);
    const Matrix& w = x.matrices[0];
    if (wanted < rows) {
      team_.phase(1, [&](Index) {
        for (Index i = 0, to = 0; i < rows; ++i) {
          if (!is_last(i)) continue;
          if (to < i) std::copy_n(at.at(in, i), in.size(), at.at(in, to));
          if (bytes >= 0 && rounds_rows(w.format, frame_.program.dots)) frame_.levels[static_cast<std::size_t>(bytes)].round(w.format, at.at(in, to), in.size(), to);
          ++to;
        }
      }, [] {});
      count_ = wanted;
    }
    const Rows from = rows_of(in, bytes, w.format);
    const Index ld = at.ld(x.out());
    over_panels(w.panels(), [&](Index i, Index row, Index n) {
      float* to = at.at(x.out(), row) + i * panel;
      product(w, frame_.program.dots, from.part(row, n), i, to, ld);
      if (const float cap = x.number(0); cap != 0.f)
        for (; n > 0; --n, to += ld)
          for (Index c = 0; c < panel; c += width<float>) store(to + c, tanh_of(load(to + c) / cap) * cap);
    }, [&](Index i) {
      Index to = begin_ + i;
      if (!all) {
        Index row = 0;
        for (Index before = i; !is_last(row) || before-- > 0;) ++row;
        to = call_.sequence(begin_ + row);
      }
      std::copy_n(at.at(x.out(), i), w.outputs, call_.out + to * w.outputs);
    });
    count_ = rows;
  }

  bool is_last(Index row) const { return call_.start(call_.sequence(begin_ + row) + 1) == begin_ + row + 1; }

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

  /// task(first row, rows, unit): the rows of one sequence for one of some units; several such are a task where rows are few.
  template <typename F, typename G>
  void over_states(Index units, F task, G row, Index states_a_task = 4) {
    const Index first = call_.sequence(begin_), sequences = call_.sequence(begin_ + count_ - 1) - first + 1;
    const Index states = sequences * units, each = std::max<Index>(1, states_a_task * sequences / count_);
    phase((states + each - 1) / each, [&](Index i) {
      for (Index state = i * each; state < smaller(states, (i + 1) * each); ++state) {
        const Index sequence = first + state / units, at = std::max<Index>(0, call_.start(sequence) - begin_);
        Index rows = smaller(call_.start(sequence + 1) - begin_, count_) - at;
        if (call_.keep) rows = smaller(rows, call_.keep[sequence]);
        if (rows > 0) task(at, rows, state % units);  // some sequences may have none here
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

  const Call& call_;
  Frame& frame_;
  Own& own_;
  const Index begin_;
  Index count_;
  Team::Member& team_;
};

std::size_t room(const Call& c, Index rows) {
  Scratch counting(nullptr);
  Frame frame(counting, c, rows);
  lay_out_parts(counting, c, rows, frame);
  return counting.used();
}

std::size_t own_room(const Call& c) {
  Scratch counting(nullptr), unused(nullptr);
  Own own;
  lay_out_own(counting, c, Frame(unused, c, 1).ld, own);
  return counting.used();
}

static_assert(most_logged <= rows_at_once);  // a filter reads those before only once

void run(const Call& c, Index begin, Index count, void* shared, void* mine, Team::Member& team) {
  Scratch of_all(shared), of_one(mine);
  Frame frame(of_all, c, count);
  lay_out_parts(of_all, c, count, frame);
  Own own;
  lay_out_own(of_one, c, frame.ld, own);
  Sweep(frame, own, begin, count, team).run();
}

const char* products(Format format) {
  const Dots has = dots_of_processor();
  if (format == Format::float32 || !rounds_rows(format, has)) return "float32";
  if (has.amx && rounds_rows(Format::bfloat16, has) && format != Format::int4) return "amx";
  if (format == Format::bfloat16) return "vdpbf16ps";
  return with_dots<BytesOfAll>(has, [](auto dot) TARNN_LAMBDA { return decltype(dot)::name; });
}

}  // namespace
}  // namespace TARNN_ISA
}  // namespace tarnn::runtime

namespace tarnn {
namespace TARNN_ISA {
extern const RuntimeKernel runtime_kernel;
const RuntimeKernel runtime_kernel = {runtime::TARNN_ISA::room, runtime::TARNN_ISA::own_room, runtime::TARNN_ISA::run, runtime::TARNN_ISA::products};
}  // namespace TARNN_ISA
}  // namespace tarnn
