// Which numbers of a phase its states take in.
#include "runtime/log.h"

#include <algorithm>

namespace tarnn::runtime {
namespace {

/// A phase whose states, but for keys and values, are those of its units, side by side, or rows that came before.
bool keeps_out(const Phase& phase, const std::vector<State>& states) {
  if (phase.op.states.empty() || phase.op.kind == Kind::softmax || phase.op.kind == Kind::mix || phase.op.kind == Kind::filter) return true;
  if (phase.op.kind != Kind::linear && phase.op.kind != Kind::delta && phase.op.kind != Kind::low_rank_delta) return false;
  return std::all_of(phase.op.states.begin(), phase.op.states.end(), [&](Index i) {
    const State& s = states[static_cast<std::size_t>(i)];
    return s.of == State::Of::numbers && s.size % phase.units == 0;
  });
}

class PhaseLog {
 public:
  PhaseLog(const Program& p, Index& width, std::vector<Logged>& parts) : p_(p), width_(width), parts_(parts) {}

  void add(const Instruction& x) {
    for (Index i = 0; i < x.inputs(); ++i)
      if (const Operand& in = x.in(i); is_shared(in) && !is_written(in)) note(in);
    for (Index i = 0; i < x.outputs; ++i)
      if (is_shared(x.out(i))) written_.push_back(x.out(i));
  }

 private:
  bool is_shared(const Operand& x) const { return p_.slots[static_cast<std::size_t>(x.slot)].of == Slot::Of::all; }
  bool is_written(const Operand& x) const {
    return std::any_of(written_.begin(), written_.end(), [&](const Operand& w) { return w.slot == x.slot && w.offset <= x.offset && w.offset + w.size() >= x.offset + x.size(); });
  }
  void note(const Operand& x) {
    for (const Logged& l : parts_)
      if (l.slot == x.slot) {
        if (l.offset == x.offset && l.size == x.size()) return;
        return parts_.push_back({x.slot, x.offset, x.size(), l.at});
      }
    parts_.push_back({x.slot, x.offset, x.size(), width_});
    width_ += (p_.slots[static_cast<std::size_t>(x.slot)].width + 63) / 64 * 64 + 64;
  }

  const Program& p_;
  Index& width_;
  std::vector<Logged>& parts_;
  std::vector<Operand> written_;
};

}  // namespace

LogLayout layout_of(const Program& p) {
  LogLayout layout;
  layout.phases.resize(p.phases.size());
  for (std::size_t i = 0; i < p.phases.size(); ++i) {
    const Phase& phase = p.phases[i];
    if (!keeps_out(phase, p.states)) return {{}, -1};
    if (phase.op.states.empty() || phase.op.kind == Kind::softmax) continue;
    PhaseLog log(p, layout.width, layout.phases[i]);
    for (const Instruction& x : phase.before) log.add(x);
    log.add(phase.op);
  }
  return layout;
}

}  // namespace tarnn::runtime
