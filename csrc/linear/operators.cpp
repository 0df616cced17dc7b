// Linear attention's operators: forward, backward and one token. Python has checked shapes and dtypes (ops/linear/arguments.py), and
// allocates all results (kernels/cpu/linear.py).
#include "common/operators.h"
#include "linear/plan.h"

namespace {

using namespace tarnn;

/// (b, s) seen as (b, 1, s).
View mask_view(const Maybe& x) {
  View out = view(x);
  out.stride[2] = out.stride[1];
  out.stride[1] = 0;
  return out;
}

/// omega (rows, heads, f, d), bias (rows, heads, f), contiguous.
Projection projection(const Maybe& omega, const Maybe& bias, double factor, double square, double offset, double shift) {
  Projection out;
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

/// So many heads of values share a head of queries and keys.
Index values_of_a_key(const Tensor& k, const Tensor& v) { return k.size(1) ? std::max<Index>(1, v.size(1) / k.size(1)) : 1; }

// What a call is about, but for its results: the parameters of both operators, their schemas and the record below come from
// this one table.
#define CALL(X)                                                                                                          \
  X(Tensor, q) X(Tensor, k) X(Tensor, v) X(Maybe, log_decay) X(Maybe, key_log_weight)                                    \
  X(Maybe, S) X(Maybe, z) X(Maybe, M) X(Maybe, key_mask) X(Maybe, bounds) X(Maybe, omega) X(Maybe, bias)                 \
  X(Index, map) X(bool, causal) X(bool, normalize) X(bool, at_least_one) X(bool, weighted) X(double, eps) X(bool, streamed) X(Index, chunk) X(Index, block) X(Index, segment) \
  X(Index, stretch)   \
  X(double, factor) X(double, square) X(double, offset) X(double, shift)
struct Inputs {
  CALL(FIELD)
};

struct Call {
  Problem problem;
  Plan keys, queries;
};

void set_up(const Inputs& in, Call& call) {
  Problem& p = call.problem;
  const Index b = in.k.size(0), g = in.v.size(1), t = in.q.size(2), s = in.k.size(2);
  const Index share = values_of_a_key(in.k, in.v);
  p.g = g;
  p.r = g ? in.q.size(1) * share / g : 0;
  p.d = in.k.size(3);
  p.f = in.omega ? in.omega->size(2) : p.d;
  p.e = in.v.size(3);
  p.projection = projection(in.omega, in.bias, in.factor, in.square, in.offset, in.shift);
  p.chunk = in.chunk;
  p.block = in.block;
  p.segment = in.segment;
  p.q = view(in.q);
  p.k = view(in.k);
  p.q.share = p.k.share = share;
  p.v = view(in.v);
  p.log_decay = view(in.log_decay);
  p.channels = in.log_decay && in.log_decay->dim() == 4;
  p.key_log_weight = view(in.key_log_weight);
  p.mask = mask_view(in.key_mask);
  p.before = {data(in.S), data(in.z), data(in.M)};
  p.map = static_cast<Map>(in.map);
  p.causal = in.causal;
  p.streamed = in.streamed;
  p.normalize = in.normalize;
  p.at_least_one = in.at_least_one;
  p.weighted = in.weighted;
  p.eps = in.eps;
  p.run = run;
  p.threads = get_num_threads();
  const bool packed = in.bounds.has_value();
  std::vector<Index> of_keys = {0, s}, of_queries = {0, t};
  if (packed) {
    const auto at = static_cast<const Index*>(data(in.bounds));
    of_keys.assign(at, at + in.bounds->size(0));
    of_queries = of_keys;
  }
  const Index sequences = packed ? static_cast<Index>(of_keys.size()) - 1 : b;
  const Index unit = (in.block + in.chunk - 1) / in.chunk * in.chunk;
  const Index tasks = tasks_of(in.causal, std::max(t, s));
  call.keys = plan(of_keys, packed, sequences, g, unit, tasks, in.stretch, !in.causal);
  if (!in.causal) call.queries = plan(of_queries, packed, sequences, g, unit, tasks, in.stretch, true);
  const Index features = p.f * (p.e + (in.omega ? p.d : 0));
  if (in.q.size(0) * g * std::max(p.r, Index(1)) * std::max(t, s) * features < worth_a_thread) p.threads = 1;
  p.keys = call.keys.view();
  p.queries = call.queries.view();
}

void forward(CALL(PARAMETER) Tensor o, Maybe den, Maybe S_out, Maybe z_out, Maybe M_out, Maybe kept) {
  Call c;
  set_up({CALL(NAME)}, c);
  in_large_pages(o);
  c.problem.o = view(o);
  c.problem.den = view(den);
  c.problem.after = {data(S_out), data(z_out), data(M_out)};
  c.problem.kept = view(kept);
  if (kept) in_large_pages(*kept);
  by_dtype(q.scalar_type(), *kernels().linear, [&](auto& of, auto) { of.forward(c.problem); });
}

void backward(Tensor grad_o, Maybe grad_S, Maybe grad_z, Tensor o, Tensor den, Maybe S_behind, Maybe z_behind, Maybe M_behind,
              Maybe kept, CALL(PARAMETER) Tensor grad_q, Tensor grad_k, Tensor grad_v, Maybe grad_log_decay, Maybe grad_key_log_weight,
              Maybe grad_S_before, Maybe grad_z_before, Maybe grad_omega, Maybe grad_bias) {
  Call c;
  set_up({CALL(NAME)}, c);
  Problem& p = c.problem;
  p.o = view(o);
  p.den = view(den);
  p.grad_o = view(grad_o);
  p.grad_after = {data(grad_S), data(grad_z), nullptr};
  p.after = {data(S_behind), data(z_behind), data(M_behind)};
  p.kept = view(kept);
  for (const Tensor* x : {&grad_q, &grad_k, &grad_v}) in_large_pages(*x);
  p.grad_q = view(grad_q);
  p.grad_k = view(grad_k);
  p.together = p.grad_q.share = p.grad_k.share = p.k.share > 1 ? v.size(1) / grad_k.size(1) : 1;
  p.grad_v = view(grad_v);
  p.grad_log_decay = view(grad_log_decay);
  p.grad_key_log_weight = view(grad_key_log_weight);
  p.grad_omega = view(grad_omega);
  p.grad_bias = view(grad_bias);
  p.grad_before = {data(grad_S_before), data(grad_z_before), nullptr};
  by_dtype(q.scalar_type(), *kernels().linear, [&](auto& of, auto) { of.backward(p); });
}

void step(Tensor q, Tensor k, Tensor v, Maybe log_decay, Maybe key_log_weight, Tensor S, Tensor z, Maybe M, Maybe omega,
          Maybe bias, Tensor o, Tensor S_out, Tensor z_out, Maybe M_out, int64_t map, bool normalize, bool at_least_one, double eps,
          double factor, double square, double offset, double shift) {
  Step p;
  p.b = k.size(0);
  p.g = v.size(1);
  p.r = p.g ? o.size(1) / p.g : 0;
  p.d = k.size(3);
  p.f = S.size(2);
  p.e = v.size(3);
  p.projection = projection(omega, bias, factor, square, offset, shift);
  p.q = view(q);
  p.k = view(k);
  p.q.share = p.k.share = values_of_a_key(k, v);
  p.v = view(v);
  p.o = view(o);
  p.log_decay = view(log_decay);
  p.channels = log_decay && log_decay->dim() == 4;
  p.key_log_weight = view(key_log_weight);
  p.normalize = normalize;
  p.at_least_one = at_least_one;
  p.weighted = M_out.has_value();
  p.map = static_cast<Map>(map);
  p.eps = eps;
  p.before = {data(S), data(z), data(M)};
  p.after = {S_out.mutable_data_ptr(), z_out.mutable_data_ptr(), data(M_out)};
  p.run = run;
  p.threads = get_num_threads();
  by_dtype(q.scalar_type(), *kernels().linear, [&](auto& of, auto) { of.step(p); });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tarnn_cpu, m) {
  m.def("forward(" CALL(SCHEMA) "Tensor(a!) o, Tensor(b!)? den, Tensor(c!)? S_out, Tensor(d!)? z_out, Tensor(e!)? M_out, Tensor(f!)? kept) -> ()");
  m.def("backward(Tensor grad_o, Tensor? grad_S, Tensor? grad_z, Tensor o, Tensor den, Tensor? S_behind, Tensor? z_behind, "
        "Tensor? M_behind, Tensor? kept, " CALL(SCHEMA)
        "Tensor(a!) grad_q, Tensor(b!) grad_k, Tensor(c!) grad_v, Tensor(d!)? grad_log_decay, "
        "Tensor(e!)? grad_key_log_weight, Tensor(f!)? grad_S_before, Tensor(g!)? grad_z_before, Tensor(h!)? grad_omega, "
        "Tensor(i!)? grad_bias) -> ()");
  m.def("step(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? key_log_weight, Tensor S, Tensor z, Tensor? M, "
        "Tensor? omega, Tensor? bias, Tensor(a!) o, Tensor(b!) S_out, Tensor(c!) z_out, Tensor(d!)? M_out, int map, "
        "bool normalize, bool at_least_one, float eps, float factor, float square, float offset, float shift) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tarnn_cpu, CPU, m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("backward", TORCH_BOX(&backward));
  m.impl("step", TORCH_BOX(&step));
}
