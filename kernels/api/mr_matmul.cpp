// The C functions of millrace/kernels/{matmul,quant}.h: what is checked on every device.
#include "millrace/kernels/matmul.h"

#include "kernels/api/mr_device.h"
#include "millrace/kernels/quant.h"

namespace millrace::api {
namespace {

constexpr int64_t kMaxDimension = INT32_MAX, kMaxExperts = 1 << 20;

// Of the numbers inside a block.
size_t alignment_of(DType type) {
  switch (type) {
    case DType::kF32:
      return 4;
    case DType::kF8E4M3:
    case DType::kMXFP4:
    case DType::kMXFP4Split:
      return 1;
    default:
      return 2;
  }
}

ScaleGrid scales_of(const mr_matrix& matrix, DType type) {
  if (type != DType::kF8E4M3 && type != DType::kMXFP4Split) {
    if (matrix.scales != nullptr) {
      throw_error(ErrorCode::kBadInput, "matrix.scales is given, expected NULL for {}", info(type).name);
    }
    return {};
  }
  const bool mxfp4 = type == DType::kMXFP4Split;
  const DType scale_type = mxfp4 ? DType::kU8 : dtype_of(matrix.scale_type, "matrix.scale_type");
  if (!mxfp4 && scale_type != DType::kF32 && scale_type != DType::kBF16) {
    throw_error(ErrorCode::kBadInput, "matrix.scale_type is {}, expected f32 or bf16", info(scale_type).name);
  }
  require_aligned(matrix.scales, mxfp4 ? 1 : alignment_of(scale_type), "matrix.scales");
  const int64_t rows_per_scale = mxfp4 ? 1 : matrix.rows_per_scale;
  const int64_t cols_per_scale = mxfp4 ? 32 : matrix.cols_per_scale;
  require_range(rows_per_scale, 1, kMaxElements, "matrix.rows_per_scale");
  require_range(cols_per_scale, 1, kMaxElements, "matrix.cols_per_scale");
  const int64_t scales = (matrix.cols + cols_per_scale - 1) / cols_per_scale;
  require_range(matrix.scales_per_row, scales, kMaxElements, "matrix.scales_per_row");
  return {static_cast<const std::byte*>(matrix.scales), scale_type, rows_per_scale, cols_per_scale,
          matrix.scales_per_row};
}

void check_whole_blocks(DType type, int64_t cols, const char* name) {
  if (cols % info(type).block_elements != 0) {
    throw_error(ErrorCode::kBadInput, "{} is {}, expected a multiple of {} for {}", name, cols,
                info(type).block_elements, info(type).name);
  }
}

}  // namespace

TensorView view_of(const mr_matrix* matrix) {
  require_pointer(matrix, "matrix");
  const DType type = dtype_of(matrix->type, "matrix.type");
  require_range(matrix->experts, 1, kMaxExperts, "matrix.experts");
  require_range(matrix->rows, 1, kMaxDimension, "matrix.rows");
  require_range(matrix->cols, 1, kMaxDimension, "matrix.cols");
  check_whole_blocks(type, matrix->cols, "matrix.cols");
  require_aligned(matrix->data, alignment_of(type), "matrix.data");
  TensorView view;
  view.name = "matrix";
  view.type = type;
  view.data = static_cast<const std::byte*>(matrix->data);
  view.row_stride_bytes =
      stride_or(matrix->row_stride_bytes, static_cast<int64_t>(bytes_of(type, matrix->cols)),
                "matrix.row_stride_bytes");
  if (view.row_stride_bytes % static_cast<int64_t>(alignment_of(type)) != 0) {
    throw_error(ErrorCode::kBadInput, "matrix.row_stride_bytes is {}, expected a multiple of {} for {}",
                view.row_stride_bytes, alignment_of(type), info(type).name);
  }
  product(product(matrix->experts, matrix->rows, "rows of all experts"), view.row_stride_bytes,
          "bytes of the matrix");
  view.scales = scales_of(*matrix, type);
  const bool plain = matrix->experts == 1;
  view.rank = plain ? 2 : 3;
  view.shape = plain ? std::array<int64_t, 4>{matrix->rows, matrix->cols, 1, 1}
                     : std::array<int64_t, 4>{matrix->experts, matrix->rows, matrix->cols, 1};
  return view;
}

namespace {

mr_matmul_args checked_args(const mr_device* device, const mr_matmul_args* args) {
  require_pointer(device, "device");
  require_pointer(args, "args");
  require_pointer(args->weight, "args.weight");
  const mr_weight& w = *args->weight;
  if (&w.device != device) throw_error(ErrorCode::kBadInput, "args.weight belongs to another device");
  if (w.experts != 1) {
    throw_error(ErrorCode::kBadInput, "args.weight has {} experts, expected a plain matrix", w.experts);
  }
  mr_matmul_args checked = *args;
  require_range(args->rows, 0, kMaxDimension, "args.rows");
  require_range(args->accumulate, 0, 1, "args.accumulate");
  checked.x_stride = stride_or(args->x_stride, w.cols, "args.x_stride");
  checked.y_stride = stride_or(args->y_stride, w.rows, "args.y_stride");
  product(args->rows, checked.x_stride, "rows of x");
  product(args->rows, checked.y_stride, "rows of y");
  allow_aligned(args->bias, alignof(float), "args.bias");
  if (args->rows > 0) {
    require_aligned(args->x, alignof(float), "args.x");
    require_aligned(args->y, alignof(float), "args.y");
  }
  return checked;
}

void check_quantized(const mr_device* device, mr_dtype type, const float* x, int64_t rows, int64_t cols,
                     const float* importance, const void* out) {
  require_pointer(device, "device");
  const DType checked = dtype_of(type, "type");
  require_range(rows, 0, kMaxDimension, "rows");
  require_range(cols, 1, kMaxDimension, "cols");
  check_whole_blocks(checked, cols, "cols");
  product(rows, cols, "rows of x");
  if (rows == 0) return;
  require_aligned(x, alignof(float), "x");
  allow_aligned(importance, alignof(float), "importance");
  require_aligned(out, alignment_of(checked), "out");
}

}  // namespace
}  // namespace millrace::api

namespace api = millrace::api;

std::unique_ptr<mr_weight> mr_device::adopt_weight(const millrace::TensorView&, void*) {
  millrace::throw_error(millrace::ErrorCode::kUnsupported,
                        "mr_weight_adopt is for GPUs, found {}: expected mr_weight_create", description());
}

extern "C" {

mr_status mr_weight_bytes(const mr_device* device, const mr_matrix* matrix, size_t* bytes) {
  return api::tell_bytes(device, bytes,
                         [&](const mr_device& on) { return on.weight_bytes(api::view_of(matrix)); });
}

mr_status mr_weight_create(mr_device* device, const mr_matrix* matrix, void* memory, size_t memory_bytes,
                           mr_weight** weight) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    api::require_pointer(weight, "weight");
    *weight = nullptr;
    const millrace::TensorView view = api::view_of(matrix);
    api::require_workspace(memory, memory_bytes, device->weight_bytes(view));
    auto made = device->make_weight(view, memory);
    made->experts = matrix->experts;
    made->rows = matrix->rows;
    made->cols = matrix->cols;
    *weight = made.release();
  });
}

mr_status mr_weight_kept_bytes(const mr_device* device, const mr_matrix* matrix, size_t* bytes) {
  return api::tell_bytes(device, bytes,
                         [&](const mr_device& on) { return on.weight_kept_bytes(api::view_of(matrix)); });
}

mr_status mr_weight_adopt(mr_device* device, const mr_matrix* matrix, void* memory, size_t memory_bytes,
                          mr_weight** weight) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    api::require_pointer(matrix, "matrix");
    api::require_pointer(weight, "weight");
    api::require_pointer(memory, "memory");
    *weight = nullptr;
    mr_matrix shape = *matrix;
    shape.data = memory;  // not read, and aligned
    if (shape.type == MR_F8_E4M3 || shape.type == MR_MXFP4_SPLIT) shape.scales = memory;
    const millrace::TensorView view = api::view_of(&shape);
    api::require_workspace(memory, memory_bytes, device->weight_kept_bytes(view));
    auto made = device->adopt_weight(view, memory);
    made->experts = shape.experts;
    made->rows = shape.rows;
    made->cols = shape.cols;
    *weight = made.release();
  });
}

void mr_weight_destroy(mr_weight* weight) { delete weight; }

mr_status mr_matmul_workspace_bytes(const mr_device* device, const mr_weight* weight, int64_t rows,
                                    size_t* bytes) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    api::require_pointer(weight, "weight");
    api::require_pointer(bytes, "bytes");
    api::require_range(rows, 0, api::kMaxDimension, "rows");
    *bytes = device->matmul_workspace_bytes(*weight, rows);
  });
}

mr_status mr_matmul(mr_device* device, const mr_matmul_args* args, void* workspace, size_t workspace_bytes,
                    mr_stream stream) {
  return api::guarded([&] {
    const mr_matmul_args checked = api::checked_args(device, args);
    if (checked.rows == 0) return;
    api::require_workspace(workspace, workspace_bytes,
                           device->matmul_workspace_bytes(*checked.weight, checked.rows));
    device->matmul(checked, workspace, stream);
  });
}

mr_status mr_row_bytes(mr_dtype type, int64_t cols, size_t* bytes) {
  return api::guarded([&] {
    api::require_pointer(bytes, "bytes");
    const millrace::DType checked = api::dtype_of(type, "type");
    api::require_range(cols, 0, api::kMaxDimension, "cols");
    api::check_whole_blocks(checked, cols, "cols");
    *bytes = millrace::bytes_of(checked, cols);
  });
}

mr_status mr_quantize(mr_device* device, mr_dtype type, const float* x, int64_t rows, int64_t cols,
                      const float* importance, void* out) {
  return api::guarded([&] {
    api::check_quantized(device, type, x, rows, cols, importance, out);
    if (rows == 0) return;
    device->quantize(static_cast<millrace::DType>(type), x, rows, cols, importance,
                     static_cast<std::byte*>(out));
  });
}

mr_status mr_dequantize(mr_device* device, const mr_matrix* matrix, int64_t first, int64_t rows, float* out) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    const millrace::TensorView view = api::view_of(matrix);
    api::require_range(first, 0, view.rows(), "first");
    api::require_range(rows, 0, view.rows() - first, "rows");
    if (rows == 0) return;
    api::require_aligned(out, alignof(float), "out");
    device->dequantize(view, first, rows, out);
  });
}

}  // extern "C"
