// GgufWriter: a GGUF v3 file written in one pass. Declare metadata and tensors, then write the tensors'
// bytes in the order they were declared; the file appears under its name at commit() and not before.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/mapped_file.h"
#include "io/gguf_types.h"
#include "tensor/dtype.h"

namespace millrace::io {

class GgufWriter {
 public:
  // `alignment`: a power of two from 8. Other than the default of 32 it is recorded in the file.
  explicit GgufWriter(const std::string& path, uint32_t alignment = kGgufDefaultAlignment);

  // Metadata. Setting a key twice throws Error, as do declarations once data has been written.
  void set_bool(std::string_view key, bool value);
  void set_u32(std::string_view key, uint32_t value);
  void set_i32(std::string_view key, int32_t value);
  void set_u64(std::string_view key, uint64_t value);
  void set_f32(std::string_view key, float value);
  void set_string(std::string_view key, std::string_view value);
  void set_bools(std::string_view key, const std::vector<bool>& values);
  void set_i32s(std::string_view key, std::span<const int32_t> values);
  void set_f32s(std::string_view key, std::span<const float> values);
  void set_strings(std::string_view key, std::span<const std::string> values);
  // A value as another file has it (Gguf::raw_metadata), type included.
  void copy_value(std::string_view key, std::span<const std::byte> bytes);

  // `shape` is slowest dimension first, as in TensorView. Throws Error{kUnsupported} for a type GGUF has not,
  // and Error{kBadInput} for a shape that the type's blocks do not fit or a name used before.
  void add_tensor(std::string_view name, DType type, std::span<const int64_t> shape);

  // Bytes of the whole file; known once everything is declared.
  uint64_t file_bytes() const;
  // Its first bytes, up to the data: padded to the alignment.
  std::string header() const;

  // The next bytes of the tensors, in pieces of any size that do not cross from one tensor into the next. The
  // first call writes the header. Throws Error when a tensor gets more than it declared or the disk is full.
  void write(const void* data, size_t bytes);

  // Throws Error, and leaves nothing behind, unless every tensor has all its bytes.
  void commit();

 private:
  struct Tensor {
    std::string name;
    uint32_t type;
    std::vector<int64_t> shape;
    uint64_t bytes;
    uint64_t offset;  // from the start of the data
  };

  void add_key(std::string_view key);
  std::string& start_value(std::string_view key, GgufType type);
  std::string& start_array(std::string_view key, GgufType type, size_t length);
  void check_not_started() const;
  void write_header();
  uint64_t padded(uint64_t bytes) const { return (bytes + alignment_ - 1) / alignment_ * alignment_; }
  // Steps over tensors that are complete, writing the padding after each.
  void skip_complete();

  std::string path_;
  AtomicFile file_;
  uint32_t alignment_;
  std::vector<std::string> keys_;
  std::string metadata_;  // encoded
  std::vector<Tensor> tensors_;
  uint64_t data_bytes_ = 0;  // of the tensors declared so far, padding included
  bool header_written_ = false;
  size_t current_ = 0;         // tensor being written
  uint64_t current_done_ = 0;  // bytes of it that are written
};

}  // namespace millrace::io
