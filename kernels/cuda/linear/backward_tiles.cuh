// What the warpgroup kernels of gradients share (linear_backward_wgmma.cu): matrices of 64 x 64 bf16 as the
// tensor cores read them, 8 KB each, kept in the workspace just so, that one bulk copy brings them; where
// they are there.
#pragma once

#include <cuda_bf16.h>

#include "kernels/cuda/linear/linear_backward.h"
#include "kernels/cuda/tile/reduce.cuh"
#include "millrace/kernels/tile/ptx/approx.cuh"
#include "millrace/kernels/tile/ptx/barrier.cuh"
#include "millrace/kernels/tile/ptx/bulk_reduce.cuh"
#include "millrace/kernels/tile/ptx/mma.cuh"
#include "millrace/kernels/tile/ptx/wgmma_16bit.cuh"

namespace millrace::cuda {

inline constexpr int kTile = kBackwardChunk;           // rows and columns
inline constexpr int kTileBytes = kTile * kTile * 2;   // rows of 128 bytes, swizzled (ptx/wgmma.cuh)
inline constexpr int kWarpTileBytes = kTileBytes / 4;  // 16 rows of one
static_assert(kTile == 64);

// Of a chunk and head. Rows that are not there decay by nothing and write nothing.
struct TileGates {
  float left[kTile];       // of the chunk's first state
  float until_end[kTile];  // of what a row writes
  float beta[kTile];       // or steps
  float log2[kTile];       // the binary logarithm of what is left of the first state
};
inline constexpr uint32_t kChainGatesBytes = 3 * kTile * 4;  // what chains want of them

// The workspace, in bytes from its first multiple of 256. Arrays are [sequences][chunks][heads or key heads].
struct TilePlaces {
  int64_t chunks;                                        // of the longest sequence
  int64_t keys_bytes, strips, value_bytes, state_bytes;  // of one entry: K or Q; 64 columns of values each
  int64_t keys, queries, solved, pairs, values, d_out, u, dy, states, d_states, gates, sums, end;
};
__host__ __device__ inline TilePlaces tile_places(const LinearBackward& op) {
  TilePlaces p{};
  const int64_t key_tiles = (op.key_dim + kTile - 1) / kTile;
  p.chunks = (int64_t{op.most_tokens} + kTile - 1) / kTile;
  p.strips = (op.value_dim + kTile - 1) / kTile;
  p.keys_bytes = key_tiles * kTileBytes;
  p.value_bytes = p.strips * kTileBytes;
  p.state_bytes = p.strips * key_tiles * kTileBytes;
  const int64_t entries = op.sequences * p.chunks * op.heads;
  const int64_t key_entries = op.sequences * p.chunks * op.key_heads;
  p.queries = p.keys + key_entries * p.keys_bytes;
  p.solved = p.queries + key_entries * p.keys_bytes;
  p.pairs = p.solved + (op.delta ? entries * kTileBytes : 0);
  p.values = p.pairs + entries * kTileBytes;
  p.d_out = p.values + entries * p.value_bytes;
  p.u = p.d_out + entries * p.value_bytes;
  p.dy = p.u + entries * p.value_bytes;
  p.states = p.dy + entries * p.value_bytes;
  p.d_states = p.states + entries * p.state_bytes;
  p.gates = p.d_states + entries * p.state_bytes;
  p.sums = p.gates + entries * static_cast<int64_t>(sizeof(TileGates));
  p.end = p.sums + entries * 8;
  return p;
}

// A head of a sequence and its chunks.
struct TileHead {
  __device__ TileHead(const LinearBackward& op, int32_t of_sequence, int32_t of_head)
      : places(tile_places(op)),
        sequence(of_sequence),
        head(of_head),
        key_head(of_head / (op.heads / op.key_heads)),
        first(op.row_starts[of_sequence]),
        tokens(op.row_starts[of_sequence + 1] - first),
        count((tokens + kTile - 1) / kTile),
        heads(op.heads),
        key_heads(op.key_heads),
        base(
            reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(op.workspace) + 255) / 256 * 256)) {
  }
  __device__ int64_t entry(int32_t chunk) const { return (sequence * places.chunks + chunk) * heads + head; }
  __device__ int64_t row(int32_t chunk) const { return int64_t{first} + int64_t{chunk} * kTile; }
  __device__ int rows(int32_t chunk) const { return min(kTile, tokens - chunk * kTile); }
  __device__ unsigned char* keys(int64_t array, int32_t chunk) const {
    return base + array + ((sequence * places.chunks + chunk) * key_heads + key_head) * places.keys_bytes;
  }
  __device__ unsigned char* at(int64_t array, int64_t bytes, int32_t chunk) const {
    return base + array + entry(chunk) * bytes;
  }
  TilePlaces places;
  int32_t sequence, head, key_head, first, tokens, count, heads, key_heads;
  unsigned char* base;
};

__device__ inline uint32_t pack_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ inline float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Shared memory that was published, to global memory; of this thread's group.
__device__ inline void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  MILLRACE_BULK_ASM("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
                    "r"(bytes)
                    : "memory");
}

#ifdef MILLRACE_HAS_WGMMA

// Sums of m64nNk16 as the left operand of the next product: kSums / 2 columns are kSums / 8 steps of 16.
// with(column, value): of each.
template <int kSums, class With>
__device__ inline void pack_operand(uint32_t (&a)[kSums / 8][4], const float (&d)[kSums], const With& with) {
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int step = 0; step < kSums / 8; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 8 * step + 2 * i, column = 16 * step + i / 2 * 8 + 2 * t;
      a[step][i] = pack_pair(with(column, d[at]), with(column + 1, d[at + 1]));
    }
  }
}

// A warp's 16 rows of such an operand to those of a tile at `tile`: 64 columns, four steps.
__device__ inline void store_operand(uint32_t tile, const uint32_t (*a)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const uint32_t row = static_cast<uint32_t>(lane % 16);
  const uint32_t at = static_cast<uint32_t>(lane / 16 * 16);
#pragma unroll
  for (int step = 0; step < 4; ++step)
    ptx::store_matrices(tile + ptx::swizzled(row, at + static_cast<uint32_t>(step) * 32),
                        *reinterpret_cast<const uint32_t(*)[4]>(a[step]));
}

using Bf16 = __nv_bfloat16;

#endif  // MILLRACE_HAS_WGMMA

}  // namespace millrace::cuda
