// The .npy header: magic, version 1.0, u16 length, a Python dictionary padded with spaces to a multiple
// of 64.
#include "io/npy_writer.h"

#include <fmt/core.h>

#include <bit>
#include <limits>

#include "base/error.h"

namespace millrace::io {

static_assert(std::endian::native == std::endian::little);

NpyWriter::NpyWriter(const std::string& path, int64_t rows, int64_t cols)
    : path_(path), file_(path), rows_(rows), cols_(cols) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max() / 8;
  if (rows < 0 || cols < 0 || (cols > 0 && rows > kMax / cols)) {
    throw_error(ErrorCode::kBadInput, "{}: shape: found [{}, {}], expected sizes of 0 or more", path, rows,
                cols);
  }
  std::string dictionary =
      fmt::format("{{'descr': '<f4', 'fortran_order': False, 'shape': ({}, {}), }}", rows, cols);
  constexpr size_t kFixedBytes = 6 + 2 + 2;  // magic, version, length
  while ((kFixedBytes + dictionary.size() + 1) % 64 != 0) dictionary += ' ';
  dictionary += '\n';
  std::string header("\x93NUMPY\x01\x00", 8);
  header += static_cast<char>(dictionary.size() & 0xff);
  header += static_cast<char>(dictionary.size() >> 8);
  header += dictionary;
  file_.write(header.data(), header.size());
}

void NpyWriter::write_rows(const float* data, int64_t rows) {
  if (rows < 0 || rows > rows_ - rows_written_) {
    throw_error(ErrorCode::kBadInput, "{}: rows: found {}, expected {}", path_, rows_written_ + rows, rows_);
  }
  file_.write(data, static_cast<size_t>(rows * cols_) * sizeof(float));
  rows_written_ += rows;
}

void NpyWriter::commit() {
  if (rows_written_ != rows_) {
    throw_error(ErrorCode::kBadInput, "{}: rows: found {}, expected {}", path_, rows_written_, rows_);
  }
  file_.commit();
}

}  // namespace millrace::io
