// What the streaming kernels share: a CTA of sixteen warps through whose shared memory tiles of packed
// weights (packed.h) pass in a ring of stages, brought by bulk copies that one thread asks for. Each warp
// owns a segment of the columns, in every tile; what the sixteen segments give is added up in order.
//
// Registers and shared memory leave room for two CTAs per SM: while one finishes, the next kernel's
// (programmatic dependent launch) already has its first stages under way.
#pragma once

#include "kernels/cuda/device.h"
#include "kernels/cuda/gemv/gemv.h"
#include "kernels/cuda/ptx/barrier.cuh"
#include "kernels/cuda/ptx/grid_dependency.cuh"
#include "kernels/cuda/ptx/mma.cuh"
#include "kernels/cuda/quant/packed_tiles.h"
#include "kernels/cuda/tile/reduce.cuh"

namespace millrace::cuda {

inline constexpr int kMaxStages = 16;
inline constexpr int kMaxStreamTokens = kMaxStreamRows;

// The ring: pieces of work go through its stages in turn. `full` completes when a stage's bytes are there,
// `empty` when all its readers have read it.
struct Ring {
  uint8_t* data;
  uint64_t *full, *empty;
  uint32_t stage_bytes;
  int stages;
  int readers;  // warps that read a piece
  // The stage and pass of whoever walks the ring: every warp has a copy of its own.
  int slot = 0;
  uint32_t pass = 0;

  __device__ void init() const {  // one thread
    for (int s = 0; s < stages; ++s) {
      ptx::barrier_init(full + s, 1);
      ptx::barrier_init(empty + s, static_cast<uint32_t>(readers));
    }
    ptx::barrier_init_fence();
  }
  __device__ uint8_t* stage() const { return data + static_cast<uint32_t>(slot) * stage_bytes; }
  __device__ void advance() {
    if (++slot == stages) slot = 0, ++pass;
  }
  // Thread 0: the stage is free, and `bytes` will be copied to it.
  __device__ void claim(uint32_t bytes) const {
    if (pass > 0) ptx::barrier_wait(empty + slot, (pass - 1) & 1u);
    ptx::barrier_arrive_expect(full + slot, bytes);
  }
  __device__ void copy(uint32_t at, const uint8_t* from, uint32_t bytes) const {
    ptx::bulk_copy(stage() + at, from, bytes, full + slot);
  }
  // A warp: the piece is there.
  __device__ const uint8_t* wait_full() const {
    ptx::barrier_wait(full + slot, pass & 1u);
    return stage();
  }
  // A warp has read the piece.
  __device__ void release(int lane) const {
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(empty + slot);
  }
};

// Thread 0's side of the ring: asks for pieces [0, count) in order. issue(ring, i) claims the ring's stage
// and copies piece i to it.
template <class Issue>
struct Feeder {
  Ring ring;
  int count;
  Issue issue;
  int next = 0;

  __device__ Feeder(const Ring& from, int pieces, const Issue& how) : ring(from), count(pieces), issue(how) {}
  __device__ void feed() {
    issue(ring, next++);
    ring.advance();
  }
  // As many as there are stages.
  __device__ void fill() {
    while (next < count && next < ring.stages) feed();
  }
  // The same by a warp, a piece per lane: what precedes a copy takes longer than the copy. The first pass of
  // the ring waits for nobody. All lanes must call; lane 0 goes on feeding.
  __device__ void fill_by_warp(int lane) {
    const int pieces = min(count, ring.stages);
    if (lane < pieces) {
      Ring mine = ring;
      mine.slot = lane;
      issue(mine, lane);
    }
    next = pieces;
    ring.slot = pieces == ring.stages ? 0 : pieces;
    ring.pass = pieces == ring.stages ? 1 : 0;
  }
  // After this warp has read and given back piece i: the stage of a piece before it, which the others have
  // most likely read too; but what this warp reads next, `ahead` pieces on, is asked for in any case.
  __device__ void refill(int i, int ahead = 1) {
    if (next < count && (next < i + ring.stages || next <= i + ahead)) feed();
  }
};

// Shared memory of a streaming CTA: the ring, rows of activations, partial sums [slots][16 segments][floats],
// barriers.
struct StreamShape {
  uint32_t stage_bytes = 0;  // a multiple of 128
  int32_t stages = 0;
  uint32_t rows_bytes = 0;     // of activations, a multiple of 16
  uint32_t partial_bytes = 0;  // a multiple of 16

  __host__ __device__ uint32_t total() const {
    return stage_bytes * static_cast<uint32_t>(stages) + rows_bytes + partial_bytes + 16 * sizeof(float) +
           2 * kMaxStages * sizeof(uint64_t);
  }
  __device__ Ring ring(uint8_t* shared, int readers = kSegments) const {
    auto* barriers =
        reinterpret_cast<uint64_t*>(rows(shared) + rows_bytes + partial_bytes + 16 * sizeof(float));
    return {shared, barriers, barriers + kMaxStages, stage_bytes, stages, readers};
  }
  __device__ uint8_t* rows(uint8_t* shared) const {
    return shared + stage_bytes * static_cast<uint32_t>(stages);
  }
  __device__ float* partial(uint8_t* shared) const {
    return reinterpret_cast<float*>(rows(shared) + rows_bytes);
  }
  __device__ float* scratch(uint8_t* shared) const {
    return reinterpret_cast<float*>(rows(shared) + rows_bytes + partial_bytes);
  }
};

// An SM has 228 KB, 1 KB of each CTA's is the system's. A kernel whose tiles all fit kWholeBytes takes as
// much and loads everything at once; beside it one of kRingBytes has room, so that consecutive kernels
// overlap. A kernel of many pieces (the logits) wants a deeper ring, and no second CTA beside it: where SMs
// become free one by one, the first would get two, and work for both.
inline constexpr uint32_t kWholeBytes = 131500, kRingBytes = 97000, kDeepBytes = 200000, kMostBytes = 231000,
                          kMoeBytes = 129500;
inline constexpr int kManyPieces = 32;

// As many stages as fit, at most `pieces`.
inline StreamShape stream_shape(uint32_t piece_bytes, int64_t pieces, uint32_t rows_bytes,
                                uint32_t partial_bytes, const Device& device,
                                uint32_t ring_bytes = kRingBytes, uint32_t deep_bytes = kDeepBytes) {
  StreamShape shape;
  shape.stage_bytes = (piece_bytes + 127) / 128 * 128;
  shape.rows_bytes = (rows_bytes + 15) / 16 * 16;
  shape.partial_bytes = partial_bytes;
  const uint32_t fixed = shape.total();
  const auto fit = [&](uint32_t limit) {
    limit = limit < device.max_shared_memory() ? limit : device.max_shared_memory();
    return limit < fixed || !device.has_bulk_copies() ? 0 : int64_t{(limit - fixed) / shape.stage_bytes};
  };
  int64_t stages = fit(pieces >= kManyPieces ? deep_bytes : ring_bytes);
  if (fit(kWholeBytes) >= pieces) stages = pieces;
  if (stages < 2) stages = fit(kMostBytes);
  stages = stages < pieces ? stages : pieces;
  shape.stages = static_cast<int32_t>(stages < kMaxStages ? stages : kMaxStages);
  return shape;
}

}  // namespace millrace::cuda
