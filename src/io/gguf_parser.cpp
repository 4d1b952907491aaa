// The GGUF layout, little-endian:
//   "GGUF", u32 version, u64 tensor count, u64 metadata count,
//   metadata: string key, u32 type, value;   tensors: string name, u32 rank, u64 dims[rank] (fastest first),
//   u32 type, u64 offset;   padding to the alignment;   tensor data, offsets counted from here.
// Nothing read from the file is used as a size before it has been held against the bytes that are there.
#include "io/gguf_parser.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <set>

#include "base/error.h"
#include "io/byte_reader.h"
#include "io/gguf_types.h"

namespace millrace::io {
namespace {

constexpr uint32_t kMagic = 0x46554747;            // "GGUF"
constexpr size_t kMinMetadataBytes = 8 + 4 + 1;    // key length, type, one byte
constexpr size_t kMinTensorBytes = 8 + 4 + 4 + 8;  // name length, rank, type, offset
// Every element becomes 8 or 16 bytes. The largest arrays known are vocabularies and merges, under 2^19.
constexpr uint64_t kMaxArrayElements = uint64_t{1} << 24;
constexpr uint64_t kMaxInt64 = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());

// Smallest number of bytes an element of the type takes; 0 for what is no element type.
size_t min_element_bytes(GgufType type) {
  switch (type) {
    case GgufType::kUint8:
    case GgufType::kInt8:
    case GgufType::kBool:
      return 1;
    case GgufType::kUint16:
    case GgufType::kInt16:
      return 2;
    case GgufType::kUint32:
    case GgufType::kInt32:
    case GgufType::kFloat32:
      return 4;
    case GgufType::kString:
    case GgufType::kUint64:
    case GgufType::kInt64:
    case GgufType::kFloat64:
      return 8;
    case GgufType::kArray:
      break;
  }
  return 0;
}

// A tensor whose bytes, [begin, end) from the start of the data, are not yet known to be in the file.
struct PlacedTensor {
  TensorView view;
  uint64_t begin = 0;
  uint64_t end = 0;
};

class Parser {
 public:
  Parser(std::span<const std::byte> bytes, const std::string& path) : bytes_(bytes), reader_(bytes, path) {}

  GgufPart parse() {
    read_magic_and_version();
    // The tensor directory follows the metadata; both must fit, each is checked again when it is reached.
    const uint64_t num_tensors = reader_.read_count({"tensor count"}, kMinTensorBytes);
    const uint64_t num_metadata = reader_.read_count({"metadata count"}, kMinMetadataBytes);
    for (uint64_t i = 0; i < num_metadata; ++i) read_metadata(static_cast<int64_t>(i));
    read_alignment();
    for (uint64_t i = 0; i < num_tensors; ++i) read_tensor(static_cast<int64_t>(i));
    place_tensors();
    return std::move(part_);
  }

 private:
  void read_magic_and_version() {
    if (bytes_.empty()) reader_.fail(ErrorCode::kBadInput, {"magic"}, "found an empty file, expected 'GGUF'");
    const uint32_t magic = reader_.read<uint32_t>({"magic"});
    if (magic != kMagic) {
      const std::string_view found(reinterpret_cast<const char*>(bytes_.data()), 4);
      reader_.fail(ErrorCode::kBadInput, {"magic"}, "found {}, expected 'GGUF'", printable(found));
    }
    const uint32_t version = reader_.read<uint32_t>({"version"});
    if (version == 2 || version == kGgufVersion) return;
    if ((version & 0xffffu) == 0 && version != 0) {
      reader_.fail(ErrorCode::kUnsupported, {"version"},
                   "found {:#010x}, a big-endian file, expected 2 or 3 in little-endian", version);
    }
    reader_.fail(ErrorCode::kUnsupported, {"version"}, "found {}, expected 2 or 3", version);
  }

  void read_metadata(int64_t entry) {
    const std::string_view key = reader_.read_string({.kind = "metadata", .entry = entry, .part = "key"});
    if (key.empty()) {
      reader_.fail(ErrorCode::kBadInput, {.kind = "metadata", .entry = entry, .part = "key"},
                   "found an empty key, expected a name");
    }
    const Field field{.kind = "metadata", .name = key};
    const size_t begin = reader_.offset();
    const GgufType type = read_type(field.of("type"));
    GgufValue value = type == GgufType::kArray ? GgufValue(read_array(field)) : read_scalar(type, field);
    if (!part_.metadata.emplace(key, std::move(value)).second) {
      reader_.fail(ErrorCode::kBadInput, field, "found the key a second time, expected it once");
    }
    part_.raw_metadata.push_back({key, bytes_.subspan(begin, reader_.offset() - begin)});
  }

  GgufType read_type(const Field& field) {
    const uint32_t type = reader_.read<uint32_t>(field);
    constexpr uint32_t kLast = static_cast<uint32_t>(GgufType::kFloat64);
    if (type > kLast) reader_.fail(ErrorCode::kBadInput, field, "found {}, expected 0 to {}", type, kLast);
    return static_cast<GgufType>(type);
  }

  GgufValue read_scalar(GgufType type, const Field& field) {
    switch (type) {
      case GgufType::kUint8:
        return uint64_t{reader_.read<uint8_t>(field)};
      case GgufType::kUint16:
        return uint64_t{reader_.read<uint16_t>(field)};
      case GgufType::kUint32:
        return uint64_t{reader_.read<uint32_t>(field)};
      case GgufType::kUint64:
        return reader_.read<uint64_t>(field);
      case GgufType::kInt8:
        return int64_t{reader_.read<int8_t>(field)};
      case GgufType::kInt16:
        return int64_t{reader_.read<int16_t>(field)};
      case GgufType::kInt32:
        return int64_t{reader_.read<int32_t>(field)};
      case GgufType::kInt64:
        return reader_.read<int64_t>(field);
      case GgufType::kFloat32:
        return double{reader_.read<float>(field)};
      case GgufType::kFloat64:
        return reader_.read<double>(field);
      case GgufType::kBool:
        return read_bool(field);
      case GgufType::kString:
        return reader_.read_string(field);
      case GgufType::kArray:
        break;
    }
    reader_.fail(ErrorCode::kUnsupported, field, "found an array, expected a single value");
  }

  bool read_bool(const Field& field) {
    const uint8_t value = reader_.read<uint8_t>(field);
    if (value > 1) reader_.fail(ErrorCode::kBadInput, field, "found {}, expected a bool, 0 or 1", value);
    return value == 1;
  }

  GgufArray read_array(Field field) {
    const GgufType type = read_type(field.of("array type"));
    if (type == GgufType::kArray) {
      reader_.fail(ErrorCode::kUnsupported, field.of("array type"),
                   "found an array of arrays, expected an array of numbers or strings");
    }
    const uint64_t length = reader_.read_count(field.of("array length"), min_element_bytes(type));
    if (length > kMaxArrayElements) {
      reader_.fail(ErrorCode::kUnsupported, field.of("array length"), "found {}, expected at most {}", length,
                   kMaxArrayElements);
    }
    GgufArray array;
    if (type == GgufType::kString) {
      array.strings.reserve(length);
    } else if (type == GgufType::kFloat32 || type == GgufType::kFloat64) {
      array.reals.reserve(length);
    } else {
      array.integers.reserve(length);
    }
    for (uint64_t i = 0; i < length; ++i) {
      field.element = static_cast<int64_t>(i);
      append(array, read_scalar(type, field), field);
    }
    return array;
  }

  void append(GgufArray& array, const GgufValue& value, const Field& field) {
    if (const auto* text = std::get_if<std::string_view>(&value)) {
      array.strings.push_back(*text);
    } else if (const auto* real = std::get_if<double>(&value)) {
      array.reals.push_back(*real);
    } else if (const auto* natural = std::get_if<uint64_t>(&value)) {
      if (*natural > kMaxInt64) {
        reader_.fail(ErrorCode::kUnsupported, field, "found {}, expected at most {}", *natural, kMaxInt64);
      }
      array.integers.push_back(static_cast<int64_t>(*natural));
    } else if (const auto* integer = std::get_if<int64_t>(&value)) {
      array.integers.push_back(*integer);
    } else if (const auto* flag = std::get_if<bool>(&value)) {
      array.integers.push_back(*flag ? 1 : 0);
    }
  }

  void read_alignment() {
    const auto found = part_.metadata.find("general.alignment");
    if (found == part_.metadata.end()) return;
    const Field field{.kind = "metadata", .name = "general.alignment"};
    const auto* value = std::get_if<uint64_t>(&found->second);
    if (value == nullptr) reader_.fail(ErrorCode::kBadInput, field, "found another type, expected uint32");
    // At least 8, as the format asks: the numbers of a tensor are then aligned where they lie.
    if (!std::has_single_bit(*value) || *value < 8 || *value > (1u << 30)) {
      reader_.fail(ErrorCode::kBadInput, field, "found {}, expected a power of two from 8 to 2^30", *value);
    }
    alignment_ = *value;
  }

  void read_tensor(int64_t entry) {
    const std::string_view name = reader_.read_string({.kind = "tensor", .entry = entry, .part = "name"});
    if (name.empty()) {
      reader_.fail(ErrorCode::kBadInput, {.kind = "tensor", .entry = entry, .part = "name"},
                   "found an empty name, expected one");
    }
    const Field field{.kind = "tensor", .name = name};
    if (!names_.insert(name).second) {
      reader_.fail(ErrorCode::kBadInput, field, "found the name a second time, expected it once");
    }
    PlacedTensor tensor;
    tensor.view.name = name;
    const uint64_t elements = read_shape(tensor.view, field);
    tensor.view.type = read_tensor_type(field.of("type"));
    const uint64_t tensor_bytes = size_in_bytes(tensor.view, elements, field.of("shape"));
    tensor.begin = reader_.read<uint64_t>(field.of("offset"));
    if (tensor.begin % alignment_ != 0) {
      reader_.fail(ErrorCode::kBadInput, field.of("offset"), "found {}, expected a multiple of {}",
                   tensor.begin, alignment_);
    }
    if (tensor.begin > bytes_.size()) {
      reader_.fail(ErrorCode::kBadInput, field.of("offset"),
                   "found {}, expected less than the file's {} bytes", tensor.begin, bytes_.size());
    }
    tensor.end = tensor.begin + tensor_bytes;
    placed_.push_back(std::move(tensor));
  }

  // Fills rank and shape (slowest first) and returns the number of elements, which fits int64.
  uint64_t read_shape(TensorView& view, const Field& field) {
    const uint32_t rank = reader_.read<uint32_t>(field.of("rank"));
    if (rank > kGgufMaxRank) {
      reader_.fail(ErrorCode::kBadInput, field.of("rank"), "found {}, expected at most {}", rank,
                   kGgufMaxRank);
    }
    view.rank = static_cast<int>(rank);
    uint64_t elements = 1;
    for (uint32_t i = 0; i < rank; ++i) {
      constexpr std::string_view kDimensions[kGgufMaxRank] = {"dimension 0", "dimension 1", "dimension 2",
                                                              "dimension 3"};
      const Field dim = field.of(kDimensions[i]);
      const uint64_t size = reader_.read<uint64_t>(dim);
      if (size == 0 || size > kMaxInt64 / elements) {
        reader_.fail(ErrorCode::kBadInput, dim, "found {}, expected at least 1 and a product below 2^63",
                     size);
      }
      elements *= size;
      view.shape[rank - 1 - i] = static_cast<int64_t>(size);
    }
    return elements;
  }

  DType read_tensor_type(const Field& field) {
    const uint32_t number = reader_.read<uint32_t>(field);
    if (const auto type = dtype_of_gguf(number)) return *type;
    const std::string_view known = gguf_type_name(number);
    if (!known.empty()) {
      reader_.fail(ErrorCode::kUnsupported, field,
                   "found {} ({}), which is not supported, expected one of {}", number, known,
                   supported_gguf_types());
    }
    reader_.fail(ErrorCode::kBadInput, field, "found {}, an unknown type, expected one of {}", number,
                 supported_gguf_types());
  }

  // At most the file's size: more is refused here, so that sums with it cannot overflow.
  uint64_t size_in_bytes(TensorView& view, uint64_t elements, const Field& field) {
    const DTypeInfo& type = info(view.type);
    const auto block = static_cast<uint64_t>(type.block_elements);
    const auto block_bytes = static_cast<uint64_t>(type.block_bytes);
    if (static_cast<uint64_t>(view.cols()) % block != 0) {
      reader_.fail(ErrorCode::kBadInput, field, "found rows of {} elements, expected a multiple of {} for {}",
                   view.cols(), block, type.name);
    }
    if (elements / block > bytes_.size() / block_bytes) {
      reader_.fail(ErrorCode::kBadInput, field,
                   "found {} elements of {}, expected no more than the file's {} bytes hold", elements,
                   type.name, bytes_.size());
    }
    view.row_stride_bytes = static_cast<int64_t>(bytes_of(view.type, view.cols()));
    return elements / block * block_bytes;
  }

  // The directory has been read: where the data starts is known, and every tensor is held against it.
  void place_tensors() {
    const uint64_t padding = (alignment_ - reader_.offset() % alignment_) % alignment_;
    const uint64_t data_start = reader_.offset() + padding;
    const uint64_t data_bytes = data_start > bytes_.size() ? 0 : bytes_.size() - data_start;
    std::vector<const PlacedTensor*> by_offset;
    for (const PlacedTensor& tensor : placed_) {
      if (tensor.end > data_bytes) {
        reader_.fail(ErrorCode::kBadInput, {.kind = "tensor", .name = tensor.view.name, .part = "data"},
                     "found its end at byte {}, expected it within the file's {} bytes",
                     data_start + tensor.end, bytes_.size());
      }
      by_offset.push_back(&tensor);
    }
    std::sort(by_offset.begin(), by_offset.end(),
              [](const PlacedTensor* a, const PlacedTensor* b) { return a->begin < b->begin; });
    for (size_t i = 1; i < by_offset.size(); ++i) {
      const PlacedTensor& before = *by_offset[i - 1];
      if (by_offset[i]->begin < before.end) {
        reader_.fail(ErrorCode::kBadInput,
                     {.kind = "tensor", .name = by_offset[i]->view.name, .part = "offset"},
                     "found {}, inside tensor {}, expected {} or more", by_offset[i]->begin,
                     printable(before.view.name), before.end);
      }
    }
    part_.tensors.reserve(placed_.size());
    for (PlacedTensor& tensor : placed_) {
      tensor.view.data = bytes_.data() + data_start + tensor.begin;
      part_.tensors.push_back(std::move(tensor.view));
    }
  }

  std::span<const std::byte> bytes_;
  ByteReader reader_;
  GgufPart part_;
  uint64_t alignment_ = kGgufDefaultAlignment;
  std::set<std::string_view> names_;
  std::vector<PlacedTensor> placed_;
};

}  // namespace

GgufPart parse_gguf_part(std::span<const std::byte> bytes, const std::string& path) {
  return Parser(bytes, path).parse();
}

}  // namespace millrace::io
