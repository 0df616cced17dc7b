// Maps packed files and checks what they say; src/tarnn/decoding/packed_file.py writes them.
#include "runtime/packed_file.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/json.h"
#include "runtime/mapped.h"
#include "runtime/sha256.h"

namespace tarnn::runtime {
namespace {

constexpr const char* remedy = " Write one by `tarnn pack FOLDER FILE`.";
constexpr const char* again = " Pack its folder again (tarnn pack).";
constexpr std::size_t largest_header = 100 << 20;  // as safetensors has it
constexpr const char *format = "tarnn.packed", *version = "2";
constexpr std::string_view prefix = "file:";

/// One tensor of a safetensors file.
struct Entry {
  const char* at;
  Index bytes;
  std::string dtype;
  std::vector<Index> shape;
};

Entry entry(const Json& header, const char* name, const char* data, Index bytes) {
  const Json& x = header[name];
  const Json& places = x["data_offsets"];
  if (places.items.size() != 2) throw std::runtime_error(std::string(name) + " has no place");
  const Index end = places.items[1].whole(0, bytes), begin = places.items[0].whole(0, end);
  Entry e{data + begin, end - begin, x["dtype"].text, {}};
  Index size = e.dtype == "I64" ? 8 : e.dtype == "F32" ? 4 : e.dtype == "BF16" || e.dtype == "F16" ? 2 : e.dtype == "U8" ? 1 : 0;
  for (const Json& n : x["shape"].items) {
    e.shape.push_back(n.whole(0, Index(1) << 40));
    if (__builtin_mul_overflow(size, e.shape.back(), &size)) size = -1;
  }
  if (size != e.bytes) throw std::runtime_error(std::string(name) + " has another size than its shape");
  return e;
}

std::vector<Table> tables_of(const Json& header, const char* data, Index bytes) {
  std::vector<Table> tables;
  for (const char* name : {"table.0", "table.1"}) {
    if (!header.has(name)) break;
    const Entry x = entry(header, name, data, bytes);
    const Type type = x.dtype == "F32" ? Type::float32 : x.dtype == "F16" ? Type::float16 : Type::bfloat16;
    if ((x.dtype != "F32" && x.dtype != "F16" && x.dtype != "BF16") || x.shape.size() != 2 || reinterpret_cast<std::uintptr_t>(x.at) % static_cast<std::size_t>(bytes_of(type)))
      throw std::runtime_error(std::string(name) + " is no table");
    tables.push_back({x.at, type, x.shape[0], x.shape[1]});
  }
  return tables;
}

/// What states begin with, and positions by a formula: what the outline says beyond the numbers.
void read_outline(const Json& outline, PackedFile& file) {
  const Program& p = file.opened->program;
  for (const Json& x : outline["states"].items) {
    constexpr std::size_t fill = 6;  // layer, kind, name, shape, type, the axis that grows, fill
    if (x.items.size() != fill + 1 || x.items[fill].is != Json::Is::number) throw std::runtime_error("a state is not described");
    file.fills.push_back(static_cast<float>(x.items[fill].number));
  }
  if (file.fills.size() != p.states.size()) throw std::runtime_error("its states are not those of its numbers");
  const Index width = p.phases[0].rows[0].out().size();
  file.sinusoidal = 2 * (outline["numbers"]["sinusoidal"].whole(0, width) / 2);
  if (p.extra != (file.sinusoidal > 0)) throw std::runtime_error("its program adds rows that it does not describe");
}

/// How it is drawn from, and what ends a text.
void read_facts(const Json& facts, PackedFile& file) {
  if (facts.has("end_ids"))
    for (const Json& x : facts["end_ids"].items) file.ends.push_back(x.whole(0, Index(1) << 40));
  if (!facts.has("sampling")) return;
  const Json& says = facts["sampling"];
  const auto number = [&](const char* name, double usual) { return says.has(name) && says[name].is == Json::Is::number ? says[name].number : usual; };
  PackedFile::Sampling& x = file.sampling;
  x.temperature = number("temperature", 1), x.top_p = number("top_p", 1), x.min_p = number("min_p", 0), x.repetition_penalty = number("repetition_penalty", 1);
  if (number("top_k", 0) > 0) x.top_k = says["top_k"].whole(0, Index(1) << 40);
}

PackedFile read(std::span<const char> all, std::shared_ptr<const void> kept, const std::string& path) {
  const auto not_one = [&](const char* why) { return BadFile(path + " " + why + "." + remedy); };
  std::uint64_t length = 0;
  if (all.size() < sizeof length) throw not_one("is no packed file: it is too short");
  std::memcpy(&length, all.data(), sizeof length);
  if (length > std::min(largest_header, all.size() - sizeof length)) throw not_one("is no packed file, or was cut short");
  const auto header_bytes = static_cast<std::size_t>(length);
  const char *begin = all.data() + sizeof length, *data = begin + header_bytes;
  const Index bytes = static_cast<Index>(all.size() - sizeof length - header_bytes);
  const Json header = JsonReader({begin, header_bytes}).read();
  if (!header.has("__metadata__") || !header["__metadata__"].has("format") || header["__metadata__"]["format"].text != format) throw not_one("is a file of another kind, not a packed model");
  const Json& about = header["__metadata__"];
  if (const std::string& of = about["format_version"].text; of != version)
    throw BadFile(path + " has version " + of.substr(0, 20) + " of packed files; this library reads version " + version + "." + again);
  const Entry numbers = entry(header, "numbers", data, bytes), block = entry(header, "block", data, bytes);
  if (numbers.dtype != "I64" || block.dtype != "U8" || reinterpret_cast<std::uintptr_t>(numbers.at) % 8) throw std::runtime_error("its program has another type");
  Sha256 hash;
  hash.add(about["facts"].text.data(), about["facts"].text.size()), hash.add(numbers.at, static_cast<std::size_t>(numbers.bytes));
  PackedFile file;
  if (file.identity = about["checksum"].text; file.identity != hash.hex()) throw std::runtime_error("its header is not the one that was written");
  const auto* from = reinterpret_cast<const Index*>(numbers.at);
  if (numbers.bytes >= 8 && *from != program_version)
    throw BadFile(path + " has a program of version " + std::to_string(*from) + "; this library runs version " + std::to_string(program_version) + "." + again);
  file.opened = open_program(from, numbers.bytes / 8, block.at, block.bytes, tables_of(header, data, bytes), std::move(kept));
  const Json facts = JsonReader(about["facts"].text).read();
  read_outline(facts["outline"], file), read_facts(facts, file);
  for (const std::string& name : header.names)
    if (name.starts_with(prefix)) {
      const Entry x = entry(header, name.c_str(), data, bytes);
      file.files.emplace_back(name.substr(prefix.size()), std::string_view(x.at, static_cast<std::size_t>(x.bytes)));
    }
  return file;
}

PackedFile checked(std::span<const char> all, std::shared_ptr<const void> kept, const std::string& path) {
  try {
    return read(all, std::move(kept), path);
  } catch (const BadFile&) {
    throw;
  } catch (const std::runtime_error& error) {
    std::string why = error.what();
    if (why.ends_with('.')) why.pop_back();
    throw BadFile(path + " is damaged (" + why.substr(0, 200) + ")." + again);
  }
}

}  // namespace

void PackedFile::positions(Index position, Index width, float* row) const {
  std::fill_n(row, width, 0.f);
  const Index half = sinusoidal / 2;
  for (Index c = 0; c < half; ++c) {
    const double angle = static_cast<double>(position) * std::pow(10000.0, static_cast<double>(2 * c) / -static_cast<double>(sinusoidal));
    row[width - sinusoidal + c] = static_cast<float>(std::sin(angle));
    row[width - half + c] = static_cast<float>(std::cos(angle));
  }
}

PackedFile read_packed_bytes(std::span<const char> bytes) { return checked(bytes, nullptr, "the packed file"); }

PackedFile read_packed_file(const char* path) {
  std::shared_ptr<const Mapped> mapped;
  try {
    mapped = std::make_shared<const Mapped>(path);
  } catch (const NotMapped& error) {
    throw BadFile(std::string(path) + " " + error.what() + "." + remedy);
  }
  return checked(mapped->bytes(), mapped, path);
}

std::string_view PackedFile::file(std::string_view name) const {
  for (const auto& [of, text] : files)
    if (of == name) return text;
  return {};
}

}  // namespace tarnn::runtime
