// Linear layers: plain matrices by mr_gemm, weights of block types by mr_matmul; quantizing and dequantizing.
#include <tuple>

#include "weights.h"

namespace millrace::torch_ops {
namespace {

using bindings::check;

bool is_plain(mr_dtype type) { return type == MR_F32 || type == MR_F16 || type == MR_BF16; }

struct Block {
  int32_t elements = 1, bytes = 1;
};
Block block_of(mr_dtype type) {
  Block block;
  check(mr_dtype_block(type, &block.elements, &block.bytes));
  return block;
}

void set_scales(WeightTensor& w, const MaybeTensor& scales, int64_t scale_rows, int64_t scale_cols,
                const char* op) {
  mr_matrix& m = w.matrix;
  if (m.type != MR_F8_E4M3 && m.type != MR_MXFP4_SPLIT) {
    if (scales.has_value()) refuse(op, "scales are given, this type has none beside its values");
    return;
  }
  if (!scales.has_value()) refuse(op, "scales is None, this type has its scales beside the values");
  w.keep_scales = scales->is_contiguous() ? *scales : torch::stable::contiguous(*scales);
  m.scales = w.keep_scales->data_ptr();
  if (m.type == MR_MXFP4_SPLIT) {
    m.rows_per_scale = 1;
    m.cols_per_scale = 32;  // of MXFP4
    require_type(*scales, ScalarType::Byte, op, "scales", "uint8 (e8m0)");
  } else {
    if (scale_rows <= 0 || scale_cols <= 0) refuse(op, "scale_rows and scale_cols must be positive");
    m.rows_per_scale = scale_rows;
    m.cols_per_scale = scale_cols;
    m.scale_type = type_of(*scales, op, "scales");
  }
  m.scales_per_row = (m.cols + m.cols_per_scale - 1) / m.cols_per_scale;
  const int64_t expected =
      m.experts * ((m.rows + m.rows_per_scale - 1) / m.rows_per_scale) * m.scales_per_row;
  if (scales->numel() != expected) {
    refuse(op, "scales has shape " + shape_text(*scales) + ", expected " + std::to_string(expected) +
                   " elements");
  }
}

// op(a) op(b) in a's type.
struct Product {
  Rows a, b;
  bool transpose_a, transpose_b;
  const float* bias;
};

Tensor multiply(const Product& p, const std::vector<int64_t>& sizes, const Tensor& like, const char* op) {
  const int64_t m = p.transpose_a ? p.a.cols : p.a.rows, k = p.transpose_a ? p.a.rows : p.a.cols;
  const int64_t n = p.transpose_b ? p.b.rows : p.b.cols, k_of_b = p.transpose_b ? p.b.cols : p.b.rows;
  if (k != k_of_b) {
    refuse(op, "the operands share " + std::to_string(k) + " and " + std::to_string(k_of_b) + " elements");
  }
  Tensor c = empty(sizes, like);
  if (c.numel() == 0) return c;
  if (k == 0 && p.bias == nullptr) return torch::stable::zero_(c);
  mr_gemm_args args{};
  args.type = p.a.view.type;
  args.m = m;
  args.n = n;
  args.k = k;
  args.a = p.a.view.data;
  args.lda = p.a.view.stride;
  args.transpose_a = p.transpose_a ? 1 : 0;
  args.b = p.b.view.data;
  args.ldb = p.b.view.stride;
  args.transpose_b = p.transpose_b ? 1 : 0;
  args.out_type = p.a.view.type;
  args.c = c.data_ptr();
  args.bias = p.bias;
  bindings::DeviceLease device = lease(like);
  size_t bytes = 0;
  check(mr_gemm_workspace_bytes(device.get(), &args, &bytes));
  const Workspace workspace(bytes, like, device);
  check(mr_gemm(device.get(), &args, workspace.data(), bytes, device.stream()));
  return c;
}

// x [..., in], weight [out, in] of the same type, bias float32 [out].
Tensor linear(const Tensor& x, const Tensor& weight, MaybeTensor bias) {
  const char* op = "linear";
  if (weight.dim() != 2) refuse(op, "weight has shape " + shape_text(weight) + ", expected [out, in]");
  require_same_device(weight, x, op, "weight");
  if (!same_type(x, weight)) refuse(op, "weight has another dtype than x");
  Product p{Rows(x, op, "x"), Rows(weight, op, "weight"), false, true, nullptr};
  MaybeTensor keep;
  if (bias.has_value()) p.bias = float32_of(*bias, p.b.rows, x, keep, op, "bias");
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = p.b.rows;
  if (p.a.cols == 0 && bias.has_value() && p.b.rows > 0 && p.a.rows > 0) {
    Tensor y = empty(sizes, x);
    return torch::stable::copy_(y, *bias);
  }
  return multiply(p, sizes, x, op);
}

Tensor matmul(const Tensor& a, const Tensor& b, bool transpose_a, bool transpose_b) {
  const char* op = "matmul";
  if (a.dim() != 2 || b.dim() != 2) {
    refuse(op, "a and b have shapes " + shape_text(a) + " and " + shape_text(b) + ", expected two matrices");
  }
  require_same_device(b, a, op, "b");
  if (!same_type(a, b)) refuse(op, "b has another dtype than a");
  const Product p{Rows(a, op, "a"), Rows(b, op, "b"), transpose_a, transpose_b, nullptr};
  return multiply(p, {transpose_a ? p.a.cols : p.a.rows, transpose_b ? p.b.rows : p.b.cols}, a, op);
}

// A matrix of float8_e4m3fn or float8_e5m2 and its scales, float32 [ceil(rows / grid[0]), ceil(cols /
// grid[1])].
struct Scaled {
  Scaled(const Tensor& x, const Tensor& scales, int64_t grid_rows, int64_t grid_cols, const char* op,
         const char* name)
      : codes(x, op, name) {
    const std::string of(name);
    if (codes.view.type != MR_F8_E4M3 && codes.view.type != MR_F8_E5M2)
      refuse(op, of + " has another dtype, expected float8_e4m3fn or float8_e5m2");
    if (x.dim() != 2) refuse(op, of + " has shape " + shape_text(x) + ", expected a matrix");
    for (const int64_t side : {grid_rows, grid_cols}) {
      if (side != 1 && side != 128)
        refuse(op, of + " has scales for " + std::to_string(grid_rows) + " x " + std::to_string(grid_cols) +
                       ", expected each 1 or 128");
    }
    const int64_t down = (codes.rows + grid_rows - 1) / grid_rows,
                  across = (codes.cols + grid_cols - 1) / grid_cols;
    require_type(scales, ScalarType::Float, op, (of + "_scales").c_str(), "float32");
    require_shape(scales, {down, across}, op, (of + "_scales").c_str());
    require_same_device(scales, x, op, (of + "_scales").c_str());
    keep = scales.is_contiguous() ? scales : torch::stable::contiguous(scales);
    rows = static_cast<int32_t>(grid_rows), cols = static_cast<int32_t>(grid_cols);
  }
  const float* scales() const { return static_cast<const float*>(keep->data_ptr()); }
  Rows codes;
  MaybeTensor keep;
  int32_t rows, cols;  // that share a scale
};

ScalarType parse_out(const std::string& name, const char* op) {
  if (name == "f32") return ScalarType::Float;
  if (name == "f16") return ScalarType::Half;
  if (name == "bf16") return ScalarType::BFloat16;
  refuse(op, "out_type is " + name + ", expected f32, f16 or bf16");
}

// op(a) op(b) of eight-bit floats with their scales, as they lie.
Tensor matmul_fp8(const Tensor& a, const Tensor& b, const Tensor& a_scales, const Tensor& b_scales,
                  bool transpose_a, bool transpose_b, int64_t a_scale_rows, int64_t a_scale_cols,
                  int64_t b_scale_rows, int64_t b_scale_cols, std::string out_type) {
  const char* op = "matmul_fp8";
  require_same_device(b, a, op, "b");
  const Scaled of_a(a, a_scales, a_scale_rows, a_scale_cols, op, "a"),
      of_b(b, b_scales, b_scale_rows, b_scale_cols, op, "b");
  const Rows &ra = of_a.codes, &rb = of_b.codes;
  mr_gemm_args args{};
  args.type = ra.view.type, args.b_type = rb.view.type;
  args.m = transpose_a ? ra.cols : ra.rows, args.k = transpose_a ? ra.rows : ra.cols;
  args.n = transpose_b ? rb.rows : rb.cols;
  const int64_t k_of_b = transpose_b ? rb.cols : rb.rows;
  if (args.k != k_of_b) {
    refuse(op,
           "the operands share " + std::to_string(args.k) + " and " + std::to_string(k_of_b) + " elements");
  }
  const ScalarType out = parse_out(out_type, op);
  Tensor c = empty({args.m, args.n}, out, a);
  if (c.numel() == 0) return c;
  if (args.k == 0) return torch::stable::zero_(c);
  args.a = ra.view.data, args.lda = ra.view.stride, args.transpose_a = transpose_a ? 1 : 0;
  args.b = rb.view.data, args.ldb = rb.view.stride, args.transpose_b = transpose_b ? 1 : 0;
  args.a_scales = of_a.scales(), args.a_scale_rows = of_a.rows, args.a_scale_cols = of_a.cols;
  args.b_scales = of_b.scales(), args.b_scale_rows = of_b.rows, args.b_scale_cols = of_b.cols;
  args.out_type = type_of(c, op, "output");
  args.c = c.data_ptr();
  bindings::DeviceLease device = lease(a);
  size_t bytes = 0;
  check(mr_gemm_workspace_bytes(device.get(), &args, &bytes));
  const Workspace workspace(bytes, a, device);
  check(mr_gemm(device.get(), &args, workspace.data(), bytes, device.stream()));
  return c;
}

// w float32 [rows, cols] -> uint8 [rows, bytes of a row].
Tensor quantize(const Tensor& w, Text type_name, MaybeTensor importance) {
  const char* op = "quantize";
  const mr_dtype type = parse_type(type_name, op);
  require_type(w, ScalarType::Float, op, "w", "float32");
  const Rows from(w.is_contiguous() ? w : torch::stable::contiguous(w), op, "w");
  const Vector columns(importance, from.cols, w, op, "importance");
  if (importance.has_value()) require_type(*importance, ScalarType::Float, op, "importance", "float32");
  size_t row_bytes = 0;
  check(mr_row_bytes(type, from.cols, &row_bytes));
  std::vector<int64_t> sizes = sizes_of(w);
  sizes.back() = static_cast<int64_t>(row_bytes);
  Tensor out = empty(sizes, ScalarType::Byte, w);
  if (w.numel() == 0) return out;
  bindings::DeviceLease device = lease(w);
  check(mr_quantize(device.get(), type, static_cast<const float*>(from.view.data), from.rows, from.cols,
                    static_cast<const float*>(columns.view.data), out.data_ptr()));
  return out;
}

// -> float32 [.., rows, cols].
Tensor dequantize(const Tensor& weight, Text type, MaybeTensor scales, int64_t scale_rows,
                  int64_t scale_cols) {
  const WeightTensor w(weight, type, scales, scale_rows, scale_cols, "dequantize", "weight");
  std::vector<int64_t> sizes = sizes_of(weight);
  sizes.back() = w.matrix.cols;
  Tensor out = empty(sizes, ScalarType::Float, weight);
  if (out.numel() == 0) return out;
  bindings::DeviceLease device = lease(weight);
  check(mr_dequantize(device.get(), &w.matrix, 0, w.matrix.experts * w.matrix.rows,
                      static_cast<float*>(out.data_ptr())));
  return out;
}

// x float32 [..., in] times a weight of any type -> float32 [..., out].
Tensor linear_quantized(const Tensor& x, const Tensor& weight, Text type, MaybeTensor scales,
                        MaybeTensor bias, int64_t scale_rows, int64_t scale_cols) {
  const char* op = "linear_quantized";
  require_type(x, ScalarType::Float, op, "x", "float32");
  require_same_device(weight, x, op, "weight");
  if (!x.is_cpu())
    refuse(op, "x lies on a GPU, where a weight is packed once: expected a CPU's, or linear_packed");
  const WeightTensor w(weight, type, scales, scale_rows, scale_cols, op, "weight");
  if (w.matrix.experts != 1)
    refuse(op, "weight has shape " + shape_text(weight) + ", expected two dimensions");
  const Rows from(x, op, "x");
  if (from.cols != w.matrix.cols) {
    refuse(op, "x has " + std::to_string(from.cols) + " columns, weight " + std::to_string(w.matrix.cols));
  }
  MaybeTensor keep;
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = w.matrix.rows;
  Tensor y = empty(sizes, ScalarType::Float, x);
  const float* add = bias.has_value() ? float32_of(*bias, w.matrix.rows, x, keep, op, "bias") : nullptr;
  if (y.numel() == 0) return y;
  bindings::DeviceLease device = lease(x);
  const PreparedWeight prepared(device.get(), w, x);
  const mr_matmul_args args{prepared.get(),
                            add,
                            static_cast<const float*>(from.view.data),
                            from.view.stride,
                            static_cast<float*>(y.data_ptr()),
                            0,
                            from.rows,
                            0};
  size_t bytes = 0;
  check(mr_matmul_workspace_bytes(device.get(), prepared.get(), from.rows, &bytes));
  const Workspace workspace(bytes, x, device);
  check(mr_matmul(device.get(), &args, workspace.data(), bytes, device.stream()));
  return y;
}

}  // namespace

mr_dtype parse_type(const std::string& name, const char* op) {
  mr_dtype type = MR_F32;
  if (mr_dtype_parse(name.c_str(), &type) != MR_OK) refuse(op, "type: " + std::string(mr_last_error()));
  return type;
}

WeightTensor::WeightTensor(const Tensor& weight, const std::string& type, const MaybeTensor& scales,
                           int64_t scale_rows, int64_t scale_cols, const char* op, const char* name) {
  const int64_t dims = weight.dim();
  if (dims != 2 && dims != 3) {
    refuse(op, std::string(name) + " has shape " + shape_text(weight) +
                   ", expected [rows, cols] or [experts, rows, cols]");
  }
  matrix.type = type.empty() ? type_of(weight, op, name) : parse_type(type, op);
  keep = weight.is_contiguous() ? weight : torch::stable::contiguous(weight);
  matrix.experts = dims == 3 ? weight.size(0) : 1;
  matrix.rows = weight.size(dims - 2);
  matrix.cols = weight.size(dims - 1);
  matrix.data = keep->data_ptr();
  if (is_plain(matrix.type) || matrix.type == MR_F8_E4M3) {
    if (type_of(weight, op, name) != matrix.type)
      refuse(op, std::string(name) + " has another dtype than type " + type);
  } else {
    require_type(weight, ScalarType::Byte, op, name, "uint8: the bytes of blocks");
    const Block block = block_of(matrix.type);
    if (matrix.cols % block.bytes != 0) {
      refuse(op, std::string(name) + " has rows of " + std::to_string(matrix.cols) +
                     " bytes, expected blocks of " + std::to_string(block.bytes));
    }
    matrix.cols = matrix.cols / block.bytes * block.elements;
  }
  set_scales(*this, scales, scale_rows, scale_cols, op);
}

PreparedWeight::PreparedWeight(mr_device* device, const WeightTensor& of, const Tensor& like) {
  size_t bytes = 0;
  check(mr_weight_bytes(device, &of.matrix, &bytes));
  memory_.emplace(bytes, like);
  check(mr_weight_create(device, &of.matrix, memory_->data(), bytes, &weight_));
}

void define_products(torch::stable::detail::StableLibrary& m) {
  m.def("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor");
  m.def("matmul(Tensor a, Tensor b, bool transpose_a=False, bool transpose_b=False) -> Tensor");
  m.def(
      "matmul_fp8(Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, bool transpose_a=False, "
      "bool transpose_b=False, int a_scale_rows=1, int a_scale_cols=128, int b_scale_rows=128, "
      "int b_scale_cols=128, str out_type=\"f32\") -> Tensor");
  m.def("quantize(Tensor w, str type, Tensor? importance=None) -> Tensor");
  m.def(
      "dequantize(Tensor weight, str type, Tensor? scales=None, int scale_rows=128, int scale_cols=128) -> "
      "Tensor");
  m.def(
      "linear_quantized(Tensor x, Tensor weight, str type, Tensor? scales=None, Tensor? bias=None, "
      "int scale_rows=128, int scale_cols=128) -> Tensor");
}

void implement_products(torch::stable::detail::StableLibrary& m) {
  implement(m, "linear", TORCH_BOX(&linear));
  implement(m, "matmul", TORCH_BOX(&matmul));
  implement(m, "matmul_fp8", TORCH_BOX(&matmul_fp8));
  implement(m, "quantize", TORCH_BOX(&quantize));
  implement(m, "dequantize", TORCH_BOX(&dequantize));
  implement(m, "linear_quantized", TORCH_BOX(&linear_quantized));
}

}  // namespace millrace::torch_ops
