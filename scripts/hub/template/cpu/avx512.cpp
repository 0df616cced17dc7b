// By a pragma, and not by flags: build.toml has flags for all processors alike.
#ifdef __x86_64__
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
#define TARNN_ISA avx512
#include "recurrences.h"
#endif
