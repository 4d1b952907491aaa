// A safetensors file is a u64 header length, the header (safetensors_header.h) and the bytes of the tensors.
#include "io/safetensors.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/mapped_file.h"
#include "io/byte_reader.h"
#include "io/json_file.h"
#include "io/safetensors_header.h"

namespace millrace::io {

struct Safetensors::State {
  std::vector<MappedFile> files;
  std::vector<std::unique_ptr<std::byte[]>> copies;
  std::vector<TensorView> tensors;
  std::map<std::string, size_t, std::less<>> index;             // name -> position in tensors
  std::map<std::string, std::string, std::less<>> unsupported;  // name -> "{path}: tensor ...", the message
  std::map<std::string, StoredTensor, std::less<>> stored;      // all whose size is known
  size_t mapped_bytes = 0;
  size_t copied_bytes = 0;

  bool has(std::string_view name) const { return index.contains(name) || unsupported.contains(name); }
  void add_file(std::span<const std::byte> bytes, const std::string& path);
  void add_shard(const std::string& directory, const std::string& shard,
                 const std::vector<std::string>& promised, const std::string& index_path);
  void add_entry(const SafetensorsEntry& entry, const std::byte* data, const std::string& path);
  const std::byte* aligned(const std::byte* data, size_t bytes, size_t alignment);
};

namespace {

// The reference implementation's limit; a header of 100 MB names a million tensors.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;

struct SafetensorsType {
  std::string_view name;
  uint64_t bytes;
  std::optional<DType> type;  // empty: sizes are checked, the tensor cannot be used
};

constexpr SafetensorsType kSafetensorsTypes[] = {
    {"F32", 4, DType::kF32},
    {"F16", 2, DType::kF16},
    {"BF16", 2, DType::kBF16},
    {"U8", 1, DType::kU8},
    {"F8_E4M3", 1, DType::kF8E4M3},
    {"I32", 4, DType::kI32},
    {"BOOL", 1, {}},
    {"I8", 1, {}},
    {"F8_E5M2", 1, {}},
    {"F8_E8M0", 1, {}},
    {"I16", 2, {}},
    {"U16", 2, {}},
    {"U32", 4, {}},
    {"F64", 8, {}},
    {"I64", 8, {}},
    {"U64", 8, {}},
    {"C64", 8, {}},
};

const SafetensorsType* find_type(std::string_view name) {
  for (const SafetensorsType& type : kSafetensorsTypes) {
    if (type.name == name) return &type;
  }
  return nullptr;
}

[[noreturn]] void fail(const std::string& path, const SafetensorsEntry& entry, const char* field,
                       const std::string& found) {
  throw_error(ErrorCode::kBadInput, "{}: tensor {} {}: {}", path, printable(entry.name), field, found);
}

// Bytes of the shape; what does not fit int64 is refused.
uint64_t shape_bytes(const SafetensorsEntry& entry, uint64_t element_bytes, const std::string& path) {
  constexpr auto kMax = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  uint64_t bytes = element_bytes;
  bool empty = false;
  for (int i = 0; i < entry.rank; ++i) {
    const uint64_t size = entry.shape[i];
    if (size > kMax / bytes) {
      fail(path, entry, "shape",
           fmt::format("found {} as dimension {}, expected a product below 2^63", size, i));
    }
    // A zero anywhere makes the tensor empty, but the other sizes must still multiply.
    if (size == 0) empty = true;
    bytes *= std::max<uint64_t>(size, 1);
  }
  return empty ? 0 : bytes;
}

void check_entry(const SafetensorsEntry& entry, uint64_t data_bytes, const std::string& path) {
  if (entry.end > data_bytes) {
    fail(path, entry, "data_offsets",
         fmt::format("found an end at {}, expected at most the {} bytes of data in the file", entry.end,
                     data_bytes));
  }
  const SafetensorsType* type = find_type(entry.dtype);
  if (type == nullptr) return;
  const uint64_t expected = shape_bytes(entry, type->bytes, path);
  if (entry.end - entry.begin != expected) {
    fail(
        path, entry, "data_offsets",
        fmt::format("found {} bytes, expected {} for its shape and type", entry.end - entry.begin, expected));
  }
}

void check_overlaps(const std::vector<SafetensorsEntry>& by_offset, const std::string& path) {
  uint64_t end = 0;
  const SafetensorsEntry* owner = nullptr;
  for (const SafetensorsEntry& entry : by_offset) {
    if (entry.begin == entry.end) continue;
    if (entry.begin < end) {
      fail(path, entry, "data_offsets",
           fmt::format("found {}, inside tensor {}, expected {} or more", entry.begin, printable(owner->name),
                       end));
    }
    end = entry.end;
    owner = &entry;
  }
}

// "weight_map" of the index turned round: shard -> the tensors it holds.
std::map<std::string, std::vector<std::string>> read_weight_map(const std::string& path) {
  const nlohmann::json index = read_json_object(path, kMaxHeaderBytes);
  const auto found = index.find("weight_map");
  if (found == index.end() || !found->is_object() || found->empty()) {
    throw_error(ErrorCode::kBadInput,
                "{}: weight_map: found {}, expected an object of tensor names and file names", path,
                found == index.end() ? "nothing"
                : found->empty()     ? "nothing in it"
                                     : found->type_name());
  }
  std::map<std::string, std::vector<std::string>> map;
  for (const auto& [tensor, file] : found->items()) {
    // A plain name: nothing outside the directory is ever opened.
    const std::string name = file.is_string() ? file.get<std::string>() : "";
    if (name.empty() || name == "." || name == ".." ||
        name.find_first_of(std::string_view("/\0", 2)) != name.npos) {
      throw_error(ErrorCode::kBadInput,
                  "{}: weight_map {}: found {}, expected the name of a file in the same directory", path,
                  printable(tensor), file.is_string() ? printable(name) : file.type_name());
    }
    map[name].push_back(tensor);
  }
  return map;
}

}  // namespace

const std::byte* Safetensors::State::aligned(const std::byte* data, size_t bytes, size_t alignment) {
  if (bytes == 0 || reinterpret_cast<uintptr_t>(data) % alignment == 0) return data;
  copies.emplace_back(new std::byte[bytes]);
  std::memcpy(copies.back().get(), data, bytes);
  copied_bytes += bytes;
  return copies.back().get();
}

void Safetensors::State::add_entry(const SafetensorsEntry& entry, const std::byte* data,
                                   const std::string& path) {
  if (has(entry.name)) {
    throw_error(ErrorCode::kBadInput,
                "{}: tensor {}: found the name in an earlier file too, expected it once", path,
                printable(entry.name));
  }
  const SafetensorsType* type = find_type(entry.dtype);
  const std::byte* at = nullptr;
  if (type != nullptr) {
    at = aligned(data + entry.begin, entry.end - entry.begin, type->bytes);
    StoredTensor& tensor = stored[entry.name];
    tensor.dtype = entry.dtype;
    tensor.rank = entry.rank;
    for (int i = 0; i < entry.rank; ++i) tensor.shape[i] = static_cast<int64_t>(entry.shape[i]);
    tensor.data = at;
  }
  if (type == nullptr || !type->type) {
    unsupported.emplace(entry.name,
                        fmt::format("{}: tensor {} dtype: found {}, expected F32, F16, BF16, F8_E4M3, U8 "
                                    "or I32: others are not supported",
                                    path, printable(entry.name), printable(entry.dtype)));
    return;
  }
  TensorView view;
  view.name = entry.name;
  view.type = *type->type;
  view.rank = entry.rank;
  for (int i = 0; i < entry.rank; ++i) view.shape[i] = static_cast<int64_t>(entry.shape[i]);
  view.row_stride_bytes = static_cast<int64_t>(bytes_of(view.type, view.cols()));
  view.data = at;
  index.emplace(entry.name, tensors.size());
  tensors.push_back(std::move(view));
}

void Safetensors::State::add_file(std::span<const std::byte> bytes, const std::string& path) {
  ByteReader reader(bytes, path);
  const auto header_bytes = reader.read<uint64_t>({"header length"});
  const uint64_t max_bytes = std::min<uint64_t>(reader.remaining(), kMaxHeaderBytes);
  if (header_bytes > max_bytes || header_bytes < 2) {
    reader.fail(ErrorCode::kBadInput, {"header length"},
                "found {}, expected 2 to {} (of {} bytes in the file)", header_bytes, max_bytes,
                bytes.size());
  }
  const std::string_view header(reinterpret_cast<const char*>(bytes.data()) + reader.offset(), header_bytes);
  std::vector<SafetensorsEntry> entries = parse_safetensors_header(header, path);
  const std::span<const std::byte> data = bytes.subspan(reader.offset() + header_bytes);
  for (const SafetensorsEntry& entry : entries) check_entry(entry, data.size(), path);
  std::stable_sort(entries.begin(), entries.end(),
                   [](const SafetensorsEntry& a, const SafetensorsEntry& b) { return a.begin < b.begin; });
  check_overlaps(entries, path);
  for (const SafetensorsEntry& entry : entries) add_entry(entry, data.data(), path);
}

void Safetensors::State::add_shard(const std::string& directory, const std::string& shard,
                                   const std::vector<std::string>& promised, const std::string& index_path) {
  const std::string path = (std::filesystem::path(directory) / shard).string();
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) {
    throw_error(ErrorCode::kIo, "{}: weight_map {}: found no file {}, expected every shard to be there",
                index_path, printable(promised.front()), path);
  }
  const auto wrong_shard = [&](const std::string& tensor) {
    throw_error(ErrorCode::kBadInput, "{}: weight_map {}: found it not in {}, expected it there", index_path,
                printable(tensor), path);
  };
  // Known before the shard has been read: it lies in another one.
  for (const std::string& tensor : promised) {
    if (has(tensor)) wrong_shard(tensor);
  }
  MappedFile& file = files.emplace_back(path);
  mapped_bytes += file.bytes().size();
  add_file(file.bytes(), path);
  for (const std::string& tensor : promised) {
    if (!has(tensor)) wrong_shard(tensor);
  }
}

Safetensors Safetensors::parse(std::span<const std::byte> bytes, const std::string& name) {
  Safetensors out;
  out.state_ = std::make_shared<State>();
  out.state_->add_file(bytes, name);
  return out;
}

Safetensors Safetensors::open_file(const std::string& path) {
  Safetensors out;
  out.state_ = std::make_shared<State>();
  State& state = *out.state_;
  MappedFile& file = state.files.emplace_back(path);
  state.mapped_bytes = file.bytes().size();
  state.add_file(file.bytes(), path);
  return out;
}

Safetensors Safetensors::open_dir(const std::string& directory) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  const std::string single = (fs::path(directory) / "model.safetensors").string();
  if (fs::exists(single, ignored)) return open_file(single);
  const std::string index_path = (fs::path(directory) / "model.safetensors.index.json").string();
  if (!fs::exists(index_path, ignored)) {
    throw_error(
        ErrorCode::kBadInput,
        "{}: weights: found neither model.safetensors nor model.safetensors.index.json, expected one of them",
        directory);
  }
  Safetensors out;
  out.state_ = std::make_shared<State>();
  for (const auto& [shard, tensors] : read_weight_map(index_path)) {
    out.state_->add_shard(directory, shard, tensors, index_path);
  }
  return out;
}

const std::vector<TensorView>& Safetensors::tensors() const {
  static const std::vector<TensorView> kNone;  // of what was not opened: a model that is a config.json so far
  return state_ == nullptr ? kNone : state_->tensors;
}

const TensorView* Safetensors::find_tensor(std::string_view name) const {
  if (const auto found = state_->index.find(name); found != state_->index.end()) {
    return &state_->tensors[found->second];
  }
  if (const auto found = state_->unsupported.find(name); found != state_->unsupported.end()) {
    throw Error(ErrorCode::kUnsupported, found->second);
  }
  return nullptr;
}

const StoredTensor* Safetensors::find_stored(std::string_view name) const {
  const auto found = state_->stored.find(name);
  return found == state_->stored.end() ? nullptr : &found->second;
}

size_t Safetensors::mapped_bytes() const { return state_->mapped_bytes; }
size_t Safetensors::copied_bytes() const { return state_->copied_bytes; }

}  // namespace millrace::io
