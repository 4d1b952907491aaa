// What a device does behind the C API. The functions of include/millrace/kernels check what holds on every
// device (pointers, shapes, strides; kernels/api/*.cpp) and call these; strides of 0 have been replaced and
// workspaces are large enough. A device throws Error for what it alone cannot do.
#pragma once

#include <memory>
#include <string>

#include "kernels/api/mr_flash.h"
#include "kernels/api/mr_fused.h"
#include "kernels/api/mr_status.h"
#include "millrace/kernels.h"
#include "tensor/tensor_view.h"

namespace millrace::api {

// What the workspace of a backward pass of linear attention depends on.
struct LinearBackwardShape {
  enum class Rule { kGatedDelta, kSelectiveScan, kWkv7 } rule;
  int32_t sequences, key_heads, heads, key_dim, value_dim;
  int64_t longest;  // tokens of a sequence
};

}  // namespace millrace::api

// Handles: the opaque types of the C headers.

struct mr_weight {
  explicit mr_weight(const mr_device& on) : device(on) {}
  mr_weight(const mr_weight&) = delete;
  mr_weight& operator=(const mr_weight&) = delete;
  virtual ~mr_weight() = default;

  const mr_device& device;
  int64_t experts = 1, rows = 0, cols = 0;
};

struct mr_attention {
  explicit mr_attention(const mr_attention_config& of) : config(of) {}
  mr_attention(const mr_attention&) = delete;
  mr_attention& operator=(const mr_attention&) = delete;
  virtual ~mr_attention() = default;

  // The batch was checked against the config.
  virtual void plan(const mr_batch& batch, mr_stream stream) = 0;
  virtual void append(const mr_kv_cache& cache, const mr_rotary* rotary, float* query, float* key,
                      const float* value, mr_stream stream) = 0;
  virtual void run(const mr_kv_cache& cache, const mr_attention_args& args, const float* query, float* out,
                   mr_stream stream) = 0;

  const mr_attention_config config;
  bool planned = false;
  size_t block_bytes = 0;  // of one layer
};

struct mr_device {
  mr_device() = default;
  mr_device(const mr_device&) = delete;
  mr_device& operator=(const mr_device&) = delete;
  virtual ~mr_device() = default;

  virtual const char* description() const = 0;
  virtual void synchronize(mr_stream stream) = 0;

  // The config was checked; a device refuses types and shapes it has no kernels for.
  virtual size_t kv_block_bytes(const mr_attention_config& config) const = 0;
  virtual size_t attention_workspace_bytes(const mr_attention_config& config) const = 0;
  virtual std::unique_ptr<mr_attention> make_attention(const mr_attention_config& config,
                                                       void* workspace) = 0;

  // Attention over tensors (mr_flash.h). The problem was checked; scale 0 has been replaced.
  virtual size_t flash_forward_workspace_bytes(const mr_flash_problem& problem) const = 0;
  virtual void flash_forward(const millrace::api::FlashForward& call) = 0;
  virtual size_t flash_backward_workspace_bytes(const mr_flash_problem& problem,
                                                bool deterministic) const = 0;
  virtual void flash_backward(const millrace::api::FlashBackward& call) = 0;
  virtual void flash_quantize(const mr_flash_quantize_args& args, mr_stream stream) = 0;
  // Attention in parts: Error{kUnsupported} unless a device has it (mr_flash_partial.cpp).
  virtual void flash_partial_forward(const millrace::api::FlashPartialForward& call);
  virtual void flash_delta(const millrace::api::FlashDelta& call);
  virtual void flash_partial_backward(const millrace::api::FlashPartialBackward& call);
  virtual void flash_merge(const mr_flash_merge_args& args);
  virtual void flash_finish(const mr_flash_finish_args& args);

  virtual size_t weight_bytes(const millrace::TensorView& matrix) const = 0;
  virtual std::unique_ptr<mr_weight> make_weight(const millrace::TensorView& matrix, void* memory) = 0;
  virtual size_t weight_kept_bytes(const millrace::TensorView& matrix) const { return weight_bytes(matrix); }
  // Error{kUnsupported} unless a device has it (mr_matmul.cpp).
  virtual std::unique_ptr<mr_weight> adopt_weight(const millrace::TensorView& matrix, void* memory);
  virtual size_t matmul_workspace_bytes(const mr_weight& weight, int64_t rows) const = 0;
  virtual void matmul(const mr_matmul_args& args, void* workspace, mr_stream stream) = 0;

  virtual size_t gemm_workspace_bytes(const mr_gemm_args& args) const = 0;
  virtual void gemm(const mr_gemm_args& args, void* workspace, mr_stream stream) = 0;

  // Checked; strides of 0 and alpha 0 have been replaced.
  virtual void lowbit_repack(const mr_lowbit_matrix& matrix, void* to, mr_stream stream) = 0;
  virtual size_t lowbit_gemm_workspace_bytes(const mr_lowbit_gemm_args& args) const = 0;
  virtual void lowbit_gemm(const mr_lowbit_gemm_args& args, void* workspace, mr_stream stream) = 0;
  virtual size_t fp4_gemm_workspace_bytes(const mr_fp4_gemm_args& args) const = 0;
  virtual void fp4_gemm(const mr_fp4_gemm_args& args, void* workspace, mr_stream stream) = 0;
  virtual size_t grouped_gemm_workspace_bytes(const mr_grouped_gemm_args& args) const = 0;
  virtual void grouped_gemm(const mr_grouped_gemm_args& args, void* workspace, mr_stream stream) = 0;

  // Linear attention. The host reads the lengths of sequences where they are in its memory.
  virtual bool has_host_memory() const = 0;
  virtual size_t linear_attention_workspace_bytes(int32_t key_dim, int32_t value_dim) const = 0;
  virtual void gated_delta(const mr_gated_delta_args& args, void* workspace, mr_stream stream) = 0;
  virtual void selective_scan(const mr_selective_scan_args& args, void* workspace, mr_stream stream) = 0;
  virtual void short_conv(const mr_short_conv_args& args, mr_stream stream) = 0;
  // Error{kUnsupported} unless a device has them (mr_linear_attention.cpp).
  virtual size_t wkv7_workspace_bytes(int32_t key_dim, int32_t value_dim) const;
  virtual void wkv7(const mr_wkv7_args& args, void* workspace, mr_stream stream);
  virtual size_t linear_backward_workspace_bytes(const millrace::api::LinearBackwardShape& shape) const;
  virtual void gated_delta_backward(const mr_gated_delta_backward_args& args, void* workspace,
                                    mr_stream stream);
  virtual void selective_scan_backward(const mr_selective_scan_backward_args& args, void* workspace,
                                       mr_stream stream);
  virtual void wkv7_backward(const mr_wkv7_backward_args& args, void* workspace, mr_stream stream);

  virtual void moe_route(const float* scores, int64_t rows, int32_t experts, int32_t k,
                         mr_softmax_over softmax_over, int32_t* chosen, float* weights, mr_stream stream) = 0;
  virtual size_t moe_workspace_bytes(const mr_moe_args& args) const = 0;
  virtual void moe(const mr_moe_args& args, void* workspace, mr_stream stream) = 0;

  virtual void rmsnorm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t rows,
                       int64_t cols, float* y, int64_t y_stride, mr_stream stream) = 0;
  virtual void rotary_apply(const mr_rotary& rotary, const int32_t* positions, int64_t rows, int32_t heads,
                            int32_t head_dim, float* x, int64_t row_stride, mr_stream stream) = 0;

  virtual size_t sample_workspace_bytes(int64_t rows, int64_t vocab) const = 0;
  virtual void sample(const float* logits, int64_t rows, int64_t vocab, const mr_sample_params* params,
                      int32_t* tokens, void* workspace, mr_stream stream) = 0;

  virtual void quantize(millrace::DType type, const float* x, int64_t rows, int64_t cols,
                        const float* importance, std::byte* out) = 0;
  virtual void dequantize(const millrace::TensorView& matrix, int64_t first, int64_t rows, float* out) = 0;

  // The fused operations (mr_fused.h).
  virtual millrace::api::FusedOps& fused() const = 0;
};

namespace millrace::api {

std::unique_ptr<mr_device> open_cpu_device(const mr_device_options& options);
// Of a GPU; Error{kDevice} in a build without CUDA.
std::unique_ptr<mr_device> open_cuda_device(int ordinal);

// Checked; an mr_dtype has the numbers of a DType.
DType dtype_of(mr_dtype type, const char* name);
// Checked: pointers, shapes, strides, scales.
TensorView view_of(const mr_matrix* matrix);

}  // namespace millrace::api
