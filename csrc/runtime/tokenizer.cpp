// From texts to tokens and back, without the tokenizers library.
#include "runtime/tokenizer.h"

#include <algorithm>
#include <queue>

#include "runtime/json.h"
#include "runtime/utf8.h"

namespace tarnn::runtime {
namespace {

constexpr Index most_tokens = Index(1) << 24;
constexpr std::size_t piece = 1 << 16;  // bytes after which a long text is cut at the end of a line, as src/tarnn/data/tokenizers.py does

/// The byte that byte-level tokenizers write as this character (GPT-2's choice); −1 where it is none of theirs.
int byte_of(std::uint32_t character) {
  static const std::vector<int> table = [] {
    std::vector<int> made(512, -1);
    std::size_t spare = 256;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      made[printable ? static_cast<std::size_t>(byte) : spare++] = byte;
    }
    return made;
  }();
  return character < table.size() ? table[character] : -1;
}

/// The bytes that a token's name stands for: an added token may be written in other characters, which are meant as they stand.
std::string bytes_of_name(std::string_view name) {
  std::string bytes;
  for (std::size_t at = 0; at < name.size();) {
    const Character c = character_at(name, at);
    const int byte = c.bytes ? byte_of(c.code) : -1;
    if (byte < 0) return std::string(name);
    bytes += static_cast<char>(byte), at += c.bytes;
  }
  return bytes;
}

bool is_null(const Json& x, const char* name) { return !x.has(name) || x[name].is == Json::Is::null; }
bool is_set(const Json& x, const char* name) { return !is_null(x, name) && !(x[name].is == Json::Is::number && x[name].number == 0) && !(x[name].is == Json::Is::text && x[name].text.empty()); }
std::string type_of(const Json& x, const char* name) { return is_null(x, name) ? "none" : x[name]["type"].text; }

[[noreturn]] void other_kind(const std::string& what) {
  throw NoTokenizer("its tokenizer is of a kind that is not read here (" + what.substr(0, 100) + "); give the ids of tokens.");
}

void check_kind(const Json& x) {
  const Json& model = x["model"];
  if (model["type"].text != "BPE") other_kind("its model is " + model["type"].text);
  for (const char* option : {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges"})
    if (is_set(model, option)) other_kind(option);
  if (!is_null(x, "normalizer")) other_kind("a normalizer, " + type_of(x, "normalizer"));
  if (type_of(x, "pre_tokenizer") != "ByteLevel" || is_set(x["pre_tokenizer"], "add_prefix_space")) other_kind("its pre-tokenizer is " + type_of(x, "pre_tokenizer"));
  if (type_of(x, "decoder") != "ByteLevel") other_kind("its decoder is " + type_of(x, "decoder"));
}

std::uint64_t pair_of(Index a, Index b) { return static_cast<std::uint64_t>(a) << 32 | static_cast<std::uint64_t>(b); }

}  // namespace

Tokenizer::Tokenizer() {
  for (Index byte = 0; byte < 256; ++byte) bytes_.emplace_back(1, static_cast<char>(byte)), id_of_byte_[static_cast<std::size_t>(byte)] = byte;
}

Tokenizer::Tokenizer(std::string_view tokenizer, std::string_view settings) {
  const Json x = JsonReader(tokenizer).read();
  check_kind(x);
  Names names;
  read_vocabulary(x["model"], names);
  read_added(x["added_tokens"], names);
  read_merges(x["model"]["merges"], names);
  if (!one_byte_each_ && std::count(id_of_byte_.begin(), id_of_byte_.end(), -1)) other_kind("not every byte has a token");
  splits_ = is_null(x["pre_tokenizer"], "use_regex") || is_set(x["pre_tokenizer"], "use_regex");
  if (!is_null(x, "post_processor")) read_first(x["post_processor"]);
  if (!settings.empty()) read_settings(JsonReader(settings).read(), names);
}

void Tokenizer::take(Index token, std::string_view name, bool special) {
  if (token < 0 || token >= most_tokens) throw std::runtime_error("its tokenizer has the id " + std::to_string(token));
  if (token >= static_cast<Index>(bytes_.size())) bytes_.resize(static_cast<std::size_t>(token) + 1);
  bytes_[static_cast<std::size_t>(token)] = special ? "" : bytes_of_name(name);
}

void Tokenizer::read_vocabulary(const Json& model, Names& names) {
  const Json& vocabulary = model["vocab"];
  const std::size_t size = vocabulary.items.size();
  id_of_byte_.fill(-1);
  std::size_t of_one_byte = 0, of_ascii = 0;
  for (std::size_t i = 0; i < size; ++i) {
    const std::string& name = vocabulary.names[i];
    const Index token = vocabulary.items[i].whole(0, most_tokens - 1);
    names[name] = token;
    take(token, name, false);
    const Character c = character_at(name, 0);
    if (c.bytes == 0 || c.bytes != name.size() || byte_of(c.code) < 0) continue;
    id_of_byte_[static_cast<std::size_t>(byte_of(c.code))] = token, ++of_one_byte;
    of_ascii += c.code < 128;
  }
  one_byte_each_ = of_one_byte == size && (size == 256 || of_ascii == size);
}

void Tokenizer::read_added(const Json& added, Names& names) {
  for (const Json& token : added.items) {
    const bool special = token["special"].number != 0;
    if (!special) other_kind("the added token " + token["content"].text);
    names[token["content"].text] = token["id"].whole(0, most_tokens - 1);
    take(token["id"].whole(0, most_tokens - 1), token["content"].text, special);
  }
}

void Tokenizer::read_merges(const Json& merges, const Names& names) {
  const auto id = [&](const std::string& name) {
    const auto found = names.find(name);
    return found == names.end() ? throw std::runtime_error("its tokenizer merges " + name.substr(0, 40) + ", which is no token") : found->second;
  };
  for (const Json& merge : merges.items) {
    const std::size_t space = merge.text.find(' ');
    const bool pair = merge.items.size() == 2;
    if (!pair && (merge.is != Json::Is::text || space == std::string::npos)) throw std::runtime_error("a merge of its tokenizer has not two parts");
    const std::string left = pair ? merge.items[0].text : merge.text.substr(0, space), right = pair ? merge.items[1].text : merge.text.substr(space + 1);
    merges_[pair_of(id(left), id(right))] = {static_cast<Index>(merges_.size()), id(left + right)};
  }
}

void Tokenizer::read_first(const Json& processor) {
  const std::string& type = processor["type"].text;
  if (type == "ByteLevel") return;
  if (type != "TemplateProcessing") other_kind("its post-processor is " + type);
  for (const Json& part : processor["single"].items) {
    if (part.has("Sequence")) return;
    for (const Json& token : processor["special_tokens"][part["SpecialToken"]["id"].text]["ids"].items) first_.push_back(token.whole(0, most_tokens - 1));
  }
}

void Tokenizer::read_settings(const Json& settings, const Names& names) {
  for (const char* named : {"mask_token", "cls_token", "pad_token", "sep_token", "unk_token", "eos_token", "bos_token"}) {  // the last one begins a text
    if (is_null(settings, named)) continue;
    const auto found = names.find(settings[named].is == Json::Is::object ? settings[named]["content"].text : settings[named].text);
    if (found == names.end()) continue;
    take(found->second, "", true);
    if (named == std::string_view("eos_token") || named == std::string_view("bos_token")) separator_ = found->second;
  }
}

std::string_view Tokenizer::bytes_of(Index token) const {
  return token < 0 || token >= static_cast<Index>(bytes_.size()) ? std::string_view() : bytes_[static_cast<std::size_t>(token)];
}

std::vector<Index> Tokenizer::encode(std::string_view text, bool starts) const {
  std::vector<Index> ids = starts ? first_ : std::vector<Index>();
  if (one_byte_each_) {
    const std::vector<Index> more = of_bytes(text);
    ids.insert(ids.end(), more.begin(), more.end());
  } else {
    check_utf8(text);
    for (std::size_t begin = 0, end; begin < text.size(); begin = end) {
      end = std::min(text.find('\n', begin + piece), text.size() - 1) + 1;
      for (std::string_view left = text.substr(begin, end - begin); !left.empty();) {
        const std::size_t bytes = splits_ ? length_of_word(left) : left.size();
        add_word(left.substr(0, bytes), ids), left.remove_prefix(bytes);
      }
    }
  }
  if (!starts || !ids.empty()) return ids;
  if (separator_ < 0) throw std::invalid_argument("the prompt is empty and this tokenizer has no separator to start from; give a prompt.");
  return {separator_};
}

std::vector<Index> Tokenizer::of_bytes(std::string_view text) const {
  std::vector<Index> ids;
  for (std::size_t i = 0; i < text.size(); ++i) {
    ids.push_back(id_of_byte_[static_cast<unsigned char>(text[i])]);
    if (ids.back() < 0) throw std::invalid_argument("this tokenizer does not know the byte " + std::to_string(static_cast<unsigned char>(text[i])) + " at position " + std::to_string(i) + " of the prompt.");
  }
  return ids;
}

/// Joins two neighbours, those of the first merge in the list before others, as long as there are any. Parts are a list in both directions.
void Tokenizer::add_word(std::string_view word, std::vector<Index>& ids) const {
  struct Part {
    Index token;
    std::size_t before, after;
  };
  struct Candidate {
    Index rank;
    std::size_t at;
    Index left, right, token;
    bool operator<(const Candidate& x) const { return rank != x.rank ? rank > x.rank : at > x.at; }  // the queue's top is its largest
  };
  const std::size_t n = word.size();
  std::vector<Part> parts(n);
  for (std::size_t i = 0; i < n; ++i) parts[i] = {id_of_byte_[static_cast<unsigned char>(word[i])], i - 1, i + 1};
  std::priority_queue<Candidate> queue;
  const auto offer = [&](std::size_t i) {
    if (i >= n || parts[i].after >= n) return;
    const Index left = parts[i].token, right = parts[parts[i].after].token;
    if (const auto merge = merges_.find(pair_of(left, right)); merge != merges_.end()) queue.push({merge->second.rank, i, left, right, merge->second.token});
  };
  for (std::size_t i = 0; i < n; ++i) offer(i);
  for (; !queue.empty();) {
    const Candidate x = queue.top();
    queue.pop();
    Part& left = parts[x.at];
    if (left.token != x.left || left.after >= n || parts[left.after].token != x.right) continue;  // joined meanwhile
    left.token = x.token, parts[left.after].token = -1, left.after = parts[left.after].after;
    if (left.after < n) parts[left.after].before = x.at;
    offer(left.before), offer(x.at);
  }
  for (std::size_t i = 0; i < n; i = parts[i].after) ids.push_back(parts[i].token);
}

}  // namespace tarnn::runtime
