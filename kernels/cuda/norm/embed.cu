// Looks up embedding rows, decoding them from whatever type the table has.
#include "kernels/cuda/device.h"
#include "kernels/cuda/norm/norm.h"
#include "kernels/cuda/quant/dequantize.cuh"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 128;

// One CTA per token, eight columns per thread and turn.
template <class Decoder>
__global__ void __launch_bounds__(kThreads)
    embed_kernel(DeviceMatrix table, const int32_t* tokens, float scale, float* out /* [count, cols] */) {
  const int64_t t = blockIdx.x, cols = table.cols;
  const int64_t row = tokens[t];
  for (int64_t c = threadIdx.x * 8; c < cols; c += kThreads * 8) {
    const int n = static_cast<int>(min(int64_t{8}, cols - c));
    float w[8];
    Decoder::decode8(table, row, c, n, w);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < n) out[t * cols + c + i] = w[i] * scale;
    }
  }
}

}  // namespace

void launch_embed(const DeviceMatrix& table, const int32_t* tokens, int64_t count, float scale, float* out,
                  const Launch& at) {
  if (count == 0) return;
  with_decoder(table.type, [&](auto decoder) {
    embed_kernel<decltype(decoder)>
        <<<static_cast<unsigned>(count), kThreads, 0, at.stream>>>(table, tokens, scale, out);
  });
  check_launch("embed_kernel");
}

}  // namespace millrace::cuda
