// For processors other than x86-64: what every one of the kind has.
#ifndef __x86_64__
#define TARNN_ISA baseline
#include "recurrences.h"
#endif
