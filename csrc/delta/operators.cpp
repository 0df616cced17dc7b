// The operators of both delta rules: forward, backward and, but of low rank, one token. Python has checked shapes and dtypes (ops/delta),
// and allocates all results (kernels/cpu/delta.py, low_rank_delta.py).
#include "common/operators.h"
#include "delta/problem.h"

namespace {

using namespace tarnn;

// What a call is about, but for its results.
#define DELTA(X)                                                                                                     \
  X(Tensor, q) X(Tensor, k) X(Tensor, v) X(Tensor, beta) X(Maybe, log_decay) X(Maybe, S) X(Maybe, key_mask)          \
  X(Maybe, bounds) X(double, scale) X(bool, normalize) X(double, norm_eps) X(Index, segment)

struct DeltaInputs {
  DELTA(FIELD)
};

#define LOW_RANK(X)                                                                                                \
  X(Tensor, q) X(Tensor, k) X(Tensor, v) X(Tensor, a) X(Tensor, b) X(Maybe, log_decay) X(Maybe, S)                 \
  X(Maybe, key_mask) X(Maybe, bounds) X(double, scale) X(Index, segment)

struct LowRankInputs {
  LOW_RANK(FIELD)
};

/// What both have; heads: of the output.
template <typename Inputs>
void fill(DeltaProblem& p, const Inputs& in, Index heads) {
  const Index h = in.q.size(1), g = in.k.size(1), m = in.v.size(1);
  p.heads = heads;
  p.q_share = h ? heads / h : 1;
  p.k_share = g ? heads / g : 1;
  p.v_share = m ? heads / m : 1;
  p.d = in.k.size(3);
  p.e = in.v.size(3);
  p.t = in.q.size(2);
  p.bounds = static_cast<const Index*>(data(in.bounds));
  p.sequences = in.bounds ? in.bounds->size(0) - 1 : in.q.size(0);
  p.segment = in.segment;
  p.q = view(in.q), p.k = view(in.k), p.v = view(in.v), p.log_decay = view(in.log_decay);
  p.channels = in.log_decay && in.log_decay->dim() == 4;
  p.mask = view(in.key_mask);  // (b, t) seen as (b, 1, t)
  p.mask.stride[2] = p.mask.stride[1], p.mask.stride[1] = 0;
  p.scale = in.scale;
  p.before = data(in.S);
  p.threads = in.q.size(0) * p.heads * p.t * p.d * p.e < worth_a_thread ? 1 : get_num_threads();
  p.run = run;
}

DeltaProblem delta_problem(const DeltaInputs& in) {
  DeltaProblem p{};
  fill(p, in, std::max(in.q.size(1), in.v.size(1)));
  p.beta = view(in.beta);
  p.normalize = in.normalize, p.norm_eps = in.norm_eps;
  return p;
}

LowRankProblem low_rank_problem(const LowRankInputs& in) {
  LowRankProblem p{};
  fill(p, in, in.q.size(1));
  p.a = view(in.a), p.b = view(in.b);
  return p;
}

void delta_forward(DELTA(PARAMETER) Tensor o, Maybe S_out, Maybe kept) {
  DeltaProblem p = delta_problem({DELTA(NAME)});
  p.o = view(o), p.kept = view(kept);
  p.after = data(S_out);
  in_large_pages(o);
  if (kept) in_large_pages(*kept);
  by_dtype(q.scalar_type(), *kernels().delta, [&](auto& of, auto) { of.forward(p); });
}

void delta_backward(Maybe grad_o, Maybe grad_S, Maybe kept, DELTA(PARAMETER) Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_beta,
                    Maybe grad_log_decay, Maybe grad_S_before) {
  DeltaProblem p = delta_problem({DELTA(NAME)});
  p.grad_o = view(grad_o), p.kept = view(kept);
  p.grad_after = data(grad_S);
  p.grad_q = view(grad_q), p.grad_k = view(grad_k), p.grad_v = view(grad_v);
  p.grad_beta = view(grad_beta), p.grad_log_decay = view(grad_log_decay);
  p.grad_before = data(grad_S_before);
  for (const Tensor* x : {&grad_q, &grad_k, &grad_v}) in_large_pages(*x);
  by_dtype(q.scalar_type(), *kernels().delta, [&](auto& of, auto) { of.backward(p); });
}

void delta_step(DELTA(PARAMETER) Tensor o, Tensor S_out) {
  DeltaProblem p = delta_problem({DELTA(NAME)});
  p.o = view(o);
  p.after = S_out.mutable_data_ptr();
  by_dtype(q.scalar_type(), *kernels().delta, [&](auto& of, auto) { of.step(p); });
}

void low_rank_forward(LOW_RANK(PARAMETER) Tensor o, Maybe S_out, Maybe kept) {
  LowRankProblem p = low_rank_problem({LOW_RANK(NAME)});
  p.o = view(o), p.kept = view(kept);
  p.after = data(S_out);
  by_dtype(q.scalar_type(), *kernels().low_rank, [&](auto& of, auto) { of.forward(p); });
}

void low_rank_backward(Maybe grad_o, Maybe grad_S, Maybe kept, LOW_RANK(PARAMETER) Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_a,
                       Tensor grad_b, Maybe grad_log_decay, Maybe grad_S_before) {
  LowRankProblem p = low_rank_problem({LOW_RANK(NAME)});
  p.grad_o = view(grad_o), p.kept = view(kept);
  p.grad_after = data(grad_S);
  p.grad_q = view(grad_q), p.grad_k = view(grad_k), p.grad_v = view(grad_v), p.grad_a = view(grad_a), p.grad_b = view(grad_b);
  p.grad_log_decay = view(grad_log_decay);
  p.grad_before = data(grad_S_before);
  by_dtype(q.scalar_type(), *kernels().low_rank, [&](auto& of, auto) { of.backward(p); });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tarnn_cpu, m) {
  m.def("delta_forward(" DELTA(SCHEMA) "Tensor(a!) o, Tensor(b!)? S_out, Tensor(c!)? kept) -> ()");
  m.def("delta_backward(Tensor? grad_o, Tensor? grad_S, Tensor? kept, " DELTA(SCHEMA) "Tensor(a!) grad_q, Tensor(b!) grad_k, "
        "Tensor(c!) grad_v, Tensor(d!) grad_beta, Tensor(e!)? grad_log_decay, Tensor(f!)? grad_S_before) -> ()");
  m.def("delta_step(" DELTA(SCHEMA) "Tensor(a!) o, Tensor(b!) S_out) -> ()");
  m.def("low_rank_forward(" LOW_RANK(SCHEMA) "Tensor(a!) o, Tensor(b!)? S_out, Tensor(c!)? kept) -> ()");
  m.def("low_rank_backward(Tensor? grad_o, Tensor? grad_S, Tensor? kept, " LOW_RANK(SCHEMA) "Tensor(a!) grad_q, Tensor(b!) grad_k, "
        "Tensor(c!) grad_v, Tensor(d!) grad_a, Tensor(e!) grad_b, Tensor(f!)? grad_log_decay, Tensor(g!)? grad_S_before) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tarnn_cpu, CPU, m) {
  m.impl("delta_forward", TORCH_BOX(&delta_forward));
  m.impl("delta_backward", TORCH_BOX(&delta_backward));
  m.impl("delta_step", TORCH_BOX(&delta_step));
  m.impl("low_rank_forward", TORCH_BOX(&low_rank_forward));
  m.impl("low_rank_backward", TORCH_BOX(&low_rank_backward));
}
