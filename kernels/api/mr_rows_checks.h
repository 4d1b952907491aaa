// What is checked of rows (millrace/kernels/rows.h) on every device.
#pragma once

#include "kernels/api/mr_status.h"
#include "millrace/kernels/rows.h"

namespace millrace::api {

inline constexpr int64_t kMaxCount = INT32_MAX;  // of rows, columns, classes

// Bytes of an element; Error{kUnsupported} unless it is f32, f16 or bf16.
size_t float_bytes(mr_dtype type, const char* name);
// Rows that must be there (unless there are no rows at all), with their stride filled in.
void check_rows(mr_rows& of, int64_t rows, int64_t cols, const char* name);
// The same where data is given.
void check_optional(mr_rows& of, int64_t rows, int64_t cols, const char* name);
// `name` is a, which must not be b; null is nobody's.
void require_apart(const void* a, const void* b, const char* name);

}  // namespace millrace::api
