// The kernels of the resident decode and how their grid is cut. One decode step has one query row a head; the
// query heads of one KV head are the rows of one tile of products, so that its keys are read once.
//   q      [batch_heads, kDim] FP16          kDim: head_dim padded with zeros to 64, 128 or 256
//   k, v   [kv_heads, max_seq, kDim] FP16
//   out    [batch_heads, head_dim] float32
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/resident/decode_plan.h"

namespace millrace::cuda::resident {

// What the splits leave for the last of them. Tickets are 0 between launches.
struct ResidentWorkspace {
  float* partial_out;   // [tiles, splits, tile_rows, kDim], relative to the split's maximum
  float2* partial_sum;  // [tiles, splits, tile_rows]: maximum (of base 2 scores) and sum
  uint32_t* tickets;    // [tiles]
};
inline size_t partial_out_floats(const ResidentShape& shape, int32_t sm_count) {
  return static_cast<size_t>(max_partials(shape.tiles(), sm_count)) * static_cast<size_t>(shape.tile_rows()) *
         static_cast<size_t>(shape.padded_dim());
}
inline size_t partial_sums(const ResidentShape& shape, int32_t sm_count) {
  return static_cast<size_t>(max_partials(shape.tiles(), sm_count)) * static_cast<size_t>(shape.tile_rows());
}

struct DecodeCall {
  ResidentShape shape;
  const __half* q;
  const __half* k;
  const __half* v;
  float* out;
  int32_t keys;  // 1 to max_seq
};

// Tensor cores, one launch: the splits of a tile take a ticket each, and who takes the last one reduces them.
cudaError_t launch_decode_mma(const DecodeCall& call, SplitPlan plan, const ResidentWorkspace& workspace,
                              cudaStream_t stream);
// For plan_decode: how large a cluster the current GPU and the code for it can have.
int32_t max_cluster_size(const ResidentShape& shape);
// Neither tensor cores nor splits: one block a query head. For comparison.
cudaError_t launch_decode_plain(const DecodeCall& call, cudaStream_t stream);
// The same in float32: q [batch_heads, head_dim], k and v [kv_heads, keys, head_dim].
cudaError_t launch_decode_baseline(const float* q, const float* k, const float* v, float* out,
                                   const ResidentShape& shape, int32_t keys, cudaStream_t stream);

// One token: staging [batch_heads + 2 kv_heads, head_dim] float32 (q, k, v; host memory that the GPU sees) to
// q and to position `position` of k and v.
cudaError_t launch_append_token(const float* staging, const ResidentShape& shape, int32_t position, __half* q,
                                __half* k, __half* v, cudaStream_t stream);
// The output to host memory that the GPU sees, and then `number` to *flag there. For outputs of a few
// thousand floats: quicker than a copy by the copy engine, which the stream waits for, and the host waits
// by reading *flag.
cudaError_t launch_send_output(const float* out, int32_t count, float* host_out, uint32_t* flag,
                               uint32_t number, cudaStream_t stream);
// rows [tokens, head_dim] float32 -> to [tokens, kDim] FP16, padded.
cudaError_t launch_convert_rows(const float* rows, int32_t tokens, const ResidentShape& shape, __half* to,
                                cudaStream_t stream);

}  // namespace millrace::cuda::resident
