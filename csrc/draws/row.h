// One row of logits on its way to a token: passes over whole blocks of 64 numbers, with −∞ behind the last logit.
#pragma once

#include <algorithm>
#include <cmath>

#include "common/maximum.h"
#include "common/memory.h"
#include "draws/philox.h"
#include "draws/problem.h"
#include "draws/select.h"

namespace tarnn {
namespace TARNN_ISA {

constexpr Index block = 64;

class Row {
 public:
  Row(Scratch& scratch, Index v)
      : v_(v), blocks_((v + block - 1) / block), scores_(scratch.take<float>(blocks_ * block)), parts_(scratch.take<float>(blocks_ * block)),
        list_(scratch.take<float>(blocks_ * block)), most_(scratch.take<float>(whole<float>(blocks_))), sums_(scratch.take<double>(blocks_)),
        places_(scratch.take<std::int32_t>(blocks_ * block)) {}

  /// Scores are now the logits; false where they are no distribution.
  bool read(const float* logits) {
    std::copy_n(logits, v_, scores_);
    return measure();
  }

  /// The same with penalties and bias.
  bool read_penalized(const Draw& d) {
    std::copy_n(d.logits, v_, scores_);
    const auto of = [&](Column::Number i) { return static_cast<float>(d.numbers[i]); };
    const float times = of(Column::repetition), each = of(Column::frequency), once = of(Column::presence);
    for (Index begin = 0; d.had && begin < v_; begin += 8) {
      const Index end = std::min(begin + 8, v_);
      std::uint64_t any = 0;  // most tokens were never had: eight at a time are passed over
      std::memcpy(&any, d.had + begin, static_cast<std::size_t>(end - begin));
      for (Index i = begin; any && i < end; ++i) {
        if (!d.had[i]) continue;
        float& x = scores_[i];
        x = x < 0 ? x * times : x / times;
        if (d.counts[i] > 0) x -= each * static_cast<float>(d.counts[i]) + once;
      }
    }
    float* const scores = scores_;
    for (Index i = 0; d.bias && i < v_; ++i) scores[i] += d.bias[i];
    return measure();
  }

  /// The first of the largest scores.
  Index greedy() const {
    const Index first = std::find(most_, most_ + blocks_, top_) - most_;
    return std::find(scores_ + first * block, scores_ + v_, top_) - scores_;
  }

  /// A token that the filters leave, at random.
  Index drawn(const Draw& d) {
    const double u = uniform(bits(d.whole[Column::seed]), bits(d.whole[Column::choice]), bits(d.whole[Column::position]));
    const double p = d.numbers[Column::top_p], least = d.numbers[Column::min_p];
    const Index k = d.whole[Column::top_k];
    const auto cold = std::clamp(d.numbers[Column::temperature], 1e-30, 1e30);
    const auto per_temperature = static_cast<float>(1 / cold);
    if (k > 0 && k < v_) {
      keep_from(scores_, most_, kth(k));
      for (Index j = 0; j < kept_; ++j) list_[j] = (scores_[places_[j]] - top_) * per_temperature;
      std::fill(list_ + kept_, list_ + whole<float>(kept_), minus_infinity<float>);
      for (Index j = 0; j < kept_; j += width<float>) store(parts_ + j, exp_nonpositive(load(list_ + j)));
      return among_kept(u, p, least, sum_of_kept(), 2.f, 0);
    }
    const double total = exponentials(per_temperature);
    if (p >= 1 && least <= 0) return among_all(u * total);
    // those that add up to less than 1 − p even if all were as likely as the likeliest of them are dropped without looking on
    const double rest = p < 1 ? 0.999 * (1 - p) * total / static_cast<double>(v_) : 0;
    auto bound = static_cast<float>(std::max(rest, least * 0.999)), beyond = 2.f;
    double above = 0;
    for (int i = 0; p < 1 && i < 6; ++i) {  // where the cut is, in quarters of the way between logarithms; ever fewer parts are left
      const std::uint32_t from = ascending(bound), quarter = (ascending(beyond) - from) / 4;
      const float x[3] = {from_ascending(from + quarter), from_ascending(from + 2 * quarter), from_ascending(from + 3 * quarter)};
      double mass[3];
      masses_from(x, mass);
      for (int j = 2; j >= 0; --j)
        if (mass[j] < p * total) beyond = x[j], above = mass[j];
      for (int j = 0; j < 3; ++j)
        if (mass[j] >= p * total) bound = x[j];
    }
    for (Index j = 0; j < whole<float>(blocks_); j += width<float>)
      store(list_ + j, exp_nonpositive((load(most_ + j) - top_) * per_temperature));
    std::transform(list_, list_ + blocks_, most_, [](float x) { return x * 1.001f; });  // the polynomial need not ascend with x
    keep_from(parts_, most_, bound);
    for (Index j = 0; j < kept_; ++j) parts_[j] = parts_[places_[j]];
    return among_kept(u, p, least, total, beyond, above);
  }

  /// Natural logarithms at temperature 1 of the token and of `wanted` tokens, likeliest first. After `read`.
  void logarithms(const Draw& d) {
    const Index count = std::min(std::min(d.whole[Column::wanted], d.k), v_);
    if (count > 0) {
      if (count < v_) keep_from(scores_, most_, kth(count));
      else keep_from(scores_, most_, minus_infinity<float>);
      const auto likelier = [&](std::int32_t i, std::int32_t j) {
        return scores_[i] > scores_[j] || (scores_[i] == scores_[j] && i < j);
      };
      std::partial_sort(places_, places_ + count, places_ + kept_, likelier);
    }
    const double all = std::log(exponentials(1.f));
    const auto logarithm = [&](Index i) { return static_cast<float>((static_cast<double>(scores_[i]) - top_) - all); };
    *d.logprob = logarithm(*d.token);
    for (Index j = 0; j < count; ++j) d.likeliest[j] = places_[j], d.likeliest_logprobs[j] = logarithm(places_[j]);
  }

 private:
  static std::uint64_t bits(Index x) { return static_cast<std::uint64_t>(x); }

  /// The largest score of each block and of all; false where there is none, or a NaN or +∞ among them.
  bool measure() {
    std::fill(scores_ + v_, scores_ + blocks_ * block, minus_infinity<float>);
    Integers<float> nan{};
    top_ = minus_infinity<float>;
    for (Index b = 0; b < blocks_; ++b) {
      Vec<float> most = load(scores_ + b * block);
      for (Index i = 0; i < block; i += width<float>) {
        const Vec<float> x = load(scores_ + b * block + i);
        nan |= x != x;
        most = x > most ? x : most;
      }
      most_[b] = largest<float>(most);
      top_ = std::max(top_, most_[b]);
    }
    std::fill(most_ + blocks_, most_ + whole<float>(blocks_), minus_infinity<float>);
    for (Index i = 0; i < width<float>; ++i)
      if (nan[i]) return false;
    return std::isfinite(top_);
  }

  /// parts = e^((scores − top)/temperature), and their sum.
  double exponentials(float per_temperature) {
    double total = 0;
    for (Index b = 0; b < blocks_; ++b) {
      Vec<float> lanes{};
      for (Index i = b * block; i < (b + 1) * block; i += width<float>) {
        const Vec<float> y = exp_nonpositive((load(scores_ + i) - top_) * per_temperature);
        store(parts_ + i, y);
        lanes += y;
      }
      sums_[b] = static_cast<double>(sum<float>(lanes));
      total += sums_[b];
    }
    return total;
  }

  /// The sums of the parts that are at least each x.
  void masses_from(const float (&x)[3], double (&masses)[3]) const {
    constexpr Index together = 16 * block;
    for (double& mass : masses) mass = 0;
    for (Index begin = 0; begin < blocks_ * block; begin += together) {
      Vec<float> lanes[3]{};
      for (Index i = begin; i < std::min(begin + together, blocks_ * block); i += width<float>) {
        const Vec<float> y = load(parts_ + i);
        unrolled<3>([&](auto j) TARNN_LAMBDA { lanes[j] += y >= x[j] ? y : Vec<float>{}; });
      }
      for (int j = 0; j < 3; ++j) masses[j] += static_cast<double>(sum<float>(lanes[j]));
    }
  }

  /// The k-th largest score, k < v. It is among those that are at least the k-th largest of the blocks' largest.
  float kth(Index k) {
    float bound = minus_infinity<float>;
    if (k <= blocks_) {
      std::copy_n(most_, blocks_, list_);
      bound = largest_but(list_, blocks_, k);
    }
    keep_from(scores_, most_, bound);
    for (Index j = 0; j < kept_; ++j) list_[j] = scores_[places_[j]];
    return largest_but(list_, kept_, k);
  }

  /// Places where a number is at least `bound`, in blocks whose largest is.
  void keep_from(const float* numbers, const float* most, float bound) {
    kept_ = 0;
    for (Index b = 0; b < blocks_; ++b) {
      if (!(most[b] >= bound)) continue;
      for (Index i = b * block; i < std::min((b + 1) * block, v_); ++i) {
        places_[kept_] = static_cast<std::int32_t>(i);
        kept_ += numbers[i] >= bound;
      }
    }
  }

  double sum_of_kept() const {
    double total = 0;
    for (Index j = 0; j < kept_; ++j) total += static_cast<double>(parts_[j]);
    return total;
  }

  /// A token by its part among those of all. The last block and the last part stand in where sums fall short by their rounding.
  Index among_all(double target) const {
    double sum = 0, before = 0;
    Index b = 0, last = 0;
    for (Index i = 0; i < blocks_ && sum <= target; sum += sums_[i++])
      if (sums_[i] > 0) b = i, before = sum;
    for (Index i = b * block; i < std::min((b + 1) * block, v_); ++i) {
      before += static_cast<double>(parts_[i]);
      if (parts_[i] > 0) last = i;
      if (before > target) break;
    }
    return last;
  }

  /// The same among those kept: parts lie side by side, of the places in their order. total: of all that top-p looks at; of those
  /// from `beyond` on it is `above`, and they stay.
  Index among_kept(double u, double p, double least, double total, float beyond, double above) {
    Cut cut{minus_infinity<float>, 0};
    const double mass = std::max(p * total, 1e-300);
    if (p < 1) {
      const Index n = std::copy_if(parts_, parts_ + kept_, list_, [&](float x) { return x < beyond; }) - list_;
      cut = cut_at(list_, n, above, mass, [](float x) { return static_cast<double>(x); });
    }
    Index left = 0;
    for (Index j = 0; j < kept_; ++j) {
      const float part = parts_[j];
      bool stays = part > cut.value || p >= 1;
      if (part == cut.value && cut.above < mass) stays = true, cut.above += static_cast<double>(part);  // of equals, the first ones
      parts_[left] = part, places_[left] = places_[j];
      left += stays && static_cast<double>(part) >= least;
    }
    kept_ = left;
    const double target = u * sum_of_kept();
    double before = 0;
    Index last = 0;
    for (Index j = 0; j < kept_; ++j) {
      before += static_cast<double>(parts_[j]);
      if (parts_[j] > 0) last = j;
      if (before > target) break;
    }
    return places_[last];
  }

  const Index v_, blocks_;
  float *const scores_, *const parts_, *const list_, *const most_;
  double* const sums_;
  std::int32_t* const places_;
  Index kept_ = 0;
  float top_ = 0;
};

}  // namespace TARNN_ISA
}  // namespace tarnn
