// Compiled once for each instruction set, with -DTARNN_ISA=<its name> and the flags that allow it.
#include "attention/full.h"
#include "attention/hybrid_backward.h"
#include "attention/hybrid_step.h"
#include "attention/step.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

namespace tarnn {
namespace TARNN_ISA {

extern const StackKernel stack_kernel;                // model_step/layers.cpp
extern const ElementwiseKernels elementwise_kernels;  // elementwise/kernels_of_isa.cpp

template <typename T>
void forward(const Problem& p) {
  p.causal ? causal_forward<T>(p) : full_forward<T>(p);
}

template <typename T>
void backward(const Problem& p) {
  p.causal ? causal_backward<T>(p) : full_backward<T>(p);
}

const HybridKernels hybrid_kernels = {{hybrid_forward<float>, hybrid_backward<float>, hybrid_step<float>},
                                      {hybrid_forward<double>, hybrid_backward<double>, hybrid_step<double>}};

const Kernels table = {TEXT(TARNN_ISA), {forward<float>, backward<float>, step<float>}, {forward<double>, backward<double>, step<double>},
                       &stack_kernel, &elementwise_kernels, &hybrid_kernels};

}  // namespace TARNN_ISA
}  // namespace tarnn

const tarnn::Kernels* JOIN(tarnn_kernels_, TARNN_ISA)() { return &tarnn::TARNN_ISA::table; }
