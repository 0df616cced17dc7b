// Refuses phases in which one task writes what another one reads, and states that two instructions write.
#include <algorithm>

#include "runtime/checks.h"

namespace tarnn::runtime {
namespace {

/// Numbers begin … end − 1 of a slot's rows, as one operand has them. shared_out: each unit has its part of them.
struct Use {
  Index slot, begin, end;
  bool written, shared_out;
  bool meets(const Use& other) const { return slot == other.slot && begin < other.end && other.begin < end; }
  bool same(const Use& other) const { return begin == other.begin && end == other.end; }
};

/// How the instructions of a phase use the memory that all threads see.
class Uses {
 public:
  explicit Uses(const Program& p) : p_(p) {}

  void add(const Instruction& x, Index units, bool whole_panels_out) {
    for (std::size_t i = 0; i < x.operands.size(); ++i) {
      const Operand& o = x.operands[i];
      if (p_.slots[static_cast<std::size_t>(o.slot)].of != Slot::Of::all) continue;
      const bool written = static_cast<Index>(i) < x.outputs;
      const Index size = written && whole_panels_out ? whole_panels(o.size()) : o.size();
      all_.push_back({o.slot, o.offset, o.offset + size, written, o.heads % units == 0});
    }
  }

  /// Whether what one task writes meets what others use. allowed(a, b): they may meet.
  template <typename F>
  bool clash(F allowed) const {
    for (std::size_t i = 0; i < all_.size(); ++i)
      for (std::size_t j = 0; j < all_.size(); ++j)
        if (i != j && all_[i].written && all_[i].meets(all_[j]) && !allowed(all_[i], all_[j])) return true;
    return false;
  }
  std::size_t size() const { return all_.size(); }

 private:
  const Program& p_;
  std::vector<Use> all_;
};

constexpr std::size_t most_uses = 2048;

bool units_clash(const Phase& phase, const Program& p, const Reader& reader) {
  Uses uses(p);
  uses.add(phase.op, phase.units, false);
  for (const auto* some : {&phase.before, &phase.after})
    for (const Instruction& x : *some) uses.add(x, phase.units, false);
  if (uses.size() > most_uses) reader.fail("a phase", "has too many instructions");
  return phase.units > 1 && uses.clash([](const Use& a, const Use& b) { return b.shared_out && a.same(b); });
}

/// While a row of a mixture is done, the next one still reads it.
bool mixture_clashes(const Phase& phase) {
  for (const Instruction& x : phase.rows)
    for (Index i = 0; i < x.outputs; ++i) {
      const Operand &o = x.out(i), &in = phase.op.in();
      const Use of_row{o.slot, o.offset, o.offset + o.size(), true, true}, of_next{in.slot, in.offset, in.offset + in.size(), false, true};
      if (of_row.meets(of_next)) return true;
    }
  return false;
}

bool clashes(const Phase& phase, const Program& p, const Reader& reader) {
  Uses uses(p);
  const bool panels = phase.op.kind == Kind::product || phase.op.kind == Kind::head || phase.op.kind == Kind::experts;
  uses.add(phase.op, 1, panels);
  const auto never = [](const Use&, const Use&) { return false; };
  switch (phase.op.kind) {
    case Kind::nothing: return false;
    case Kind::product:
    case Kind::experts:
    case Kind::selective_scan:
    case Kind::head: return uses.clash(never);
    case Kind::diagonal_scan:
    case Kind::filter: return uses.clash([](const Use& a, const Use& b) { return a.same(b); });
    case Kind::mix: return uses.clash(never) || mixture_clashes(phase);
    default: return units_clash(phase, p, reader);
  }
}

/// Channels of a state that one filter has.
struct Channels {
  Index state, begin, end, of;
};

}  // namespace

void check_races(const Phase& phase, const Program& p, const Reader& reader) {
  if (clashes(phase, p, reader)) reader.fail("a phase", "has tasks that write what others read");
}

void check_states(const Program& p, const Reader& reader) {
  std::vector<bool> taken(p.states.size());
  std::vector<Channels> channels;
  const auto twice = [&] { reader.fail("a state", "is written by two instructions"); };
  const auto take = [&](const Instruction& x, Index units) {
    const bool filters = x.kind == Kind::filter || x.kind == Kind::filter_rows;
    if (filters) channels.push_back({x.state(0), x.integer(2), x.integer(2) + heads_of_all(x.in(), p, units) * x.in().width, x.integer(1)});
    else for (const Index state : x.states) {
      if (taken[static_cast<std::size_t>(state)]) twice();
      taken[static_cast<std::size_t>(state)] = true;
    }
  };
  for (const Phase& phase : p.phases) {
    take(phase.op, phase.units);
    for (const Instruction& x : phase.before) take(x, phase.units);
  }
  std::ranges::sort(channels, [](const Channels& a, const Channels& b) { return a.state != b.state ? a.state < b.state : a.begin < b.begin; });
  for (std::size_t i = 0; i < channels.size(); ++i) {
    if (taken[static_cast<std::size_t>(channels[i].state)]) twice();
    const Channels* before = i ? &channels[i - 1] : nullptr;
    if (before && before->state == channels[i].state && (before->end > channels[i].begin || before->of != channels[i].of)) twice();
  }
}

}  // namespace tarnn::runtime
