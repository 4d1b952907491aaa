// A CPU behind the C API: threads, the kernel table of an instruction set, and calls of kernels/cpu.
#pragma once

#include <string>

#include "base/thread_pool.h"
#include "kernels/api/cpu_fused.h"
#include "kernels/api/mr_device.h"
#include "kernels/cpu/context.h"
#include "kernels/cpu/matmul/weight_matrix.h"

namespace millrace::api {

struct CpuDeviceWeight final : mr_weight {
  CpuDeviceWeight(const mr_device& on, cpu::WeightMatrix of) : mr_weight(on), matrix(std::move(of)) {}
  cpu::WeightMatrix matrix;
};

class CpuDevice final : public mr_device {
 public:
  explicit CpuDevice(const mr_device_options& options);

  const char* description() const override { return description_.c_str(); }
  void synchronize(mr_stream) override {}

  size_t kv_block_bytes(const mr_attention_config& config) const override;
  size_t attention_workspace_bytes(const mr_attention_config& config) const override;
  std::unique_ptr<mr_attention> make_attention(const mr_attention_config& config, void* workspace) override;

  // cpu_flash.cpp
  size_t flash_forward_workspace_bytes(const mr_flash_problem& problem) const override;
  void flash_forward(const FlashForward& call) override;
  size_t flash_backward_workspace_bytes(const mr_flash_problem& problem, bool deterministic) const override;
  void flash_backward(const FlashBackward& call) override;
  void flash_quantize(const mr_flash_quantize_args& args, mr_stream stream) override;
  void flash_partial_forward(const FlashPartialForward& call) override;
  void flash_delta(const FlashDelta& call) override;
  void flash_partial_backward(const FlashPartialBackward& call) override;
  void flash_merge(const mr_flash_merge_args& args) override;
  void flash_finish(const mr_flash_finish_args& args) override;

  size_t weight_bytes(const TensorView& matrix) const override;
  std::unique_ptr<mr_weight> make_weight(const TensorView& matrix, void* memory) override;
  size_t matmul_workspace_bytes(const mr_weight& weight, int64_t rows) const override;
  void matmul(const mr_matmul_args& args, void* workspace, mr_stream stream) override;

  // cpu_gemm.cpp
  size_t gemm_workspace_bytes(const mr_gemm_args& args) const override;
  void gemm(const mr_gemm_args& args, void* workspace, mr_stream stream) override;
  void lowbit_repack(const mr_lowbit_matrix& matrix, void* to, mr_stream stream) override;
  size_t lowbit_gemm_workspace_bytes(const mr_lowbit_gemm_args& args) const override;
  void lowbit_gemm(const mr_lowbit_gemm_args& args, void* workspace, mr_stream stream) override;
  size_t fp4_gemm_workspace_bytes(const mr_fp4_gemm_args& args) const override;
  void fp4_gemm(const mr_fp4_gemm_args& args, void* workspace, mr_stream stream) override;
  size_t grouped_gemm_workspace_bytes(const mr_grouped_gemm_args& args) const override;
  void grouped_gemm(const mr_grouped_gemm_args& args, void* workspace, mr_stream stream) override;

  // cpu_linear_attention.cpp
  bool has_host_memory() const override { return true; }
  size_t linear_attention_workspace_bytes(int32_t key_dim, int32_t value_dim) const override;
  void gated_delta(const mr_gated_delta_args& args, void* workspace, mr_stream stream) override;
  void selective_scan(const mr_selective_scan_args& args, void* workspace, mr_stream stream) override;
  void short_conv(const mr_short_conv_args& args, mr_stream stream) override;
  size_t wkv7_workspace_bytes(int32_t key_dim, int32_t value_dim) const override;
  void wkv7(const mr_wkv7_args& args, void* workspace, mr_stream stream) override;
  size_t linear_backward_workspace_bytes(const LinearBackwardShape& shape) const override;
  void gated_delta_backward(const mr_gated_delta_backward_args& args, void* workspace,
                            mr_stream stream) override;
  void selective_scan_backward(const mr_selective_scan_backward_args& args, void* workspace,
                               mr_stream stream) override;
  void wkv7_backward(const mr_wkv7_backward_args& args, void* workspace, mr_stream stream) override;

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
  bool has_bf16_tiles() const { return kernels_.quantize_bf16_tile != nullptr; }
  cpu::Context context(const cpu::GemmScratch* scratch = nullptr) { return {kernels_, pool_, scratch}; }

  const cpu::KernelTable& kernels_;
  ThreadPool pool_;
  mutable CpuFused fused_{kernels_, pool_};  // it has nothing of its own that changes
  std::string description_;
};

// cpu_attention.cpp
std::unique_ptr<mr_attention> make_cpu_attention(const mr_attention_config& config,
                                                 const cpu::KernelTable& kernels, ThreadPool& pool,
                                                 void* workspace);
size_t cpu_attention_workspace_bytes(const mr_attention_config& config, int threads);

}  // namespace millrace::api
