// What the GEMV kernels share: a CTA of sixteen warps through whose shared memory tiles of packed weights
// (quant/packed_tiles.h) pass in a ring of stages, loaded by bulk copies that one thread, the producer,
// issues. Each warp is the consumer of one split-K segment of every tile; the sums of the sixteen segments
// are added in order.
//
// Registers and shared memory leave room for two CTAs per SM: while one finishes, the next kernel's
// (programmatic dependent launch) already has its first stages under way.
#pragma once

#include "kernels/cuda/device.h"
#include "kernels/cuda/gemv/gemv.h"
#include "kernels/cuda/quant/packed_tiles.h"
#include "kernels/cuda/tile/reduce.cuh"
#include "millrace/kernels/tile/ptx/barrier.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"
#include "millrace/kernels/tile/ptx/mma.cuh"

namespace millrace::cuda {

inline constexpr int kMaxStages = 16;

// The ring: work items go through its stages in turn. `full` completes when a stage's bytes are there,
// `empty` when all its consumers have read it.
struct Ring {
  uint8_t* data;
  uint64_t *full, *empty;
  uint32_t stage_bytes;
  int stages;
  int consumers;  // warps that read a stage
  // Where whoever goes through the ring is: every warp has a copy of its own.
  int index = 0;      // of the stage
  uint32_t pass = 0;  // through the ring

  __device__ void init() const {  // one thread
    for (int s = 0; s < stages; ++s) {
      ptx::barrier_init(full + s, 1);
      ptx::barrier_init(empty + s, static_cast<uint32_t>(consumers));
    }
    ptx::barrier_init_fence();
  }
  __device__ uint8_t* stage() const { return data + static_cast<uint32_t>(index) * stage_bytes; }
  __device__ void advance() {
    if (++index == stages) index = 0, ++pass;
  }
  // The producer: waits until the stage is empty, and expects `bytes` of copies to it.
  __device__ void acquire(uint32_t bytes) const {
    if (pass > 0) ptx::barrier_wait(empty + index, (pass - 1) & 1u);
    ptx::barrier_arrive_expect(full + index, bytes);
  }
  __device__ void copy(uint32_t at, const uint8_t* from, uint32_t bytes) const {
    ptx::bulk_copy(stage() + at, from, bytes, full + index);
  }
  // A consumer warp: waits until the stage is full.
  __device__ const uint8_t* wait_full() const {
    ptx::barrier_wait(full + index, pass & 1u);
    return stage();
  }
  // A consumer warp has read the stage.
  __device__ void release(int lane) const {
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(empty + index);
  }
};

// The producer's side of the ring: loads work items [0, count) in order. load(ring, i) acquires the ring's
// stage and copies item i to it.
template <class Load>
struct Producer {
  Ring ring;
  int count;
  Load load;
  int next = 0;

  __device__ Producer(const Ring& from, int items, const Load& how) : ring(from), count(items), load(how) {}
  __device__ void load_next() {
    load(ring, next++);
    ring.advance();
  }
  // All stages, by a warp, an item per lane: what precedes a copy takes longer than the copy. The first pass
  // of the ring waits for nobody. All lanes must call; lane 0 goes on loading.
  __device__ void fill_by_warp(int lane) {
    const int items = min(count, ring.stages);
    if (lane < items) {
      Ring mine = ring;
      mine.index = lane;
      load(mine, lane);
    }
    next = items;
    ring.index = items == ring.stages ? 0 : items;
    ring.pass = items == ring.stages ? 1 : 0;
  }
  // After the producer's own warp has released item i: refills the stage of an earlier item, which the other
  // consumers have most likely released too; but what this warp reads next, `ahead` items on, is loaded in
  // any case.
  __device__ void refill(int i, int ahead = 1) {
    if (next < count && (next < i + ring.stages || next <= i + ahead)) load_next();
  }
};

// Shared memory of a GEMV's CTA: the ring, rows of activations, partial sums of the segments,
// barriers.
struct GemvLayout {
  uint32_t stage_bytes = 0;  // a multiple of 128
  int32_t stages = 0;
  uint32_t rows_bytes = 0;     // of activations, a multiple of 16
  uint32_t partial_bytes = 0;  // a multiple of 16

  __host__ __device__ uint32_t total() const {
    return stage_bytes * static_cast<uint32_t>(stages) + rows_bytes + partial_bytes +
           2 * kMaxStages * sizeof(uint64_t);
  }
  __device__ Ring ring(uint8_t* shared, int consumers = kSplitK) const {
    auto* barriers = reinterpret_cast<uint64_t*>(rows(shared) + rows_bytes + partial_bytes);
    return {shared, barriers, barriers + kMaxStages, stage_bytes, stages, consumers};
  }
  __device__ uint8_t* rows(uint8_t* shared) const {
    return shared + stage_bytes * static_cast<uint32_t>(stages);
  }
  __device__ float* partial(uint8_t* shared) const {
    return reinterpret_cast<float*>(rows(shared) + rows_bytes);
  }
};

// An SM has 228 KB, 1 KB of each CTA's is the system's. A kernel whose tiles all fit kWholeBytes takes as
// much and loads everything at once; beside it one of kRingBytes has room, so that consecutive kernels
// overlap. A kernel of many items (the logits) wants a deeper ring, and no second CTA beside it: where SMs
// become free one by one, the first would get two, and work for both.
inline constexpr uint32_t kWholeBytes = 131500, kRingBytes = 97000, kDeepBytes = 200000, kMaxBytes = 231000,
                          kPersistentBytes = 129500;
inline constexpr int kManyItems = 32;

// As many stages as fit, at most `items`.
inline GemvLayout gemv_layout(uint32_t item_bytes, int64_t items, uint32_t rows_bytes, uint32_t partial_bytes,
                              const Device& device, uint32_t ring_bytes = kRingBytes,
                              uint32_t deep_bytes = kDeepBytes) {
  GemvLayout layout;
  layout.stage_bytes = (item_bytes + 127) / 128 * 128;
  layout.rows_bytes = (rows_bytes + 15) / 16 * 16;
  layout.partial_bytes = partial_bytes;
  const uint32_t fixed = layout.total();
  const auto fit = [&](uint32_t limit) {
    limit = limit < device.max_shared_memory() ? limit : device.max_shared_memory();
    return limit < fixed || !device.has_bulk_copies() ? 0 : int64_t{(limit - fixed) / layout.stage_bytes};
  };
  int64_t stages = fit(items >= kManyItems ? deep_bytes : ring_bytes);
  if (fit(kWholeBytes) >= items) stages = items;
  if (stages < 2) stages = fit(kMaxBytes);
  stages = stages < items ? stages : items;
  layout.stages = static_cast<int32_t>(stages < kMaxStages ? stages : kMaxStages);
  return layout;
}

}  // namespace millrace::cuda
