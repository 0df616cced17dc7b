// A packed file, as `tarnn pack` writes it: one model in one safetensors file, which is mapped and not copied.
#pragma once

#include <string>

#include "runtime/run.h"

namespace tarnn::runtime {

struct BadFile : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct PackedFile {
  std::shared_ptr<const Opened> opened;
  std::vector<float> fills;     // what each state begins with
  std::string identity;         // 64 digits: of the program and all facts about it
  Index sinusoidal = 0;         // channels of each row, its last ones, to which positions are added by a formula

  /// What is added to the embedding of a token, (width), at this position.
  void positions(Index position, Index width, float* row) const;
};

/// Throws BadFile, with one sentence, for a file that is missing, none, cut short, damaged or of another version.
PackedFile read_packed_file(const char* path);

}  // namespace tarnn::runtime
