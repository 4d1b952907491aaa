// Encoding is the mirror of gguf_parser.cpp. The header is built in memory (it is some megabytes of
// vocabulary); the data goes straight to the file.
#include "io/gguf_writer.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "base/error.h"
#include "io/printable.h"

namespace millrace::io {
namespace {

template <class T>
void append_raw(std::string& out, T value) {
  static_assert(std::is_arithmetic_v<T> && std::endian::native == std::endian::little);
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void append_string(std::string& out, std::string_view text) {
  append_raw<uint64_t>(out, text.size());
  out += text;
}

}  // namespace

GgufWriter::GgufWriter(const std::string& path, uint32_t alignment)
    : path_(path), file_(path), alignment_(alignment) {
  if (!std::has_single_bit(alignment) || alignment < 8) {
    throw_error(ErrorCode::kBadInput, "{}: general.alignment: found {}, expected a power of two from 8", path,
                alignment);
  }
  if (alignment != kGgufDefaultAlignment) set_u32("general.alignment", alignment);
}

void GgufWriter::check_not_started() const {
  if (header_written_) {
    throw_error(ErrorCode::kBadInput,
                "{}: header: found a declaration after the first data, expected it before", path_);
  }
}

void GgufWriter::add_key(std::string_view key) {
  check_not_started();
  if (key.empty() || std::find(keys_.begin(), keys_.end(), key) != keys_.end()) {
    throw_error(ErrorCode::kBadInput,
                "{}: metadata {}: found the key empty or a second time, expected a new one", path_,
                printable(key));
  }
  keys_.emplace_back(key);
  append_string(metadata_, key);
}

std::string& GgufWriter::start_value(std::string_view key, GgufType type) {
  add_key(key);
  append_raw(metadata_, static_cast<uint32_t>(type));
  return metadata_;
}

void GgufWriter::copy_value(std::string_view key, std::span<const std::byte> bytes) {
  add_key(key);
  metadata_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

std::string& GgufWriter::start_array(std::string_view key, GgufType type, size_t length) {
  std::string& out = start_value(key, GgufType::kArray);
  append_raw(out, static_cast<uint32_t>(type));
  append_raw<uint64_t>(out, length);
  return out;
}

void GgufWriter::set_bool(std::string_view key, bool value) {
  append_raw<uint8_t>(start_value(key, GgufType::kBool), value ? 1 : 0);
}
void GgufWriter::set_u32(std::string_view key, uint32_t value) {
  append_raw(start_value(key, GgufType::kUint32), value);
}
void GgufWriter::set_i32(std::string_view key, int32_t value) {
  append_raw(start_value(key, GgufType::kInt32), value);
}
void GgufWriter::set_u64(std::string_view key, uint64_t value) {
  append_raw(start_value(key, GgufType::kUint64), value);
}
void GgufWriter::set_f32(std::string_view key, float value) {
  append_raw(start_value(key, GgufType::kFloat32), value);
}
void GgufWriter::set_string(std::string_view key, std::string_view value) {
  append_string(start_value(key, GgufType::kString), value);
}

void GgufWriter::set_bools(std::string_view key, const std::vector<bool>& values) {
  std::string& out = start_array(key, GgufType::kBool, values.size());
  for (const bool value : values) append_raw<uint8_t>(out, value ? 1 : 0);
}
void GgufWriter::set_i32s(std::string_view key, std::span<const int32_t> values) {
  std::string& out = start_array(key, GgufType::kInt32, values.size());
  for (const int32_t value : values) append_raw(out, value);
}
void GgufWriter::set_f32s(std::string_view key, std::span<const float> values) {
  std::string& out = start_array(key, GgufType::kFloat32, values.size());
  for (const float value : values) append_raw(out, value);
}
void GgufWriter::set_strings(std::string_view key, std::span<const std::string> values) {
  std::string& out = start_array(key, GgufType::kString, values.size());
  for (const std::string& value : values) append_string(out, value);
}

void GgufWriter::add_tensor(std::string_view name, DType type, std::span<const int64_t> shape) {
  check_not_started();
  const auto fail = [&](const char* field, const std::string& found) {
    throw_error(ErrorCode::kBadInput, "{}: tensor {} {}: {}", path_, printable(name), field, found);
  };
  const auto number = gguf_of_dtype(type);
  if (!number) {
    throw_error(ErrorCode::kUnsupported, "{}: tensor {} type: found {}, expected one of {}", path_,
                printable(name), info(type).name, supported_gguf_types());
  }
  const bool known =
      std::any_of(tensors_.begin(), tensors_.end(), [&](const Tensor& t) { return t.name == name; });
  if (name.empty() || known) fail("name", "found it empty or a second time, expected a new one");
  if (shape.size() > kGgufMaxRank)
    fail("rank", fmt::format("found {}, expected at most {}", shape.size(), kGgufMaxRank));
  // Four bytes an element at most: bytes of the file then stay below 2^63.
  int64_t elements = 1;
  for (const int64_t size : shape) {
    if (size < 1 || size > std::numeric_limits<int64_t>::max() / 8 / elements) {
      fail("shape",
           fmt::format("found a dimension of {}, expected at least 1 and a product below 2^60", size));
    }
    elements *= size;
  }
  const int64_t cols = shape.empty() ? 1 : shape.back();
  if (cols % info(type).block_elements != 0) {
    fail("shape", fmt::format("found rows of {} elements, expected a multiple of {} for {}", cols,
                              info(type).block_elements, info(type).name));
  }
  tensors_.push_back(
      {std::string(name), *number, {shape.begin(), shape.end()}, bytes_of(type, elements), data_bytes_});
  data_bytes_ = padded(data_bytes_ + tensors_.back().bytes);
}

std::string GgufWriter::header() const {
  std::string out = "GGUF";
  append_raw(out, kGgufVersion);
  append_raw<uint64_t>(out, tensors_.size());
  append_raw<uint64_t>(out, keys_.size());
  out += metadata_;
  for (const Tensor& tensor : tensors_) {
    append_string(out, tensor.name);
    append_raw(out, static_cast<uint32_t>(tensor.shape.size()));
    for (auto size = tensor.shape.rbegin(); size != tensor.shape.rend(); ++size) append_raw(out, *size);
    append_raw(out, tensor.type);
    append_raw(out, tensor.offset);
  }
  out.resize(padded(out.size()), '\0');
  return out;
}

uint64_t GgufWriter::file_bytes() const { return header().size() + data_bytes_; }

void GgufWriter::write_header() {
  if (header_written_) return;
  const std::string bytes = header();
  file_.write(bytes.data(), bytes.size());
  header_written_ = true;
}

void GgufWriter::skip_complete() {
  while (current_ < tensors_.size() && current_done_ == tensors_[current_].bytes) {
    const std::string zeros(padded(current_done_) - current_done_, '\0');
    file_.write(zeros.data(), zeros.size());
    ++current_;
    current_done_ = 0;
  }
}

void GgufWriter::write(const void* data, size_t bytes) {
  write_header();
  if (bytes == 0) return;
  if (current_ == tensors_.size()) {
    throw_error(ErrorCode::kBadInput, "{}: data: found {} bytes after the last tensor, expected none", path_,
                bytes);
  }
  const Tensor& tensor = tensors_[current_];
  if (bytes > tensor.bytes - current_done_) {
    throw_error(ErrorCode::kBadInput, "{}: tensor {} data: found {} bytes, expected {}", path_,
                printable(tensor.name), current_done_ + bytes, tensor.bytes);
  }
  file_.write(data, bytes);
  current_done_ += bytes;
  skip_complete();
}

void GgufWriter::commit() {
  write_header();
  if (current_ < tensors_.size()) {
    throw_error(ErrorCode::kBadInput, "{}: tensor {} data: found {} bytes, expected {}", path_,
                printable(tensors_[current_].name), current_done_, tensors_[current_].bytes);
  }
  file_.commit();
}

}  // namespace millrace::io
