#include "kernels/api/cuda/cuda_device.h"

#include <algorithm>
#include <vector>

#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/moe/moe.h"
#include "kernels/cuda/norm/norm.h"
#include "kernels/cuda/sample/argmax.h"
#include "kernels/cuda/sample/sample.h"
#include "kernels/quant/codec.h"

namespace millrace::api::gpu {

CudaDevice::CudaDevice(int ordinal) : device_(cuda::Device::open(ordinal)) {
  constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;
  const cuda::DeviceInfo& info = device_.info();
  description_ = fmt::format("cuda:{}, {}, {}, {:.1f} GiB", ordinal, info.name, info.architecture,
                             static_cast<double>(info.memory_bytes) / kGiB);
}

void CudaDevice::synchronize(mr_stream stream) {
  MILLRACE_CUDA_TRY(cudaStreamSynchronize(at(stream).stream));
}

// ---------------------------------------------------------------- attention

size_t CudaDevice::kv_block_bytes(const mr_attention_config& config) const {
  return cuda_kv_block_bytes(config);
}
size_t CudaDevice::attention_workspace_bytes(const mr_attention_config& config) const {
  return cuda_attention_workspace_bytes(config, device_);
}
std::unique_ptr<mr_attention> CudaDevice::make_attention(const mr_attention_config& config, void* workspace) {
  return make_cuda_attention(config, device_, workspace);
}

// ---------------------------------------------------------------- norms, rotary

void CudaDevice::rmsnorm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t rows,
                         int64_t cols, float* y, int64_t y_stride, mr_stream stream) {
  require_range(rows, 0, INT32_MAX, "rows");
  cuda::launch_rmsnorm({x, x_stride, nullptr, weight, eps, rows, cols, y, y_stride}, at(stream));
}

void CudaDevice::rotary_apply(const mr_rotary& rotary, const int32_t* positions, int64_t rows, int32_t heads,
                              int32_t head_dim, float* x, int64_t row_stride, mr_stream stream) {
  require_range(rows, 0, INT32_MAX, "rows");
  const cuda::RopeParams params{rotary.inv_freq, rotary.num_freqs, rotary.magnitude, rotary.interleaved != 0};
  cuda::launch_rotary(params, positions, rows, heads, head_dim, x, row_stride, at(stream));
}

// ---------------------------------------------------------------- routing

void CudaDevice::moe_route(const float* scores, int64_t rows, int32_t experts, int32_t k,
                           mr_softmax_over softmax_over, int32_t* chosen, float* weights, mr_stream stream) {
  cuda::launch_route_top_k(scores, rows, experts, k, softmax_over == MR_SOFTMAX_ALL, chosen, weights,
                           at(stream));
}

// ---------------------------------------------------------------- sampling

namespace {

constexpr float kGreedyBelow = 1e-6f;  // of temperatures

cuda::SampleParams params_of(const mr_sample_params& from) {
  cuda::SampleParams to;
  const bool draw = from.temperature >= kGreedyBelow && from.top_k != 1;
  to.mode = draw ? cuda::SampleParams::kDraw : cuda::SampleParams::kGreedy;
  to.scale = draw ? 1.0f / from.temperature : 1.0f;
  to.top_k = from.top_k;
  to.top_p = from.top_p;
  to.min_p = from.min_p;
  to.uniform = from.uniform;
  return to;
}

struct SampleMemory {
  SampleMemory(DeviceArena& arena, int64_t rows)
      : params(arena.take<cuda::SampleParams>(static_cast<size_t>(rows))),
        details(arena.take<cuda::SampleDetails>(static_cast<size_t>(rows))),
        candidates(arena.take<uint8_t>(cuda::argmax_candidates_bytes(rows))),
        candidates_bytes(cuda::argmax_candidates_bytes(rows)) {}
  cuda::SampleParams* params;
  cuda::SampleDetails* details;
  uint8_t* candidates;
  size_t candidates_bytes;
};

}  // namespace

size_t CudaDevice::sample_workspace_bytes(int64_t rows, int64_t) const {
  DeviceArena count(nullptr);
  const SampleMemory memory(count, rows);
  return count.used();
}

void CudaDevice::sample(const float* logits, int64_t rows, int64_t vocab, const mr_sample_params* params,
                        int32_t* tokens, void* workspace, mr_stream stream) {
  const cuda::Launch launch = at(stream);
  DeviceArena arena(workspace);
  const SampleMemory memory(arena, rows);
  std::vector<cuda::SampleParams> host(static_cast<size_t>(rows));
  std::transform(params, params + rows, host.begin(), params_of);
  if (cuda::supports_sampling(vocab, device_)) {
    // Of pageable memory: it is read before this returns.
    MILLRACE_CUDA_TRY(cudaMemcpyAsync(memory.params, host.data(), host.size() * sizeof(host[0]),
                                      cudaMemcpyHostToDevice, stream));
    return cuda::launch_sample(logits, rows, vocab, memory.params, tokens, memory.details, launch);
  }
  for (const cuda::SampleParams& p : host) {
    if (p.mode == cuda::SampleParams::kGreedy) continue;
    throw_error(ErrorCode::kUnsupported,
                "a draw from {} logits: this GPU has no kernel for so many, it has the likeliest's alone",
                vocab);
  }
  MILLRACE_CUDA_TRY(cudaMemsetAsync(memory.candidates, 0, memory.candidates_bytes, stream));
  cuda::launch_argmax(logits, rows, vocab, memory.candidates, tokens, launch);
}

// ---------------------------------------------------------------- quantizing: host memory in and out

void CudaDevice::quantize(DType type, const float*, int64_t, int64_t, const float*, std::byte*) {
  throw_error(ErrorCode::kUnsupported, "quantizing to {} on a GPU, expected a cpu device", info(type).name);
}

void CudaDevice::dequantize(const TensorView& matrix, int64_t first, int64_t rows, float* out) {
  for (int64_t r = 0; r < rows; ++r) quant::dequantize_row(matrix, first + r, out + r * matrix.cols());
}

}  // namespace millrace::api::gpu

namespace millrace::api {

std::unique_ptr<mr_device> open_cuda_device(int ordinal) {
  return std::make_unique<gpu::CudaDevice>(ordinal);
}

}  // namespace millrace::api
