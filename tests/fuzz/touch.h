// What the fuzz targets do with what was parsed: read every byte that a view promises, for the address
// sanitizer to see, and hold messages to their form.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tensor/tensor_view.h"

namespace millrace::fuzz {

inline void touch(std::string_view text) {
  unsigned sum = 0;
  for (const char c : text) sum += static_cast<unsigned char>(c);
  asm volatile("" : : "r"(sum));  // the sum counts as used
}

inline void touch(const TensorView& tensor) {
  if (tensor.rank < 0 || tensor.rank > 4) __builtin_trap();
  // By rows, as kernels walk them; an empty tensor has as many rows of nothing as it likes.
  if (tensor.elements() == 0) return;
  if (tensor.row_stride_bytes != static_cast<int64_t>(bytes_of(tensor.type, tensor.cols()))) __builtin_trap();
  for (int64_t row = 0; row < tensor.rows(); ++row) {
    touch({reinterpret_cast<const char*>(tensor.row(row)), static_cast<size_t>(tensor.row_stride_bytes)});
  }
  const size_t alignment =
      info(tensor.type).block_elements == 1 ? static_cast<size_t>(info(tensor.type).block_bytes) : 1;
  if (reinterpret_cast<uintptr_t>(tensor.data) % alignment != 0) __builtin_trap();
}

// One line of printable text that begins with the file's name.
inline void check_message(std::string_view message) {
  if (!message.starts_with("input: ")) __builtin_trap();
  for (const char c : message) {
    if (c < 0x20 || c > 0x7e) __builtin_trap();
  }
}

}  // namespace millrace::fuzz
