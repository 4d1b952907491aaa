#include "kernels/cuda/gemm/product_rate.h"

#include <algorithm>

#include "kernels/cuda/resources.h"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 256;

// Random numbers of magnitude 0.5 to 2, of either sign: zeros would cost less power than what models have.
// Of e4m3 the high nibbles are exponents 6 and 7, of bf16 the pattern below.
__global__ void __launch_bounds__(kThreads) fill_kernel(DenseType type, int64_t words, uint32_t* to) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < words;
       i += int64_t{gridDim.x} * kThreads) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u;
    x = (x ^ x >> 15) * 2246822519u;
    x ^= x >> 13;
    to[i] = type == DenseType::kBf16 ? (x & 0x80ff80ffu) | 0x3f003f00u : (x & 0x8f8f8f8fu) | 0x30303030u;
  }
}

__global__ void __launch_bounds__(kThreads) ones_kernel(int64_t count, float* to) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads)
    to[i] = 1.0f;
}

}  // namespace

double measure_product_rate(DenseType type, const Launch& at) {
  constexpr int64_t kSize = 8192;
  constexpr int kRuns = 4, kProducts = 8;  // of each run: long enough for the power limit to show
  const auto bytes = static_cast<size_t>(kSize * kSize * dense_bytes(type));
  const int64_t scales = kSize * (kSize / 128);
  const DeviceBuffer a(bytes, "a product to measure"), b(bytes, "a product to measure"),
      c(static_cast<size_t>(kSize * kSize) * 2, "a product to measure"),
      ones(static_cast<size_t>(scales) * sizeof(float), "a product to measure");
  const auto ctas = static_cast<unsigned>(8 * at.device.sm_count());
  for (const DeviceBuffer* operand : {&a, &b}) {
    fill_kernel<<<ctas, kThreads, 0, at.stream>>>(type, static_cast<int64_t>(bytes / 4),
                                                  operand->as<uint32_t>());
    check_launch("fill_kernel");
  }
  ones_kernel<<<ctas, kThreads, 0, at.stream>>>(scales, ones.as<float>());
  check_launch("ones_kernel");
  DenseGemm op;
  op.type = type;
  op.a = a.as<void>();
  op.b = b.as<void>();
  op.c = c.as<void>();
  op.m = op.n = op.k = op.lda = op.ldb = op.ldc = kSize;
  op.epilogue.out = DenseOut::kBf16;
  if (type == DenseType::kE4m3) {
    op.a_scales = op.b_scales = ones.as<const float>();
    op.a_scale_stride = op.b_scale_stride = kSize / 128;
  }
  cudaEvent_t begin, end;
  check_call(cudaEventCreate(&begin), "cudaEventCreate");
  check_call(cudaEventCreate(&end), "cudaEventCreate");
  float best_ms = 0.0f;
  for (int run = 0; run < kRuns; ++run) {
    check_call(cudaEventRecord(begin, at.stream), "cudaEventRecord");
    for (int i = 0; i < kProducts; ++i) launch_dense(op, at);
    check_call(cudaEventRecord(end, at.stream), "cudaEventRecord");
    check_call(cudaEventSynchronize(end), "cudaEventSynchronize");
    float ms = 0.0f;
    check_call(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    best_ms = run == 0 ? ms : std::min(best_ms, ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return 2.0 * static_cast<double>(kSize) * kSize * kSize * kProducts / (1e-3 * best_ms);
}

}  // namespace millrace::cuda
