// A packed file, as `tarnn pack` writes it: one model in one safetensors file, which is mapped and not copied.
#pragma once

#include <span>
#include <string>
#include <string_view>

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

  struct Sampling {
    double temperature = 1, top_p = 1, min_p = 0, repetition_penalty = 1;
    Index top_k = 0;
  } sampling;                   // how its makers draw from it
  std::vector<Index> ends;      // tokens that end a text
  std::vector<std::pair<std::string, std::string_view>> files;  // of its tokenizer

  /// One of them; empty where there is none.
  std::string_view file(std::string_view name) const;

  /// What is added to the embedding of a token, (width), at this position.
  void positions(Index position, Index width, float* row) const;
};

/// Throws BadFile, with one sentence, for a file that is missing, none, cut short, damaged or of another version.
PackedFile read_packed_file(const char* path);

/// The same for one in memory, which stays where it is.
PackedFile read_packed_bytes(std::span<const char> bytes);

}  // namespace tarnn::runtime
