// Products with weights of four bits (millrace/kernels/lowbit.h): published codes are repacked once into a
// tensor of bytes, which is multiplied on the device that it lies on.
#include "millrace/kernels/lowbit.h"
#include "tensors.h"

namespace millrace::torch_ops {
namespace {

mr_lowbit_format format_named(const std::string& name, const char* op) {
  if (name == "mxfp4") return MR_LOWBIT_MXFP4;
  if (name == "nvfp4") return MR_LOWBIT_NVFP4;
  if (name == "int4_32") return MR_LOWBIT_INT4_32;
  if (name == "int4_128") return MR_LOWBIT_INT4_128;
  refuse(op, "format is \"" + name + "\", expected mxfp4, nvfp4, int4_32 or int4_128");
}
mr_lowbit_packing packing_named(const std::string& name, const char* op) {
  if (name == "rows") return MR_LOWBIT_ROWS;
  if (name == "gptq") return MR_LOWBIT_GPTQ;
  if (name == "gptq_v2") return MR_LOWBIT_GPTQ_V2;
  if (name == "awq") return MR_LOWBIT_AWQ;
  refuse(op, "packing is \"" + name + "\", expected rows, gptq, gptq_v2 or awq");
}

// Bytes of `count` elements, or a refusal by name.
const void* bytes_of(const Tensor& x, size_t bytes, const Tensor& like, const char* op, const char* name) {
  require_same_device(x, like, op, name);
  const auto found = static_cast<size_t>(x.numel()) * x.element_size();
  if (!x.is_contiguous() || found != bytes) {
    refuse(op, std::string(name) + " has " + std::to_string(found) + " bytes, expected " +
                   std::to_string(bytes) + " without gaps");
  }
  return x.data_ptr();
}

// -> uint8 [bytes], what lowbit_linear multiplies.
Tensor lowbit_repack(const Tensor& codes, const Tensor& scales, MaybeTensor zeros, Text format, Text packing,
                     int64_t n, int64_t k) {
  const char* op = "lowbit_repack";
  mr_lowbit_matrix matrix{
      format_named(format, op), packing_named(packing, op), 1, n, k, nullptr, nullptr, nullptr};
  if (n < 0 || k < 0) refuse(op, "n and k are sizes, found one below 0");
  const bool int4 = matrix.format == MR_LOWBIT_INT4_32 || matrix.format == MR_LOWBIT_INT4_128;
  const int64_t group = matrix.format == MR_LOWBIT_NVFP4      ? 16
                        : matrix.format == MR_LOWBIT_INT4_128 ? 128
                                                              : 32;
  const auto weights = static_cast<size_t>(n * k), groups = static_cast<size_t>(n * (k / group));
  matrix.codes = bytes_of(codes, weights / 2, codes, op, "codes");
  matrix.scales = bytes_of(scales, groups * (int4 ? 2 : 1), codes, op, "scales");
  if (int4 != zeros.has_value()) refuse(op, int4 ? "zeros are missing" : "zeros are int4's alone");
  if (int4) matrix.zeros = bytes_of(*zeros, groups / 2, codes, op, "zeros");
  size_t bytes = 0;
  bindings::check(mr_lowbit_bytes(&matrix, &bytes));
  Tensor out = empty({static_cast<int64_t>(bytes)}, ScalarType::Byte, codes);
  if (bytes == 0) return out;
  bindings::DeviceLease device = lease(codes);
  bindings::check(mr_lowbit_repack(device.get(), &matrix, out.data_ptr(), bytes, device.stream()));
  return out;
}

// x bf16 [..., k] -> bf16 [..., n]; backward: x bf16 [..., n] -> bf16 [..., k].
Tensor lowbit_linear(const Tensor& x, const Tensor& weight, Text format, int64_t n, int64_t k, double scale,
                     MaybeTensor bias, bool backward) {
  const char* op = "lowbit_linear";
  require_type(x, ScalarType::BFloat16, op, "x", "bfloat16");
  if (scale == 0.0) refuse(op, "scale is 0");
  if (backward && bias.has_value()) refuse(op, "bias is the forward pass's alone");
  mr_lowbit_matrix shape{format_named(format, op), MR_LOWBIT_ROWS, 1, n, k, nullptr, nullptr, nullptr};
  if (shape.format == MR_LOWBIT_INT4_32 || shape.format == MR_LOWBIT_INT4_128)
    shape.packing = MR_LOWBIT_GPTQ_V2;
  size_t packed = 0;
  bindings::check(mr_lowbit_bytes(&shape, &packed));
  mr_lowbit_gemm_args args{};
  args.format = shape.format;
  args.experts = 1, args.n = n, args.k = k;
  args.weights = bytes_of(weight, packed, x, op, "weight");
  args.backward = backward ? 1 : 0;
  args.alpha = static_cast<float>(scale);
  const Rows from(x, op, "x");
  if (from.cols != (backward ? n : k)) {
    refuse(op,
           "x has " + std::to_string(from.cols) + " columns, expected " + std::to_string(backward ? n : k));
  }
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = backward ? k : n;
  Tensor y = empty(sizes, ScalarType::BFloat16, x);
  MaybeTensor keep;
  if (bias.has_value()) args.bias = float32_of(*bias, n, x, keep, op, "bias");
  if (y.numel() == 0) return y;
  args.m = from.rows;
  args.x = from.view.data, args.ldx = from.view.stride;
  args.out_type = MR_BF16;
  args.y = y.data_ptr(), args.ldy = 0;
  bindings::DeviceLease device = lease(x);
  size_t bytes = 0;
  bindings::check(mr_lowbit_gemm_workspace_bytes(device.get(), &args, &bytes));
  const Workspace workspace(bytes, x, device);
  bindings::check(mr_lowbit_gemm(device.get(), &args, workspace.data(), bytes, device.stream()));
  return y;
}

}  // namespace

void define_lowbit(torch::stable::detail::StableLibrary& m) {
  m.def(
      "lowbit_repack(Tensor codes, Tensor scales, Tensor? zeros, str format, str packing, int n, int k) -> "
      "Tensor");
  m.def(
      "lowbit_linear(Tensor x, Tensor weight, str format, int n, int k, float scale=1.0, Tensor? bias=None, "
      "bool backward=False) -> Tensor");
}

void implement_lowbit(torch::stable::detail::StableLibrary& m) {
  implement(m, "lowbit_repack", TORCH_BOX(&lowbit_repack));
  implement(m, "lowbit_linear", TORCH_BOX(&lowbit_linear));
}

}  // namespace millrace::torch_ops
