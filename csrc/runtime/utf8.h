// Characters of a text in UTF-8, and the words into which GPT-2's tokenizer cuts it.
#pragma once

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/letters.h"

namespace tarnn::runtime {

struct Character {
  std::uint32_t code;
  std::size_t bytes;  // 0: none begins here
};

inline Character character_at(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : 0u; };
  const std::uint32_t first = byte(0);
  if (at >= text.size()) return {0, 0};
  if (first < 0x80) return {first, 1};
  const std::size_t bytes = first < 0xC2 ? 0 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : first < 0xF5 ? 4 : 0;
  std::uint32_t code = first & (0x7Fu >> bytes);
  for (std::size_t i = 1; i < bytes; ++i) {
    if (byte(i) >> 6 != 2) return {0, 0};
    code = code << 6 | (byte(i) & 63);
  }
  const bool least = (bytes == 3 && code < 0x800) || (bytes == 4 && code < 0x10000), half = code >= 0xD800 && code < 0xE000;
  return {code, least || half || code > 0x10FFFF ? 0 : bytes};
}

/// Throws std::invalid_argument with the place of the first byte that is no character.
inline void check_utf8(std::string_view text) {
  for (std::size_t at = 0, bytes; at < text.size(); at += bytes)
    if (bytes = character_at(text, at).bytes; bytes == 0)
      throw std::invalid_argument("the prompt is not UTF-8: byte " + std::to_string(static_cast<unsigned char>(text[at])) + " at position " + std::to_string(at) + ". This model's tokenizer takes UTF-8 only; convert the text.");
}

/// Characters of one class, by where its runs end.
class CharacterClass {
 public:
  template <std::size_t n>
  explicit CharacterClass(const std::uint16_t (&runs)[n]) : ends_(n) { std::partial_sum(runs, runs + n, ends_.begin(), std::plus<std::uint32_t>()); }
  bool has(std::uint32_t character) const { return (std::upper_bound(ends_.begin(), ends_.end(), character) - ends_.begin()) % 2; }

 private:
  std::vector<std::uint32_t> ends_;
};

/// How many bytes of a text, which is not empty, are its first word: what the expression
///     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
/// finds at its beginning.
inline std::size_t length_of_word(std::string_view text) {
  enum class Class { letter, digit, space, other, end };
  static const CharacterClass letter(letters), digit(digits), space(spaces);
  const auto class_at = [&](std::size_t at) {
    const Character c = character_at(text, at);
    if (c.bytes == 0) return Class::end;
    return letter.has(c.code) ? Class::letter : digit.has(c.code) ? Class::digit : space.has(c.code) ? Class::space : Class::other;
  };
  for (const char* ending : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"})
    if (text.starts_with(ending)) return std::string_view(ending).size();
  std::size_t at = text[0] == ' ' && class_at(1) != Class::space && class_at(1) != Class::end, last = 0;
  const Class first = class_at(at);
  for (; class_at(at) == first && first != Class::end; at += character_at(text, at).bytes) last = at;
  return first == Class::space && at < text.size() && last > 0 ? last : at;  // the last space before a word goes with it
}

}  // namespace tarnn::runtime
