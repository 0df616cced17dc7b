// The tokenizers of tarnn's own models: of bytes, of letters, and byte-level BPE, as tokenizer.json describes them.
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tarnn::runtime {

using Index = std::int64_t;
struct Json;

/// A tokenizer of another kind, or none.
struct NoTokenizer : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Tokenizer {
 public:
  /// Ids 0 to 255 are the bytes.
  Tokenizer();
  /// From the texts of tokenizer.json and tokenizer_config.json ("" where there is none). Throws NoTokenizer, with what is not read here, and
  /// std::runtime_error for a damaged one.
  Tokenizer(std::string_view tokenizer, std::string_view settings);

  /// The ids of a prompt, as src/tarnn/decoding/prompt.py has them: special tokens in it are text. starts: with those that begin a text. Throws
  /// std::invalid_argument for what this tokenizer can't encode.
  std::vector<Index> encode(std::string_view text, bool starts) const;

  /// The bytes of a token; none of a special one, or of one that is not there.
  std::string_view bytes_of(Index token) const;

 private:
  struct Merge {
    Index rank, token;
  };
  using Names = std::unordered_map<std::string, Index>;

  void read_vocabulary(const Json& model, Names& names);
  void read_added(const Json& added, Names& names);
  void read_merges(const Json& merges, const Names& names);
  void read_first(const Json& processor);
  void read_settings(const Json& settings, const Names& names);
  void take(Index token, std::string_view name, bool special);
  void add_word(std::string_view word, std::vector<Index>& ids) const;
  std::vector<Index> of_bytes(std::string_view text) const;

  std::vector<std::string> bytes_;       // of each token
  std::array<Index, 256> id_of_byte_{};  // −1: none
  std::unordered_map<std::uint64_t, Merge> merges_;  // of two tokens, the first in the upper half
  std::vector<Index> first_;             // what every text begins with
  Index separator_ = -1;                 // what an empty text begins with
  bool one_byte_each_ = true, splits_ = false;
};

}  // namespace tarnn::runtime
