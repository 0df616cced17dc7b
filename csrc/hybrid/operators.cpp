// Hybrid attention's operators: forward, backward and one token in place. Python (kernels/cpu/hybrid.py) has checked shapes and dtypes,
// and allocates all results.
#include "common/operators.h"
#include "hybrid/problem.h"

namespace {

using namespace tarnn;

#define HYBRID(X)                                                                                                       \
  X(Tensor, q) X(Tensor, k) X(Tensor, v) X(Tensor, sink_k) X(Tensor, sink_v) X(Tensor, count) X(Tensor, length)             \
  X(Maybe, phi_q) X(Maybe, a) X(Maybe, phi_k) X(Maybe, weight) X(Maybe, barred) X(Maybe, num_sinks)                      \
  X(Index, window) X(bool, causal) X(double, scale) X(double, softcap) X(bool, log_features)

struct HybridInputs {
  HYBRID(FIELD)
};

HybridProblem hybrid_problem(const HybridInputs& in) {
  HybridProblem p;
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
  p.barred = view(in.barred), p.num_sinks = static_cast<const Index*>(data(in.num_sinks));
  p.threads = get_num_threads();
  p.run = run;
  return p;
}

void hybrid_forward(HYBRID(PARAMETER) Tensor S, Tensor z, Tensor M, Tensor o, Tensor share, Maybe log_total, Maybe behind,
                    Maybe joined, Tensor S_out, Tensor z_out, Tensor M_out) {
  HybridProblem p = hybrid_problem({HYBRID(NAME)});
  p.o = view(o), p.share = view(share), p.log_total = view(log_total), p.behind = view(behind), p.joined = view(joined);
  p.before = {data(S), data(z), data(M)};
  p.after = {S_out.mutable_data_ptr(), z_out.mutable_data_ptr(), M_out.mutable_data_ptr()};
  by_dtype(q.scalar_type(), *kernels().hybrid, [&](auto& of, auto) { of.forward(p); });
}

void hybrid_backward(HYBRID(PARAMETER) Maybe a_behind, Tensor o, Tensor log_total, Tensor grad_o, Tensor grad_q, Tensor grad_k,
                     Tensor grad_v, Tensor grad_sink_k, Tensor grad_sink_v, Maybe grad_phi_q, Maybe grad_phi_k) {
  HybridProblem p = hybrid_problem({HYBRID(NAME)});
  p.a_behind = view(a_behind);
  p.o = view(o), p.log_total = view(log_total), p.grad_o = view(grad_o), p.grad_q = view(grad_q);
  p.grad_k = view(grad_k), p.grad_v = view(grad_v);
  p.grad_sink_k = view(grad_sink_k), p.grad_sink_v = view(grad_sink_v);
  p.grad_phi_q = view(grad_phi_q), p.grad_phi_k = view(grad_phi_k);
  by_dtype(q.scalar_type(), *kernels().hybrid, [&](auto& of, auto) { of.backward(p); });
}

void hybrid_step(Tensor q, Tensor k, Tensor v, Maybe phi_q, Maybe a, Maybe phi_k, Maybe weight, Maybe decay, Tensor store_k,
                 Tensor store_v, Tensor fade, Tensor count, Tensor S, Tensor z, Tensor M, Tensor o, Tensor share, Index sinks,
                 double scale, double softcap) {
  HybridStep p;
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
  p.threads = work < worth_a_thread ? 1 : get_num_threads();
  p.run = run;
  by_dtype(q.scalar_type(), *kernels().hybrid, [&](auto& of, auto) { of.step(p); });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tarnn_cpu, m) {
  m.def("hybrid_forward(" HYBRID(SCHEMA) "Tensor S, Tensor z, Tensor M, Tensor(a!) o, Tensor(b!) share, Tensor(c!)? log_total, "
        "Tensor(d!)? behind, Tensor(e!)? joined, Tensor(f!) S_out, Tensor(g!) z_out, Tensor(h!) M_out) -> ()");
  m.def("hybrid_backward(" HYBRID(SCHEMA) "Tensor? a_behind, Tensor o, Tensor log_total, Tensor grad_o, Tensor(a!) grad_q, "
        "Tensor(b!) grad_k, Tensor(c!) grad_v, Tensor(d!) grad_sink_k, Tensor(e!) grad_sink_v, Tensor(f!)? grad_phi_q, "
        "Tensor(g!)? grad_phi_k) -> ()");
  m.def("hybrid_step(Tensor q, Tensor k, Tensor v, Tensor? phi_q, Tensor? a, Tensor? phi_k, Tensor? weight, Tensor? decay, "
        "Tensor(a!) store_k, Tensor(b!) store_v, Tensor(c!) fade, Tensor count, Tensor(d!) S, Tensor(e!) z, Tensor(f!) M, "
        "Tensor(g!) o, Tensor(h!) share, int sinks, float scale, float softcap) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tarnn_cpu, CPU, m) {
  m.impl("hybrid_forward", TORCH_BOX(&hybrid_forward));
  m.impl("hybrid_backward", TORCH_BOX(&hybrid_backward));
  m.impl("hybrid_step", TORCH_BOX(&hybrid_step));
}
