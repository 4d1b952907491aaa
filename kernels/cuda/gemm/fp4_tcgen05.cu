// GEMM of e2m1 operands with block scales on sm_100a, by tcgen05.mma.
//
// A CTA has 128 x 256 outputs, their sums in 256 columns of tensor memory. One thread copies stages of 256
// columns of K to shared memory (codes by tensor copies in the 128-byte swizzle, scales by bulk copies of
// whole tiles), one copies a stage's scales on to tensor memory and issues its four products, and four
// warps take the sums out in the end. Scales are brought into tiles by a kernel of their own before.
//
// Roofline of a stage: four products of 128 x 256 x 64 are 8.4 M multiply-adds on 54 KB from L2, 155 a byte.
// By the vendor's peaks the copies set the pace, not the products. Nobody has measured it.
#include "kernels/cuda/gemm/fp4.h"
#include "kernels/cuda/gemm/lowbit_output.cuh"
#include "kernels/cuda/tile/launch.cuh"
#include "kernels/cuda/tile/tensor_map.cuh"
#include "kernels/quant/fp4_tiles.h"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"
#include "millrace/kernels/tile/ptx/tcgen05.cuh"

namespace millrace::cuda {
namespace {

using quant::Fp4Stage;
using quant::kFp4RowBytes;
using quant::kFp4ScaleTileBytes;
using quant::kFp4Stages;
using quant::kFp4Steps;
using quant::kFp4TileColumns;
using quant::kFp4TileRows;
using quant::kTensorColumns;

constexpr int kThreads = 192;  // warps 0 to 3: sums to memory; 4: copies; 5: products
[[maybe_unused]] constexpr int kCopyWarp = 4, kProductWarp = 5;

struct Fp4Problem {
  CUtensorMap a, b;                  // codes as bytes, boxes of 128 bytes x 128 and 256 rows
  const uint8_t *a_tiles, *b_tiles;  // scales, [rows / 128][scale_tiles][512]
  int64_t scale_tiles;
  int64_t m, n, m_tiles;
  int32_t stages;  // of K
  float alpha;
  DenseOut out;
  void* c;  // [m, n]
  int64_t ldc;
};

template <bool kNvfp4>
constexpr size_t kSharedBytes = size_t{kFp4Stages} * Fp4Stage<kNvfp4>::kBytes + 1024;

#ifdef MILLRACE_HAS_TCGEN05

struct Fp4Barriers {
  uint64_t full[kFp4Stages];   // the products wait for a stage's copies
  uint64_t empty[kFp4Stages];  // the copies wait for the products that read what the stage had before
  uint64_t done;               // who stores waits for all products
};

template <bool kNvfp4>
__device__ void copy_stages(const Fp4Problem& p, int64_t row, int64_t column, uint8_t* stages,
                            Fp4Barriers& barriers) {
  using Stage = Fp4Stage<kNvfp4>;
  ptx::fence_bulk_copies();  // the scales' tiles were written by ordinary stores
  const int64_t run = p.scale_tiles * kFp4ScaleTileBytes;  // of 128 rows
  const uint8_t* a_scales = p.a_tiles + row / 128 * run;
  const uint8_t* b_scales = p.b_tiles + column / 128 * run;
  for (int i = 0; i < p.stages; ++i) {
    const int slot = i % kFp4Stages;
    if (i >= kFp4Stages) ptx::barrier_wait(&barriers.empty[slot], (i / kFp4Stages - 1) & 1);
    uint8_t* to = stages + slot * Stage::kBytes;
    uint64_t* full = &barriers.full[slot];
    ptx::barrier_arrive_expect(full, Stage::kBytes);
    ptx::tma_load_5d(to + Stage::kA, &p.a, i * kFp4RowBytes, static_cast<int32_t>(row), 0, 0, 0, full);
    ptx::tma_load_5d(to + Stage::kB, &p.b, i * kFp4RowBytes, static_cast<int32_t>(column), 0, 0, 0, full);
    const int64_t at = int64_t{i} * Stage::kScaleRun;
    ptx::bulk_copy_kept(to + Stage::kAScales, a_scales + at, Stage::kScaleRun, full);
    ptx::bulk_copy_kept(to + Stage::kBScales, b_scales + at, Stage::kScaleRun, full);
    ptx::bulk_copy_kept(to + Stage::kBScales + Stage::kScaleRun, b_scales + run + at, Stage::kScaleRun, full);
  }
}

template <bool kNvfp4>
__device__ void multiply_stages(const Fp4Problem& p, uint32_t tensor, const uint8_t* stages,
                                Fp4Barriers& barriers) {
  using Stage = Fp4Stage<kNvfp4>;
  for (int i = 0; i < p.stages; ++i) {
    const int slot = i % kFp4Stages;
    ptx::barrier_wait(&barriers.full[slot], (i / kFp4Stages) & 1);
    ptx::tensor_fence_after();
    const uint32_t stage = ptx::shared_address(stages + slot * Stage::kBytes);
#pragma unroll
    for (int tile = 0; tile < Stage::kScaleTiles; ++tile) {
      const uint32_t a = stage + Stage::kAScales + tile * kFp4ScaleTileBytes,
                     b = stage + Stage::kBScales + tile * kFp4ScaleTileBytes;
      ptx::tensor_copy_scales(tensor + Stage::a_scale_column(slot, tile), quant::fp4_scales_descriptor(a));
      ptx::tensor_copy_scales(tensor + Stage::b_scale_column(slot, tile, 0), quant::fp4_scales_descriptor(b));
      ptx::tensor_copy_scales(tensor + Stage::b_scale_column(slot, tile, 1),
                              quant::fp4_scales_descriptor(b + Stage::kScaleRun));
    }
#pragma unroll
    for (int step = 0; step < kFp4Steps; ++step) {
      const int tile = Stage::scale_tile(step);
      const uint32_t at = stage + step * (kFp4RowBytes / kFp4Steps);
      ptx::tensor_mma_fp4<kNvfp4>(tensor, quant::fp4_codes_descriptor(at + Stage::kA),
                                  quant::fp4_codes_descriptor(at + Stage::kB),
                                  quant::fp4_instruction_descriptor(kNvfp4, Stage::scale_id(step)),
                                  tensor + Stage::a_scale_column(slot, tile),
                                  tensor + Stage::b_scale_column(slot, tile, 0), i > 0 || step > 0);
    }
    ptx::tensor_commit(&barriers.empty[slot]);
  }
  ptx::tensor_commit(&barriers.done);
}

// A warp: its 32 rows, 32 columns at a time by a patch of shared memory, so that a row's stores are together.
__device__ void store_sums(const Fp4Problem& p, uint32_t tensor, int64_t row, int64_t column, float* patch) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int chunk = 0; chunk < kFp4TileColumns / 32; ++chunk) {
    const int64_t first = column + chunk * 32;
    if (first >= p.n) return;
    float v[32];
    ptx::tensor_load(v, tensor + (static_cast<uint32_t>(warp * 32) << 16) + chunk * 32);
#pragma unroll
    for (int j = 0; j < 32; ++j) patch[lane * 33 + j] = v[j];
    __syncwarp();
#pragma unroll 8
    for (int r = 0; r < 32; ++r) {
      const int64_t to = row + warp * 32 + r;
      if (to < p.m && first + lane < p.n)
        store_out(p.c, to * p.ldc + first + lane, p.out, p.alpha * patch[r * 33 + lane]);
    }
    __syncwarp();
  }
}

#endif  // MILLRACE_HAS_TCGEN05

template <bool kNvfp4>
__global__ void __launch_bounds__(kThreads, 1) gemm_fp4_tcgen05_kernel(const __grid_constant__ Fp4Problem p) {
#ifdef MILLRACE_HAS_TCGEN05
  extern __shared__ uint8_t fp4_raw[];
  __shared__ Fp4Barriers barriers;
  __shared__ uint32_t tensor_address;
  uint8_t* stages = fp4_raw + (1024u - ptx::shared_address(fp4_raw) % 1024u) % 1024u;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kFp4Stages; ++i) {
      ptx::barrier_init(&barriers.full[i], 1);
      ptx::barrier_init(&barriers.empty[i], 1);
    }
    ptx::barrier_init(&barriers.done, 1);
    ptx::barrier_init_fence();
  }
  if (warp == kProductWarp) ptx::tensor_alloc(&tensor_address, kTensorColumns);
  ptx::tensor_fence_before();
  __syncthreads();  // barriers and the address of tensor memory are there for every warp
  ptx::tensor_fence_after();
  const uint32_t tensor = tensor_address;
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  const int64_t row = int64_t{blockIdx.x} % p.m_tiles * kFp4TileRows,
                column = int64_t{blockIdx.x} / p.m_tiles * kFp4TileColumns;
  if (warp == kCopyWarp) {
    if (lane == 0) copy_stages<kNvfp4>(p, row, column, stages, barriers);
  } else if (warp == kProductWarp) {
    if (lane == 0) multiply_stages<kNvfp4>(p, tensor, stages, barriers);
  } else {
    ptx::barrier_wait(&barriers.done, 0);
    ptx::tensor_fence_after();
    // All copies have come and were read: the stages' memory is free.
    store_sums(p, tensor, row, column, reinterpret_cast<float*>(stages) + warp * 32 * 33);
    ptx::tensor_fence_before();
  }
  __syncwarp();
  __syncthreads();  // the sums have been read
  if (warp == kProductWarp) {
    ptx::tensor_fence_after();
    ptx::tensor_free(tensor, kTensorColumns);
  }
#else
  __trap();
#endif
}

// A thread has a word: four blocks of a row. Reads 4 bytes of a row, writes them side by side; both once.
constexpr int kTileThreads = 256;
__global__ void __launch_bounds__(kTileThreads)
    tile_fp4_scales_kernel(const uint8_t* scales, int64_t rows, int64_t blocks, uint32_t* to, int64_t words,
                           int64_t tiles) {
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  const int64_t step = int64_t{gridDim.x} * kTileThreads;
  for (int64_t i = int64_t{blockIdx.x} * kTileThreads + threadIdx.x; i < words; i += step) {
    constexpr int64_t kWords = kFp4ScaleTileBytes / 4;
    const int64_t tile = i / kWords, row = tile / tiles * 128 + i % 4 * 32 + i % kWords / 4;
    const int64_t first = tile % tiles * quant::kFp4ScaleTileBlocks;
    uint32_t word = 0;
    if (row < rows) {
      for (int b = 0; b < quant::kFp4ScaleTileBlocks; ++b) {
        if (first + b < blocks) word |= uint32_t{scales[row * blocks + first + b]} << (8 * b);
      }
    }
    to[i] = word;
  }
}

int64_t whole_tiles(int64_t rows, int64_t tile) { return (rows + tile - 1) / tile; }

CUtensorMap codes_map(const Device& device, const uint8_t* codes, int64_t rows, int64_t k, int box_rows) {
  const auto row_bytes = static_cast<cuuint64_t>(k / 2);
  const cuuint64_t sizes[5] = {row_bytes, static_cast<cuuint64_t>(rows), 1, 1, 1};
  const cuuint64_t strides[4] = {row_bytes, row_bytes, row_bytes, row_bytes};
  return ptx::swizzled_map(device, codes, true, sizes, strides, kFp4RowBytes,
                           static_cast<uint32_t>(box_rows));
}

template <bool kNvfp4>
void launch_product(const Fp4Problem& problem, int64_t ctas, const Launch& at) {
  const auto kernel = gemm_fp4_tcgen05_kernel<kNvfp4>;
  allow_shared_memory(kernel, kSharedBytes<kNvfp4>);
  launch_dependent("gemm_fp4_tcgen05_kernel", kernel, dim3(static_cast<unsigned>(ctas)), kThreads,
                   kSharedBytes<kNvfp4>, at, problem);
}

}  // namespace

bool supports_fp4_tcgen05(const Fp4Gemm& op, const Device& device) {
  // Rows of whole 16 bytes for the tensor copies.
  if (device.code_architecture() != 100 || op.k % 32 != 0 || op.k == 0 || op.m == 0 || op.n == 0)
    return false;
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  if (!aligned(op.a) || !aligned(op.b)) return false;
  if (whole_tiles(op.m, kFp4TileRows) > INT32_MAX / whole_tiles(op.n, kFp4TileColumns)) return false;
  // Without sm_100a in the build, or on a GPU that runs only sm_100's code, the kernel is a trap, which takes
  // few registers.
  cudaFuncAttributes attributes{};
  check_call(cudaFuncGetAttributes(&attributes, gemm_fp4_tcgen05_kernel<true>), "cudaFuncGetAttributes");
  return attributes.binaryVersion == 100 && attributes.numRegs > 32;
}

size_t fp4_tcgen05_workspace_bytes(const Fp4Gemm& op) {
  return static_cast<size_t>(quant::fp4_tiled_scale_bytes(op.m, op.k, op.nvfp4, kFp4TileRows) +
                             quant::fp4_tiled_scale_bytes(op.n, op.k, op.nvfp4, kFp4TileColumns));
}

void launch_tile_fp4_scales(const uint8_t* scales, int64_t rows, int64_t blocks, uint8_t* to,
                            int64_t padded_rows, int64_t tiles, const Launch& at) {
  const int64_t words = padded_rows / 128 * tiles * (kFp4ScaleTileBytes / 4);
  if (words == 0) return;
  const int64_t ctas = whole_tiles(words, kTileThreads);
  constexpr int64_t kMostCtas = 1 << 16;
  launch_dependent("tile_fp4_scales_kernel", tile_fp4_scales_kernel,
                   dim3(static_cast<unsigned>(ctas < kMostCtas ? ctas : kMostCtas)), kTileThreads, 0, at,
                   scales, rows, blocks, reinterpret_cast<uint32_t*>(to), words, tiles);
}

void launch_fp4_tcgen05(const Fp4Gemm& op, void* tiled, const Launch& at) {
  const int64_t blocks = op.k / (op.nvfp4 ? 16 : 32), tiles = quant::fp4_scale_tiles(op.k, op.nvfp4);
  const int64_t m_tiles = whole_tiles(op.m, kFp4TileRows), n_tiles = whole_tiles(op.n, kFp4TileColumns);
  auto* a_tiles = static_cast<uint8_t*>(tiled);
  uint8_t* b_tiles = a_tiles + quant::fp4_tiled_scale_bytes(op.m, op.k, op.nvfp4, kFp4TileRows);
  launch_tile_fp4_scales(op.a_scales, op.m, blocks, a_tiles, m_tiles * kFp4TileRows, tiles, at);
  launch_tile_fp4_scales(op.b_scales, op.n, blocks, b_tiles, n_tiles * kFp4TileColumns, tiles, at);
  Fp4Problem p{};
  p.a = codes_map(at.device, op.a, op.m, op.k, kFp4TileRows);
  p.b = codes_map(at.device, op.b, op.n, op.k, kFp4TileColumns);
  p.a_tiles = a_tiles, p.b_tiles = b_tiles, p.scale_tiles = tiles;
  p.m = op.m, p.n = op.n, p.m_tiles = m_tiles;
  p.stages = static_cast<int32_t>(quant::fp4_stages(op.k));
  p.alpha = op.alpha, p.out = op.out, p.c = op.c, p.ldc = op.ldc;
  op.nvfp4 ? launch_product<true>(p, m_tiles * n_tiles, at) : launch_product<false>(p, m_tiles * n_tiles, at);
}

}  // namespace millrace::cuda
