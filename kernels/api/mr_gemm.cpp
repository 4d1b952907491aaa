// The C function of millrace/kernels/gemm.h: what is checked on every device.
#include "millrace/kernels/gemm.h"

#include "kernels/api/mr_device.h"

namespace millrace::api {
namespace {

constexpr int64_t kMaxGemmSize = INT32_MAX;

int64_t gemm_element_bytes(mr_dtype type) {
  switch (type) {
    case MR_F32:
      return 4;
    case MR_F16:
    case MR_BF16:
      return 2;
    default:
      return 1;
  }
}

// Rows and columns of an operand as it lies; its stride replaced.
void check_matrix(const void* data, int64_t rows, int64_t cols, int64_t& stride, mr_dtype type,
                  const char* name, const char* stride_name) {
  stride = stride_or(stride, cols, stride_name);
  product(rows, stride, stride_name);
  if (rows > 0 && cols > 0) require_aligned(data, static_cast<size_t>(gemm_element_bytes(type)), name);
}

bool is_fp8(mr_dtype type) { return type == MR_F8_E4M3 || type == MR_F8_E5M2; }
bool is_float(mr_dtype type) { return type == MR_F32 || type == MR_F16 || type == MR_BF16; }

// What a and b are; b_type replaced.
void check_types(mr_gemm_args& args) {
  if (!is_float(args.type) && !is_fp8(args.type) && args.type != MR_I8) {
    throw_error(ErrorCode::kBadInput,
                "args.type is {}, expected MR_F32, MR_BF16, MR_F16, MR_F8_E4M3, MR_F8_E5M2 or MR_I8",
                static_cast<int>(args.type));
  }
  if (args.b_type == MR_F32) args.b_type = args.type;
  if (args.b_type == args.type || (is_float(args.type) && is_float(args.b_type)) ||
      (is_fp8(args.type) && is_fp8(args.b_type)))
    return;
  throw_error(ErrorCode::kBadInput, "args.b_type is {}, expected {} beside an args.type of {}",
              mr_dtype_name(args.b_type),
              is_float(args.type) ? "f16 or bf16"
              : is_fp8(args.type) ? "f8_e4m3 or f8_e5m2"
                                  : "i8",
              mr_dtype_name(args.type));
}

// The grid of an operand that lies as rows x cols; its stride replaced. 0 and 0 stand for `usual`, whose
// scales lie as the product takes them: along k, `k_blocks` to a row.
struct OperandGrid {
  int32_t &rows, &cols;
  int64_t& stride;
};
void check_grid(const OperandGrid& grid, int64_t columns, int64_t k_blocks, bool is_usual, const char* name,
                const char* stride_name) {
  const bool given = grid.rows != 0 || grid.cols != 0;
  const auto fits = [](int32_t x) { return x == 1 || x == 128; };
  if (given && !(fits(grid.rows) && fits(grid.cols))) {
    throw_error(ErrorCode::kBadInput, "{}_rows and _cols are {} and {}, expected each 1 or 128, or both 0",
                name, grid.rows, grid.cols);
  }
  grid.stride = stride_or(grid.stride, given ? (columns + grid.cols - 1) / grid.cols : k_blocks, stride_name);
  if (is_usual) grid.rows = grid.cols = 0;
}

void check_scales(mr_gemm_args& args) {
  const int64_t blocks = (args.k + 127) / 128;
  if (is_fp8(args.type)) {
    if (blocks > 0 && args.m > 0) require_aligned(args.a_scales, 4, "args.a_scales");
    if (blocks > 0 && args.n > 0) require_aligned(args.b_scales, 4, "args.b_scales");
    check_grid({args.a_scale_rows, args.a_scale_cols, args.a_scale_stride},
               args.transpose_a ? args.m : args.k, blocks,
               args.transpose_a == 0 && args.a_scale_rows == 1 && args.a_scale_cols == 128, "args.a_scale",
               "args.a_scale_stride");
    check_grid({args.b_scale_rows, args.b_scale_cols, args.b_scale_stride},
               args.transpose_b ? args.k : args.n, blocks,
               args.transpose_b == 1 && args.b_scale_rows == 128 && args.b_scale_cols == 128, "args.b_scale",
               "args.b_scale_stride");
    return;
  }
  if (args.a_scale_rows != 0 || args.a_scale_cols != 0 || args.b_scale_rows != 0 || args.b_scale_cols != 0) {
    throw_error(ErrorCode::kBadInput, "args.{} is given, expected 0 unless args.type is f8_e4m3 or f8_e5m2",
                args.a_scale_rows != 0   ? "a_scale_rows"
                : args.a_scale_cols != 0 ? "a_scale_cols"
                : args.b_scale_rows != 0 ? "b_scale_rows"
                                         : "b_scale_cols");
  }
  if (args.type == MR_I8) {
    allow_aligned(args.a_scales, alignof(float), "args.a_scales");
    allow_aligned(args.b_scales, alignof(float), "args.b_scales");
  } else if (args.a_scales != nullptr || args.b_scales != nullptr) {
    throw_error(ErrorCode::kBadInput,
                "args.{} is given, expected NULL unless args.type is f8_e4m3, f8_e5m2 or i8",
                args.a_scales != nullptr ? "a_scales" : "b_scales");
  }
}

bool is_gated(mr_gemm_activation activation) {
  return activation == MR_GEMM_SWIGLU || activation == MR_GEMM_CLAMPED_SWIGLU;
}

// What the outputs are: their type's scales, the parameters of gates.
void check_outputs(mr_gemm_args& args, int64_t outputs) {
  if (is_gated(args.activation) && args.n % 2 != 0) {
    throw_error(ErrorCode::kBadInput, "args.n is {}, expected gates and as many columns that they multiply",
                args.n);
  }
  if (args.activation == MR_GEMM_CLAMPED_SWIGLU) {
    if (!(args.gate_limit > 0.0f)) {
      throw_error(ErrorCode::kBadInput, "args.gate_limit is {}, expected more than 0", args.gate_limit);
    }
    require_finite(args.gate_alpha, "args.gate_alpha");
  } else if (args.gate_alpha != 0.0f || args.gate_limit != 0.0f) {
    throw_error(ErrorCode::kBadInput, "args.{} is given, expected 0 unless args.activation is clamped SwiGLU",
                args.gate_alpha != 0.0f ? "gate_alpha" : "gate_limit");
  }
  if (args.out_type != MR_F8_E4M3) {
    if (args.c_scales != nullptr)
      throw_error(ErrorCode::kBadInput,
                  "args.c_scales is given, expected NULL unless args.out_type is f8_e4m3");
    return;
  }
  if (args.m > 0 && outputs > 0) require_aligned(args.c_scales, 4, "args.c_scales");
  args.c_scale_stride = stride_or(args.c_scale_stride, (outputs + 127) / 128, "args.c_scale_stride");
  product(args.m, args.c_scale_stride, "args.c_scale_stride");
  if (args.residual != nullptr) {
    throw_error(ErrorCode::kBadInput,
                "args.residual is given, expected NULL with an args.out_type of f8_e4m3");
  }
}

mr_gemm_args checked(const mr_gemm_args* given) {
  require_pointer(given, "args");
  mr_gemm_args args = *given;
  check_types(args);
  if (args.out_type != MR_F32 && args.out_type != MR_BF16 && args.out_type != MR_F16 &&
      args.out_type != MR_F8_E4M3) {
    throw_error(ErrorCode::kBadInput, "args.out_type is {}, expected MR_F32, MR_BF16, MR_F16 or MR_F8_E4M3",
                static_cast<int>(args.out_type));
  }
  require_range(args.m, 0, kMaxGemmSize, "args.m");
  require_range(args.n, 0, kMaxGemmSize, "args.n");
  require_range(args.k, 0, kMaxGemmSize, "args.k");
  require_range(args.transpose_a, 0, 1, "args.transpose_a");
  require_range(args.transpose_b, 0, 1, "args.transpose_b");
  require_range(args.split_k, 0, 1, "args.split_k");
  require_enum(args.activation, MR_GEMM_NONE, MR_GEMM_CLAMPED_SWIGLU, "args.activation");
  check_matrix(args.a, args.transpose_a ? args.k : args.m, args.transpose_a ? args.m : args.k, args.lda,
               args.type, "args.a", "args.lda");
  check_matrix(args.b, args.transpose_b ? args.n : args.k, args.transpose_b ? args.k : args.n, args.ldb,
               args.b_type, "args.b", "args.ldb");
  const int64_t outputs = is_gated(args.activation) ? args.n / 2 : args.n;
  check_matrix(args.c, args.m, outputs, args.ldc, args.out_type, "args.c", "args.ldc");
  check_outputs(args, outputs);
  check_scales(args);
  allow_aligned(args.bias, alignof(float), "args.bias");
  if (args.alpha == 0.0f) args.alpha = 1.0f;
  if (args.residual != nullptr) {
    if (args.residual_stride == 0) args.residual_stride = args.ldc;
    check_matrix(args.residual, args.m, outputs, args.residual_stride, args.out_type, "args.residual",
                 "args.residual_stride");
  }
  return args;
}

}  // namespace
}  // namespace millrace::api

using millrace::api::guarded;
using millrace::api::require_pointer;

mr_status mr_gemm_workspace_bytes(const mr_device* device, const mr_gemm_args* args, size_t* bytes) {
  return millrace::api::tell_bytes(device, bytes, [&](const mr_device& on) {
    return on.gemm_workspace_bytes(millrace::api::checked(args));
  });
}

mr_status mr_gemm(mr_device* device, const mr_gemm_args* args, void* workspace, size_t workspace_bytes,
                  mr_stream stream) {
  return guarded([&] {
    require_pointer(device, "device");
    const mr_gemm_args checked = millrace::api::checked(args);
    millrace::api::require_workspace(workspace, workspace_bytes, device->gemm_workspace_bytes(checked));
    if (checked.m > 0 && checked.n > 0) device->gemm(checked, workspace, stream);
  });
}
