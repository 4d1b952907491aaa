// q, k and v to E4M3 codes and scales (flash_attention.h): the bits of the CPU's, since every step is one
// float32 operation. A warp has a row, 8 elements a lane at most; rows that share a scale are read twice.
//
// Roofline: two bytes an element read (twice where 128 rows share a scale, the second time from L2) and one
// written.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "kernels/cuda/attention/flash_mma.h"
#include "kernels/cuda/resources.h"

namespace millrace::cuda {
namespace {

constexpr float kLargestE4M3 = 448.0f;
constexpr int kWarps = 8, kMaxPerLane = 8;

// Element d of the row lies in lane d % 32, place d / 32: what is 32 or more apart meets within a lane.
template <class Element>
struct Row {
  float x[kMaxPerLane];

  __device__ void load(const Element* from, int dim, bool rotate) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kMaxPerLane; ++i)
      x[i] = 32 * i + lane < dim ? static_cast<float>(from[32 * i + lane]) : 0.0f;
    if (rotate) turn(dim);
  }
  // x H / sqrt(n) for every n neighbours, n the largest power of two that divides dim.
  __device__ void turn(int dim) {
    const int lane = threadIdx.x % 32, n = dim & -dim;
    for (int step = 1; step < n && step < 32; step *= 2) {
#pragma unroll
      for (int i = 0; i < kMaxPerLane; ++i) {
        const float other = __shfl_xor_sync(~0u, x[i], step);
        x[i] = (lane & step) != 0 ? other - x[i] : x[i] + other;
      }
    }
#pragma unroll
    for (int step = 1; step < kMaxPerLane; step *= 2) {
      if (32 * step >= n) break;
#pragma unroll
      for (int i = 0; i < kMaxPerLane; ++i) {
        if ((i & step) != 0) continue;
        const float a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
    }
    const float by = 1.0f / sqrtf(static_cast<float>(n));
#pragma unroll
    for (int i = 0; i < kMaxPerLane; ++i) x[i] *= by;
  }
  __device__ float largest() const {
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < kMaxPerLane; ++i) top = fmaxf(top, fabsf(x[i]));
    for (int offset = 16; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
    return top;
  }
  __device__ void store(uint8_t* to, int dim, float scale) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kMaxPerLane; ++i) {
      if (32 * i + lane < dim)
        to[32 * i + lane] = __nv_cvt_float_to_fp8(x[i] / scale, __NV_SATFINITE, __NV_E4M3);
    }
  }
};

__device__ inline float scale_of(float largest) {
  const float scale = largest / kLargestE4M3;
  return scale == 0.0f ? 1.0f : scale;
}

template <class Element>
__device__ inline const Element* source(const mr_flash_quantize_args& a, int64_t b, int64_t row, int64_t h) {
  return static_cast<const Element*>(a.x.data) + b * a.x.batch_stride + row * a.x.seq_stride +
         h * a.x.head_stride;
}
__device__ inline uint8_t* target(const mr_flash_quantize_args& a, int64_t b, int64_t row, int64_t h) {
  return static_cast<uint8_t*>(a.codes.data) + b * a.codes.batch_stride + row * a.codes.seq_stride +
         h * a.codes.head_stride;
}

// A scale a row. Grid: eight rows of (sequence, position, head) each.
template <class Element>
__global__ void __launch_bounds__(kWarps * 32)
    flash_quantize_rows_kernel(const __grid_constant__ mr_flash_quantize_args a) {
  const int64_t index = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int64_t h = index % a.heads, row = index / a.heads % a.seq, b = index / a.heads / a.seq;
  if (b >= a.batch) return;
  Row<Element> x;
  x.load(source<Element>(a, b, row, h), a.dim, a.rotate != 0);
  const float scale = scale_of(x.largest());
  if (threadIdx.x % 32 == 0) a.scales[index] = scale;
  x.store(target(a, b, row, h), a.dim, scale);
}

// A scale for every a.rows_per_scale rows. Grid: (sequence, head, group).
template <class Element>
__global__ void __launch_bounds__(kWarps * 32)
    flash_quantize_groups_kernel(const __grid_constant__ mr_flash_quantize_args a, int64_t groups) {
  __shared__ float tops[kWarps];
  const int64_t group = blockIdx.x % groups, h = blockIdx.x / groups % a.heads,
                b = blockIdx.x / groups / a.heads;
  const int64_t first = group * a.rows_per_scale, past = min(first + a.rows_per_scale, int64_t{a.seq});
  const int warp = threadIdx.x / 32;
  Row<Element> x;
  float top = 0.0f;
  for (int64_t row = first + warp; row < past; row += kWarps) {
    x.load(source<Element>(a, b, row, h), a.dim, a.rotate != 0);
    top = fmaxf(top, x.largest());
  }
  if (threadIdx.x % 32 == 0) tops[warp] = top;
  __syncthreads();  // every warp's largest is there
  for (const float other : tops) top = fmaxf(top, other);
  const float scale = scale_of(top);
  if (threadIdx.x == 0) a.scales[blockIdx.x] = scale;
  for (int64_t row = first + warp; row < past; row += kWarps) {
    x.load(source<Element>(a, b, row, h), a.dim, a.rotate != 0);
    x.store(target(a, b, row, h), a.dim, scale);
  }
}

template <class Element>
void launch_type(const mr_flash_quantize_args& a, cudaStream_t stream) {
  if (a.rows_per_scale == 1) {
    const int64_t rows = int64_t{a.batch} * a.seq * a.heads;
    flash_quantize_rows_kernel<Element>
        <<<static_cast<unsigned>((rows + kWarps - 1) / kWarps), kWarps * 32, 0, stream>>>(a);
  } else {
    const int64_t groups = (int64_t{a.seq} + a.rows_per_scale - 1) / a.rows_per_scale;
    flash_quantize_groups_kernel<Element>
        <<<static_cast<unsigned>(groups * a.heads * a.batch), kWarps * 32, 0, stream>>>(a, groups);
  }
  check_launch("flash_quantize");
}

}  // namespace

void launch_flash_quantize(const mr_flash_quantize_args& args, cudaStream_t stream) {
  if (args.batch == 0 || args.seq == 0 || args.heads == 0) return;
  args.type == MR_F16 ? launch_type<__half>(args, stream) : launch_type<__nv_bfloat16>(args, stream);
}

}  // namespace millrace::cuda
