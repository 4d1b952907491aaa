// Opening GGUF files, one or the parts of a split one, and typed access to their metadata.
#include "io/gguf.h"

#include <filesystem>
#include <limits>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "io/gguf_parser.h"
#include "io/printable.h"

namespace millrace::io {

struct Gguf::State {
  std::string path;
  std::vector<MappedFile> files;
  GgufMetadata metadata;                   // of the first part
  std::vector<GgufRawValue> raw_metadata;  // the same
  std::vector<TensorView> tensors;
  std::map<std::string, size_t, std::less<>> index;  // name -> position in tensors
  size_t mapped_bytes = 0;

  void add_part(MappedFile file, GgufPart part) {
    if (files.empty()) {
      metadata = std::move(part.metadata);
      raw_metadata = std::move(part.raw_metadata);
    }
    add(std::move(part.tensors), file.path());
    mapped_bytes += file.bytes().size();
    files.push_back(std::move(file));
  }

  // Adds the tensors of one part.
  void add(std::vector<TensorView> more, const std::string& part_path) {
    for (TensorView& tensor : more) {
      if (!index.emplace(tensor.name, tensors.size()).second) {
        throw_error(ErrorCode::kBadInput,
                    "{}: tensor {}: found the name in an earlier part too, expected it once", part_path,
                    printable(tensor.name));
      }
      tensors.push_back(std::move(tensor));
    }
  }
};

namespace {

const char* type_name(const GgufValue& value) {
  constexpr const char* kNames[] = {
      "an unsigned integer", "an integer", "a real number", "a bool", "a string", "an array"};
  return kNames[value.index()];
}

const GgufValue* find_value(const GgufMetadata& metadata, std::string_view key) {
  const auto found = metadata.find(key);
  return found == metadata.end() ? nullptr : &found->second;
}

const GgufValue& require_value(const std::string& path, const GgufMetadata& metadata, std::string_view key) {
  const GgufValue* value = find_value(metadata, key);
  if (value == nullptr) {
    throw_error(ErrorCode::kBadInput, "{}: metadata {}: found nothing, expected the key", path,
                printable(key));
  }
  return *value;
}

[[noreturn]] void wrong_type(const std::string& path, std::string_view key, const GgufValue& value,
                             const char* expected) {
  throw_error(ErrorCode::kBadInput, "{}: metadata {}: found {}, expected {}", path, printable(key),
              type_name(value), expected);
}

int64_t as_int(const std::string& path, std::string_view key, const GgufValue& value) {
  if (const auto* integer = std::get_if<int64_t>(&value)) return *integer;
  const auto* natural = std::get_if<uint64_t>(&value);
  if (natural == nullptr) wrong_type(path, key, value, "an integer");
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  if (*natural > static_cast<uint64_t>(kMax)) {
    throw_error(ErrorCode::kBadInput, "{}: metadata {}: found {}, expected at most {}", path, printable(key),
                *natural, kMax);
  }
  return static_cast<int64_t>(*natural);
}

double as_real(const std::string& path, std::string_view key, const GgufValue& value) {
  if (const auto* real = std::get_if<double>(&value)) return *real;
  if (const auto* natural = std::get_if<uint64_t>(&value)) return static_cast<double>(*natural);
  if (const auto* integer = std::get_if<int64_t>(&value)) return static_cast<double>(*integer);
  wrong_type(path, key, value, "a number");
}

template <class T>
const T& as(const std::string& path, std::string_view key, const GgufValue& value, const char* expected) {
  const T* held = std::get_if<T>(&value);
  if (held == nullptr) wrong_type(path, key, value, expected);
  return *held;
}

int64_t int_or(const std::string& path, const GgufMetadata& metadata, std::string_view key,
               int64_t fallback) {
  const GgufValue* value = find_value(metadata, key);
  return value == nullptr ? fallback : as_int(path, key, *value);
}

// Where a part stands in its split file. A file that is not split is part 0 of 1.
struct SplitPosition {
  int64_t no = 0;
  int64_t count = 1;
};

SplitPosition split_position(const GgufPart& part, const std::string& path) {
  SplitPosition at;
  at.count = int_or(path, part.metadata, "split.count", 1);
  if (at.count <= 1) return {};  // writers leave 0 in files that are not split
  // Five digits in the name; the part number is stored as a uint16.
  if (at.count > 65535) {
    throw_error(ErrorCode::kBadInput, "{}: metadata 'split.count': found {}, expected at most 65535", path,
                at.count);
  }
  at.no = as_int(path, "split.no", require_value(path, part.metadata, "split.no"));
  if (at.no < 0 || at.no >= at.count) {
    throw_error(ErrorCode::kBadInput, "{}: metadata 'split.no': found {}, expected 0 to {}", path, at.no,
                at.count - 1);
  }
  return at;
}

std::string split_suffix(int64_t no, int64_t count) {
  return fmt::format("-{:05}-of-{:05}.gguf", no + 1, count);
}

// The name without its "-00001-of-00003.gguf"; the name must agree with what the file says of itself.
std::string split_prefix(const std::string& path, const SplitPosition& at) {
  const std::string suffix = split_suffix(at.no, at.count);
  if (!path.ends_with(suffix)) {
    throw_error(ErrorCode::kBadInput,
                "{}: metadata 'split.no': found part {} of {}, expected a file name that ends in {}", path,
                at.no + 1, at.count, suffix);
  }
  return path.substr(0, path.size() - suffix.size());
}

}  // namespace

Gguf Gguf::parse(std::span<const std::byte> bytes, const std::string& name) {
  auto state = std::make_shared<State>();
  state->path = name;
  GgufPart part = parse_gguf_part(bytes, name);
  state->metadata = std::move(part.metadata);
  state->raw_metadata = std::move(part.raw_metadata);
  state->add(std::move(part.tensors), name);
  Gguf gguf;
  gguf.state_ = std::move(state);
  return gguf;
}

// `given` is the part the user named, for the message about one that is missing.
void Gguf::open_part(State& state, const std::string& given, const std::string& path, int64_t no,
                     int64_t count) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) {
    throw_error(ErrorCode::kIo,
                "{}: metadata 'split.count': found {} parts but not {}, expected every part beside it", given,
                count, path);
  }
  MappedFile file(path);
  GgufPart part = parse_gguf_part(file.bytes(), path);
  const SplitPosition at = split_position(part, path);
  if (at.no != no || at.count != count) {
    throw_error(ErrorCode::kBadInput, "{}: metadata 'split.no': found part {} of {}, expected part {} of {}",
                path, at.no + 1, at.count, no + 1, count);
  }
  state.add_part(std::move(file), std::move(part));
}

void Gguf::check_tensor_count(const State& state) {
  const auto num_tensors = static_cast<int64_t>(state.tensors.size());
  const int64_t declared = int_or(state.path, state.metadata, "split.tensors.count", num_tensors);
  if (declared != num_tensors) {
    throw_error(ErrorCode::kBadInput,
                "{}: metadata 'split.tensors.count': found {}, expected the {} tensors of the parts",
                state.path, declared, num_tensors);
  }
}

Gguf Gguf::open(const std::string& path) {
  auto state = std::make_shared<State>();
  state->path = path;
  MappedFile given(path);
  GgufPart given_part = parse_gguf_part(given.bytes(), path);
  const SplitPosition split = split_position(given_part, path);
  if (split.count == 1) {
    state->add_part(std::move(given), std::move(given_part));
  } else {
    // Any part opens the whole family; the metadata of the first one counts.
    const std::string prefix = split_prefix(path, split);
    for (int64_t no = 0; no < split.count; ++no)
      open_part(*state, path, prefix + split_suffix(no, split.count), no, split.count);
    check_tensor_count(*state);
  }
  Gguf gguf;
  gguf.state_ = std::move(state);
  return gguf;
}

const std::string& Gguf::path() const { return state_->path; }
const std::map<std::string, GgufValue, std::less<>>& Gguf::metadata() const { return state_->metadata; }
const std::vector<GgufRawValue>& Gguf::raw_metadata() const { return state_->raw_metadata; }
bool Gguf::has(std::string_view key) const { return find_value(state_->metadata, key) != nullptr; }

int64_t Gguf::get_int(std::string_view key) const {
  return as_int(path(), key, require_value(path(), metadata(), key));
}

int64_t Gguf::get_int(std::string_view key, int64_t fallback) const {
  return int_or(path(), metadata(), key, fallback);
}

double Gguf::get_real(std::string_view key) const {
  return as_real(path(), key, require_value(path(), metadata(), key));
}

double Gguf::get_real(std::string_view key, double fallback) const {
  const GgufValue* value = find_value(metadata(), key);
  return value == nullptr ? fallback : as_real(path(), key, *value);
}

bool Gguf::get_bool(std::string_view key, bool fallback) const {
  const GgufValue* value = find_value(metadata(), key);
  return value == nullptr ? fallback : as<bool>(path(), key, *value, "a bool");
}

std::string_view Gguf::get_string(std::string_view key) const {
  return as<std::string_view>(path(), key, require_value(path(), metadata(), key), "a string");
}

std::string_view Gguf::get_string(std::string_view key, std::string_view fallback) const {
  const GgufValue* value = find_value(metadata(), key);
  return value == nullptr ? fallback : as<std::string_view>(path(), key, *value, "a string");
}

const GgufArray* Gguf::get_array(std::string_view key) const {
  const GgufValue* value = find_value(metadata(), key);
  return value == nullptr ? nullptr : &as<GgufArray>(path(), key, *value, "an array");
}

const std::vector<TensorView>& Gguf::tensors() const { return state_->tensors; }

const TensorView* Gguf::find_tensor(std::string_view name) const {
  const auto found = state_->index.find(name);
  return found == state_->index.end() ? nullptr : &state_->tensors[found->second];
}

size_t Gguf::mapped_bytes() const { return state_->mapped_bytes; }

}  // namespace millrace::io
