// By a pragma, and not by flags: build.toml has flags for all processors alike.
#ifdef __x86_64__
#pragma GCC target("avx2,fma")
#define TARNN_ISA avx2
#include "recurrences.h"
#endif
