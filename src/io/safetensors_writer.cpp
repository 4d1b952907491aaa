#include "io/safetensors_writer.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/error.h"
#include "io/printable.h"

namespace millrace::io {

void SafetensorsWriter::add_tensor(std::string_view name, std::string_view dtype,
                                   const std::vector<int64_t>& shape, size_t bytes) {
  MILLRACE_CHECK(!header_written_);
  if (std::any_of(tensors_.begin(), tensors_.end(), [&](const Tensor& t) { return t.name == name; })) {
    throw_error(ErrorCode::kBadInput, "{}: tensor {}: found it twice, expected it once", path_,
                printable(name));
  }
  tensors_.push_back({std::string(name), std::string(dtype), shape, declared_, declared_ + bytes});
  declared_ += bytes;
}

void SafetensorsWriter::write_header() {
  nlohmann::ordered_json header = {{"__metadata__", {{"format", "pt"}}}};
  for (const Tensor& tensor : tensors_) {
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {tensor.begin, tensor.end}}};
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the data begins at a multiple of eight
  const uint64_t size = text.size();
  file_.write(&size, sizeof(size));
  file_.write(text.data(), text.size());
  header_written_ = true;
}

void SafetensorsWriter::write(const void* data, size_t bytes) {
  if (!header_written_) write_header();
  MILLRACE_CHECK(written_ + bytes <= declared_);
  file_.write(data, bytes);
  written_ += bytes;
}

void SafetensorsWriter::commit() {
  if (!header_written_) write_header();
  MILLRACE_CHECK(written_ == declared_);
  file_.commit();
}

}  // namespace millrace::io
