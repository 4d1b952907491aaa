// Forward with E4M3 codes: values are transposed first, since the tensor cores take 8-bit operands K-major
// alone, in the order in which a lane has probabilities; then the forward kernel.
#include "kernels/cuda/attention/flash_forward_launch.cuh"

namespace millrace::cuda {
namespace {

constexpr int kBlockKeys = 128, kTransposeThreads = 256, kMaxValueDim = 128;

struct TransposeParams {
  FlashShape shape;
  const uint8_t* v;
  FlashStrides strides;
  int32_t dim, blocks;
  uint8_t* to;  // [batch][kv_heads][dim][blocks * 128]
};

// The key, of 16 neighbours, that byte `at` of a row stands for: bytes 4t to 4t + 3 are keys 2t, 2t + 1, 8 +
// 2t and 9 + 2t.
__device__ inline int key_of_byte(int at) { return at % 4 / 2 * 8 + at / 4 * 2 + at % 2; }

// A CTA has 128 keys of a head. Keys past the sequence's end are zeros.
__global__ void __launch_bounds__(kTransposeThreads)
    flash_transpose_values_kernel(const __grid_constant__ TransposeParams p) {
  __shared__ __align__(16) uint8_t tile[kBlockKeys][kMaxValueDim + 16];
  const auto block = static_cast<int32_t>(blockIdx.x), head = static_cast<int32_t>(blockIdx.y),
             b = static_cast<int32_t>(blockIdx.z);
  const FlashSequence seq(p.shape, b);
  const int chunks = p.dim / 8;
  for (int i = static_cast<int>(threadIdx.x); i < kBlockKeys * chunks; i += kTransposeThreads) {
    const int row = i / chunks, column = i % chunks * 8, key = block * kBlockKeys + row;
    uint2 x{0, 0};
    if (key < seq.k_len) {
      x = *reinterpret_cast<const uint2*>(p.v + flash_row_at(p.strides, b, seq.k_start, key, head) + column);
    }
    *reinterpret_cast<uint2*>(&tile[row][column]) = x;
  }
  __syncthreads();  // all rows are there
  const int64_t keys = int64_t{p.blocks} * kBlockKeys;
  uint8_t* to = p.to + (int64_t{b} * p.shape.kv_heads + head) * p.dim * keys + block * kBlockKeys;
  for (int i = static_cast<int>(threadIdx.x); i < p.dim * (kBlockKeys / 16); i += kTransposeThreads) {
    const int column = i / (kBlockKeys / 16), first = i % (kBlockKeys / 16) * 16;
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      words[w] = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) words[w] |= uint32_t{tile[first + key_of_byte(4 * w + e)][column]} << 8 * e;
    }
    *reinterpret_cast<uint4*>(to + column * keys + first) = uint4{words[0], words[1], words[2], words[3]};
  }
}

}  // namespace

void launch_flash_forward_fp8(const FlashForwardCall& call, const Launch& at) {
  const mr_flash_problem& problem = call.problem;
  if (problem.max_k > 0) {
    const int32_t blocks = (problem.max_k + kBlockKeys - 1) / kBlockKeys;
    const TransposeParams p{flash_shape(problem),
                            static_cast<const uint8_t*>(call.v.data),
                            flash_strides(call.v, problem.cu_k != nullptr),
                            problem.value_dim,
                            blocks,
                            call.values};
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(problem.kv_heads),
                    static_cast<unsigned>(problem.batch));
    flash_transpose_values_kernel<<<grid, kTransposeThreads, 0, at.stream>>>(p);
    check_launch("flash_transpose_values_kernel");
  }
  using Element = __nv_fp8_e4m3;
  const bool small = problem.head_dim <= 64 && problem.value_dim <= 64;
  small ? launch_flash_forward_as<FlashForwardConfig<Element, 64, 64, 128, 2, 4, true>>(call, at)
        : launch_flash_forward_as<FlashForwardConfig<Element, 128, 128, 128, 2, 4, true>>(call, at);
}

}  // namespace millrace::cuda
