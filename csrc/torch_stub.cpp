// A libtorch_cpu to link with where there is no torch: its functions have names and do nothing. A process has the real one.
#include "torch.h"

#define TARNN_DEFINE(name, parameters) \
  std::int32_t name parameters { return 1; }
TARNN_TORCH(TARNN_DEFINE)
