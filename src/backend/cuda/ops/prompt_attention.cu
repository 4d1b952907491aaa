// Attention of prompts: the numbers of packed_attention.cu to the bit, arranged for many rows that follow one
// another. A warp takes two rows of a sequence with all heads of a KV head: 16 rows of a product, the upper
// halves of queries and weights in one product and the rest in another. It walks the units alone, so nothing
// waits for another warp; the twelve warps of a CTA have neighbouring rows and find keys and values in L1.
//
// Roofline: 2 x 4 x 64 x heads operations per row and position (twice, for the two halves): 64 products of
// m16n8k16 per unit of a warp, some 300 tensor core cycles of its scheduler, beside as many instructions of
// softmax. Values are loaded under the scores; three warps a scheduler hide the rest.
#include "backend/cuda/ops/packed_attention.cuh"

namespace millrace::cuda {
namespace {

constexpr int kPromptWarps = 12;
constexpr int kPromptThreads = kPromptWarps * kWarpLanes;
constexpr int kRowsPerWarp = 2;

// One of a warp's two rows: its heads are rows g (or g + 8) of the products.
struct PromptRow {
  int64_t row;  // negative: none
  Sight sight;
  RunningWeight span, all;
  __device__ bool sees(int32_t unit) const {
    return row >= 0 && unit >= sight.first_unit && unit < sight.first_unit + sight.units;
  }
  __device__ bool ends_span(int32_t unit) const {
    const int32_t next = unit + 1 - sight.first_unit;
    return next == sight.units || next % sight.units_per_span == 0;
  }
};

class PromptWalker {
 public:
  __device__ PromptWalker(const PackedAttention& p, int kv_head, float* all)
      : p_(p), kv_head_(kv_head), lane_(threadIdx.x % kWarpLanes), all_(all + lane_) {}

  // Rows of one sequence; the second may be negative.
  __device__ void run(int64_t first, int64_t second) {
    begin(first, rows_[0]);
    begin(second, rows_[1]);
    table_ = table_of_row(p_.cache, first);
    load_queries();
#pragma unroll
    for (int i = 0; i < 32; ++i) sums_[i] = 0.0f, all_[i * kWarpLanes] = 0.0f;
    int32_t unit = rows_[0].sight.first_unit, last = rows_[0].sight.last;
    if (second >= 0) {
      unit = min(unit, rows_[1].sight.first_unit);
      last = max(last, rows_[1].sight.last);
    }
    last_block_ = last / kBlockTokens;
    load_keys(unit);
    for (; unit <= last / kUnit; ++unit) {
      load_values(unit, last);
      float score[2][kTilesOfUnit][2];
      scores(unit, score);
      float top[2], weight[2];
      soften(score[0], top[0], weight[0]);
      soften(score[1], top[1], weight[1]);
      add_values(unit, score, top, weight);
      if (unit < last / kUnit) load_keys(unit + 1);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (rows_[r].sees(unit) && rows_[r].ends_span(unit)) end_span(r);
      }
    }
    store(0);
    if (second >= 0) store(1);
  }

 private:
  __device__ void begin(int64_t row, PromptRow& to) const {
    to.row = row;
    to.sight = sight_of(row >= 0 ? p_.cache.positions[row] : 0, p_.op.window);
    to.span = to.all = RunningWeight{};
  }

  __device__ void load_queries() {
    const int g = lane_ / 4, t = lane_ % 4, group = p_.cache.heads / p_.cache.kv_heads;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      HeadPart query{};
      if (g < group && rows_[r].row >= 0) {
        query = load_part(p_.query + (rows_[r].row * p_.cache.heads + kv_head_ * group + g) * kDim, t);
      }
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        split_bf16(query.x[4 * s], query.x[4 * s + 1], upper_[s][r], rest_[s][r]);
        split_bf16(query.x[4 * s + 2], query.x[4 * s + 3], upper_[s][2 + r], rest_[s][2 + r]);
      }
    }
  }

  __device__ const __nv_bfloat16* block_of(int32_t logical) const {
    const int32_t block = logical <= last_block_ ? table_[logical] : kNoBlock;
    return block == kNoBlock ? nullptr : keys_of_block<__nv_bfloat16>(p_.cache, block, kv_head_);
  }
  __device__ void load_keys(int32_t unit) {
    const int g = lane_ / 4, t = lane_ % 4;
#pragma unroll
    for (int b = 0; b < kBlocksOfUnit; ++b) {
      const __nv_bfloat16* keys = block_of(unit * kBlocksOfUnit + b);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const auto* row = reinterpret_cast<const uint4*>(keys + (8 * n + g) * kDim);
        keys_[2 * b + n][0] = keys != nullptr ? row[t] : uint4{0, 0, 0, 0};
        keys_[2 * b + n][1] = keys != nullptr ? row[4 + t] : uint4{0, 0, 0, 0};
      }
    }
  }
  // Zeros for positions after the last: nobody may have written them, and a weight of zero does not undo a
  // NaN.
  __device__ void load_values(int32_t unit, int32_t last) {
    const int g = lane_ / 4, t = lane_ % 4;
#pragma unroll
    for (int b = 0; b < kBlocksOfUnit; ++b) {
      const __nv_bfloat16* keys = block_of(unit * kBlocksOfUnit + b);
      const __nv_bfloat16* values = keys + value_distance(p_.cache);
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        values_[n][b] = keys != nullptr
                            ? reinterpret_cast<const uint2*>(values + (8 * n + g) * kBlockTokens)[t]
                            : uint2{0, 0};
      }
    }
    if ((unit + 1) * kUnit - 1 <= last) return;
#pragma unroll
    for (int b = 0; b < kBlocksOfUnit; ++b) {
      const int32_t first = unit * kUnit + b * kBlockTokens + 2 * t;
      const uint32_t low = (first <= last ? 0xffffu : 0u) | (first + 1 <= last ? 0xffff0000u : 0u);
      const uint32_t high = (first + 8 <= last ? 0xffffu : 0u) | (first + 9 <= last ? 0xffff0000u : 0u);
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) values_[n][b].x &= low, values_[n][b].y &= high;
    }
  }

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
        const int32_t position = unit * kUnit + 8 * n + 2 * (lane_ % 4) + i % 2;
        const Sight& sight = rows_[i / 2].sight;
        const bool seen = position >= sight.first && position <= sight.last;
        score[i / 2][n][i % 2] = seen ? (c[i] + d[i]) * p_.op.scale : -INFINITY;
      }
    }
  }

  // Scores to weights, with the unit's own largest.
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
        score[n][j] = score[n][j] == -INFINITY ? 0.0f : exp2f((score[n][j] - top) * kLog2e);
        sum += score[n][j];
      }
    }
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
  }

  __device__ void add_values(int32_t unit, const float (&weight)[2][kTilesOfUnit][2], const float (&top)[2],
                             const float (&weights)[2]) {
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
      if (rows_[r].sees(unit)) by[r] = rows_[r].span.add(top[r], weights[r]);
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
  PromptRow rows_[2];
  uint32_t upper_[4][4], rest_[4][4];  // queries
  uint4 keys_[kTilesOfUnit][2];        // as UnitCache
  uint2 values_[kDim / 8][kBlocksOfUnit];
  float sums_[32];  // [n][row][column], of the span
};

// grid: x over 24 rows, the last first (they see the most), y over KV heads.
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
    walker.run(row, together ? first + 1 : -1);
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
