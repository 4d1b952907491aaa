// EncodeTable: the encoders of values that all count alike, one table per instruction set, chosen once at
// start (the best one, or what MILLRACE_ISA names). Every table writes the same bytes: lanes are blocks, what
// is searched is searched in integers, and what is float is the same IEEE operation in the same order.
#pragma once

#include <cstdint>

namespace millrace::quant {

// The types a table has an encoder for; the order is the table's and nothing else's.
enum class Encoding : int {
  kF16,
  kBF16,
  kQ8_0,
  kQ4_0,
  kQ5_0,
  kQ4_1,
  kQ5_1,
  kMXFP4,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kCount
};

// Sums of squares over what a call has encoded: of the misses, and of the values.
struct EncodeSums {
  float error = 0.0f, total = 0.0f;
};

// `blocks` blocks of the type's elements (for f16 and bf16: single values), finite, to `out`.
using EncodeFn = EncodeSums (*)(const float* x, int64_t blocks, uint8_t* out);

struct EncodeTable {
  const char* name;
  EncodeFn encode[static_cast<int>(Encoding::kCount)];
  // Stored values to float32, exactly; false if one is NaN or infinite.
  bool (*widen_f16)(const uint8_t* x, int64_t count, float* out);
  bool (*widen_bf16)(const uint8_t* x, int64_t count, float* out);
};

extern const EncodeTable kScalarEncoders;
#if defined(__aarch64__)
extern const EncodeTable kNeonEncoders, kNeonDotprodEncoders;
#elif defined(__x86_64__)
extern const EncodeTable kAvx2Encoders;
#endif

}  // namespace millrace::quant
