// NpyWriter: float32 rows to a NumPy .npy file (format 1.0), row by row; the file appears whole at commit().
#pragma once

#include <cstdint>
#include <string>

#include "base/mapped_file.h"

namespace millrace::io {

class NpyWriter {
 public:
  // The array will be [rows, cols] of little-endian float32, C order.
  NpyWriter(const std::string& path, int64_t rows, int64_t cols);

  void write_rows(const float* data, int64_t rows);  // data [rows, cols]
  // Throws Error, and leaves nothing behind, unless all rows were written.
  void commit();

 private:
  std::string path_;
  AtomicFile file_;
  int64_t rows_;
  int64_t cols_;
  int64_t rows_written_ = 0;
};

}  // namespace millrace::io
