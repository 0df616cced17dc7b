// JSON as Python writes it, for the header of a packed file.
#pragma once

#include <charconv>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>
#ifdef __APPLE__
#include <xlocale.h>
#endif

namespace tarnn::runtime {

/// A value: a number (true is 1, false 0), a text, a list or an object; null has none of them.
struct Json {
  enum class Is { null, number, text, list, object } is = Is::null;
  double number = 0;
  std::string text;
  std::vector<Json> items;                             // of a list, or the values of an object
  std::vector<std::string> names;                      // of an object, in the order of its values

  /// The value of that name, which must be there once.
  const Json& operator[](std::string_view name) const {
    const Json* found = nullptr;
    for (std::size_t i = 0; i < names.size(); ++i)
      if (names[i] == name) found = found ? throw std::runtime_error(names[i] + " stands there twice") : &items[i];
    return found ? *found : throw std::runtime_error("there is no " + std::string(name));
  }
  bool has(std::string_view name) const {
    for (const std::string& x : names)
      if (x == name) return true;
    return false;
  }
  /// A whole number from `least` to `most`.
  long long whole(long long least, long long most) const {
    if (is != Is::number || !(number >= static_cast<double>(least) && number <= static_cast<double>(most)) || number != static_cast<double>(static_cast<long long>(number)))
      throw std::runtime_error("a whole number is missing, or out of its range");
    return static_cast<long long>(number);
  }
};

/// Reads one value. Throws std::runtime_error.
class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : text_(text) {}
  Json read() {
    Json x = value(0);
    space();
    return at_ == text_.size() ? x : fail();
  }

 private:
  static constexpr int deepest = 32;

  [[noreturn]] Json fail() const { throw std::runtime_error("its JSON ends or is wrong at byte " + std::to_string(at_)); }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  char next() { return at_ < text_.size() ? text_[at_++] : (fail(), '\0'); }
  void space() {
    while (peek() == ' ' || peek() == '\n' || peek() == '\t' || peek() == '\r') ++at_;
  }
  bool taken(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  Json value(int depth) {
    if (depth > deepest) fail();
    space();
    Json x;
    const char c = peek();
    if (c == '"') return x.is = Json::Is::text, x.text = string(), x;
    if (c == '[' || c == '{') return collection(next() == '{', depth);
    if (taken("null")) return x;
    x.is = Json::Is::number;
    if (taken("true")) return x.number = 1, x;
    if (taken("false")) return x;
    if (taken("NaN")) return x.number = std::numeric_limits<double>::quiet_NaN(), x;
    const bool negative = taken("-");
    if (taken("Infinity")) x.number = std::numeric_limits<double>::infinity();
    else x.number = plain_number();
    if (negative) x.number = -x.number;
    return x;
  }

  double plain_number() {
    const std::size_t begin = at_;
    while (std::string_view("0123456789.eE+-").find(peek()) != std::string_view::npos && at_ < text_.size()) ++at_;
    const std::string digits(text_.substr(begin, at_ - begin));
#ifdef __APPLE__  // whose from_chars has no fractions; null is the locale "C"
    char* end = nullptr;
    const double x = strtod_l(digits.c_str(), &end, nullptr);
    if (digits.empty() || *end) fail();
#else
    double x = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), x);
    if (digits.empty() || error != std::errc() || *end) fail();
#endif
    return x;
  }

  Json collection(bool object, int depth) {
    Json x;
    x.is = object ? Json::Is::object : Json::Is::list;
    const char end = object ? '}' : ']';
    for (space(); peek() != end; space()) {
      if (!x.items.empty() && (next() != ',')) fail();
      if (object) {
        space();
        x.names.push_back(string());
        space();
        if (next() != ':') fail();
      }
      x.items.push_back(value(depth + 1));
    }
    ++at_;
    return x;
  }

  std::string string() {
    std::string s;
    if (next() != '"') fail();
    for (char c; (c = next()) != '"';) {
      if (c != '\\') {
        s += c;
        continue;
      }
      switch (c = next()) {
        case 'n': s += '\n'; break;
        case 't': s += '\t'; break;
        case 'r': s += '\r'; break;
        case 'b': s += '\b'; break;
        case 'f': s += '\f'; break;
        case 'u': escape(s); break;
        default: s += c;
      }
    }
    return s;
  }

  unsigned four_digits() {
    unsigned x = 0;
    for (int i = 0; i < 4; ++i) {
      const std::size_t digit = std::string_view("0123456789abcdefABCDEF").find(next());
      if (digit == std::string_view::npos) fail();
      x = 16 * x + static_cast<unsigned>(digit < 16 ? digit : digit - 6);
    }
    return x;
  }

  /// \uXXXX, or two of them, as UTF-8.
  void escape(std::string& s) {
    unsigned x = four_digits();
    if (x >= 0xd800 && x < 0xdc00 && taken("\\u")) x = 0x10000 + ((x - 0xd800) << 10) + (four_digits() - 0xdc00);
    const auto add = [&](unsigned byte) { s += static_cast<char>(byte); };
    if (x < 0x80) return add(x);
    if (x < 0x800) return add(0xc0 | x >> 6), add(0x80 | (x & 63));
    if (x < 0x10000) add(0xe0 | x >> 12);
    else add(0xf0 | (x >> 18 & 7)), add(0x80 | (x >> 12 & 63));
    add(0x80 | (x >> 6 & 63)), add(0x80 | (x & 63));
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace tarnn::runtime
