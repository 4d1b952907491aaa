#include "io/imatrix.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>

#include "base/error.h"
#include "base/mapped_file.h"
#include "io/gguf.h"
#include "io/gguf_writer.h"
#include "io/printable.h"

namespace millrace::io {
namespace {

constexpr std::string_view kSums = ".in_sum2", kCounts = ".counts";
constexpr int32_t kMaxName = 4096, kMaxEntries = 1 << 20;

void check_values(const std::string& path, std::string_view name, const ImportanceEntry& entry) {
  const auto good = [](float x) { return std::isfinite(x) && x >= 0.0f; };
  if (std::all_of(entry.sums.begin(), entry.sums.end(), good) &&
      std::all_of(entry.counts.begin(), entry.counts.end(), good)) {
    return;
  }
  throw_error(ErrorCode::kBadInput,
              "{}: {}: found a number that is negative or not finite, expected sums of squares", path,
              printable(name));
}

std::vector<float> floats_of(const std::string& path, const TensorView& tensor) {
  if (tensor.type != DType::kF32) {
    throw_error(ErrorCode::kBadInput, "{}: tensor {}: found {}, expected f32", path, tensor.name,
                info(tensor.type).name);
  }
  std::vector<float> values(static_cast<size_t>(tensor.elements()));
  std::memcpy(values.data(), tensor.data, values.size() * sizeof(float));
  return values;
}

ImportanceMatrix read_gguf(const std::string& path) {
  const Gguf file = Gguf::open(path);
  if (file.get_string("general.type", "") != "imatrix") {
    throw_error(ErrorCode::kBadInput, "{}: general.type: found {}, expected imatrix", path,
                printable(file.get_string("general.type", "nothing")));
  }
  ImportanceMatrix matrix;
  matrix.chunks = file.get_int("imatrix.chunk_count", 0);
  matrix.chunk_tokens = file.get_int("imatrix.chunk_size", 0);
  if (const GgufArray* names = file.get_array("imatrix.datasets")) {
    for (const std::string_view name : names->strings) matrix.datasets.emplace_back(name);
  }
  for (const TensorView& tensor : file.tensors()) {
    const std::string_view name = tensor.name;
    if (!name.ends_with(kSums)) continue;
    const std::string weight(name.substr(0, name.size() - kSums.size()));
    const TensorView* counts = file.find_tensor(weight + std::string(kCounts));
    ImportanceEntry entry;
    entry.cols = tensor.cols();
    entry.matrices = tensor.rows();
    if (counts == nullptr || counts->elements() != entry.matrices) {
      throw_error(ErrorCode::kBadInput, "{}: tensor {}{}: found {}, expected {} counts", path, weight,
                  kCounts, counts == nullptr ? "nothing" : std::to_string(counts->elements()),
                  entry.matrices);
    }
    entry.sums = floats_of(path, tensor);
    entry.counts = floats_of(path, *counts);
    check_values(path, weight, entry);
    matrix.entries[weight] = std::move(entry);
  }
  return matrix;
}

// int32 entries; each: int32 length and name, int32 calls, int32 values, float32 [values]. The values are
// means of squares times the calls; how many experts share them is not told.
class LegacyReader {
 public:
  explicit LegacyReader(const std::string& path) : file_(path), left_(file_.bytes()) {}

  ImportanceMatrix read() {
    ImportanceMatrix matrix;
    const int32_t entries = number("number of entries", 1, kMaxEntries);
    for (int32_t i = 0; i < entries; ++i) {
      const std::string name = text(fmt::format("name of entry {}", i), kMaxName);
      const int32_t calls = number(fmt::format("calls of {}", printable(name)), 0, INT32_MAX);
      const int32_t values = number(fmt::format("values of {}", printable(name)), 1, INT32_MAX);
      ImportanceEntry entry;
      entry.cols = values;
      entry.sums.resize(static_cast<size_t>(values));
      take(fmt::format("values of {}", printable(name)), entry.sums.data(),
           entry.sums.size() * sizeof(float));
      entry.counts = {static_cast<float>(std::max(calls, 1))};
      check_values(file_.path(), name, entry);
      matrix.entries[name] = std::move(entry);
    }
    if (left_.empty()) return matrix;  // the oldest files end here
    matrix.chunks = number("chunks", 0, INT32_MAX);
    if (!left_.empty()) matrix.datasets = {text("name of the text", kMaxName)};
    return matrix;
  }

 private:
  void take(const std::string& what, void* to, size_t bytes) {
    if (left_.size() < bytes) {
      throw_error(ErrorCode::kBadInput, "{}: {}: found {} bytes, expected {} of an importance matrix",
                  file_.path(), what, left_.size(), bytes);
    }
    std::memcpy(to, left_.data(), bytes);
    left_ = left_.subspan(bytes);
  }
  int32_t number(const std::string& what, int32_t least, int32_t most) {
    int32_t value = 0;
    take(what, &value, sizeof(value));
    if (value < least || value > most) {
      throw_error(ErrorCode::kBadInput, "{}: {}: found {}, expected {} to {} in an importance matrix",
                  file_.path(), what, value, least, most);
    }
    // Before anything is allocated for it.
    if (most == INT32_MAX && least == 1 && static_cast<size_t>(value) > left_.size() / sizeof(float)) {
      throw_error(ErrorCode::kBadInput, "{}: {}: found {}, expected as many as the file has bytes for",
                  file_.path(), what, value);
    }
    return value;
  }
  std::string text(const std::string& what, int32_t most) {
    std::string value(static_cast<size_t>(number(what + " (length)", 0, most)), '\0');
    take(what, value.data(), value.size());
    return value;
  }

  const MappedFile file_;
  std::span<const std::byte> left_;
};

}  // namespace

ImportanceMatrix read_imatrix(const std::string& path) {
  const MappedFile file(path);
  const bool gguf = file.bytes().size() >= 4 && std::memcmp(file.bytes().data(), "GGUF", 4) == 0;
  ImportanceMatrix matrix = gguf ? read_gguf(path) : LegacyReader(path).read();
  if (matrix.entries.empty()) {
    throw_error(ErrorCode::kBadInput, "{}: found no entries, expected sums of squares for some weights",
                path);
  }
  return matrix;
}

void write_imatrix(const std::string& path, const ImportanceMatrix& matrix) {
  GgufWriter writer(path);
  writer.set_string("general.type", "imatrix");
  writer.set_strings("imatrix.datasets", matrix.datasets);
  writer.set_u32("imatrix.chunk_count", static_cast<uint32_t>(matrix.chunks));
  writer.set_u32("imatrix.chunk_size", static_cast<uint32_t>(matrix.chunk_tokens));
  for (const auto& [name, entry] : matrix.entries) {
    const int64_t sums[] = {entry.matrices, entry.cols}, counts[] = {entry.matrices, 1};
    writer.add_tensor(name + std::string(kSums), DType::kF32, sums);
    writer.add_tensor(name + std::string(kCounts), DType::kF32, counts);
  }
  for (const auto& [name, entry] : matrix.entries) {
    writer.write(entry.sums.data(), entry.sums.size() * sizeof(float));
    writer.write(entry.counts.data(), entry.counts.size() * sizeof(float));
  }
  writer.commit();
}

}  // namespace millrace::io
