// tarnn-run: a packed model continues a prompt, without Python. It calls nothing but tarnn.h.
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <unistd.h>

#include "runtime/tarnn.h"

namespace {

constexpr const char* usage =
    "usage: tarnn-run MODEL.tarnn [PROMPT] [options]\n"
    "\n"
    "Continues a prompt with a packed model (tarnn pack FOLDER MODEL.tarnn). The text goes to stdout, all else to stderr. Without PROMPT,\n"
    "it is read from stdin where that is a pipe or a file.\n"
    "\n"
    "  --max-new-tokens N    how many at most; 0 only reads the prompt (default: 256)\n"
    "  --temperature X       below 1 sharper, above 1 flatter, 0 greedy (default: as the model's makers draw from it)\n"
    "  --top-k N  --top-p X  --min-p X    draw among the likeliest tokens alone\n"
    "  --greedy              the likeliest token, as --temperature 0\n"
    "  --seed N              the same seed, the same tokens, as of `tarnn generate`\n"
    "  --threads N           (default: as many as there are processors)\n"
    "  --state-in FILE       go on from a saved state      --state-out FILE    save the state behind the last token\n"
    "  --ids                 tokens are numbers: read as words from PROMPT or stdin, written one a line\n"
    "  --quiet, -q           the text only, nothing on stderr but errors\n";

/// What the user has done wrong, or what can't be done; in one sentence.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void check(int code) {
  if (code != TARNN_OK) throw Failure(tarnn_error());
}

struct Close {
  void operator()(tarnn_program* x) const { tarnn_close(x); }
  void operator()(tarnn_state* x) const { tarnn_free(x); }
  void operator()(tarnn_tokenizer* x) const { tarnn_close_tokenizer(x); }
  void operator()(std::FILE* x) const { std::fclose(x); }
};
template <typename T>
using Owned = std::unique_ptr<T, Close>;

struct Options {
  std::string model, prompt, state_in, state_out;
  bool has_prompt = false, ids = false, quiet = false, greedy = false;
  std::int64_t max_new_tokens = 256, threads = std::max(1u, std::thread::hardware_concurrency()), top_k = -1;
  double temperature = -1, top_p = -1, min_p = -1;  // −1: as the model's makers say
  std::uint64_t seed = std::random_device()();
};

template <typename T>
T number(std::string_view name, std::string_view text) {
  T x{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), x);
  if (error != std::errc() || end != text.data() + text.size() || x < T(0)) throw Failure(std::string(name) + " takes a number from 0 on; got '" + std::string(text) + "'.");
  return x;
}

Options options_of(int count, char** words) {
  Options o;
  bool only_words = false;
  for (int i = 1; i < count; ++i) {
    const std::string_view name = words[i];
    const auto value = [&]() -> std::string_view {
      if (++i == count) throw Failure(std::string(name) + " takes a value.");
      return words[i];
    };
    if (only_words || !name.starts_with('-') || name == "-") {
      if (!o.model.empty() && o.has_prompt) throw Failure("there are more words than a model and a prompt: '" + std::string(name) + "'. Put the prompt into quotes.");
      if (o.model.empty()) o.model = name;
      else o.prompt = name, o.has_prompt = true;
    } else if (name == "--") only_words = true;
    else if (name == "--help" || name == "-h") std::fputs(usage, stdout), std::exit(0);
    else if (name == "--max-new-tokens") o.max_new_tokens = number<std::int64_t>(name, value());
    else if (name == "--temperature") o.temperature = number<double>(name, value());
    else if (name == "--top-k") o.top_k = number<std::int64_t>(name, value());
    else if (name == "--top-p") o.top_p = number<double>(name, value());
    else if (name == "--min-p") o.min_p = number<double>(name, value());
    else if (name == "--greedy") o.greedy = true;
    else if (name == "--seed") o.seed = number<std::uint64_t>(name, value());
    else if (name == "--threads") o.threads = number<std::int64_t>(name, value());
    else if (name == "--state-in") o.state_in = value();
    else if (name == "--state-out") o.state_out = value();
    else if (name == "--ids") o.ids = true;
    else if (name == "--quiet" || name == "-q") o.quiet = true;
    else throw Failure("there is no option " + std::string(name) + "; `tarnn-run --help` names all.");
  }
  if (o.model.empty()) throw Failure(std::string("name a packed model.\n\n") + usage);
  return o;
}

std::string read_all(std::FILE* file) {
  std::string text;
  char piece[1 << 16];
  for (std::size_t n; (n = std::fread(piece, 1, sizeof piece, file)) > 0;) text.append(piece, n);
  return text;
}

std::string contents(const std::string& path) {
  const Owned<std::FILE> file(std::fopen(path.c_str(), "rb"));
  if (!file) throw Failure(path + " can't be read: " + std::strerror(errno) + ".");
  return read_all(file.get());
}

/// Where a text stands: a state, and the last token, which it has still to read. So its logits can be had again, and are not kept.
class Text {
 public:
  Text(const Options& options, const tarnn_program* program) : program_(program), threads_(static_cast<int>(options.threads)), logits_(static_cast<std::size_t>(tarnn_num_outputs(program))) {
    tarnn_state* state = nullptr;
    if (options.state_in.empty()) check(tarnn_new(program, 1, &state));
    else {
      const std::string saved = contents(options.state_in);
      if (saved.size() < sizeof(std::int64_t)) throw Failure(options.state_in + " is no state that tarnn-run saved.");
      check(tarnn_load(program, saved.data(), saved.size() - sizeof(std::int64_t), &state));
      std::int64_t last = 0;
      std::memcpy(&last, saved.data() + saved.size() - sizeof last, sizeof last);
      unread_.push_back(last);
    }
    state_.reset(state);
  }

  void add(const std::vector<std::int64_t>& tokens) { unread_.insert(unread_.end(), tokens.begin(), tokens.end()); }
  bool is_empty() const { return unread_.empty(); }

  /// Reads all tokens but the last one.
  void read() { read_some(unread_.size() - 1); }

  /// Reads them all, and draws the next one.
  std::int64_t next(const tarnn_sampling& sampling, std::int64_t position) {
    std::int64_t token = 0;
    read_some(unread_.size());
    check(tarnn_draw(program_, &sampling, position, logits_.data(), &token));
    unread_.push_back(token);
    return token;
  }

  std::string saved() const {
    std::size_t size = 0;
    check(tarnn_save(state_.get(), nullptr, 0, &size));
    std::string bytes(size + sizeof(std::int64_t), '\0');
    check(tarnn_save(state_.get(), bytes.data(), size, &size));
    std::memcpy(bytes.data() + size, unread_.data(), sizeof(std::int64_t));
    return bytes;
  }

  std::int64_t position() const { return tarnn_position(state_.get(), 0) + static_cast<std::int64_t>(unread_.size()); }

 private:
  static constexpr std::size_t piece = 1024;  // tokens at once: memory is that of one piece

  void read_some(std::size_t count) {
    for (std::size_t at = 0; at < count; at += piece) {
      const auto n = static_cast<std::int64_t>(std::min(piece, count - at));
      check(tarnn_read(state_.get(), unread_.data() + at, &n, threads_, logits_.data()));
    }
    unread_.erase(unread_.begin(), unread_.begin() + static_cast<std::ptrdiff_t>(count));
  }

  const tarnn_program* program_;
  int threads_;
  Owned<tarnn_state> state_;
  std::vector<std::int64_t> unread_;
  std::vector<float> logits_;
};

std::vector<std::int64_t> tokens_of(const Options& o, const tarnn_tokenizer* tokenizer) {
  const std::string text = o.has_prompt ? o.prompt : o.state_in.empty() && !isatty(STDIN_FILENO) ? read_all(stdin) : "";
  std::vector<std::int64_t> tokens;
  if (!o.ids) {
    std::size_t count = 0;
    check(tarnn_encode(tokenizer, text.data(), text.size(), o.state_in.empty(), nullptr, 0, &count));
    tokens.resize(count);
    check(tarnn_encode(tokenizer, text.data(), text.size(), o.state_in.empty(), tokens.data(), count, &count));
    return tokens;
  }
  constexpr const char* space = " \t\r\n,";
  for (std::size_t at = text.find_first_not_of(space); at != text.npos;) {
    const std::size_t end = std::min(text.find_first_of(space, at), text.size());
    tokens.push_back(number<std::int64_t>("--ids", std::string_view(text).substr(at, end - at)));
    at = text.find_first_not_of(space, end);
  }
  return tokens;
}

tarnn_sampling sampling_of(const Options& o, const tarnn_program* program) {
  tarnn_sampling x;
  tarnn_default_sampling(program, &x);
  if (o.temperature >= 0) x.temperature = o.temperature;
  if (o.greedy) x.temperature = 0;
  if (o.top_p >= 0) x.top_p = o.top_p;
  if (o.min_p >= 0) x.min_p = o.min_p;
  if (o.top_k >= 0) x.top_k = o.top_k;
  x.seed = o.seed;
  return x;
}

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void write_state(const std::string& path, const std::string& bytes) {
  Owned<std::FILE> file(std::fopen(path.c_str(), "wb"));
  if (!file || std::fwrite(bytes.data(), 1, bytes.size(), file.get()) != bytes.size() || std::fclose(file.release())) throw Failure("the state can't be written to " + path + ": " + std::strerror(errno) + ".");
}

/// Writes tokens until one ends the text, or nobody reads on; how many it made.
std::int64_t write(Text& text, const Options& o, const tarnn_program* program, const tarnn_tokenizer* tokenizer) {
  const tarnn_sampling sampling = sampling_of(o, program);
  for (std::int64_t i = 0; i < o.max_new_tokens; ++i) {
    const std::int64_t token = text.next(sampling, i);
    if (o.ids) std::printf("%lld\n", static_cast<long long>(token));
    else if (!tarnn_is_end(program, token)) {
      std::size_t bytes = 0;
      const char* at = tarnn_bytes_of(tokenizer, token, &bytes);
      std::fwrite(at, 1, bytes, stdout);
    }
    if (std::fflush(stdout) || tarnn_is_end(program, token)) return i + 1;
  }
  return o.max_new_tokens;
}

void run(const Options& o) {
  tarnn_program* opened = nullptr;
  check(tarnn_open(o.model.c_str(), &opened));
  const Owned<tarnn_program> program(opened);
  tarnn_tokenizer* tokenizer = nullptr;
  if (!o.ids && tarnn_open_tokenizer(opened, &tokenizer)) throw Failure(o.model + ": " + tarnn_error() + " With --ids, tarnn-run takes them.");
  const Owned<tarnn_tokenizer> owned(tokenizer);
  Text text(o, opened);
  text.add(tokens_of(o, tokenizer));
  if (text.is_empty()) throw Failure("there are no tokens to go on from; give a prompt.");
  const double start = seconds();
  text.read();
  const double middle = seconds();
  const std::int64_t prompt = text.position(), made = write(text, o, opened, tokenizer);
  if (isatty(STDOUT_FILENO)) std::putchar('\n');
  if (!o.quiet) std::fprintf(stderr, "tarnn-run: prompt of %lld tokens in %.2f s; made %lld tokens in %.2f s (%.0f tokens/s)\n", static_cast<long long>(prompt), middle - start, static_cast<long long>(made), seconds() - middle, static_cast<double>(made) / (seconds() - middle));
  if (!o.state_out.empty()) write_state(o.state_out, text.saved());
}

}  // namespace

int main(int count, char** words) {
  try {
    run(options_of(count, words));
    return 0;
  } catch (const Failure& error) {
    std::fprintf(stderr, "tarnn-run: %s\n", error.what());
    return 1;
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "tarnn-run: out of memory; take a smaller model or a shorter prompt.\n");
    return 1;
  }
}
