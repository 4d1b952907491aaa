// SafetensorsWriter: one safetensors file, its header first, then the tensors in the order they were
// declared. Appears whole or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/mapped_file.h"

namespace millrace::io {

class SafetensorsWriter {
 public:
  explicit SafetensorsWriter(const std::string& path) : path_(path), file_(path) {}

  // `dtype`: safetensors' name, "F32", "BF16", "F8_E4M3". Throws Error{kBadInput} for a name used before.
  void add_tensor(std::string_view name, std::string_view dtype, const std::vector<int64_t>& shape,
                  size_t bytes);
  // The next bytes of the tensors. The first call writes the header.
  void write(const void* data, size_t bytes);
  // Throws Error, and leaves nothing behind, unless every tensor has all its bytes.
  void commit();

 private:
  struct Tensor {
    std::string name, dtype;
    std::vector<int64_t> shape;
    size_t begin, end;  // of the data
  };
  void write_header();

  std::string path_;
  AtomicFile file_;
  std::vector<Tensor> tensors_;
  size_t declared_ = 0, written_ = 0;
  bool header_written_ = false;
};

}  // namespace millrace::io
