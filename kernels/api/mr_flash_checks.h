// What the C functions of millrace/kernels/flash_attention.h and flash_partial.h check alike. Each throws
// Error{kBadInput} or Error{kUnsupported} that names the argument.
#pragma once

#include <string>

#include "millrace/kernels/flash_attention.h"

namespace millrace::api {

inline constexpr int32_t kMaxFlashHeads = 1 << 16, kMaxFlashBatch = 1 << 20, kMaxFlashLength = 1 << 30;
inline constexpr int32_t kFlashKeysPerScale = 128;

[[noreturn]] void flash_bad(const std::string& line);

void check_dim(int32_t dim, const char* name);
// An array that may be absent.
void check_words(const void* pointer, const char* name);

// Checked, with the scale that 0 stands for.
mr_flash_problem checked_problem(const mr_flash_problem* problem);
mr_flash_problem checked_for_backward(const mr_flash_problem* problem);
mr_dtype flash_out_type(const mr_flash_problem& problem);

// How many of what a tensor's strides step over; a count of 0 or 1 leaves its stride unread.
struct TensorShape {
  int64_t batch, seq, heads, dim;
  mr_dtype type;
  bool written;
  bool ragged = false;  // seq: as many rows as all sequences may have
};
void check_flash_tensor(const mr_flash_tensor& t, const TensorShape& shape, const char* name);
// Of q, out and their gradients; of k, v and theirs, of `type`.
TensorShape query_shape(const mr_flash_problem& p, int32_t dim, mr_dtype type, bool written);
TensorShape key_shape(const mr_flash_problem& p, int32_t dim, mr_dtype type, bool written);
void check_inputs(const mr_flash_problem& p, const mr_flash_tensor& q, const mr_flash_tensor& k,
                  const mr_flash_tensor& v, const mr_flash_tensor& out, bool out_written);

}  // namespace millrace::api
