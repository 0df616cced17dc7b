// Experts: which of them a row's router chose, and where rows lie while they go through these.
#pragma once

#include <algorithm>

#include "runtime/instructions/rows.h"

namespace tarnn::runtime {
namespace TARNN_ISA {

/// The k largest of n numbers, of equal ones the first: their places, ascending. Whatever the numbers are, it finds k places.
inline void best_of(const float* x, Index n, Index k, Index* best) {
  Index count = 0;
  for (Index i = 0; i < n; ++i) {
    if (count == k && !(x[i] > x[best[k - 1]])) continue;
    Index at = count < k ? count++ : k - 1;
    for (; at > 0 && x[i] > x[best[at - 1]]; --at) best[at] = best[at - 1];
    best[at] = i;
  }
  std::sort(best, best + k);
}

/// What a router needs of its thread: scores, what experts are chosen by, how good groups are.
struct RouteRoom {
  float *scores, *choice, *groups;
  Index* best;
  RouteRoom(Scratch& scratch, const Instruction& x) {
    const Index n = x.in().size();
    scores = scratch.take<float>(whole_panels(n)), choice = scratch.take<float>(n), groups = scratch.take<float>(n), best = scratch.take<Index>(n);
  }
};

/// Experts of a row, their numbers ascending, and their weights. integers: how many, whether scores are sigmoids and no softmax, groups, how many of these
/// are kept, whether weights are divided by their sum. numbers: what is added to that sum, a factor. vectors: what is added to scores to choose by them.
inline void route(const Instruction& x, const View& at, Index row) {
  const Index n = x.in().size(), k = x.integer(0), groups = x.integer(2), kept = x.integer(3), each = n / groups;
  Scratch scratch(at.own.scratch);
  const RouteRoom r(scratch, x);
  const float *logits = at.at(x.in(), row), *bias = x.vector(0);
  const bool sigmoids = x.integer(1) != 0;
  float most = logits[0];
  for (Index i = 1; i < n; ++i) most = logits[i] > most ? logits[i] : most;
  for (Index i = 0; i < n; i += width<float>) {
    const Vec<float> logit = read(logits + i, n - i);
    store(r.scores + i, sigmoids ? sigmoid<float>(logit) : exp_nonpositive(logit - most));
  }
  const float all = sigmoids ? 1.f : summed(n, [&](Index i) TARNN_LAMBDA { return load(r.scores + i); });
  for (Index i = 0; i < n; ++i) r.scores[i] /= all, r.choice[i] = r.scores[i] + (bias ? bias[i] : 0.f);
  if (groups > 1) {
    for (Index g = 0; g < groups; ++g) {
      best_of(r.choice + g * each, each, 2, r.best);
      r.groups[g] = r.choice[g * each + r.best[0]] + r.choice[g * each + r.best[1]];
    }
    best_of(r.groups, groups, kept, r.best);
    for (Index g = 0, next = 0; g < groups; ++g) {
      if (next < kept && r.best[next] == g) ++next;
      else std::fill_n(r.choice + g * each, each, -__builtin_inff());
    }
  }
  best_of(r.choice, n, k, r.best);
  float sum = 0;
  for (Index j = 0; j < k; ++j) sum += r.scores[r.best[j]];
  const float below = x.integer(4) ? sum + x.number(0) : 1.f, scale = x.number(1);
  float *chosen = at.at(x.out(), row), *weights = at.at(x.out(1), row);
  for (Index j = 0; j < k; ++j) chosen[j] = static_cast<float>(r.best[j]), weights[j] = r.scores[r.best[j]] / below * scale;
}

/// Rows that one expert has: so many places from `first` on.
struct Group {
  Index expert, first, rows;
};

/// The rows of a block by the experts that they chose: a place for each row and each of its k experts, those of an expert one behind the other, in the order
/// of rows. All threads share it. Of one row the places are its experts as it chose them, and all read the row itself.
class Places {
 public:
  Places(Scratch& scratch, const Instruction& x, Index rows, Dots dots)
      : format_(x.matrices[0].format), rows_(rows), k_(x.in(1).size()), experts_(static_cast<Index>(x.matrices.size()) / 2), inner_(x.matrices[1].inputs) {
    const Index n = x.in().size(), places = rows * k_;
    count_ = scratch.take<Index>(1), active_ = scratch.take<Index>(experts_), first_ = scratch.take<Index>(experts_ + 1);
    next_ = scratch.take<Index>(experts_), entries_ = scratch.take<Index>(places);
    in_ = room(scratch, rows > 1 ? places : 0, n, rounds(x, dots));
    between_ = room(scratch, places, inner_, rounds(x, dots));
    floats_ = scratch.take<float>(places * apart(inner_));
    if (!between_.levels) between_.x = floats_;
    between_.ld = apart(inner_);
  }

  Index count() const { return rows_ * k_; }
  Index groups() const { return rows_ > 1 ? *count_ : k_; }
  /// At least as many, and known outside of tasks, where a late thread must not look at what others may be writing again.
  Index most_groups() const { return smaller(experts_, count()); }

  Group group(Index i, const Instruction& x, const View& at) const {
    if (rows_ == 1) return {expert(i, x, at), i, 1};
    const Index e = active_[i];
    return {e, first_[e], first_[e + 1] - first_[e]};
  }
  Index row(Index place) const { return rows_ > 1 ? entries_[place] / k_ : 0; }
  float weight(Index place, const Instruction& x, const View& at) const {
    const Index entry = rows_ > 1 ? entries_[place] : place;
    return at.at(x.in(2), entry / k_)[entry % k_];
  }

  /// Counts the rows of each expert, and gives them their places.
  void sort(const Instruction& x, const View& at) const {
    std::fill_n(first_, experts_ + 1, Index(0));
    for (Index i = 0; i < count(); ++i) ++first_[expert(i, x, at) + 1];
    *count_ = 0;
    for (Index e = 0; e < experts_; ++e) {
      if (first_[e + 1]) active_[(*count_)++] = e;
      next_[e] = first_[e], first_[e + 1] += first_[e];
    }
    for (Index i = 0; i < count(); ++i) entries_[next_[expert(i, x, at)]++] = i;
  }

  /// Copies the row of a place.
  void gather(Index place, const Rows& from, Index n) const {
    const Index of = row(place);
    if (!in_.levels) return void(std::copy_n(from.x + of * from.ld, n, x(in_) + place * in_.ld));
    std::copy_n(from.levels + of * from.ld_levels, bytes_of_row(format_, n), levels(in_) + place * in_.ld_levels);
    if (format_ != Format::bfloat16) step(in_)[place] = from.step[of], least(in_)[place] = from.least[of];
  }

  /// What the experts of a group read first: `given` is the row itself where there is one.
  Rows in(const Group& g, Index row, Index rows, const Rows& given) const { return rows_ > 1 ? in_.part(g.first + row, rows) : given; }
  /// Their inner numbers, and these as the second product reads them.
  float* inner(Index place) const { return floats_ + place * between_.ld; }
  Index ld() const { return between_.ld; }
  Rows between(const Group& g, Index row, Index rows) const { return between_.part(g.first + row, rows); }
  /// Rounds the inner numbers of a place, where the second product wants them so.
  void round(Index place) const { Levels{step(between_), least(between_), levels(between_), between_.ld_levels}.round(format_, inner(place), inner_, place); }
  bool rounds() const { return between_.levels != nullptr; }

 private:
  static bool rounds(const Instruction& x, Dots dots) { return x.integer(2) >= 0 && rounds_rows(x.matrices[0].format, dots); }
  Rows room(Scratch& scratch, Index places, Index n, bool rounded) const {
    Rows x{places, apart(n), nullptr, nullptr, bytes_of_row(format_, n) + 64, nullptr, nullptr};
    if (!rounded) return x.x = scratch.take<float>(places * x.ld), x;
    x.step = scratch.take<float>(places), x.least = scratch.take<float>(places);
    return x.levels = scratch.take<std::uint8_t>(places * x.ld_levels), x;
  }
  static float* x(const Rows& of) { return const_cast<float*>(of.x); }
  static std::uint8_t* levels(const Rows& of) { return const_cast<std::uint8_t*>(of.levels); }
  static float* step(const Rows& of) { return const_cast<float*>(of.step); }
  static float* least(const Rows& of) { return const_cast<float*>(of.least); }

  /// Of the row's j-th number, entry row·k + j; whatever it is, it becomes that of an expert.
  Index expert(Index entry, const Instruction& x, const View& at) const {
    const float number = at.at(x.in(1), entry / k_)[entry % k_];
    return !(number > 0) ? 0 : number >= static_cast<float>(experts_) ? experts_ - 1 : static_cast<Index>(number);
  }

  Format format_;  // of all matrices: what rows are rounded for
  Index rows_, k_, experts_, inner_;
  Index *count_, *active_, *first_, *next_, *entries_;  // experts with rows, and which; of each its first place; entries by places
  Rows in_, between_;
  float* floats_;
};

}  // namespace TARNN_ISA
}  // namespace tarnn::runtime
