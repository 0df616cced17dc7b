// Which instruction set is picked on processors with other flags than this one: isa_alone WISH FLAG… prints it, or "none".
#include <cstdio>
#include <set>
#include <string>

namespace {
std::set<std::string> flags;
bool has(const char* flag) { return flags.count(flag) > 0; }
}  // namespace

#define __builtin_cpu_init()
#define __builtin_cpu_supports(flag) has(flag)
#define TARNN_HAS_avx2
#define TARNN_HAS_avx512
#define TARNN_HAS_avx512bf16
#include "isa.h"

namespace {
const tarnn::Kernels avx2{"avx2"}, avx512{"avx512"}, avx512bf16{"avx512bf16"};
}  // namespace

const tarnn::Kernels* tarnn_kernels_avx2() { return &avx2; }
const tarnn::Kernels* tarnn_kernels_avx512() { return &avx512; }
const tarnn::Kernels* tarnn_kernels_avx512bf16() { return &avx512bf16; }

int main(int count, char** words) {
  for (int i = 2; i < count; ++i) flags.insert(words[i]);
  const tarnn::Kernels* best = tarnn::table_of(words[1]);
  std::puts(best ? best->isa : "none");
  return 0;
}
