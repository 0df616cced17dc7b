// What each kind of instruction wants of its operands: sizes that fit, memory that nobody else writes at the same time.
#include <algorithm>

#include "runtime/expectations.h"

namespace tarnn::runtime {
namespace {

constexpr Index most_of_places = Index(1) << 22;  // numbers of a row at all of its experts

enum class Place { spreading, unit, rows };

class Checks : Expectations {
 public:
  Checks(const Phase& phase, const Program& p, const std::vector<Table>& tables, const Reader& reader) : Expectations(p, reader), phase_(phase), tables_(tables) {}

  void run() {
    one(phase_.op, Place::spreading);
    for (const Instruction& x : phase_.before) one(x, Place::unit);
    for (const Instruction& x : phase_.after) one(x, Place::unit);
    for (const Instruction& x : phase_.rows) one(x, Place::rows);
    if ((!phase_.before.empty() || !phase_.after.empty() || phase_.units != 1) && !has_units()) wrong("a phase without units has instructions for them");
  }

 private:
  bool has_units() const {
    return phase_.op.kind == Kind::softmax || phase_.op.kind == Kind::linear || phase_.op.kind == Kind::delta || phase_.op.kind == Kind::low_rank_delta ||
           phase_.op.kind == Kind::hybrid;
  }

  void one(const Instruction& x, Place place) {
    const bool of_rows = x.kind >= Kind::first_of_rows;
    if (of_rows != (place != Place::spreading)) wrong("it stands at another place than its kind");
    const bool whole_rows = x.kind == Kind::embed || x.kind == Kind::angles || x.kind == Kind::to_bytes || x.kind == Kind::route;
    if (whole_rows && place != Place::rows) wrong("units have a part of a row, and it wants all");
    if (x.kind == Kind::filter_rows && (place != Place::unit || phase_.op.kind == Kind::softmax)) wrong("rows that are filtered do not come one after the other");
    const bool units = place == Place::unit || (place == Place::spreading && has_units());
    for (std::size_t i = 0; i < x.operands.size(); ++i) operand(x, x.operands[i], static_cast<Index>(i) < x.outputs, units);
    Instruction whole = x;  // a thread's own memory holds the heads of one unit
    for (Operand& o : whole.operands) o.heads = heads_of_all(o, p_, phase_.units);
    kind(whole);
  }

  void kind(const Instruction& x) const {
    switch (x.kind) {
      case Kind::nothing: return counts(x, 0, 0);
      case Kind::product: return product(x);
      case Kind::filter:
      case Kind::filter_rows: return filter(x);
      case Kind::softmax: return softmax(x);
      case Kind::linear: return linear(x);
      case Kind::delta: return delta(x);
      case Kind::low_rank_delta: return low_rank(x);
      case Kind::hybrid: return hybrid(x);
      case Kind::selective_scan: return selective_scan(x);
      case Kind::diagonal_scan: return diagonal_scan(x);
      case Kind::mix: return mix(x);
      case Kind::head: return head(x);
      case Kind::experts: return experts(x);
      case Kind::route: return route(x);
      case Kind::embed: return embed(x);
      case Kind::angles: return angles(x);
      case Kind::norm: return norm(x);
      case Kind::combine: return combine(x);
      case Kind::rotate: return rotate(x);
      case Kind::clamp: return counts(x, 1, 1, 0, 2), same(x.in(), x.out());
      case Kind::concat: return concat(x);
      case Kind::features: return features(x);
      case Kind::head_product: return head_product(x);
      case Kind::to_bytes: return to_bytes(x);
      default: wrong("its kind is unknown");
    }
  }

  /// Units partition heads; what several share may be read only. Memory of a thread's own is for units.
  void operand(const Instruction& x, const Operand& o, bool written, bool units) {
    const Slot::Of of = p_.slots[static_cast<std::size_t>(o.slot)].of;
    if (of == Slot::Of::bytes && !(x.kind == Kind::to_bytes && written)) wrong("it reads numbers from a slot of bytes");
    if (of == Slot::Of::own && !units) wrong("it stands outside of units, and uses a thread's own memory");
    if (of == Slot::Of::own && (phase_.op.kind == Kind::softmax || phase_.op.kind == Kind::hybrid)) wrong("a thread's own memory does not last from a key to its queries");
    if (of == Slot::Of::own && o.size() > Reader::largest / phase_.units) wrong("its units have too much memory together");
    if (!units || of == Slot::Of::own) return;
    if (o.heads % phase_.units && (written || phase_.units % o.heads)) wrong("its heads do not fit the units");
  }

  void product(const Instruction& x) const {
    const auto n = static_cast<Index>(x.matrices.size());
    counts(x, n, n, static_cast<std::size_t>(3 * n));
    need(n > 0, "it has no matrix");
    for (Index j = 0; j < n; ++j) {
      const Matrix& w = x.matrices[static_cast<std::size_t>(j)];
      whole(x.integer(3 * j), 0, static_cast<Index>(Function::count) - 1);
      const bool pairs = whole(x.integer(3 * j + 1), 0, 1) != 0;
      need(x.in(j).size() == w.inputs, "a product has another number of inputs");
      need(!pairs || w.outputs == 2 * whole_panels(x.out(j).size()), "panels that take turns are not in pairs");
      panels(x.out(j), pairs ? x.out(j).size() : w.outputs);
      bytes(x.integer(3 * j + 2), w);
    }
  }
  void experts(const Instruction& x) const {
    counts(x, 1, 3, 3);
    const std::size_t n = x.matrices.size();
    need(n >= 2 && n % 2 == 0, "it has no matrices of experts");
    const Matrix &up = x.matrices[0], &down = x.matrices[1];
    for (std::size_t i = 2; i < n; ++i) {
      const Matrix &w = x.matrices[i], &first = x.matrices[i % 2];
      need(w.format == first.format && w.inputs == first.inputs && w.outputs == first.outputs, "its experts have different sizes");
    }
    whole(x.integer(0), 0, static_cast<Index>(Function::count) - 1);
    const bool pairs = whole(x.integer(1), 0, 1) != 0;
    const Index k = whole(x.in(1).size(), 1, static_cast<Index>(n / 2));
    need(x.in(2).size() == k, "it has other weights than experts");
    need(up.inputs == x.in().size() && up.outputs == (pairs ? 2 * whole_panels(down.inputs) : down.inputs), "its matrices do not fit");
    need(up.inputs + down.inputs <= most_of_places / k, "its rows take too much memory");
    panels(x.out(), down.outputs), bytes(x.integer(2), up);
  }
  void route(const Instruction& x) const {
    counts(x, 2, 1, 5, 2);
    const Index n = x.in().size(), k = whole(x.integer(0), 1, n), groups = whole(x.integer(2), 1, n), kept = whole(x.integer(3), 1, groups);
    whole(x.integer(1), 0, 1), whole(x.integer(4), 0, 1);
    need(n % groups == 0 && k <= kept * (n / groups) && (groups == 1 || n / groups > 1), "its groups do not fit its experts");
    need(x.out().size() == k && x.out(1).size() == k, "it chooses another number of experts");
    vector(x, 0, n, false);
  }
  void filter(const Instruction& x) const {
    counts(x, 1, 1, 4, 0, 1);
    same(x.in(), x.out());
    const Index taps = whole(x.integer(0), 1, 32), channels = whole(x.integer(1), 1, Reader::largest), first = whole(x.integer(2), 0, channels);
    whole(x.integer(3), 0, static_cast<Index>(Function::count) - 1);
    need(x.in().size() <= channels - first, "filters are fewer than channels");
    vector(x, 0, taps * whole_panels(channels), true), vector(x, 1, channels, false);
    state(x, 0, (taps - 1) * channels);
  }
  void softmax(const Instruction& x) const {
    const bool of_keys = x.inputs() == 2;  // values are the first channels of the keys
    counts(x, 1, of_keys ? 2 : 3, 0, 1, of_keys ? 1 : 2);
    if (of_keys) return values_of_keys(x);
    keys_and_values(x);
    caches(x, 0, x.in(1).heads);
  }
  void keys_and_values(const Instruction& x) const {
    const Operand &q = x.in(0), &k = x.in(1), &v = x.in(2);
    need(k.heads == v.heads && x.out().heads == q.heads && x.out().width == v.width, "its values have another shape");
    need(q.width == k.width && q.heads % k.heads == 0 && phase_.units == k.heads, "its heads do not fit");
  }
  void values_of_keys(const Instruction& x) const {
    const Operand &q = x.in(0), &k = x.in(1);
    need(x.out().heads == q.heads && x.out().width <= k.width, "its values have another shape");
    need(q.width == k.width && q.heads % k.heads == 0 && phase_.units == k.heads, "its heads do not fit");
    cache(x, 0, k.heads, k.width);
  }
  void hybrid(const Instruction& x) const {
    need(x.outputs == 1 && x.inputs() == 3, "it has another number of operands");
    keys_and_values(x);
    const Index g = x.in(1).heads;
    need(static_cast<Index>(x.integers.size()) >= 4 + g, "it has fewer reaches than heads");
    const Index room = whole(x.integer(0), 1, Reader::largest), f = whole(x.integer(2), 0, Reader::largest);
    const bool logs = whole(x.integer(3), 0, 1) != 0;
    whole(x.integer(1), 0, room - 1);
    Index heads[3] = {};
    for (Index i = 0; i < g; ++i) ++heads[whole(x.integer(4 + i), 0, 2)];
    const Index far = heads[0] > 0, rings = far + (heads[1] > 0), caches_at = 6 * rings;
    need((f > 0) == (far > 0), "it has features that no head reaches, or none that one does");
    counts(x, 1, 3, static_cast<std::size_t>(4 + g + 8 * far), static_cast<std::size_t>(2 + 10 * far), static_cast<std::size_t>(caches_at + 2 * (heads[2] > 0)));
    if (far) ring(x, 0, heads[0], room, f, logs), maps(x, heads[0], f);
    if (heads[1]) ring(x, 6 * far, heads[1], room, 0, false);
    if (heads[2]) caches(x, caches_at, heads[2]);
  }
  /// The states of n heads from the `first` on.
  void ring(const Instruction& x, Index first, Index n, Index room, Index f, bool logs) const {
    const Index d = x.in(1).width, e = x.in(2).width;
    need(room <= Reader::largest / (n * std::max(d, e)) && f <= Reader::largest / (n * e), "its states are too large");
    state(x, first, n * room * d), state(x, first + 1, n * room * e), state(x, first + 2, n * f * e), state(x, first + 3, n * f);
    state(x, first + 4, n * (logs ? f : 1)), state(x, first + 5, 1, State::Of::counts);
  }
  /// What makes the features of queries and of keys, of n heads.
  void maps(const Instruction& x, Index n, Index f) const {
    const Index integer = 4 + x.in(1).heads, d = x.in().width;
    vector(x, 0, x.in(0).heads, false);
    Index matrices = 0;
    for (Index side = 0; side < 2; ++side) {
      need(x.integer(integer + 4 * side) != static_cast<Index>(tarnn::Function::cosformer), "its features depend on places");
      matrices += map(x, {integer + 4 * side, 2 + 5 * side, 1 + 5 * side, matrices}, n, d, f);
    }
    need(static_cast<Index>(x.matrices.size()) == matrices, "it has another matrix");
  }
  /// Heads of q, k and v; returns those of the states, which units share out.
  Index states_of(const Instruction& x) const {
    const Operand &q = x.in(0), &k = x.in(1), &v = x.in(2);
    const Index n = std::max(k.heads, v.heads);
    need(q.width == k.width && n % k.heads == 0 && n % v.heads == 0, "its heads do not fit");
    need(q.heads % k.heads == 0 && (q.heads % n == 0 || n % q.heads == 0), "its heads do not fit");
    need(x.out().heads == std::max(q.heads, n) && x.out().width == v.width, "its output has another shape");
    need(n % phase_.units == 0 && x.out().heads % phase_.units == 0, "its units do not fit its states");
    return n;
  }
  void of_states(const Operand& o, Index n, Index width) const { need(o.heads == n && (o.width == 1 || o.width == width), "a decay, β or scale has another shape"); }
  void linear(const Instruction& x) const {
    need(x.outputs == 1 && x.inputs() >= 3 && x.integers.size() == 7 && x.numbers.size() == 1, "it has other operands");
    const Index n = states_of(x), f = x.in(0).width, e = x.in(2).width, inputs = x.inputs();
    whole(x.integer(0), 0, static_cast<Index>(Map::exp)), whole(x.integer(1), 0, 2);
    for (Index i = 2; i < 6; ++i) whole(x.integer(i), -1, inputs - (i == 5 ? 2 : 1));
    const bool keeps_z = whole(x.integer(6), 0, 1) != 0;
    if (x.integer(2) >= 0) of_states(x.in(x.integer(2)), n, f);
    if (x.integer(3) >= 0) of_states(x.in(x.integer(3)), x.in(0).heads, 1);
    if (x.integer(4) >= 0) of_states(x.in(x.integer(4)), x.in(1).heads, 1);
    if (x.integer(5) >= 0) same(x.in(x.integer(5)), x.in(0)), same(x.in(x.integer(5) + 1), x.in(1)), need(keeps_z, "it has no z");
    const bool weighted = x.integer(4) >= 0 || static_cast<Map>(x.integer(0)) == Map::exp;
    need(keeps_z || !(x.integer(1) || weighted || x.integer(3) >= 0 || x.integer(0)), "it has no z");
    need(x.states.size() == (weighted ? 3u : keeps_z ? 2u : 1u), "it has other states");
    state(x, 0, n * f * e);
    if (keeps_z) state(x, 1, n * f);
    if (weighted) state(x, 2, n);
    vector(x, 0, n, false);
  }
  void delta(const Instruction& x) const {
    need(x.outputs == 1 && (x.inputs() == 4 || x.inputs() == 5) && x.integers.empty() && x.numbers.empty() && x.states.size() == 1, "it has other operands");
    const Index n = states_of(x);
    of_states(x.in(3), n, 1);
    if (x.inputs() == 5) of_states(x.in(4), n, x.in(0).width);
    state(x, 0, n * x.in(0).width * x.in(2).width);
    vector(x, 0, n, false);
  }
  void low_rank(const Instruction& x) const {
    counts(x, 1, 6, 0, 0, 1);
    for (Index i = 0; i < 6; ++i) same(x.in(i), x.out());
    need(x.out().heads % phase_.units == 0, "its units do not fit its heads");
    state(x, 0, x.out().size() * x.out().width);
  }
  void selective_scan(const Instruction& x) const {
    counts(x, 1, 4, 0, 0, 1);
    const Operand &u = x.in(0), &B = x.in(2);
    same(u, x.in(1)), same(u, x.out()), same(B, x.in(3));
    need(B.heads == u.heads, "its heads do not fit");
    need(B.size() <= Reader::largest / whole_panels(u.width), "its states are too large");
    vector(x, 0, B.size() * whole_panels(u.width), true);
    state(x, 0, B.width * u.size());
  }
  void diagonal_scan(const Instruction& x) const {
    counts(x, 1, 2, 1, 0, 1);
    same(x.in(), x.in(1)), same(x.in(), x.out());
    whole(x.integer(0), 0, 1);
    state(x, 0, x.in().size());
  }
  void mix(const Instruction& x) const {
    counts(x, x.outputs, 1, 0, 0, 1);
    for (Index i = 0; i < x.outputs; ++i) need(x.out(i).size() == x.in().size() && x.out(i).slot != x.in().slot, "a mixture has another size"), vector(x, i, x.in().size(), true);
    state(x, 0, x.in().size());
  }
  void head(const Instruction& x) const {
    counts(x, 1, 1, 1, 1);
    need(x.matrices.size() == 1 && x.matrices[0].inputs == x.in().size(), "it has another matrix");
    panels(x.out(), x.matrices[0].outputs), bytes(x.integer(0), x.matrices[0]);
  }
  void embed(const Instruction& x) const {
    counts(x, 1, 0, 1, 1);
    const Index places = whole(x.integer(0), -1, static_cast<Index>(tables_.size()) - 1);
    for (const Table* table : {&tables_[0], places < 0 ? nullptr : &tables_[static_cast<std::size_t>(places)]})
      need(!table || (table->width <= x.out().size() && table->rows > 0), "a table is wider than what it fills");
  }
  void angles(const Instruction& x) const {
    counts(x, 1, 0, 1, x.numbers.size());
    need(!x.numbers.empty() && x.out().size() == 2 * static_cast<Index>(x.numbers.size()), "angles have another number");
    whole(x.integer(0), 0, 1);
  }
  void norm(const Instruction& x) const {
    counts(x, 1, 1, 2, 2);
    same(x.in(), x.out());
    whole(x.integer(0), 0, 3), whole(x.integer(1), 0, 1);
    for (Index i = 0; i < 2; ++i) need(x.length(i) == 0 || x.length(i) == x.in().width || x.length(i) == x.in().size(), "a gain has another length");
  }
  void combine(const Instruction& x) const {
    const Index other = whole(x.integers.size() == 4 ? x.integer(3) : -1, 0, 6);
    counts(x, 1, other == 1 || other == 2 ? 2 : 1, 4, 1);
    same(x.in(), x.out());
    whole(x.integer(0), 0, static_cast<Index>(Function::count) - 1), whole(x.integer(1), 0, 2), whole(x.integer(2), 0, static_cast<Index>(Function::count) - 1);
    if (other == 1) same(x.in(), x.in(1));
    if (other == 2) need(x.in(1).heads == x.in().heads && x.in(1).width == 1, "it has no number for each head");
    if (other >= 3 && other <= 5) vector(x, 0, other == 3 ? x.in().width : other == 4 ? x.in().size() : x.in().heads, true);
  }
  void rotate(const Instruction& x) const {
    counts(x, 1, 2, 2);
    same(x.in(), x.out());
    const Index half = whole(x.integer(0), 1, x.in().width / 2);
    whole(x.integer(1), 0, 1);
    need(x.in(1).heads == 1 && x.in(1).size() == 2 * half, "its angles are not as many as its pairs");
  }
  void concat(const Instruction& x) const {
    counts(x, 1, x.inputs());
    Index width = 0;
    for (Index i = 0; i < x.inputs(); ++i) {
      need(x.in(i).heads == x.out().heads && x.in(i).slot != x.out().slot, "its parts have other heads, or lie where it writes");
      width += x.in(i).width;  // of a slot's width at most, and inputs are few
    }
    need(width == x.out().width, "its parts have another width together");
  }
  void features(const Instruction& x) const {
    counts(x, 2, 1, 4, 5);
    const Index heads = x.in().heads;
    need(x.out().heads == heads && x.out(1).heads == heads && x.out(1).width == 1, "its outputs have other heads");
    need(static_cast<Index>(x.matrices.size()) == map(x, {}, heads, x.in().width, x.out().width), "it has another matrix");
  }
  void head_product(const Instruction& x) const {
    counts(x, 1, 1);
    need(x.matrices.size() == 1 && (x.in().heads == 1 || x.in().heads == x.out().heads), "it has other heads");
    matrix(x.matrices[0], x.in().width, x.out().heads * whole_panels(x.out().width));
  }
  void to_bytes(const Instruction& x) const {
    counts(x, 1, 1, 1);
    const auto format = static_cast<Format>(whole(x.integer(0), static_cast<Index>(Format::bfloat16), static_cast<Index>(Format::int4)));
    const Slot& slot = p_.slots[static_cast<std::size_t>(x.out().slot)];
    need(slot.of == Slot::Of::bytes && x.out().offset == 0 && x.out().size() == bytes_of_inputs(format, x.in().size()), "it writes other bytes than it reads");
  }

  const Phase& phase_;
  const std::vector<Table>& tables_;
};

}  // namespace

void check_phase(const Phase& phase, const Program& p, const std::vector<Table>& tables, const Reader& reader) { Checks(phase, p, tables, reader).run(); }

}  // namespace tarnn::runtime
