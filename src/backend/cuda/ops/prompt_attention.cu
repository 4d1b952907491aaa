// Attention of prompts: the numbers of packed_attention.cu to the bit, arranged for many rows that follow one
// another. A warp takes two rows of a sequence with all heads of a KV head: 16 rows of a product, the upper
// halves of queries and weights in one product and the rest in another. It walks the units alone, so nothing
// waits for another warp; the eight warps of a CTA have neighbouring rows and find keys and values in L1.
//
// Roofline: 2 x 4 x 64 x heads operations per row and position (twice, for the two halves): 64 products of
// m16n8k16 per unit of a warp, some 300 tensor core cycles of its scheduler, beside as many instructions of
// softmax. Values are loaded under the scores, the next keys under the softmax.
#include "backend/cuda/ops/packed_attention.cuh"

namespace millrace::cuda {
namespace {

constexpr int kPromptWarps = 8;
constexpr int kPromptThreads = kPromptWarps * kWarpLanes;
constexpr int kRowsPerWarp = 2;

// One of a warp's two rows: its heads are rows g (or g + 8) of the products.
struct PromptRow {
  int64_t row;
  Sight sight;
  int32_t left, left_in_span;  // units
  RunningWeight span, all;

  __device__ void begin(int64_t at, int32_t position, int32_t window) {
    row = at;
    sight = sight_of(position, window);
    left = sight.units;
    left_in_span = min(sight.units_per_span, left);
    span = all = RunningWeight{};
  }
  __device__ bool sees(int32_t unit) const { return unit >= sight.first_unit && left > 0; }
  // After a unit it sees: does a span end?
  __device__ bool advance() {
    --left;
    if (--left_in_span > 0) return false;
    left_in_span = min(sight.units_per_span, left);
    return true;
  }
};

class PromptWalker {
 public:
  __device__ PromptWalker(const PackedAttention& p, int kv_head, float* all)
      : p_(p), kv_head_(kv_head), lane_(threadIdx.x % kWarpLanes), all_(all + lane_) {}

  // Rows of one sequence, the second not before the first. The same row twice: it is computed twice.
  __device__ void run(int64_t first, int64_t second) {
    rows_[0].begin(first, p_.cache.positions[first], p_.op.window);
    rows_[1].begin(second, p_.cache.positions[second], p_.op.window);
    table_ = table_of_row(p_.cache, first);
    last_block_ = rows_[1].sight.last / kBlockTokens;
    load_queries();
#pragma unroll
    for (int i = 0; i < 32; ++i) sums_[i] = 0.0f, all_[i * kWarpLanes] = 0.0f;
    const int32_t last_unit = rows_[1].sight.last / kUnit;
    // Units that both rows see all of need no masks.
    const int32_t first_whole = (rows_[1].sight.first + kUnit - 1) / kUnit,
                  past_whole = (rows_[0].sight.last + 1) / kUnit;
    int32_t unit = rows_[0].sight.first_unit;
    load_keys(unit);
    for (; unit <= last_unit; ++unit) {
      if (unit >= first_whole && unit < past_whole) {
        step<false>(unit, last_unit);
      } else {
        step<true>(unit, last_unit);
      }
    }
    store(0);
    if (second != first) store(1);
  }

 private:
  template <bool kEdge>
  __device__ __forceinline__ void step(int32_t unit, int32_t last_unit) {
    load_values<kEdge>(unit);
    float score[2][kTilesOfUnit][2], top[2], weight[2];
    scores<kEdge>(unit, score);
    load_keys(min(unit + 1, last_unit));
    soften<kEdge>(score[0], top[0], weight[0]);
    soften<kEdge>(score[1], top[1], weight[1]);
    const bool sees[2] = {!kEdge || rows_[0].sees(unit), !kEdge || rows_[1].sees(unit)};
    add_values(sees, score, top, weight);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (sees[r] && rows_[r].advance()) end_span(r);
    }
  }

  __device__ void load_queries() {
    const int g = lane_ / 4, t = lane_ % 4, group = p_.cache.heads / p_.cache.kv_heads;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      HeadPart query{};
      if (g < group) {
        query = load_part(p_.query + (rows_[r].row * p_.cache.heads + kv_head_ * group + g) * kDim, t);
      }
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        split_bf16(query.x[4 * s], query.x[4 * s + 1], upper_[s][r], rest_[s][r]);
        split_bf16(query.x[4 * s + 2], query.x[4 * s + 3], upper_[s][2 + r], rest_[s][2 + r]);
      }
    }
  }

  // Of a unit's two blocks one may be past the last or before a window: whatever stands for it is masked.
  __device__ const __nv_bfloat16* block_of(int32_t logical) const {
    int32_t block = table_[min(logical, last_block_)];
    if (block == kNoBlock) block = table_[last_block_];
    return keys_of_block<__nv_bfloat16>(p_.cache, block, kv_head_);
  }
  __device__ void load_keys(int32_t unit) {
    const int g = lane_ / 4, t = lane_ % 4;
#pragma unroll
    for (int b = 0; b < kBlocksOfUnit; ++b) {
      blocks_[b] = block_of(unit * kBlocksOfUnit + b);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const auto* row = reinterpret_cast<const uint4*>(blocks_[b] + (8 * n + g) * kDim) + t;
        keys_[2 * b + n][0] = row[0];
        keys_[2 * b + n][1] = row[4];
      }
    }
  }
  // Of the unit whose keys were loaded last. Zeros for what no row sees: nobody may have written it, and a
  // weight of zero does not undo a NaN.
  template <bool kEdge>
  __device__ void load_values(int32_t unit) {
    const int g = lane_ / 4, t = lane_ % 4;
#pragma unroll
    for (int b = 0; b < kBlocksOfUnit; ++b) {
      const auto* values =
          reinterpret_cast<const uint2*>(blocks_[b] + value_distance(p_.cache) + g * kBlockTokens) + t;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) values_[n][b] = values[n * 8 * kBlockTokens / 4];
    }
    if (!kEdge) return;
    const int32_t from = rows_[0].sight.first, to = rows_[1].sight.last;
    const auto mask = [&](int32_t position) {
      return (position >= from && position <= to ? 0xffffu : 0u) |
             (position + 1 >= from && position + 1 <= to ? 0xffff0000u : 0u);
    };
#pragma unroll
    for (int b = 0; b < kBlocksOfUnit; ++b) {
      const int32_t first = unit * kUnit + b * kBlockTokens + 2 * t;
      const uint32_t low = mask(first), high = mask(first + 8);
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) values_[n][b].x &= low, values_[n][b].y &= high;
    }
  }

  template <bool kEdge>
  __device__ void scores(int32_t unit, float (&score)[2][kTilesOfUnit][2]) const {
#pragma unroll
    for (int n = 0; n < kTilesOfUnit; ++n) {
      float c[4] = {0.0f, 0.0f, 0.0f, 0.0f}, d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      const uint32_t k[4][2] = {{keys_[n][0].x, keys_[n][0].y},
                                {keys_[n][0].z, keys_[n][0].w},
                                {keys_[n][1].x, keys_[n][1].y},
                                {keys_[n][1].z, keys_[n][1].w}};
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        ptx::mma_bf16(c, upper_[s], k[s][0], k[s][1]);
        ptx::mma_bf16(d, rest_[s], k[s][0], k[s][1]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& to = score[i / 2][n][i % 2];
        to = (c[i] + d[i]) * p_.op.scale;
        if (!kEdge) continue;
        const int32_t position = unit * kUnit + 8 * n + 2 * (lane_ % 4) + i % 2;
        const Sight& sight = rows_[i / 2].sight;
        if (position < sight.first || position > sight.last) to = -INFINITY;
      }
    }
  }

  // Scores to weights, with the unit's own largest.
  template <bool kEdge>
  __device__ static void soften(float (&score)[kTilesOfUnit][2], float& top, float& sum) {
    top = -INFINITY;
#pragma unroll
    for (int n = 0; n < kTilesOfUnit; ++n) top = fmaxf(fmaxf(top, score[n][0]), score[n][1]);
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
    sum = 0.0f;
#pragma unroll
    for (int n = 0; n < kTilesOfUnit; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float weight = exp2f((score[n][j] - top) * kLog2e);
        score[n][j] = kEdge && score[n][j] == -INFINITY ? 0.0f : weight;
        sum += score[n][j];
      }
    }
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
  }

  __device__ void add_values(const bool (&sees)[2], const float (&weight)[2][kTilesOfUnit][2],
                             const float (&top)[2], const float (&weights)[2]) {
    uint32_t upper[kBlocksOfUnit][4], rest[kBlocksOfUnit][4];
#pragma unroll
    for (int b = 0; b < kBlocksOfUnit; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&pair)[2] = weight[i % 2][2 * b + i / 2];
        split_bf16(pair[0], pair[1], upper[b][i], rest[b][i]);
      }
    }
    // A row that does not see the unit keeps what it has.
    RunningWeight::Factors by[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      by[r] = {1.0f, 0.0f};
      if (sees[r]) by[r] = rows_[r].span.add(top[r], weights[r]);
    }
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      float c[4] = {0.0f, 0.0f, 0.0f, 0.0f}, d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int b = 0; b < kBlocksOfUnit; ++b) {
        ptx::mma_bf16(c, upper[b], values_[n][b].x, values_[n][b].y);
        ptx::mma_bf16(d, rest[b], values_[n][b].x, values_[n][b].y);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) sums_[4 * n + i] = by[i / 2].merge(sums_[4 * n + i], c[i] + d[i]);
    }
  }

  // What the row has so far is in this warp's shared memory: needed once in a span, not in registers.
  __device__ void end_span(int r) {
    const RunningWeight::Factors by = rows_[r].all.add(rows_[r].span.top, rows_[r].span.weight);
    rows_[r].span = RunningWeight{};
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& to = all_[(4 * n + 2 * r + j) * kWarpLanes];
        float& from = sums_[4 * n + 2 * r + j];
        to = by.merge(to, from);
        from = 0.0f;
      }
    }
  }

  __device__ void store(int r) {
    const int g = lane_ / 4, t = lane_ % 4, group = p_.cache.heads / p_.cache.kv_heads;
    if (g >= group) return;
    const int head = kv_head_ * group + g;
    RunningWeight& all = rows_[r].all;
    RunningWeight::Factors by{1.0f, 0.0f};
    const bool sink = p_.op.sinks != nullptr;
    if (sink) by = all.add(__ldg(p_.op.sinks + head), 1.0f);
    float* out = p_.out + (rows_[r].row * p_.cache.heads + head) * kDim;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      float v[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        v[j] = all_[(4 * n + 2 * r + j) * kWarpLanes];
        if (sink) v[j] = by.merge(v[j], 0.0f);
      }
      *reinterpret_cast<float2*>(out + 8 * n + 2 * t) = {v[0] / all.weight, v[1] / all.weight};
    }
  }

  const PackedAttention& p_;
  int kv_head_, lane_;
  float* all_;  // [32][lane]
  const int32_t* table_;
  int32_t last_block_;
  const __nv_bfloat16* blocks_[kBlocksOfUnit];  // of the unit whose keys are loaded
  PromptRow rows_[2];
  uint32_t upper_[4][4], rest_[4][4];  // queries
  uint4 keys_[kTilesOfUnit][2];        // as UnitCache
  uint2 values_[kDim / 8][kBlocksOfUnit];
  float sums_[32];  // [n][row][column], of the span
};

// grid: x over 16 rows, the last first (they see the most), y over KV heads.
__global__ void __launch_bounds__(kPromptThreads, 1)
    prompt_attention_kernel(const __grid_constant__ PackedAttention p) {
  __shared__ float all[kPromptWarps][32 * kWarpLanes];
  const int warp = threadIdx.x / kWarpLanes;
  const int64_t group = gridDim.x - 1 - blockIdx.x, first = (group * kPromptWarps + warp) * kRowsPerWarp;
  if (first >= p.rows) return;
  const int32_t* sequence = p.cache.sequence_of;
  const bool two = first + 1 < p.rows, together = two && sequence[first] == sequence[first + 1];
  PromptWalker walker(p, blockIdx.y, all[warp]);
  for (int64_t row = first; row <= first + (two && !together ? 1 : 0); ++row) {
    walker.run(row, together ? first + 1 : row);
  }
}

}  // namespace

// Launched after everything before it is complete: keys and values may then come through L1.
void launch_prompt_attention(const PackedAttention& op, cudaStream_t stream) {
  constexpr int kRows = kPromptWarps * kRowsPerWarp;
  const dim3 grid(static_cast<unsigned>((op.rows + kRows - 1) / kRows),
                  static_cast<unsigned>(op.cache.kv_heads));
  prompt_attention_kernel<<<grid, kPromptThreads, 0, stream>>>(op);
  check_launch("prompt_attention_kernel");
}

}  // namespace millrace::cuda
