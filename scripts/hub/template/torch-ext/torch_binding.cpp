// The extension as a module of Python. Its operators are registered by csrc/library.cpp and the folders of the ops, where tarnn_cpu is the
// name of this extension: build.toml says so to the compiler.
#include "registration.h"

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
