// A GPU behind the C API: the calls of mr_device.h as launches of kernels/cuda. Workspaces and weights lie in
// the caller's device memory; nothing here allocates any.
#pragma once

#include <string>
#include <vector>

#include "kernels/api/cuda/cuda_fused.h"
#include "kernels/api/mr_device.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/quant/device_matrix.h"
#include "kernels/cuda/quant/packed_tiles.h"

namespace millrace::api::gpu {

// Parts of a caller's memory, each 256-byte aligned. With a null base it counts.
class DeviceArena {
 public:
  explicit DeviceArena(void* base) : base_(static_cast<uint8_t*>(base)) {}
  template <class T>
  T* take(size_t count) {
    uint8_t* at = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (count * sizeof(T) + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    return reinterpret_cast<T*>(at);
  }
  size_t used() const { return used_; }

 private:
  uint8_t* base_;
  size_t used_ = 0;
};

// In tiles (packed.format) or, for F32 and rows that are not whole blocks of 32, in the file's encoding.
struct CudaDeviceWeight final : mr_weight {
  using mr_weight::mr_weight;
  cuda::PackedMatrix packed;
  cuda::DeviceMatrix matrix;
  bool is_packed() const { return packed.format != cuda::PackedFormat::kNone; }
};
inline const CudaDeviceWeight& cuda_weight(const mr_weight* weight) {
  return static_cast<const CudaDeviceWeight&>(*weight);
}

class CudaDevice final : public mr_device {
 public:
  explicit CudaDevice(int ordinal);

  const char* description() const override { return description_.c_str(); }
  void synchronize(mr_stream stream) override;

  size_t kv_block_bytes(const mr_attention_config& config) const override;
  size_t attention_workspace_bytes(const mr_attention_config& config) const override;
  std::unique_ptr<mr_attention> make_attention(const mr_attention_config& config, void* workspace) override;

  // cuda_flash_attention.cpp
  size_t flash_forward_workspace_bytes(const mr_flash_problem& problem) const override;
  void flash_forward(const FlashForward& call) override;
  size_t flash_backward_workspace_bytes(const mr_flash_problem& problem, bool deterministic) const override;
  void flash_backward(const FlashBackward& call) override;
  void flash_quantize(const mr_flash_quantize_args& args, mr_stream stream) override;

  size_t weight_bytes(const TensorView& matrix) const override;
  std::unique_ptr<mr_weight> make_weight(const TensorView& matrix, void* memory) override;
  size_t weight_kept_bytes(const TensorView& matrix) const override;
  std::unique_ptr<mr_weight> adopt_weight(const TensorView& matrix, void* memory) override;
  size_t matmul_workspace_bytes(const mr_weight& weight, int64_t rows) const override;
  void matmul(const mr_matmul_args& args, void* workspace, mr_stream stream) override;

  size_t gemm_workspace_bytes(const mr_gemm_args& args) const override;
  void gemm(const mr_gemm_args& args, void* workspace, mr_stream stream) override;

  // cuda_linear_attention.cpp
  bool has_host_memory() const override { return false; }
  size_t linear_attention_workspace_bytes(int32_t key_dim, int32_t value_dim) const override;
  void gated_delta(const mr_gated_delta_args& args, void* workspace, mr_stream stream) override;
  void selective_scan(const mr_selective_scan_args& args, void* workspace, mr_stream stream) override;
  void short_conv(const mr_short_conv_args& args, mr_stream stream) override;
  size_t linear_backward_workspace_bytes(const LinearBackwardShape& shape) const override;
  void gated_delta_backward(const mr_gated_delta_backward_args& args, void* workspace,
                            mr_stream stream) override;
  void selective_scan_backward(const mr_selective_scan_backward_args& args, void* workspace,
                               mr_stream stream) override;

  // cuda_grouped_gemm.cpp
  void lowbit_repack(const mr_lowbit_matrix& matrix, void* to, mr_stream stream) override;
  size_t lowbit_gemm_workspace_bytes(const mr_lowbit_gemm_args& args) const override;
  void lowbit_gemm(const mr_lowbit_gemm_args& args, void* workspace, mr_stream stream) override;
  size_t fp4_gemm_workspace_bytes(const mr_fp4_gemm_args& args) const override;
  void fp4_gemm(const mr_fp4_gemm_args& args, void* workspace, mr_stream stream) override;
  size_t grouped_gemm_workspace_bytes(const mr_grouped_gemm_args&) const override { return 0; }
  void grouped_gemm(const mr_grouped_gemm_args& args, void* workspace, mr_stream stream) override;

  void moe_route(const float* scores, int64_t rows, int32_t experts, int32_t k, mr_softmax_over softmax_over,
                 int32_t* chosen, float* weights, mr_stream stream) override;
  size_t moe_workspace_bytes(const mr_moe_args& args) const override;
  void moe(const mr_moe_args& args, void* workspace, mr_stream stream) override;

  void rmsnorm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t rows, int64_t cols,
               float* y, int64_t y_stride, mr_stream stream) override;
  void rotary_apply(const mr_rotary& rotary, const int32_t* positions, int64_t rows, int32_t heads,
                    int32_t head_dim, float* x, int64_t row_stride, mr_stream stream) override;

  size_t sample_workspace_bytes(int64_t rows, int64_t vocab) const override;
  void sample(const float* logits, int64_t rows, int64_t vocab, const mr_sample_params* params,
              int32_t* tokens, void* workspace, mr_stream stream) override;

  void quantize(DType type, const float* x, int64_t rows, int64_t cols, const float* importance,
                std::byte* out) override;
  void dequantize(const TensorView& matrix, int64_t first, int64_t rows, float* out) override;

  FusedOps& fused() const override { return fused_; }

 private:
  // Where kernels go; the GPU is current on this thread from here on.
  cuda::Launch at(mr_stream stream) const {
    device_.use();
    return {device_, stream};
  }

  cuda::Device device_;
  mutable CudaFused fused_{device_};  // it has nothing of its own that changes
  std::string description_;
};

// cuda_attention.cpp
size_t cuda_kv_block_bytes(const mr_attention_config& config);
size_t cuda_attention_workspace_bytes(const mr_attention_config& config, const cuda::Device& device);
std::unique_ptr<mr_attention> make_cuda_attention(const mr_attention_config& config,
                                                  const cuda::Device& device, void* workspace);

}  // namespace millrace::api::gpu
