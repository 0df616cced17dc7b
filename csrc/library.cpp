// Registers the kernels with torch (torch.h: one binary for every Python and every torch from 2.10 on), picks the
// instruction set, and turns tensors into what kernels take. Python (kernels/cpu/__init__.py) has checked shapes and dtypes, and
// allocates all results.
#include <atomic>
#include <cstdlib>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "attention/hybrid_problem.h"
#include "attention/plan.h"
#include "threads.h"
#include "torch.h"

namespace {

using tarnn::Index;
using tarnn::Sums;
using tarnn::Tensor;
using tarnn::Type;
using tarnn::View;
using Maybe = std::optional<Tensor>;

// --- the instruction set

const tarnn::Kernels* table_of(std::string_view isa) {
  const auto wanted = [&](std::string_view name) { return isa.empty() || isa == name; };
#ifdef __x86_64__
  __builtin_cpu_init();
  [[maybe_unused]] const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
#ifdef TARNN_HAS_avx512
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && wanted("avx512"))
    return tarnn_kernels_avx512();
#endif
#ifdef TARNN_HAS_avx2
  if (avx2 && wanted("avx2")) return tarnn_kernels_avx2();
#endif
#ifdef TARNN_HAS_baseline
  if (wanted("baseline")) return tarnn_kernels_baseline();
#endif
  return nullptr;
}

}  // namespace

const tarnn::Kernels& tarnn::kernels() {
  static const tarnn::Kernels* table = [] {
    const char* wish = std::getenv("TARNN_ISA");
    const tarnn::Kernels* found = table_of(wish ? wish : "");
    if (!found)
      throw std::runtime_error(wish ? "TARNN_ISA=" + std::string(wish) + " is not an instruction set of this processor and build."
                                    : "tarnn's kernels were compiled for other instruction sets than this processor's.");
    return found;
  }();
  return *table;
}

namespace {

using tarnn::FlushDenormals;
using tarnn::ThreadMemory;
using tarnn::kernels;

std::string isa() { return kernels().isa; }

template <typename F, typename G>
void call(Type dtype, F of_float, G of_double) {
  dtype == Type::float64 ? of_double(kernels().of_double) : of_float(kernels().of_float);
}

// --- threads

void run(Index tasks, Index threads, std::size_t bytes, void (*task)(void*, Index, void*), void* context) {
  if (tasks == 0) return;
  std::atomic<Index> next{0};
  const auto worker = [&](Index, Index) {
    thread_local ThreadMemory memory;
    FlushDenormals flush;
    void* scratch = memory.at_least(bytes);
    if (!scratch) return;  // the other threads take its tasks
    for (Index i; (i = next.fetch_add(1)) < tasks;) task(context, i, scratch);
    memory.shrink();
  };
  threads = std::min(threads, tasks);
  if (threads <= 1) worker(0, 1);
  else tarnn::parallel_for(0, threads, 1, worker);
  if (next == 0) throw tarnn::OutOfMemory(bytes);  // no thread had any: nothing is done
}

/// Large pages for a result: by small ones, a fresh block of hundreds of megabytes costs a quarter of the kernel's time in
/// page faults. What is asked for stays with the addresses, whoever has them next: TARNN_LARGE_PAGES=off asks for none.
void in_large_pages(const Tensor& x) {
  static const char* wish = std::getenv("TARNN_LARGE_PAGES");
  static const bool off = wish && std::string_view(wish) == "off";
  if (off) return;
  const std::size_t each = x.scalar_type() == Type::float64 ? 8 : x.scalar_type() == Type::float32 ? 4 : 2;
  const std::size_t bytes = static_cast<std::size_t>(x.numel()) * each;
  if (bytes >= 4 * tarnn::large_page) tarnn::ask_for_large_pages(x.const_data_ptr(), bytes);
}

// --- tensors

View view(const Tensor& x) {
  View out;
  out.data = const_cast<void*>(x.const_data_ptr());
  out.type = x.scalar_type();
  for (Index i = 0; i < x.dim(); ++i) out.stride[i] = x.stride(i);
  return out;
}

View view(const Maybe& x) { return x ? view(*x) : View(); }

/// (b, s) seen as (b, 1, s).
View mask_view(const Maybe& x) {
  View out = view(x);
  out.stride[2] = out.stride[1];
  out.stride[1] = 0;
  return out;
}

/// omega (rows, heads, f, d), bias (rows, heads, f), contiguous.
tarnn::Projection projection(const Maybe& omega, const Maybe& bias, double factor, double square, double offset, double shift) {
  tarnn::Projection out;
  if (!omega) return out;
  out.omega = omega->const_data_ptr();
  out.bias = bias ? bias->const_data_ptr() : nullptr;
  out.rows = omega->size(0);
  out.heads = omega->size(1);
  out.factor = factor;
  out.square = square;
  out.offset = offset;
  out.shift = shift;
  return out;
}

void* data(const Tensor& x) { return const_cast<void*>(x.const_data_ptr()); }
void* data(const Maybe& x) { return x ? data(*x) : nullptr; }

// What a call is about, but for its results: the parameters of both operators, their schemas and the record below come from
// this one table.
#define CALL(X)                                                                                                          \
  X(Tensor, q) X(Tensor, k) X(Tensor, v) X(Maybe, log_decay) X(Maybe, key_log_weight)                                    \
  X(Maybe, S) X(Maybe, z) X(Maybe, M) X(Maybe, key_mask) X(Maybe, bounds) X(Maybe, omega) X(Maybe, bias)                 \
  X(Index, map) X(bool, causal) X(bool, normalize) X(bool, weighted) X(double, eps) X(Index, chunk) X(Index, segment)        \
  X(Index, stretch)   \
  X(double, factor) X(double, square) X(double, offset) X(double, shift)
#define PARAMETER(type, name) type name,
#define FIELD(type, name) const type& name;
#define NAME(type, name) name,
#define SCHEMA(type, name) SCHEMA_##type " " #name ", "
#define SCHEMA_Tensor "Tensor"
#define SCHEMA_Maybe "Tensor?"
#define SCHEMA_Index "int"
#define SCHEMA_bool "bool"
#define SCHEMA_double "float"

struct Inputs {
  CALL(FIELD)
};

struct Call {
  tarnn::Problem problem;
  tarnn::Plan keys, queries;
};

void set_up(const Inputs& in, Call& call) {
  tarnn::Problem& p = call.problem;
  const Index b = in.k.size(0), g = in.k.size(1), t = in.q.size(2), s = in.k.size(2);
  p.g = g;
  p.r = g ? in.q.size(1) / g : 0;
  p.d = in.k.size(3);
  p.f = in.omega ? in.omega->size(2) : p.d;
  p.e = in.v.size(3);
  p.projection = projection(in.omega, in.bias, in.factor, in.square, in.offset, in.shift);
  p.chunk = in.chunk;
  p.segment = in.segment;
  p.q = view(in.q);
  p.k = view(in.k);
  p.v = view(in.v);
  p.log_decay = view(in.log_decay);
  p.channels = in.log_decay && in.log_decay->dim() == 4;
  p.key_log_weight = view(in.key_log_weight);
  p.mask = mask_view(in.key_mask);
  p.before = {data(in.S), data(in.z), data(in.M)};
  p.map = static_cast<tarnn::Map>(in.map);
  p.causal = in.causal;
  p.normalize = in.normalize;
  p.weighted = in.weighted;
  p.eps = in.eps;
  p.run = run;
  p.threads = tarnn::get_num_threads();
  const bool packed = in.bounds.has_value();
  std::vector<Index> of_keys = {0, s}, of_queries = {0, t};
  if (packed) {
    const auto at = static_cast<const Index*>(data(in.bounds));
    of_keys.assign(at, at + in.bounds->size(0));
    of_queries = of_keys;
  }
  const Index sequences = packed ? static_cast<Index>(of_keys.size()) - 1 : b;
  const Index tasks = tarnn::tasks_of(in.causal, std::max(t, s));
  call.keys = tarnn::plan(of_keys, packed, sequences, g, in.chunk, tasks, in.stretch, !in.causal);
  if (!in.causal) call.queries = tarnn::plan(of_queries, packed, sequences, g, in.chunk, tasks, in.stretch, true);
  const Index features = p.f * (p.e + (in.omega ? p.d : 0));
  if (in.q.size(0) * in.q.size(1) * std::max(t, s) * features < tarnn::worth_a_thread) p.threads = 1;
  p.keys = call.keys.view();
  p.queries = call.queries.view();
}

// --- the operators

void forward(CALL(PARAMETER) Tensor o, Maybe den, Maybe S_out, Maybe z_out, Maybe M_out, Maybe kept) {
  Call c;
  set_up({CALL(NAME)}, c);
  in_large_pages(o);
  c.problem.o = view(o);
  c.problem.den = view(den);
  c.problem.after = {data(S_out), data(z_out), data(M_out)};
  c.problem.kept = view(kept);
  if (kept) in_large_pages(*kept);
  call(q.scalar_type(), [&](auto& of) { of.forward(c.problem); }, [&](auto& of) { of.forward(c.problem); });
}

void backward(Tensor grad_o, Maybe grad_S, Maybe grad_z, Tensor o, Tensor den, Maybe S_behind, Maybe z_behind, Maybe M_behind,
              Maybe kept, CALL(PARAMETER) Tensor grad_q, Tensor grad_k, Tensor grad_v, Maybe grad_log_decay, Maybe grad_key_log_weight,
              Maybe grad_S_before, Maybe grad_z_before, Maybe grad_omega, Maybe grad_bias) {
  Call c;
  set_up({CALL(NAME)}, c);
  tarnn::Problem& p = c.problem;
  p.o = view(o);
  p.den = view(den);
  p.grad_o = view(grad_o);
  p.grad_after = {data(grad_S), data(grad_z), nullptr};
  p.after = {data(S_behind), data(z_behind), data(M_behind)};
  p.kept = view(kept);
  for (const Tensor* x : {&grad_q, &grad_k, &grad_v}) in_large_pages(*x);
  p.grad_q = view(grad_q);
  p.grad_k = view(grad_k);
  p.grad_v = view(grad_v);
  p.grad_log_decay = view(grad_log_decay);
  p.grad_key_log_weight = view(grad_key_log_weight);
  p.grad_omega = view(grad_omega);
  p.grad_bias = view(grad_bias);
  p.grad_before = {data(grad_S_before), data(grad_z_before), nullptr};
  call(q.scalar_type(), [&](auto& of) { of.backward(p); }, [&](auto& of) { of.backward(p); });
}

void step(Tensor q, Tensor k, Tensor v, Maybe log_decay, Maybe key_log_weight, Tensor S, Tensor z, Maybe M, Maybe omega,
          Maybe bias, Tensor o, Tensor S_out, Tensor z_out, Maybe M_out, int64_t map, bool normalize, double eps, double factor,
          double square, double offset, double shift) {
  tarnn::Step p;
  p.b = k.size(0);
  p.g = k.size(1);
  p.r = p.g ? q.size(1) / p.g : 0;
  p.d = k.size(3);
  p.f = S.size(2);
  p.e = v.size(3);
  p.projection = projection(omega, bias, factor, square, offset, shift);
  p.q = view(q);
  p.k = view(k);
  p.v = view(v);
  p.o = view(o);
  p.log_decay = view(log_decay);
  p.channels = log_decay && log_decay->dim() == 4;
  p.key_log_weight = view(key_log_weight);
  p.normalize = normalize;
  p.weighted = M_out.has_value();
  p.map = static_cast<tarnn::Map>(map);
  p.eps = eps;
  p.before = {data(S), data(z), data(M)};
  p.after = {S_out.mutable_data_ptr(), z_out.mutable_data_ptr(), data(M_out)};
  p.run = run;
  p.threads = tarnn::get_num_threads();
  call(q.scalar_type(), [&](auto& of) { of.step(p); }, [&](auto& of) { of.step(p); });
}

template <typename F>
void hybrid(Type dtype, F of) {
  dtype == Type::float64 ? of(kernels().hybrid->of_double) : of(kernels().hybrid->of_float);
}

#define HYBRID(X)                                                                                                       \
  X(Tensor, q) X(Tensor, k) X(Tensor, v) X(Tensor, sink_k) X(Tensor, sink_v) X(Tensor, count) X(Tensor, length)             \
  X(Maybe, phi_q) X(Maybe, a) X(Maybe, phi_k) X(Maybe, weight)                                                           \
  X(Index, window) X(bool, causal) X(double, scale) X(double, softcap) X(bool, log_features)

struct HybridInputs {
  HYBRID(FIELD)
};

tarnn::HybridProblem hybrid_problem(const HybridInputs& in) {
  tarnn::HybridProblem p;
  p.b = in.k.size(0);
  p.g = in.k.size(1);
  p.r = p.g ? in.q.size(1) / p.g : 0;
  p.d = in.k.size(3);
  p.e = in.v.size(3);
  p.f = in.phi_q ? in.phi_q->size(3) : 0;
  p.t = in.q.size(2);
  p.window = in.window;
  p.sinks = in.sink_k.size(2);
  p.causal = in.causal;
  p.scale = in.scale;
  p.softcap = in.softcap;
  p.log_features = in.log_features;
  p.count = static_cast<const Index*>(in.count.const_data_ptr());
  p.length = static_cast<const Index*>(in.length.const_data_ptr());
  p.q = view(in.q), p.k = view(in.k), p.v = view(in.v), p.sink_k = view(in.sink_k), p.sink_v = view(in.sink_v);
  p.phi_q = view(in.phi_q), p.a = view(in.a), p.phi_k = view(in.phi_k), p.weight = view(in.weight);
  p.threads = tarnn::get_num_threads();
  p.run = run;
  return p;
}

void hybrid_forward(HYBRID(PARAMETER) Tensor S, Tensor z, Tensor M, Tensor o, Tensor share, Maybe log_total, Maybe behind,
                    Tensor S_out, Tensor z_out, Tensor M_out) {
  tarnn::HybridProblem p = hybrid_problem({HYBRID(NAME)});
  p.o = view(o), p.share = view(share), p.log_total = view(log_total), p.behind = view(behind);
  p.before = {data(S), data(z), data(M)};
  p.after = {S_out.mutable_data_ptr(), z_out.mutable_data_ptr(), M_out.mutable_data_ptr()};
  hybrid(q.scalar_type(), [&](auto& of) { of.forward(p); });
}

void hybrid_backward(HYBRID(PARAMETER) Tensor o, Tensor log_total, Tensor grad_o, Tensor grad_q, Tensor grad_k, Tensor grad_v,
                     Tensor grad_sink_k, Tensor grad_sink_v, Maybe grad_phi_q, Maybe grad_phi_k) {
  tarnn::HybridProblem p = hybrid_problem({HYBRID(NAME)});
  p.o = view(o), p.log_total = view(log_total), p.grad_o = view(grad_o), p.grad_q = view(grad_q);
  p.grad_k = grad_k.mutable_data_ptr(), p.grad_v = grad_v.mutable_data_ptr();
  p.grad_sink_k = grad_sink_k.mutable_data_ptr(), p.grad_sink_v = grad_sink_v.mutable_data_ptr();
  p.grad_phi_q = data(grad_phi_q), p.grad_phi_k = data(grad_phi_k);
  hybrid(q.scalar_type(), [&](auto& of) { of.backward(p); });
}

void hybrid_step(Tensor q, Tensor k, Tensor v, Maybe phi_q, Maybe a, Maybe phi_k, Maybe weight, Maybe decay, Tensor store_k,
                 Tensor store_v, Tensor fade, Tensor count, Tensor S, Tensor z, Tensor M, Tensor o, Tensor share, Index sinks,
                 double scale, double softcap) {
  tarnn::HybridStep p;
  p.log_features = M.dim() == 3;
  p.b = k.size(0);
  p.g = k.size(1);
  p.r = p.g ? q.size(1) / p.g : 0;
  p.d = k.size(3);
  p.e = v.size(3);
  p.f = phi_q ? phi_q->size(3) : 0;
  p.room = store_k.size(2);
  p.sinks = sinks;
  p.scale = scale;
  p.softcap = softcap;
  p.count = static_cast<const Index*>(count.const_data_ptr());
  p.q = view(q), p.k = view(k), p.v = view(v), p.decay = view(decay);
  p.phi_q = view(phi_q), p.a = view(a), p.phi_k = view(phi_k), p.weight = view(weight);
  p.store_k = view(store_k), p.store_v = view(store_v), p.fade = view(fade), p.o = view(o), p.share = view(share);
  p.sums = {data(S), data(z), data(M)};
  const Index work = p.b * p.g * (p.room * (p.d + p.e) * p.r + p.f * p.e);
  p.threads = work < tarnn::worth_a_thread ? 1 : tarnn::get_num_threads();
  p.run = run;
  hybrid(q.scalar_type(), [&](auto& of) { of.step(p); });
}

}  // namespace

STABLE_TORCH_LIBRARY(tarnn_cpu, m) {
  m.def("isa() -> str");
  m.def("forward(" CALL(SCHEMA) "Tensor(a!) o, Tensor(b!)? den, Tensor(c!)? S_out, Tensor(d!)? z_out, Tensor(e!)? M_out, Tensor(f!)? kept) -> ()");
  m.def("backward(Tensor grad_o, Tensor? grad_S, Tensor? grad_z, Tensor o, Tensor den, Tensor? S_behind, Tensor? z_behind, "
        "Tensor? M_behind, Tensor? kept, " CALL(SCHEMA)
        "Tensor(a!) grad_q, Tensor(b!) grad_k, Tensor(c!) grad_v, Tensor(d!)? grad_log_decay, "
        "Tensor(e!)? grad_key_log_weight, Tensor(f!)? grad_S_before, Tensor(g!)? grad_z_before, Tensor(h!)? grad_omega, "
        "Tensor(i!)? grad_bias) -> ()");
  m.def("step(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? key_log_weight, Tensor S, Tensor z, Tensor? M, "
        "Tensor? omega, Tensor? bias, Tensor(a!) o, Tensor(b!) S_out, Tensor(c!) z_out, Tensor(d!)? M_out, int map, "
        "bool normalize, float eps, float factor, float square, float offset, float shift) -> ()");
  m.def("hybrid_forward(" HYBRID(SCHEMA) "Tensor S, Tensor z, Tensor M, Tensor(a!) o, Tensor(b!) share, Tensor(c!)? log_total, "
        "Tensor(d!)? behind, Tensor(e!) S_out, Tensor(f!) z_out, Tensor(g!) M_out) -> ()");
  m.def("hybrid_backward(" HYBRID(SCHEMA) "Tensor o, Tensor log_total, Tensor grad_o, Tensor(a!) grad_q, Tensor(b!) grad_k, "
        "Tensor(c!) grad_v, Tensor(d!) grad_sink_k, Tensor(e!) grad_sink_v, Tensor(f!)? grad_phi_q, Tensor(g!)? grad_phi_k) -> ()");
  m.def("hybrid_step(Tensor q, Tensor k, Tensor v, Tensor? phi_q, Tensor? a, Tensor? phi_k, Tensor? weight, Tensor? decay, "
        "Tensor(a!) store_k, Tensor(b!) store_v, Tensor(c!) fade, Tensor count, Tensor(d!) S, Tensor(e!) z, Tensor(f!) M, "
        "Tensor(g!) o, Tensor(h!) share, int sinks, float scale, float softcap) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tarnn_cpu, CompositeExplicitAutograd, m) { m.impl("isa", TORCH_BOX(&isa)); }

STABLE_TORCH_LIBRARY_IMPL(tarnn_cpu, CPU, m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("backward", TORCH_BOX(&backward));
  m.impl("step", TORCH_BOX(&step));
  m.impl("hybrid_forward", TORCH_BOX(&hybrid_forward));
  m.impl("hybrid_backward", TORCH_BOX(&hybrid_backward));
  m.impl("hybrid_step", TORCH_BOX(&hybrid_step));
}
