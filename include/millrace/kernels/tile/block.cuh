// The block's level of the tile vocabulary: tiles in shared memory as tensor copies load them and warpgroup
// products read them, the copies, and the products (sm_90a). Rings and roles are in ring.cuh.
//
// Shared<Element, kRows, kColumns> of 16 bits is [kColumns / 64][kRows][128 bytes], every 128 bytes swizzled:
// chunk c of 16 bytes lies at c ^ (row % 8). That is the layout of a tensor copy with 128-byte swizzle, one
// box for every 64 columns, and of both operands of a product, K-major or MN-major.
#pragma once

#include "millrace/kernels/tile/ptx/bulk_reduce.cuh"
#include "millrace/kernels/tile/ptx/tensor_copy.cuh"
#include "millrace/kernels/tile/ptx/wgmma_16bit.cuh"
#include "millrace/kernels/tile/ring.cuh"
#include "millrace/kernels/tile/warp.cuh"

namespace millrace::tile {

template <class ElementType, int kTileRows, int kTileColumns>
struct alignas(1024) Shared {
  using Element = ElementType;
  static constexpr int kRows = kTileRows, kColumns = kTileColumns;
  static constexpr int kPartColumns = ptx::kSwizzleRowBytes / static_cast<int>(sizeof(Element));
  static constexpr int kParts = kColumns / kPartColumns, kPartBytes = kRows * ptx::kSwizzleRowBytes;
  static_assert(kColumns % kPartColumns == 0 && kRows % 8 == 0);
  uint8_t bytes[kParts][kRows][ptx::kSwizzleRowBytes];

  // Where row `row`, byte `at` of part `part` lies.
  __device__ __forceinline__ uint8_t* address(int part, int row, int at) {
    return bytes[part][0] + ptx::swizzled(static_cast<uint32_t>(row), static_cast<uint32_t>(at));
  }
};

// ---------------------------------------------------------------- copies

// By one thread: the tile at element (row, column) of the map, whose boxes are kRows x 128 bytes. Completes
// on `full`.
template <class Element, int kRows, int kColumns>
__device__ __forceinline__ void load_async(Shared<Element, kRows, kColumns>& to, const CUtensorMap& map,
                                           int row, int column, uint64_t* full) {
#pragma unroll
  for (int part = 0; part < to.kParts; ++part)
    ptx::tma_load_box(to.bytes[part], &map, column + part * to.kPartColumns, row, full);
}
// The same of a tile that all kCtas of a cluster need: CTA `rank` loads its share of the rows to all of them.
// Boxes are kRows / kCtas x 128 bytes.
template <int kCtas, class Element, int kRows, int kColumns>
__device__ __forceinline__ void load_async_shared(Shared<Element, kRows, kColumns>& to,
                                                  const CUtensorMap& map, int row, int column, int rank,
                                                  uint64_t* full) {
  constexpr int kShare = kRows / kCtas;
  static_assert(kRows % kCtas == 0 && kShare % 8 == 0);
#pragma unroll
  for (int part = 0; part < to.kParts; ++part) {
    ptx::tma_load_box_multicast((1 << kCtas) - 1, to.bytes[part][rank * kShare], &map,
                                column + part * to.kPartColumns, row + rank * kShare, full);
  }
}
// By the thread that called publish's barrier last: the tile to element (row, column) of the map; what lies
// outside is left out. Nobody waits until it is there, store_wait waits until shared memory has been read.
template <class Element, int kRows, int kColumns>
__device__ __forceinline__ void store_async(const CUtensorMap& map, int row, int column,
                                            Shared<Element, kRows, kColumns>& from) {
#pragma unroll
  for (int part = 0; part < from.kParts; ++part)
    ptx::tma_store_box(&map, column + part * from.kPartColumns, row, from.bytes[part]);
  ptx::bulk_store_commit();
}
template <int kLeft = 0>
__device__ __forceinline__ void store_wait() {
  ptx::bulk_store_wait<kLeft>();
}
// A warp's 16 rows of sums to rows `row` and on of a shared tile, rounded to its type.
template <class Element, int kRows, int kColumns, int kTileColumns>
__device__ __forceinline__ void store(Shared<Element, kRows, kTileColumns>& to, int row,
                                      const SumTile<16, kColumns>& from, int column = 0) {
  const int lane = static_cast<int>(threadIdx.x % kWarpLanes), r = row + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
  for (int j = 0; j < kColumns / 16; ++j) {
    const float* x = from.v[0] + 8 * j;
    const uint32_t words[4] = {pack<Element>(x[0], x[1]), pack<Element>(x[2], x[3]),
                               pack<Element>(x[4], x[5]), pack<Element>(x[6], x[7])};
    const int at = column + 16 * j;
    ptx::store_matrices(
        ptx::shared_address(to.address(at / to.kPartColumns, r, at % to.kPartColumns * 2 + lane / 16 * 16)),
        words);
  }
}
// What a warpgroup wrote to shared memory is there for tensor copies and products, once this returns in all
// its threads. kName + warpgroup: a named barrier of theirs.
template <int kName>
__device__ __forceinline__ void publish(int warpgroup) {
  ptx::publish_to_async();
  ptx::named_barrier<kWarpgroupThreads>(kName + warpgroup);
}

// A warpgroup's 64 rows of sums to element (row, column) of the map, in whole lines: 64 columns at a time
// through two tiles in turn, by tensor copies that leave out what lies outside. kName + its index: a named
// barrier of its.
template <int kName, class Element, int kColumns>
__device__ __forceinline__ void store_rows(const CUtensorMap& map, int row, int column,
                                           SumTile<16, kColumns>& sums,
                                           Shared<Element, 64, 64> (&panels)[2]) {
  const int warpgroup = warpgroup_index();
#pragma unroll
  for (int part = 0; part < kColumns / 64; ++part) {
    if (warpgroup_leader()) store_wait<1>();  // no copy reads this panel any more
    ptx::named_barrier<kWarpgroupThreads>(kName + warpgroup);
    store(panels[part % 2], 16 * warpgroup_warp(),
          *reinterpret_cast<SumTile<16, 64>*>(sums.v[0] + 32 * part));
    publish<kName>(warpgroup);
    if (warpgroup_leader()) store_async(map, row, column + 64 * part, panels[part % 2]);
  }
}

// A warp's operands of gemm (warp.cuh) from a shared tile: 16 rows at a time by ldmatrix.
template <class Element, int kRows, int kColumns, int kR, int kC>
__device__ __forceinline__ void load(Registers<Element, kRows, kColumns, Left>& to,
                                     Shared<Element, kR, kC>& from, int row, int column) {
  const int lane = static_cast<int>(threadIdx.x % kWarpLanes);
#pragma unroll
  for (int b = 0; b < kRows / 16; ++b) {
#pragma unroll
    for (int s = 0; s < kColumns / 16; ++s) {
      const int at = column + 16 * s + lane / 16 * 8;
      const uint4 m =
          ptx::ldmatrix_x4(from.address(at / from.kPartColumns, row + 16 * b + lane % 16,
                                        at % from.kPartColumns * static_cast<int>(sizeof(Element))));
      to.v[b][s][0] = m.x, to.v[b][s][1] = m.y, to.v[b][s][2] = m.z, to.v[b][s][3] = m.w;
    }
  }
}
// to [kDepth][kColumns] from K-major rows: shared row `row` + n has column n's elements of K, from `column`
// on.
template <class Element, int kDepth, int kColumns, int kR, int kC>
__device__ __forceinline__ void load(Registers<Element, kDepth, kColumns, Right>& to,
                                     Shared<Element, kR, kC>& from, int row, int column) {
  const int lane = static_cast<int>(threadIdx.x % kWarpLanes);
#pragma unroll
  for (int s = 0; s < kDepth / 16; ++s) {
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      const int at = column + 16 * s + lane / 8 % 2 * 8;
      const uint4 m =
          ptx::ldmatrix_x4(from.address(at / from.kPartColumns, row + 16 * n + lane / 16 * 8 + lane % 8,
                                        at % from.kPartColumns * static_cast<int>(sizeof(Element))));
      to.v[s][n][0] = m.x, to.v[s][n][1] = m.y, to.v[s][n][2] = m.z, to.v[s][n][3] = m.w;
    }
  }
}

// ---------------------------------------------------------------- products of a warpgroup

// In code for other GPUs than sm_90a these trap.
#ifdef MILLRACE_HAS_WGMMA
#define MILLRACE_TILE_WGMMA(...) __VA_ARGS__
#else
#define MILLRACE_TILE_WGMMA(...) __trap()
#endif

// The compiler moves no access to these registers across this point.
template <int kColumns>
__device__ __forceinline__ void hold(SumTile<16, kColumns>& x) {
  MILLRACE_TILE_WGMMA(ptx::fence_registers(x.v[0]));
}
template <class Element, int kColumns>
__device__ __forceinline__ void hold(Registers<Element, 16, kColumns, Left>& x) {
  MILLRACE_TILE_WGMMA(ptx::fence_registers(x.v[0]));
}
// Products are under way until gemm_wait, in the order in which they were begun; what they read and write
// belongs to the tensor cores meanwhile. gemm_wait<kLeft>: all but the last kLeft are done, and `tiles`,
// their sums and left operands, are the warpgroup's again.
template <int kLeft, class... Tiles>
__device__ __forceinline__ void gemm_wait(Tiles&... tiles) {
  MILLRACE_TILE_WGMMA(ptx::wgmma_wait<kLeft>());
  (hold(tiles), ...);
}

// d (+)= a b^T: rows `row` to `row` + 63 of a [kRows][kDepth], all of b [kColumns][kDepth].
template <class Element, int kRows, int kColumns, int kDepth>
__device__ __forceinline__ void gemm_abt(SumTile<16, kColumns>& d, const Shared<Element, kRows, kDepth>& a,
                                         int row, const Shared<Element, kColumns, kDepth>& b, bool add) {
#ifdef MILLRACE_HAS_WGMMA
  const uint64_t left = ptx::wgmma_operand(a.bytes[0][0] + row * ptx::kSwizzleRowBytes),
                 right = ptx::wgmma_operand(b.bytes[0][0]);
  ptx::wgmma_fence();
#pragma unroll
  for (int s = 0; s < kDepth / 16; ++s) {
    ptx::wgmma_16bit<Element, 0, 0>(d.v[0], left + s / 4 * (a.kPartBytes / 16) + s % 4 * 2,
                                    right + s / 4 * (b.kPartBytes / 16) + s % 4 * 2, add || s > 0);
  }
  ptx::wgmma_commit();
#else
  __trap();
#endif
}
// d += a b: a in registers, all of b [kDepth][kColumns].
template <class Element, int kColumns, int kDepth>
__device__ __forceinline__ void gemm_ab(SumTile<16, kColumns>& d,
                                        const Registers<Element, 16, kDepth, Left>& a,
                                        const Shared<Element, kDepth, kColumns>& b) {
#ifdef MILLRACE_HAS_WGMMA
  const uint64_t right = ptx::wgmma_transposed_operand(b.bytes[0][0], b.kPartBytes);
  ptx::wgmma_fence();
#pragma unroll
  for (int s = 0; s < kDepth / 16; ++s) {
    ptx::wgmma_16bit<Element, 1>(d.v[0], a.v[0][s], right + s * (16 * ptx::kSwizzleRowBytes / 16), true);
  }
  ptx::wgmma_commit();
#else
  __trap();
#endif
}

// How many registers a thread of this warpgroup has from here on: multiples of 8; the block's are shared out.
template <int kRegisters>
__device__ inline void take_registers() {
  MILLRACE_TILE_WGMMA(ptx::more_registers<kRegisters>());
}
template <int kRegisters>
__device__ inline void give_registers() {
  MILLRACE_TILE_WGMMA(ptx::fewer_registers<kRegisters>());
}

}  // namespace millrace::tile
