// The scans' operators: forward, which is also one token, and backward. Python (kernels/cpu/diagonal_scan.py, selective_scan.py) has
// checked shapes and types, and allocates all results.
#include "common/operators.h"
#include "scan/problem.h"

namespace {

using namespace tarnn;

/// What both scans have: x, the state before, the mask, the bounds of packed sequences.
#define SCAN(X) X(Tensor, x) X(Maybe, before) X(Maybe, mask) X(Maybe, cuts) X(Index, segment)

struct ScanInputs {
  SCAN(FIELD)
};

/// work: of one channel and token, in multiplications.
void fill(ScanProblem& p, const ScanInputs& in, Index work) {
  p.b = in.x.size(0);
  p.t = in.x.size(1);
  p.c = in.x.size(2);
  p.segment = in.segment;
  p.sequences = in.cuts ? in.cuts->numel() - 1 : p.b;
  p.cuts = static_cast<const Index*>(data(in.cuts));
  p.mask = static_cast<const bool*>(data(in.mask));
  p.before = data(in.before);
  p.x = view(in.x);
  p.threads = p.b * p.t * p.c * work < worth_a_thread ? 1 : get_num_threads();
  p.run = run;
}

constexpr Index exponential = 12;  // multiplications, about

void diagonal_scan(SCAN(PARAMETER) Tensor log_decay, Tensor o, Maybe behind, Maybe kept) {
  DiagonalScan p;
  fill(p, {SCAN(NAME)}, exponential);
  p.log_decay = view(log_decay), p.o = view(o);
  p.behind = data(behind), p.kept = data(kept);
  in_large_pages(o);
  by_dtype(x.scalar_type(), *kernels().scan, [&](auto& of, auto) { of.diagonal(p); });
}

void diagonal_scan_backward(SCAN(PARAMETER) Tensor log_decay, Tensor kept, Tensor grad_o, Maybe grad_behind, Tensor grad_x,
                            Tensor grad_log_decay, Maybe grad_before) {
  DiagonalScan p;
  fill(p, {SCAN(NAME)}, exponential);
  p.log_decay = view(log_decay), p.kept = data(kept);
  p.grad_o = view(grad_o), p.grad_behind = data(grad_behind);
  p.grad_x = view(grad_x), p.grad_log_decay = view(grad_log_decay), p.grad_before = data(grad_before);
  for (const Tensor* gradient : {&grad_x, &grad_log_decay}) in_large_pages(*gradient);
  by_dtype(x.scalar_type(), *kernels().scan, [&](auto& of, auto) { of.diagonal_backward(p); });
}

#define SELECTIVE(X) X(Tensor, dt) X(Tensor, A) X(Tensor, B) X(Tensor, C) X(Maybe, D)

struct SelectiveInputs {
  SELECTIVE(FIELD)
};

void fill(SelectiveScan& p, const ScanInputs& scan, const SelectiveInputs& in) {
  p.n = in.A.size(1);
  fill(p, scan, p.n * exponential);
  p.dt = view(in.dt), p.B = view(in.B), p.C = view(in.C);
  p.A = data(in.A), p.D = data(in.D);
}

void selective_scan(SCAN(PARAMETER) SELECTIVE(PARAMETER) Tensor o, Maybe behind, Maybe kept) {
  SelectiveScan p;
  fill(p, {SCAN(NAME)}, {SELECTIVE(NAME)});
  p.o = view(o), p.behind = data(behind), p.kept = data(kept);
  in_large_pages(o);
  by_dtype(x.scalar_type(), *kernels().scan, [&](auto& of, auto) { of.selective(p); });
}

void selective_scan_backward(SCAN(PARAMETER) SELECTIVE(PARAMETER) Tensor kept, Tensor grad_o, Maybe grad_behind, Tensor grad_x, Tensor grad_dt,
                             Tensor grad_A, Tensor grad_B, Tensor grad_C, Maybe grad_D, Maybe grad_before, Tensor parts, Index bundles) {
  SelectiveScan p;
  fill(p, {SCAN(NAME)}, {SELECTIVE(NAME)});
  p.kept = data(kept), p.grad_o = view(grad_o), p.grad_behind = data(grad_behind);
  p.grad_x = view(grad_x), p.grad_dt = view(grad_dt);
  p.grad_A = data(grad_A), p.grad_B = data(grad_B), p.grad_C = data(grad_C), p.grad_D = data(grad_D);
  p.grad_before = data(grad_before), p.parts = data(parts), p.bundles = bundles;
  for (const Tensor* gradient : {&grad_x, &grad_dt}) in_large_pages(*gradient);
  by_dtype(x.scalar_type(), *kernels().scan, [&](auto& of, auto) { of.selective_backward(p); });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tarnn_cpu, m) {
  m.def("diagonal_scan(" SCAN(SCHEMA) "Tensor log_decay, Tensor(a!) o, Tensor(b!)? behind, Tensor(c!)? kept) -> ()");
  m.def("diagonal_scan_backward(" SCAN(SCHEMA) "Tensor log_decay, Tensor kept, Tensor grad_o, Tensor? grad_behind, "
        "Tensor(a!) grad_x, Tensor(b!) grad_log_decay, Tensor(c!)? grad_before) -> ()");
  m.def("selective_scan(" SCAN(SCHEMA) SELECTIVE(SCHEMA) "Tensor(a!) o, Tensor(b!)? behind, Tensor(c!)? kept) -> ()");
  m.def("selective_scan_backward(" SCAN(SCHEMA) SELECTIVE(SCHEMA) "Tensor kept, Tensor grad_o, Tensor? grad_behind, "
        "Tensor(a!) grad_x, Tensor(b!) grad_dt, Tensor(c!) grad_A, Tensor(d!) grad_B, Tensor(e!) grad_C, Tensor(f!)? grad_D, "
        "Tensor(g!)? grad_before, Tensor(h!) parts, int bundles) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tarnn_cpu, CPU, m) {
  m.impl("diagonal_scan", TORCH_BOX(&diagonal_scan));
  m.impl("diagonal_scan_backward", TORCH_BOX(&diagonal_scan_backward));
  m.impl("selective_scan", TORCH_BOX(&selective_scan));
  m.impl("selective_scan_backward", TORCH_BOX(&selective_scan_backward));
}
