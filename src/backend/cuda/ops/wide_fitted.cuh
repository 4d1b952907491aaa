// Large items (wide_large.cuh) whose outputs are fitted: two CTAs, a cluster, have 128 tokens each and the
// same outputs, as many as let all SMs have an item and none a second one. For few rows: 2,880 outputs of 512
// tokens are 33 x 2 items of 88 outputs for 66 clusters, where 128 x 128 outputs keep 92 of 132 SMs at work.
//
// Tokens are the rows of the products here and weights their columns, of which an instruction takes any
// multiple of eight. Each CTA brings its own tokens, and half of the weights to both.
//
// Limits, in cycles for 64 columns of a CTA: the tensor cores, and 40 bytes a cycle from L2; beside them what
// was measured, by the clock of the SM. (By 128 bytes a cycle of shared memory, each warpgroup reading both
// of its operands, 48, 88 and 160 outputs would be 400, 520 and 736: that count is too high.)
//                  tensor cores    L2              measured
//   48 outputs     192             19 KB: 475      292
//   88 outputs     352             21.5 KB: 550    392
//   160 outputs    640             26 KB: 650      661
#pragma once

#include "backend/cuda/ops/wide_large.cuh"

namespace millrace::cuda {

// kTiles: of weights. Shared memory: stages of [weights][tokens], barriers.
template <int kTiles>
struct FittedLayout {
  static constexpr int kPairBytes = TileFormat<PackedFormat::kBf16>::kPairBytes;
  static constexpr int kTokensAt = kTiles * kPairBytes;
  static constexpr int kStageBytes = kTokensAt + kFittedTokens * ptx::kSwizzleRowBytes;
  static constexpr int kFits = kMostShared / (kStageBytes + 2 * 8);
  static constexpr int kCount = kFits < 8 ? kFits : 8;
  static constexpr int kBytes = kCount * (kStageBytes + 2 * 8);
  static constexpr int kSums = 4 * kTiles;  // of a thread
  // What a CTA brings to both; of an odd number both bring the one in the middle.
  static constexpr int kBroughtTiles = (kTiles + 1) / 2;
  static_assert(kPairBytes == 1024 && kSums <= kMostSums && kFittedTokens == 2 * kWgmmaRows);
  __device__ static constexpr uint32_t first_operand(int group) {
    return static_cast<uint32_t>(kTokensAt + group * kWgmmaTileBytes);
  }
  __device__ static constexpr uint32_t second_operand() { return 0; }
};

template <int kTiles>
struct FittedProblem : LargeWork {
  using Layout = FittedLayout<kTiles>;
  CUtensorMap rows_map;
  FittedGrid grid;

  __device__ LargeItem item(int i) const { return grid.item(i, static_cast<int>(blockIdx.x % kClusterCtas)); }
  __device__ void prefetch_maps() const { ptx::prefetch_map(&rows_map); }

  // Outputs 8j + 2t and + 1, j from kFirst on, of tokens g and g + 8 of the warp's. kTwo: those two at once.
  template <int kFirst, int kLast, bool kTwo>
  __device__ __forceinline__ void store_as(const Part& part, int first_token, int first_output,
                                           const float (&total)[Layout::kSums]) const {
    constexpr int kAtOnce = 4;  // pairs of outputs that are added to: registers
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = first_token + 8 * half;
      if (token >= rows) continue;
      float* to = part.out + int64_t{token} * part.rows + first_output;
      const int left = part.rows - first_output;  // outputs from there on
#pragma unroll
      for (int begin = kFirst; begin < kLast; begin += kAtOnce) {
        const int count = kLast - begin < kAtOnce ? kLast - begin : kAtOnce;
        // Asked for before anything is stored; what changes nothing, where nothing is added.
        float old[2 * kAtOnce], bias[2 * kAtOnce];
#pragma unroll
        for (int i = 0; i < 2 * count; ++i) {
          const int output = 8 * (begin + i / 2) + i % 2;
          old[i] = -0.0f, bias[i] = 0.0f;
          ptx::load_if(add && output < left, to + output, old[i]);
          ptx::load_if(part.bias != nullptr && output < left, part.bias + first_output + output, bias[i]);
        }
#pragma unroll
        for (int i = 0; i < 2 * count; i += 2) {
          const int output = 8 * (begin + i / 2), at = 4 * (begin + i / 2) + 2 * half;
          // The products are exact: a power of two.
          const float a = old[i] + fmaf(total[at], unscale, bias[i]);
          const float b = old[i + 1] + fmaf(total[at + 1], unscale, bias[i + 1]);
          if (kTwo) {
            if (output < left) *reinterpret_cast<float2*>(to + output) = make_float2(a, b);
          } else {
            if (output < left) to[output] = a;
            if (output + 1 < left) to[output + 1] = b;
          }
        }
      }
    }
  }
  // Half of the warp's outputs.
  template <int kHalf>
  __device__ void store(const LargeItem& item, int warp, int lane,
                        const float (&total)[Layout::kSums]) const {
    constexpr int kFirst = kHalf * (kTiles / 2), kLast = kHalf == 0 ? kTiles / 2 : kTiles;
    const Part& part = parts[item.part];
    const int token = item.first_token + warp * 16 + lane / 4;
    const int output = item.first_tile * kTileRows + 2 * (lane % 4);
    if (part.rows % 2 == 0 && reinterpret_cast<uintptr_t>(part.out) % sizeof(float2) == 0) {
      store_as<kFirst, kLast, true>(part, token, output, total);
    } else {
      store_as<kFirst, kLast, false>(part, token, output, total);
    }
  }
};

#ifdef MILLRACE_HAS_WGMMA

template <Brings kBrings, int kTiles>
__device__ void load_pieces(const FittedProblem<kTiles>& p, const ClusterRing<FittedLayout<kTiles>>& ring) {
  using Layout = FittedLayout<kTiles>;
  const int mine = static_cast<int>(blockIdx.x % kClusterCtas) * (kTiles - Layout::kBroughtTiles);
  uint32_t slot = 0, parity = 1;
  LargePiece piece;
  for (int k = 0; p.piece(k, piece); ++k) {
    const LargeItem item = p.item(piece.item);
    const int last = p.pairs_until(piece.end);
    for (int pair = p.pairs_until(piece.begin); pair < last; ++pair) {
      ptx::barrier_wait(ring.empty + slot, parity);
      uint64_t* full = ring.full + slot;
      uint8_t* stage = ring.stages + slot * Layout::kStageBytes;
      if constexpr (kBrings == Brings::kWeights) {
        ptx::barrier_arrive_expect(full, kClusterCtas * Layout::kBroughtTiles * Layout::kPairBytes);
        ptx::box_copy_to(kBothCtas, stage + mine * Layout::kPairBytes, p.maps + item.part,
                         pair * Layout::kPairBytes, item.first_tile + mine, full);
      } else {
        ptx::barrier_arrive_expect(full, Layout::kStageBytes - Layout::kTokensAt);
        ptx::kilobyte_box_copy(stage + Layout::kTokensAt, &p.rows_map, pair * (kWgmmaTileBytes / 1024),
                               item.first_token / kWgmmaRows, full);
      }
      if (++slot == Layout::kCount) slot = 0, parity ^= 1u;
    }
  }
}

#endif  // MILLRACE_HAS_WGMMA

template <int kTiles>
void launch_fitted_as(const WgmmaLinear& linear, float unscale, const WideSplit& split, cudaStream_t stream) {
  FittedProblem<kTiles> p{};
  static_cast<WgmmaLinear&>(p) = linear;
  p.unscale = unscale;
  p.split = split;
  p.segment_pairs = pairs_per_segment(p.pairs);
  int32_t part_tiles[kLargeParts] = {};
  for (int i = 0; i < p.num_parts; ++i) part_tiles[i] = p.parts[i].num_tiles;
  p.grid = FittedGrid(part_tiles, p.num_parts, p.rows, kTiles);
  p.rows_map = rows_map_of(p.x, divide_up(p.rows, kWgmmaRows), p.pairs);
  map_parts(p, FittedLayout<kTiles>::kBroughtTiles);
  share_out(p, p.grid.items());
  launch_clusters_of(p, stream);
}

}  // namespace millrace::cuda
