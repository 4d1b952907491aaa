// The C functions of millrace/kernels/{fp4_gemm,grouped_gemm,lowbit}.h: what is checked on every device.
#include "millrace/kernels/grouped_gemm.h"

#include "kernels/api/mr_device.h"
#include "kernels/quant/lowbit_units.h"
#include "millrace/kernels/fp4_gemm.h"
#include "millrace/kernels/lowbit.h"

namespace millrace::api {
namespace {

constexpr int64_t kMaxGroupedSize = INT32_MAX, kMaxGroupedExperts = 1 << 20;
constexpr size_t kPackedAlignment = 64;  // of repacked weights: what allocators of tensors give

void require_grouped_out(mr_dtype type) {
  if (type == MR_F32 || type == MR_BF16 || type == MR_F16) return;
  throw_error(ErrorCode::kBadInput, "args.out_type is {}, expected MR_F32, MR_BF16 or MR_F16",
              static_cast<int>(type));
}
size_t out_bytes_of(mr_dtype type) { return type == MR_F32 ? 4 : type == MR_F8_E4M3 ? 1 : 2; }

// A matrix as it lies; its stride replaced.
void check_grouped_rows(const void* data, int64_t rows, int64_t cols, int64_t& stride, size_t bytes,
                        const char* name, const char* stride_name) {
  stride = stride_or(stride, cols, stride_name);
  product(rows, stride, stride_name);
  if (rows > 0 && cols > 0) require_aligned(data, bytes, name);
}

// Where the host reads the device's memory: offsets that are not these lead out of the arrays.
void check_offsets(const mr_device& device, const int32_t* offsets, int64_t experts, int64_t m) {
  if (offsets == nullptr || !device.has_host_memory()) return;
  if (offsets[0] != 0) throw_error(ErrorCode::kBadInput, "args.offsets[0] is {}, expected 0", offsets[0]);
  for (int64_t e = 0; e < experts; ++e) {
    if (offsets[e + 1] < offsets[e] || offsets[e + 1] > m)
      throw_error(ErrorCode::kBadInput, "args.offsets[{}] is {}, expected {} to {}, args.m", e + 1,
                  offsets[e + 1], offsets[e], m);
  }
  if (offsets[experts] != m)
    throw_error(ErrorCode::kBadInput, "args.offsets[{}] is {}, expected {}, args.m", experts,
                offsets[experts], m);
}

// ---------------------------------------------------------------- four-bit weights

void require_whole_groups(mr_lowbit_format format, int64_t k, const char* name) {
  require_enum(format, MR_LOWBIT_MXFP4, MR_LOWBIT_INT4_128, "format");
  if (k % quant::lowbit_group(format) != 0)
    throw_error(ErrorCode::kBadInput, "{} is {}, expected a multiple of {}", name, k,
                quant::lowbit_group(format));
}

size_t lowbit_bytes(const mr_lowbit_matrix& m) {
  return static_cast<size_t>(m.experts * quant::UnitGrid(m.n, m.k).units()) *
         static_cast<size_t>(quant::unit_bytes(m.format));
}

mr_lowbit_matrix checked_shape(const mr_lowbit_matrix* given) {
  require_pointer(given, "matrix");
  const mr_lowbit_matrix& m = *given;
  require_enum(m.packing, MR_LOWBIT_ROWS, MR_LOWBIT_AWQ, "matrix.packing");
  require_range(m.experts, 1, kMaxGroupedExperts, "matrix.experts");
  require_range(m.n, 0, kMaxGroupedSize, "matrix.n");
  require_range(m.k, 0, kMaxGroupedSize, "matrix.k");
  require_whole_groups(m.format, m.k, "matrix.k");
  product(product(m.n + quant::kUnitRows, m.k + quant::kUnitColumns, "matrix.k"), m.experts,
          "matrix.experts");
  if (quant::is_int4(m.format) != (m.packing != MR_LOWBIT_ROWS))
    throw_error(ErrorCode::kBadInput, "matrix.packing is {}, expected {}", static_cast<int>(m.packing),
                quant::is_int4(m.format) ? "MR_LOWBIT_GPTQ, _GPTQ_V2 or _AWQ for INT4"
                                         : "MR_LOWBIT_ROWS for MXFP4 and NVFP4");
  if (quant::is_int4(m.format) && m.n % 8 != 0)
    throw_error(ErrorCode::kBadInput, "matrix.n is {}, expected a multiple of 8", m.n);
  return m;
}
mr_lowbit_matrix checked(const mr_lowbit_matrix* given) {
  const mr_lowbit_matrix m = checked_shape(given);
  const bool int4 = quant::is_int4(m.format);
  if (m.n == 0 || m.k == 0) return m;
  require_aligned(m.codes, int4 ? 4 : 1, "matrix.codes");
  require_aligned(m.scales, int4 ? 2 : 1, "matrix.scales");
  if (int4) require_aligned(m.zeros, 4, "matrix.zeros");
  if (!int4 && m.zeros != nullptr)
    throw_error(ErrorCode::kBadInput, "matrix.zeros is given, expected NULL for MXFP4 and NVFP4");
  return m;
}

mr_lowbit_gemm_args checked(const mr_lowbit_gemm_args* given) {
  require_pointer(given, "args");
  mr_lowbit_gemm_args args = *given;
  require_grouped_out(args.out_type);
  require_range(args.experts, 1, kMaxGroupedExperts, "args.experts");
  require_range(args.m, 0, kMaxGroupedSize, "args.m");
  require_range(args.n, 0, kMaxGroupedSize, "args.n");
  require_range(args.k, 0, kMaxGroupedSize, "args.k");
  require_range(args.backward, 0, 1, "args.backward");
  require_whole_groups(args.format, args.k, "args.k");
  if (args.n > 0 && args.k > 0) require_aligned(args.weights, kPackedAlignment, "args.weights");
  if (args.experts > 1) require_pointer(args.offsets, "args.offsets");
  allow_aligned(args.offsets, alignof(int32_t), "args.offsets");
  allow_aligned(args.expert_scales, alignof(float), "args.expert_scales");
  allow_aligned(args.bias, alignof(float), "args.bias");
  if (args.backward != 0 && args.bias != nullptr)
    throw_error(ErrorCode::kBadInput, "args.bias is given, expected NULL where args.backward is 1");
  check_grouped_rows(args.x, args.m, args.backward ? args.n : args.k, args.ldx, 2, "args.x", "args.ldx");
  check_grouped_rows(args.y, args.m, args.backward ? args.k : args.n, args.ldy, out_bytes_of(args.out_type),
                     "args.y", "args.ldy");
  if (args.alpha == 0.0f) args.alpha = 1.0f;
  return args;
}

mr_fp4_gemm_args checked(const mr_fp4_gemm_args* given) {
  require_pointer(given, "args");
  mr_fp4_gemm_args args = *given;
  require_enum(args.format, MR_LOWBIT_MXFP4, MR_LOWBIT_NVFP4, "args.format");
  require_grouped_out(args.out_type);
  require_range(args.m, 0, kMaxGroupedSize, "args.m");
  require_range(args.n, 0, kMaxGroupedSize, "args.n");
  require_range(args.k, 0, kMaxGroupedSize, "args.k");
  require_whole_groups(args.format, args.k, "args.k");
  if (args.k > 0 && args.m > 0)
    require_pointer(args.a, "args.a"), require_pointer(args.a_scales, "args.a_scales");
  if (args.k > 0 && args.n > 0)
    require_pointer(args.b, "args.b"), require_pointer(args.b_scales, "args.b_scales");
  check_grouped_rows(args.c, args.m, args.n, args.ldc, out_bytes_of(args.out_type), "args.c", "args.ldc");
  if (args.alpha == 0.0f) args.alpha = 1.0f;
  return args;
}

// ---------------------------------------------------------------- experts

mr_grouped_gemm_args checked(const mr_grouped_gemm_args* given) {
  require_pointer(given, "args");
  mr_grouped_gemm_args args = *given;
  require_enum(args.op, MR_GROUPED_FORWARD, MR_GROUPED_WGRAD, "args.op");
  const bool fp8 = args.type == MR_F8_E4M3, forward = args.op == MR_GROUPED_FORWARD,
             wgrad = args.op == MR_GROUPED_WGRAD;
  if (args.type != MR_BF16 && args.type != MR_F16 && !fp8)
    throw_error(ErrorCode::kBadInput, "args.type is {}, expected MR_BF16, MR_F16 or MR_F8_E4M3",
                static_cast<int>(args.type));
  require_grouped_out(args.out_type);
  require_range(args.experts, 1, kMaxGroupedExperts, "args.experts");
  require_range(args.m, 0, kMaxGroupedSize, "args.m");
  require_range(args.n, 0, kMaxGroupedSize, "args.n");
  require_range(args.k, 0, kMaxGroupedSize, "args.k");
  product(product(args.experts, args.n, "args.n"), args.k, "args.k");
  require_aligned(args.offsets, alignof(int32_t), "args.offsets");
  const size_t bytes = out_bytes_of(args.type), out = out_bytes_of(args.out_type);
  check_grouped_rows(args.a, args.m, forward ? args.k : args.n, args.lda, bytes, "args.a", "args.lda");
  if (!wgrad && args.ldb != 0 && args.ldb != args.k)
    throw_error(ErrorCode::kBadInput, "args.ldb is {}, expected 0: weights lie packed", args.ldb);
  if (wgrad && args.ldc != 0 && args.ldc != args.k)
    throw_error(ErrorCode::kBadInput, "args.ldc is {}, expected 0: weights' gradients lie packed", args.ldc);
  check_grouped_rows(args.b, wgrad ? args.m : args.experts * args.n, args.k, args.ldb, bytes, "args.b",
                     "args.ldb");
  check_grouped_rows(args.c, wgrad ? args.experts * args.n : args.m, forward ? args.n : args.k, args.ldc, out,
                     "args.c", "args.ldc");
  if (fp8 && args.k > 0 && args.m > 0 && args.n > 0) {
    require_aligned(args.a_scales, 4, "args.a_scales");
    require_aligned(args.b_scales, 4, "args.b_scales");
  } else if (!fp8 && (args.a_scales != nullptr || args.b_scales != nullptr)) {
    throw_error(ErrorCode::kBadInput, "args.{} is given, expected NULL unless args.type is f8_e4m3",
                args.a_scales != nullptr ? "a_scales" : "b_scales");
  }
  if (args.alpha == 0.0f) args.alpha = 1.0f;
  return args;
}

}  // namespace
}  // namespace millrace::api

using millrace::api::guarded;
using millrace::api::require_pointer;

mr_status mr_lowbit_bytes(const mr_lowbit_matrix* matrix, size_t* bytes) {
  return guarded([&] {
    require_pointer(bytes, "bytes");
    *bytes = millrace::api::lowbit_bytes(millrace::api::checked_shape(matrix));
  });
}

mr_status mr_lowbit_repack(mr_device* device, const mr_lowbit_matrix* matrix, void* to, size_t bytes,
                           mr_stream stream) {
  return guarded([&] {
    require_pointer(device, "device");
    const mr_lowbit_matrix m = millrace::api::checked(matrix);
    const size_t needed = millrace::api::lowbit_bytes(m);
    if (bytes < needed) {
      millrace::throw_error(millrace::ErrorCode::kNoMemory, "bytes is {}, expected {}", bytes, needed);
    }
    if (needed > 0) millrace::api::require_aligned(to, millrace::api::kPackedAlignment, "to");
    if (m.n > 0 && m.k > 0) device->lowbit_repack(m, to, stream);
  });
}

mr_status mr_lowbit_gemm_workspace_bytes(const mr_device* device, const mr_lowbit_gemm_args* args,
                                         size_t* bytes) {
  return millrace::api::tell_bytes(device, bytes, [&](const mr_device& on) {
    return on.lowbit_gemm_workspace_bytes(millrace::api::checked(args));
  });
}

mr_status mr_lowbit_gemm(mr_device* device, const mr_lowbit_gemm_args* args, void* workspace,
                         size_t workspace_bytes, mr_stream stream) {
  return guarded([&] {
    require_pointer(device, "device");
    const mr_lowbit_gemm_args good = millrace::api::checked(args);
    millrace::api::require_workspace(workspace, workspace_bytes, device->lowbit_gemm_workspace_bytes(good));
    millrace::api::check_offsets(*device, good.offsets, good.experts, good.m);
    if (good.m > 0 && (good.backward ? good.k : good.n) > 0) device->lowbit_gemm(good, workspace, stream);
  });
}

mr_status mr_grouped_gemm_workspace_bytes(const mr_device* device, const mr_grouped_gemm_args* args,
                                          size_t* bytes) {
  return millrace::api::tell_bytes(device, bytes, [&](const mr_device& on) {
    return on.grouped_gemm_workspace_bytes(millrace::api::checked(args));
  });
}

mr_status mr_grouped_gemm(mr_device* device, const mr_grouped_gemm_args* args, void* workspace,
                          size_t workspace_bytes, mr_stream stream) {
  return guarded([&] {
    require_pointer(device, "device");
    const mr_grouped_gemm_args good = millrace::api::checked(args);
    millrace::api::require_workspace(workspace, workspace_bytes, device->grouped_gemm_workspace_bytes(good));
    millrace::api::check_offsets(*device, good.offsets, good.experts, good.m);
    device->grouped_gemm(good, workspace, stream);
  });
}

mr_status mr_fp4_gemm_workspace_bytes(const mr_device* device, const mr_fp4_gemm_args* args, size_t* bytes) {
  return millrace::api::tell_bytes(device, bytes, [&](const mr_device& on) {
    return on.fp4_gemm_workspace_bytes(millrace::api::checked(args));
  });
}

mr_status mr_fp4_gemm(mr_device* device, const mr_fp4_gemm_args* args, void* workspace,
                      size_t workspace_bytes, mr_stream stream) {
  return guarded([&] {
    require_pointer(device, "device");
    const mr_fp4_gemm_args good = millrace::api::checked(args);
    millrace::api::require_workspace(workspace, workspace_bytes, device->fp4_gemm_workspace_bytes(good));
    if (good.m > 0 && good.n > 0) device->fp4_gemm(good, workspace, stream);
  });
}
