// Rows in a file's encoding for tests: any codes, scales and minima of moderate size.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "tensor/dtype.h"

namespace millrace::cuda {

inline std::vector<uint8_t> random_rows(DType type, int64_t rows, int64_t cols, std::mt19937& random) {
  std::vector<uint8_t> bytes(static_cast<size_t>(rows) * bytes_of(type, cols));
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(random() & 255u);
  const auto block = static_cast<size_t>(info(type).block_bytes);
  const auto put_half = [&](size_t at) {  // an f16 of 2^-7 to 2^-6, sometimes negative
    const auto bits = static_cast<uint32_t>(random());
    bytes[at] = static_cast<uint8_t>(bits & 255u);
    bytes[at + 1] = static_cast<uint8_t>(0x20u | (bits >> 8 & 0x83u));
  };
  for (size_t at = 0; at < bytes.size(); at += block) {
    switch (type) {
      case DType::kBF16:
        bytes[at + 1] = static_cast<uint8_t>((bytes[at + 1] & 0x80u) | 0x3cu);
        break;
      case DType::kQ6_K:
        put_half(at + block - 2);
        break;
      case DType::kQ4_K:
      case DType::kQ5_K:
      case DType::kQ4_1:
      case DType::kQ5_1:
        put_half(at);
        put_half(at + 2);
        break;
      case DType::kQ4_Z:
        bytes[at + 1] = static_cast<uint8_t>(0x88u | (bytes[at + 1] & 7u));
        break;
      default:
        put_half(at);
    }
  }
  return bytes;
}

}  // namespace millrace::cuda
