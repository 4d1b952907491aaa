// What is checked of rows.
#include "kernels/api/mr_rows_checks.h"

namespace millrace::api {

size_t float_bytes(mr_dtype type, const char* name) {
  if (type == MR_F32) return 4;
  if (type == MR_F16 || type == MR_BF16) return 2;
  throw_error(ErrorCode::kUnsupported, "{}.type is {}, expected f32, f16 or bf16", name, mr_dtype_name(type));
}

void check_rows(mr_rows& of, int64_t rows, int64_t cols, const char* name) {
  const size_t bytes = float_bytes(of.type, name);
  of.stride = stride_or(of.stride, cols, name);
  product(rows, of.stride, name);
  if (rows > 0) require_aligned(of.data, bytes, name);
}

void check_optional(mr_rows& of, int64_t rows, int64_t cols, const char* name) {
  if (of.data != nullptr) check_rows(of, rows, cols, name);
}

void require_apart(const void* a, const void* b, const char* name) {
  if (a != nullptr && a == b) throw_error(ErrorCode::kBadInput, "{} is the memory of another array", name);
}

}  // namespace millrace::api
