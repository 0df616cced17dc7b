// Picks the instruction set, once, among those of the files beside this one.
#ifdef __x86_64__
#define TARNN_HAS_avx2
#define TARNN_HAS_avx512
#else
#define TARNN_HAS_baseline
#endif
#include "../csrc/isa.cpp"
