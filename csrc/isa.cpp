// Compiled once for each instruction set, with -DTARNN_ISA=<its name> and the flags that allow it.
#include "kernels.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

const tarnn::Kernels* JOIN(tarnn_kernels_, TARNN_ISA)() {
  static const tarnn::Kernels table = {TEXT(TARNN_ISA)};
  return &table;
}
