// The attention kernels without torch: held against a loop in float64, on shapes that no chunk or vector divides.
//
//     g++ -std=c++20 -O2 -I csrc tests/kernels/alone.cpp -o alone && ./alone          (tests/aarch64.sh, for another processor)
//     ./alone 4096 64 both side-by-side                                               (processor milliseconds of one call)
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <random>
#include <string>
#include <vector>

#include "linear/full.h"
#include "linear/plan.h"
#include "linear/streamed_backward.h"

using namespace tarnn;
namespace isa = TARNN_ISA;

namespace {

Index threads = 2;  // for so many the work is divided; one does it

void run(Index tasks, Index, std::size_t bytes, void (*task)(void*, Index, void*), void* context) {
  static ThreadMemory memory;
  FlushDenormals flush;
  for (Index i = 0; i < tasks; ++i) task(context, i, memory.at_least(bytes));
}

/// A (b, h, t, n) tensor: contiguous, or a view of (b, t, h·n).
template <typename T>
struct Drawn {
  std::vector<T> numbers;
  View view;
  Drawn(Index b, Index h, Index t, Index n, bool side_by_side, std::mt19937* draw) : numbers(b * h * t * n) {
    std::normal_distribution<double> normal;
    for (T& x : numbers) x = draw ? static_cast<T>(normal(*draw)) : T(0);
    view = {numbers.data(), sizeof(T) == 8 ? Type::float64 : Type::float32, {h * t * n, t * n, n, 1}};
    if (side_by_side) view.stride[1] = n, view.stride[2] = h * n;
  }
  T& at(Index b, Index h, Index t, Index n) {
    return numbers[b * view.stride[0] + h * view.stride[1] + t * view.stride[2] + n];
  }
};

template <typename T>
struct Case {
  Index b = 1, g = 2, r = 1, t = 97, d = 20, e = 20;
  bool causal = true, side_by_side = false, decay = false;

  Drawn<T> q, k, v, o, grad_o, grad_q, grad_k, grad_v, log_decay, grad_decay, den;
  std::vector<T> S, z, M, grad_S, grad_z;
  Plan keys, queries;
  Problem p{};

  Case(Index b, Index g, Index r, Index t, Index d, Index e, bool causal, bool side_by_side, bool decay, std::mt19937 draw)
      : b(b), g(g), r(r), t(t), d(d), e(e), causal(causal), side_by_side(side_by_side), decay(decay),
        q(b, g * r, t, d, side_by_side, &draw), k(b, g, t, d, side_by_side, &draw), v(b, g, t, e, side_by_side, &draw),
        o(b, g * r, t, e, side_by_side, nullptr), grad_o(b, g * r, t, e, side_by_side, &draw),
        grad_q(b, g * r, t, d, side_by_side, nullptr), grad_k(b, g, t, d, side_by_side, nullptr),
        grad_v(b, g, t, e, side_by_side, nullptr), log_decay(b, g, t, 1, false, &draw), grad_decay(b, g, t, 1, false, nullptr),
        den(b, g * r, t, 1, false, nullptr), S(b * g * d * e), z(b * g * d), M(b * g), grad_S(S), grad_z(z) {
    for (T& x : log_decay.numbers) x = -std::abs(x) / 8;
    p.g = g, p.r = r, p.d = p.f = d, p.e = e, p.chunk = 32, p.block = 64, p.segment = 256;
    p.q = q.view, p.k = k.view, p.v = v.view, p.o = o.view, p.den = den.view;
    p.grad_o = grad_o.view, p.grad_q = grad_q.view, p.grad_k = grad_k.view, p.grad_v = grad_v.view;
    if (decay) p.log_decay = log_decay.view, p.grad_log_decay = grad_decay.view;
    p.after = {S.data(), z.data(), M.data()};
    p.grad_before = {grad_S.data(), grad_z.data(), nullptr};
    p.causal = causal, p.normalize = true, p.map = Map::elu, p.eps = sizeof(T) == 8 ? 1e-290 : 1e-30, p.run = run, p.threads = threads;
    keys = plan({0, t}, false, b, g, 64, 8, 512, !causal);
    if (!causal) queries = plan({0, t}, false, b, g, 64, 8, 512, true);
    p.keys = keys.view(), p.queries = queries.view();
  }

  void forward() { causal ? isa::streamed_forward<T>(p) : isa::full_forward<T>(p); }
  void backward() {
    if (!causal) return isa::full_backward<T>(p);
    decay || r > 1 ? isa::causal_backward<T>(p) : isa::streamed_backward<T>(p);
  }
};

double elu(double x) { return x > 0 ? x + 1 : std::exp(x); }

/// The largest error of o, dq, dk, dv and of the decays' gradient, relative to the largest number of each, or to one.
template <typename T>
double error_of(Case<T>& c) {
  c.forward(), c.backward();
  double worst = 0;
  for (Index b = 0; b < c.b; ++b)
    for (Index g = 0; g < c.g; ++g) {
      std::vector<double> dk(c.t * c.d), dv(c.t * c.e), dl(c.t + 1), sums(c.t + 1);
      std::vector<double> keys(c.t * c.d);
      for (Index j = 0; j < c.t; ++j)
        for (Index x = 0; x < c.d; ++x) keys[j * c.d + x] = elu(c.k.at(b, g, j, x));
      for (Index i = 0; i < c.t; ++i) sums[i + 1] = sums[i] + (c.decay ? double(c.log_decay.at(b, g, i, 0)) : 0.0);
      double errors[5] = {}, sizes[5] = {};
      const auto meet = [&](int which, double found, double wanted) {
        errors[which] = std::max(errors[which], std::isfinite(found) ? std::abs(found - wanted) : 1e300);
        sizes[which] = std::max(sizes[which], std::abs(wanted));
      };
      for (Index h = g * c.r; h < (g + 1) * c.r; ++h)
        for (Index i = 0; i < c.t; ++i) {
          const Index end = c.causal ? i + 1 : c.t;
          std::vector<double> weight(end), dq(c.d), out(c.e), query(c.d);
          for (Index x = 0; x < c.d; ++x) query[x] = elu(c.q.at(b, h, i, x));
          double den = 0;
          for (Index j = 0; j < end; ++j) {
            for (Index x = 0; x < c.d; ++x) weight[j] += query[x] * keys[j * c.d + x];
            weight[j] *= std::exp(sums[i + 1] - sums[j + 1]);
            den += weight[j];
            for (Index x = 0; x < c.e; ++x) out[x] += weight[j] * c.v.at(b, g, j, x);
          }
          double along = 0;
          for (Index x = 0; x < c.e; ++x) meet(0, c.o.at(b, h, i, x), out[x] /= den), along += out[x] * c.grad_o.at(b, h, i, x);
          for (Index j = 0; j < end; ++j) {
            double dw = -along;
            for (Index x = 0; x < c.e; ++x) dw += c.grad_o.at(b, h, i, x) * c.v.at(b, g, j, x);
            dw /= den;
            for (Index x = 0; x < c.e; ++x) dv[j * c.e + x] += weight[j] / den * c.grad_o.at(b, h, i, x);
            const double decayed = dw * std::exp(sums[i + 1] - sums[j + 1]);
            for (Index x = 0; x < c.d; ++x) {
              const double key = keys[j * c.d + x];
              dq[x] += decayed * key * std::min(1.0, query[x]);
              dk[j * c.d + x] += decayed * query[x] * std::min(1.0, key);
            }
            for (Index l = j + 1; c.decay && l <= i; ++l) dl[l] += dw * weight[j];
          }
          for (Index x = 0; x < c.d; ++x) meet(1, c.grad_q.at(b, h, i, x), dq[x]);
        }
      for (Index j = 0; j < c.t; ++j) {
        for (Index x = 0; x < c.d; ++x) meet(2, c.grad_k.at(b, g, j, x), dk[j * c.d + x]);
        for (Index x = 0; x < c.e; ++x) meet(3, c.grad_v.at(b, g, j, x), dv[j * c.e + x]);
        if (c.decay) meet(4, c.grad_decay.at(b, g, j, 0), dl[j]);
      }
      for (int x = 0; x < 5; ++x) worst = std::max(worst, errors[x] / std::max(1.0, sizes[x]));
    }
  return worst;
}

/// Of all results so far, in one number: whether a change left them as they were, to the bit.
std::uint64_t bits = 14695981039346656037u;

template <typename T>
void count_bits(const std::vector<T>& x) {
  const auto bytes = reinterpret_cast<const unsigned char*>(x.data());
  for (std::size_t i = 0; i < x.size() * sizeof(T); ++i) bits = (bits ^ bytes[i]) * 1099511628211u;
}

template <typename T>
bool check(double most) {
  bool right = true;
  for (Index t : {1, 31, 97, 1100})
    for (Index d : {20, 64})
      for (int options = 0; options < 12; ++options) {
        const bool causal = options % 2, side_by_side = options / 2 % 2, decay = options / 4 == 1;
        const Index r = options / 4 == 2 ? 3 : 1;
        if ((decay && !causal) || (t > 1000 && (r > 1 || d > 20))) continue;
        Case<T> c(t > 1000 ? 1 : 2, t > 1000 ? 2 : 3, r, t, d, d == 20 ? 17 : d, causal, side_by_side, decay, std::mt19937(t + d));
        const double error = error_of(c);
        for (auto* x : {&c.o, &c.grad_q, &c.grad_k, &c.grad_v, &c.grad_decay}) count_bits(x->numbers);
        if (error <= most) continue;
        right = false;
        std::printf("wrong by %.1e: t = %d, d = %d, %s, %s%s, %d query heads\n", error, int(t), int(d), causal ? "causal" : "full",
                    side_by_side ? "side by side" : "heads first", decay ? ", decay" : "", int(r));
      }
  return right;
}

double seconds() {
  timespec at;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &at);
  return double(at.tv_sec) + 1e-9 * double(at.tv_nsec);
}

void measure(Index t, Index d, bool both, bool side_by_side, bool causal) {
  Case<float> c(1, 8, 1, t, d, d, causal, side_by_side, false, std::mt19937(0));
  std::vector<double> times;
  for (double begun = seconds(); times.size() < 5 || seconds() - begun < 0.7;) {
    const double start = seconds();
    c.forward();
    if (both) c.backward();
    times.push_back(1e3 * (seconds() - start));
  }
  std::sort(times.begin(), times.end());
  std::printf("%.3f ms (least %.3f)\n", times[times.size() / 2], times[0]);
}

}  // namespace

int main(int count, char** given) {
  if (count > 1) {
    std::string words;
    for (int i = 3; i < count; ++i) words += std::string(" ") + given[i];
    const auto has = [&](const char* word) { return words.find(word) != std::string::npos; };
    measure(std::atol(given[1]), std::atol(given[2]), has("both"), has("side-by-side"), !has("full"));
    return 0;
  }
#ifdef TARNN_FLOAT_ONLY
  const bool right = check<float>(1e-4);
#else
  const bool right = check<float>(1e-4) & check<double>(1e-11);
#endif
  std::printf("%s; bits %016llx\n", right ? "right" : "wrong", static_cast<unsigned long long>(bits));
  return right ? 0 : 1;
}
