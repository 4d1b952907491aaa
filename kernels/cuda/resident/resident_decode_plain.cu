// Decode without tensor cores and without splits, one block a query head: in float32 what
// flash_attention_v2.h is, and over the FP16 cache what tensor cores and splits are measured against. Also
// the kernels that write the cache.
#include "kernels/cuda/resident/resident_decode.h"

namespace millrace::cuda::resident {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;

__device__ inline float as_float(float x) { return x; }
__device__ inline float as_float(__half x) { return __half2float(x); }
__device__ inline float warp_sum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// A warp takes every eighth key; lane l has dimensions l, l + 32, .. of at most kDim. q, k, v: rows of
// `stride` elements, head_dim of them used; k and v of one KV head begin head_rows rows after the one before.
template <class Element, int kDim>
__global__ void __launch_bounds__(kThreads)
    plain_decode_kernel(const Element* q, const Element* k, const Element* v, float* out, ResidentShape shape,
                        int32_t keys, int64_t head_rows, int32_t stride, float scale_log2) {
  constexpr int kParts = kDim / 32;
  __shared__ float shared_out[kWarps][kDim];
  __shared__ float shared_max[kWarps], shared_sum[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x;
  const int64_t start = static_cast<int64_t>(head / shape.group()) * head_rows * stride;
  float query[kParts], sum_out[kParts] = {}, row_max = -INFINITY, row_sum = 0;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const int d = lane + 32 * i;
    query[i] = d < shape.head_dim ? as_float(q[static_cast<int64_t>(head) * stride + d]) : 0.f;
  }
  for (int key = warp; key < keys; key += kWarps) {
    const int64_t row = start + static_cast<int64_t>(key) * stride;
    float score = 0, value[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int d = lane + 32 * i;
      const bool there = d < shape.head_dim;
      score = fmaf(query[i], there ? as_float(k[row + d]) : 0.f, score);
      value[i] = there ? as_float(v[row + d]) : 0.f;
    }
    score = warp_sum(score) * scale_log2;
    const float top = fmaxf(row_max, score);
    const float shrink = exp2f(row_max - top), p = exp2f(score - top);
    row_max = top;
    row_sum = fmaf(row_sum, shrink, p);
#pragma unroll
    for (int i = 0; i < kParts; ++i) sum_out[i] = fmaf(sum_out[i], shrink, p * value[i]);
  }
#pragma unroll
  for (int i = 0; i < kParts; ++i) shared_out[warp][lane + 32 * i] = sum_out[i];
  if (lane == 0) {
    shared_max[warp] = row_max;
    shared_sum[warp] = row_sum;
  }
  __syncthreads();  // all warps' parts before the sum
  float top = -INFINITY, sum = 0;
  for (int w = 0; w < kWarps; ++w) top = fmaxf(top, shared_max[w]);
  for (int w = 0; w < kWarps; ++w) sum = fmaf(shared_sum[w], exp2f(shared_max[w] - top), sum);
  for (int d = threadIdx.x; d < shape.head_dim; d += kThreads) {
    float x = 0;
    for (int w = 0; w < kWarps; ++w) x = fmaf(shared_out[w][d], exp2f(shared_max[w] - top), x);
    out[static_cast<int64_t>(head) * shape.head_dim + d] = x / sum;
  }
}

template <class Element>
cudaError_t launch_plain(const Element* q, const Element* k, const Element* v, float* out,
                         const ResidentShape& shape, int32_t keys, int64_t head_rows, int32_t stride,
                         cudaStream_t stream) {
  const float scale_log2 = 1.44269504f / sqrtf(static_cast<float>(shape.head_dim));
  const auto launch = [&](auto kernel) {
    kernel<<<static_cast<unsigned>(shape.batch_heads), kThreads, 0, stream>>>(q, k, v, out, shape, keys,
                                                                              head_rows, stride, scale_log2);
    return cudaGetLastError();
  };
  switch (shape.padded_dim()) {
    case 64:
      return launch(plain_decode_kernel<Element, 64>);
    case 128:
      return launch(plain_decode_kernel<Element, 128>);
    default:
      return launch(plain_decode_kernel<Element, 256>);
  }
}

// One thread an element of the padded rows; rows: batch_heads of q, then kv_heads of k and of v.
__global__ void append_token_kernel(const float* staging, ResidentShape shape, int32_t position, __half* q,
                                    __half* k, __half* v) {
  const int dim = shape.padded_dim();
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t row = index / dim;
  const int d = static_cast<int>(index % dim);
  if (row >= shape.batch_heads + 2 * static_cast<int64_t>(shape.kv_heads)) return;
  const __half x = __float2half_rn(d < shape.head_dim ? staging[row * shape.head_dim + d] : 0.f);
  if (row < shape.batch_heads) {
    q[row * dim + d] = x;
    return;
  }
  int64_t head = row - shape.batch_heads;
  __half* cache = head < shape.kv_heads ? k : v;
  if (head >= shape.kv_heads) head -= shape.kv_heads;
  cache[(head * shape.max_seq + position) * dim + d] = x;
}

__global__ void convert_rows_kernel(const float* rows, int32_t tokens, int32_t head_dim, int32_t dim,
                                    __half* to) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t row = index / dim;
  const int d = static_cast<int>(index % dim);
  if (row < tokens) to[index] = __float2half_rn(d < head_dim ? rows[row * head_dim + d] : 0.f);
}

__global__ void __launch_bounds__(kThreads)
    send_output_kernel(const float* out, int32_t count, float* host_out, volatile uint32_t* flag,
                       uint32_t number) {
  for (int i = threadIdx.x; i < count; i += kThreads) host_out[i] = out[i];
  __threadfence_system();  // the host sees this thread's part before the flag
  __syncthreads();
  if (threadIdx.x == 0) *flag = number;
}

unsigned blocks_for(int64_t elements) { return static_cast<unsigned>((elements + 255) / 256); }

}  // namespace

cudaError_t launch_decode_plain(const DecodeCall& call, cudaStream_t stream) {
  return launch_plain(call.q, call.k, call.v, call.out, call.shape, call.keys, call.shape.max_seq,
                      call.shape.padded_dim(), stream);
}

cudaError_t launch_decode_baseline(const float* q, const float* k, const float* v, float* out,
                                   const ResidentShape& shape, int32_t keys, cudaStream_t stream) {
  return launch_plain(q, k, v, out, shape, keys, keys, shape.head_dim, stream);
}

cudaError_t launch_append_token(const float* staging, const ResidentShape& shape, int32_t position, __half* q,
                                __half* k, __half* v, cudaStream_t stream) {
  const int64_t rows = shape.batch_heads + 2 * static_cast<int64_t>(shape.kv_heads);
  append_token_kernel<<<blocks_for(rows * shape.padded_dim()), 256, 0, stream>>>(staging, shape, position, q,
                                                                                 k, v);
  return cudaGetLastError();
}

cudaError_t launch_send_output(const float* out, int32_t count, float* host_out, uint32_t* flag,
                               uint32_t number, cudaStream_t stream) {
  send_output_kernel<<<1, kThreads, 0, stream>>>(out, count, host_out, flag, number);
  return cudaGetLastError();
}

cudaError_t launch_convert_rows(const float* rows, int32_t tokens, const ResidentShape& shape, __half* to,
                                cudaStream_t stream) {
  const int64_t elements = static_cast<int64_t>(tokens) * shape.padded_dim();
  convert_rows_kernel<<<blocks_for(elements), 256, 0, stream>>>(rows, tokens, shape.head_dim,
                                                                shape.padded_dim(), to);
  return cudaGetLastError();
}

}  // namespace millrace::cuda::resident
