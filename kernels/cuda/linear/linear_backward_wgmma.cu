// Gradients of layers with a state where there are warpgroup products (linear_backward.h): what chunks need
// of themselves, a CTA each; states forwards and gradients of states backwards at once, a warpgroup for 64
// columns of values; the gradients of chunks, a CTA each.
//
// Roofline: of a chunk and head of 128 x 128 13 products of 64 x 128 x 128 in bf16, 0.15 ms of 8,192 tokens
// and 32 heads, and 550 KB of traffic, 0.55 ms.
#include "base/check.h"
#include "kernels/cuda/linear/backward_chain.cuh"
#include "kernels/cuda/linear/backward_prepare.cuh"
#include "kernels/cuda/linear/backward_rows.cuh"
#include "kernels/cuda/linear/linear_backward.h"
#include "kernels/cuda/tile/launch.cuh"

namespace millrace::cuda {
namespace {

// Gradients of what a head has once: a thread each, chunks in order.
__global__ void tile_sums_kernel(const __grid_constant__ LinearBackward op) {
  const auto head = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  if (head >= op.heads) return;
  float sums[2] = {0.0f, 0.0f};
  for (int32_t sequence = 0; sequence < op.sequences; ++sequence) {
    const TileHead of(op, sequence, head);
    for (int32_t chunk = 0; chunk < of.count; ++chunk) {
      const float2 from = *reinterpret_cast<const float2*>(of.at(of.places.sums, 8, chunk));
      sums[0] += from.x, sums[1] += from.y;
    }
  }
  if (op.d_rates != nullptr) op.d_rates[head] = sums[0];
  if (op.d_skip != nullptr) op.d_skip[head] = sums[1];
}

template <class Shared, class Kernel>
void launch_tiles(Kernel* kernel, const char* name, dim3 grid, int threads, const LinearBackward& op,
                  const Launch& at) {
  allow_shared_memory(kernel, sizeof(Shared));
  kernel<<<grid, static_cast<unsigned>(threads), sizeof(Shared), at.stream>>>(op);
  check_launch(name);
}

template <int kKeys, bool kDelta, int kStrips>
void launch_chains(const LinearBackward& op, const Launch& at) {
  const auto groups = static_cast<unsigned>(tile_places(op).strips) / kStrips;
  launch_tiles<ChainShared<kKeys, kDelta, kStrips>>(
      chains_kernel<kKeys, kDelta, kStrips>, "chains_kernel",
      dim3(2 * groups, static_cast<unsigned>(op.heads), static_cast<unsigned>(op.sequences)),
      chain_threads(kStrips), op, at);
}

template <int kKeys, bool kDelta>
void launch_tile_backward(const LinearBackward& op, const Launch& at) {
  const TilePlaces places = tile_places(op);
  const int32_t parts = (op.heads / op.key_heads - 1) / prepare_heads(kDelta) + 1;
  const auto chunks = static_cast<unsigned>(places.chunks * op.sequences);
  launch_tiles<PrepareTiles<kKeys>>(prepare_tiles_kernel<kKeys, kDelta>, "prepare_tiles_kernel",
                                    dim3(static_cast<unsigned>(2 * op.key_heads * parts), chunks),
                                    kPrepareThreads, op, at);
  // Two strips of a head share what is copied: where there are more of them than SMs.
  if (places.strips == 2 && int64_t{op.sequences} * op.heads * 2 > at.device.sm_count()) {
    launch_chains<kKeys, kDelta, 2>(op, at);
  } else {
    launch_chains<kKeys, kDelta, 1>(op, at);
  }
  launch_tiles<RowShared<kKeys, kDelta>>(row_gradients_kernel<kKeys, kDelta>, "row_gradients_kernel",
                                         dim3(static_cast<unsigned>(op.key_heads), chunks),
                                         kKeys / kTile * 128, op, at);
}

}  // namespace

size_t warpgroup_backward_floats(const LinearBackward& op) {
  return static_cast<size_t>(tile_places(op).end + 256) / sizeof(float);
}

void launch_warpgroup_backward(const LinearBackward& op, const Launch& at) {
  if (op.sequences > 0) {
    if (op.key_dim <= 64) {
      op.delta ? launch_tile_backward<64, true>(op, at) : launch_tile_backward<64, false>(op, at);
    } else {
      op.delta ? launch_tile_backward<128, true>(op, at) : launch_tile_backward<128, false>(op, at);
    }
  }
  if (op.d_rates == nullptr && op.d_skip == nullptr) return;
  constexpr unsigned kHeadThreads = 64;
  tile_sums_kernel<<<(static_cast<unsigned>(op.heads) + kHeadThreads - 1) / kHeadThreads, kHeadThreads, 0,
                     at.stream>>>(op);
  check_launch("tile_sums_kernel");
}

}  // namespace millrace::cuda
