// Attention over the paged cache on the tensor cores: all query heads of a KV head at once, so that keys and
// values are read once for the group.
//
// A warp takes 32 positions (a unit): the product's 16 rows are 8 heads twice, the upper half of each query
// (and then of each weight) as bf16 and what is left of it, so that nothing but the cache is rounded to 8
// bits. Keys and values go straight to registers: with dimensions (keys) and positions (values) dealt to
// lanes as the fragments want them, every load is 8 or 16 aligned bytes. The units of a span follow one
// another in a running softmax; the spans of a row (at most 32, of a length that depends on the row's
// position alone) are computed by different CTAs and added up in order by the last to arrive. A row's bits
// depend on its position, the window and the cache.
//
// Roofline: 2 x 64 x 2 bytes per position and KV head / B; 8 warps hold 64 KB in flight per CTA, two CTAs per
// SM. Short contexts are latency-bound; in a step of single tokens old keys and values are loaded before the
// kernel ahead has ended.
#include "backend/cuda/ops/packed_attention.cuh"

namespace millrace::cuda {
namespace {

constexpr int kThreads = kWarps * kWarpLanes;
constexpr int kRowPad = kDim + 8;  // floats between heads in shared memory: no two lanes meet in a bank
constexpr int kPartialFloats = kGroup * (kDim + 2);  // of a span: sums, then maxima, then weights' sums

__device__ inline void turn(float2 by, float& a, float& b) {
  const float a0 = a, b0 = b;
  a = fmaf(a0, by.x, -(b0 * by.y));
  b = fmaf(b0, by.x, a0 * by.y);
}
// turns: [32]. Both kinds of pairs lie within a lane's part.
__device__ inline void rotate_part(HeadPart& p, const float2* turns, bool interleaved, int t) {
  if (interleaved) {
#pragma unroll
    for (int i = 0; i < 8; ++i) turn(turns[i / 4 * 16 + 4 * t + i % 4], p.x[2 * i], p.x[2 * i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) turn(turns[8 * t + i], p.x[i], p.x[i + 8]);
  }
}

// A lane's keys and values of a unit: keys of position 8n + g, dimensions as HeadPart; values of dimension 8n
// + g, positions 2t, 2t + 1, 8 + 2t, 9 + 2t of each block.
struct UnitCache {
  uint4 keys[kTilesOfUnit][2];
  uint2 values[kDim / 8][kBlocksOfUnit];
};

__device__ __forceinline__ void load_unit(const LayerCache& cache, const int32_t* table, int kv_head,
                                          int32_t unit, int32_t last_block, int lane, UnitCache& u) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int b = 0; b < kBlocksOfUnit; ++b) {
    const int32_t logical = unit * kBlocksOfUnit + b;
    const int32_t block = logical <= last_block ? table[logical] : kNoBlock;
    const bool there = block != kNoBlock;
    const auto* keys = keys_of_block<__nv_bfloat16>(cache, there ? block : 0, kv_head);
    const auto* values = keys + value_distance(cache);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const auto* row = reinterpret_cast<const uint4*>(keys + (8 * n + g) * kDim);
      u.keys[2 * b + n][0] = there ? __ldcg(row + t) : uint4{0, 0, 0, 0};
      u.keys[2 * b + n][1] = there ? __ldcg(row + 4 + t) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const auto* row = reinterpret_cast<const uint2*>(values + (8 * n + g) * kBlockTokens);
      u.values[n][b] = there ? __ldcg(row + t) : uint2{0, 0};
    }
  }
}

// The new token's key and value, rotated and rounded: into the unit's registers and into the cache.
__device__ __forceinline__ void append(const PackedAttention& p, int64_t row, int kv_head, int32_t position,
                                       const int32_t* table, int lane, UnitCache& u) {
  const int g = lane / 4, t = lane % 4, in_block = position % kBlockTokens;
  const int64_t at = (row * p.cache.kv_heads + kv_head) * kDim;
  auto* keys = keys_of_block<__nv_bfloat16>(p.cache, table[position / kBlockTokens], kv_head);
  HeadPart key = load_part(p.key + at, t);
  rotate_part(key, p.angles + row * (kDim / 2), p.interleaved, t);
  uint4 words[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float* x = key.x + 8 * h;
    words[h] = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
  }
  const bool my_key = g == position % 8;
#pragma unroll
  for (int n = 0; n < kTilesOfUnit; ++n) {
    const bool here = my_key && n == position % kUnit / 8;
    u.keys[n][0] = here ? words[0] : u.keys[n][0];
    u.keys[n][1] = here ? words[1] : u.keys[n][1];
  }
  if (my_key) {
    auto* to = reinterpret_cast<uint4*>(keys + in_block * kDim);
    to[t] = words[0], to[4 + t] = words[1];
  }
  // The bits of a lane's words that are the new position's; none in lanes that do not hold it.
  const bool my_value = t == in_block % 8 / 2;
  const uint32_t place = my_value ? (in_block % 2 == 0 ? 0xffffu : 0xffff0000u) : 0u;
  __nv_bfloat16* values = keys + value_distance(p.cache);
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
    const __nv_bfloat16 value = __float2bfloat16_rn(__ldcg(p.value + at + 8 * n + g));
    if (my_value) values[value_offset(p.cache, in_block, 8 * n + g)] = value;
    const uint32_t twice = __bfloat16_as_ushort(value) * 0x10001u;
#pragma unroll
    for (int b = 0; b < kBlocksOfUnit; ++b) {
      const uint32_t in_this = b == position % kUnit / kBlockTokens ? place : 0u;
      const uint32_t low = in_block / 8 == 0 ? in_this : 0u, high = in_block / 8 == 1 ? in_this : 0u;
      u.values[n][b].x = (u.values[n][b].x & ~low) | (twice & low);
      u.values[n][b].y = (u.values[n][b].y & ~high) | (twice & high);
    }
  }
}

// Zeros for positions after the last: nobody has written them, and a weight of zero does not undo a NaN.
__device__ __forceinline__ void clear_after(int32_t last, int32_t unit, int t, UnitCache& u) {
#pragma unroll
  for (int b = 0; b < kBlocksOfUnit; ++b) {
    const int32_t first = unit * kUnit + b * kBlockTokens + 2 * t;
    const uint32_t low = (first <= last ? 0xffffu : 0u) | (first + 1 <= last ? 0xffff0000u : 0u);
    const uint32_t high = (first + 8 <= last ? 0xffffu : 0u) | (first + 9 <= last ? 0xffff0000u : 0u);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      u.values[n][b].x &= low;
      u.values[n][b].y &= high;
    }
  }
}

// The query as the A operand: rows 0-7 the heads' upper halves, rows 8-15 the rest.
struct QueryFragments {
  uint32_t a[4][4];
};
__device__ inline QueryFragments query_fragments(const PackedAttention& p, int64_t row, int kv_head,
                                                 int lane) {
  const int g = lane / 4, t = lane % 4, group = p.cache.heads / p.cache.kv_heads;
  HeadPart query{};
  if (g < group) {
    query = load_part(p.query + (row * p.cache.heads + kv_head * group + g) * kDim, t);
    if (p.angles != nullptr) rotate_part(query, p.angles + row * (kDim / 2), p.interleaved, t);
  }
  QueryFragments q;
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    split_bf16(query.x[4 * s], query.x[4 * s + 1], q.a[s][0], q.a[s][1]);
    split_bf16(query.x[4 * s + 2], query.x[4 * s + 3], q.a[s][2], q.a[s][3]);
  }
  return q;
}

// One unit: its sums [64] per head, largest score and sum of weights, to shared memory (rows of kRowPad
// floats).
__device__ __forceinline__ void attend_unit(const UnitCache& u, const QueryFragments& q, const Sight& sight,
                                            int32_t unit, float scale, int lane, float* sums, float* tops,
                                            float* weights) {
  const int g = lane / 4, t = lane % 4;
  float score[kTilesOfUnit][2];
  float top = -INFINITY;
#pragma unroll
  for (int n = 0; n < kTilesOfUnit; ++n) {
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    ptx::mma_bf16(c, q.a[0], u.keys[n][0].x, u.keys[n][0].y);
    ptx::mma_bf16(c, q.a[1], u.keys[n][0].z, u.keys[n][0].w);
    ptx::mma_bf16(c, q.a[2], u.keys[n][1].x, u.keys[n][1].y);
    ptx::mma_bf16(c, q.a[3], u.keys[n][1].z, u.keys[n][1].w);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int32_t position = unit * kUnit + 8 * n + 2 * t + j;
      const bool seen = position >= sight.first && position <= sight.last;
      score[n][j] = seen ? (c[j] + c[2 + j]) * scale : -INFINITY;
      top = fmaxf(top, score[n][j]);
    }
  }
  top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
  top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
  float sum = 0.0f;
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
  uint32_t weight[kBlocksOfUnit][4];
#pragma unroll
  for (int b = 0; b < kBlocksOfUnit; ++b) {
    split_bf16(score[2 * b][0], score[2 * b][1], weight[b][0], weight[b][1]);
    split_bf16(score[2 * b + 1][0], score[2 * b + 1][1], weight[b][2], weight[b][3]);
  }
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int b = 0; b < kBlocksOfUnit; ++b) ptx::mma_bf16(c, weight[b], u.values[n][b].x, u.values[n][b].y);
    *reinterpret_cast<float2*>(sums + g * kRowPad + 8 * n + 2 * t) = {c[0] + c[2], c[1] + c[3]};
  }
  if (t == 0) tops[g] = top, weights[g] = sum;
}

// Two dimensions per lane.
struct Running {
  RunningWeight state;
  float2 sum = {0.0f, 0.0f};
  __device__ void add(float other_top, float other_weight, float2 other) {
    const RunningWeight::Factors by = state.add(other_top, other_weight);
    sum = {by.merge(sum.x, other.x), by.merge(sum.y, other.y)};
  }
};

__device__ inline void store_out(const PackedAttention& p, int64_t row, int head, int lane, float sink,
                                 Running all) {
  if (p.op.sinks != nullptr) all.add(sink, 1.0f, {0.0f, 0.0f});
  const float2 out = {all.sum.x / all.state.weight, all.sum.y / all.state.weight};
  reinterpret_cast<float2*>(p.out + (row * p.cache.heads + head) * kDim)[lane] = out;
}

// Has every span of (row, KV head) been written? True in one CTA, for all its threads, which then see them
// all.
__device__ inline bool last_to_arrive(int32_t* arrived, int32_t spans) {
  __shared__ bool last;
  __threadfence();  // this thread's part of the span is visible before the count says so
  __syncthreads();  // everybody's
  if (threadIdx.x == 0) {
    last = atomicAdd(arrived, 1) == spans - 1;
    if (last) *arrived = 0;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

// One span of a row: warp w takes unit w of each turn, then adds up head w of the group.
template <bool kAppend>
class SpanWalker {
 public:
  __device__ SpanWalker(const PackedAttention& p, int64_t row, int kv_head)
      : p_(p),
        row_(row),
        kv_head_(kv_head),
        position_(p.cache.positions[row]),
        sight_(sight_of(position_, p.op.window)),
        table_(table_of_row(p.cache, row)) {}

  __device__ const Sight& sight() const { return sight_; }

  // What earlier steps stored is there before the kernel ahead has ended; a key of this step is not.
  __device__ __forceinline__ void load_ahead(int32_t span, int warp, int lane, UnitCache& u) const {
    if (!kAppend || warp >= count_of(span)) return;
    load_unit(p_.cache, table_, kv_head_, first_of(span) + warp, position_ / kBlockTokens, lane, u);
  }

  struct Shared {
    float sums[kWarps][kGroup * kRowPad];
    float tops[kWarps][kGroup], weights[kWarps][kGroup];
  };

  // `ahead`: u already holds the first turn's units. Leaves those of `next_span`'s first turn in u, when
  // there is one: they are on their way while this one's are added up.
  __device__ __forceinline__ Running walk(int32_t span, int32_t next_span, bool ahead,
                                          const QueryFragments& q, int warp, int lane, UnitCache& u,
                                          Shared& shared) const {
    Running state;
    const int32_t first = first_of(span), count = count_of(span);
    for (int32_t turn = 0; turn < count; turn += kWarps) {
      const int32_t unit = first + turn + warp, here = min(kWarps, count - turn);
      if (warp < here) {
        if (!ahead) load_unit(p_.cache, table_, kv_head_, unit, position_ / kBlockTokens, lane, u);
        if (unit == position_ / kUnit) {
          if (kAppend) append(p_, row_, kv_head_, position_, table_, lane, u);
          clear_after(position_, unit, lane % 4, u);
        }
        attend_unit(u, q, sight_, unit, p_.op.scale, lane, shared.sums[warp], shared.tops[warp],
                    shared.weights[warp]);
      }
      const bool more = turn + kWarps < count;
      const int32_t next = more ? unit + kWarps : first_of(next_span) + warp;
      const int32_t there = more ? count - turn - kWarps : next_span >= 0 ? count_of(next_span) : 0;
      if (warp < there) load_unit(p_.cache, table_, kv_head_, next, position_ / kBlockTokens, lane, u);
      ahead = true;
      __syncthreads();  // all units of this turn are there
      for (int32_t i = 0; i < here; ++i) {
        state.add(shared.tops[i][warp], shared.weights[i][warp],
                  *reinterpret_cast<const float2*>(&shared.sums[i][warp * kRowPad + 2 * lane]));
      }
      __syncthreads();  // and read, before the next turn's
    }
    return state;
  }

 private:
  __device__ int32_t first_of(int32_t span) const { return sight_.first_unit + span * sight_.units_per_span; }
  __device__ int32_t count_of(int32_t span) const {
    return min(sight_.units_per_span, sight_.units - span * sight_.units_per_span);
  }

  const PackedAttention& p_;
  int64_t row_;
  int kv_head_;
  int32_t position_;
  Sight sight_;
  const int32_t* table_;
};

// grid: x rows, y KV heads, z spans side by side, or 1: a CTA takes all spans of its row in turn.
template <bool kAppend>
__global__ void __launch_bounds__(kThreads, 2)
    packed_attention_kernel(const __grid_constant__ PackedAttention p) {
  __shared__ __align__(16) typename SpanWalker<kAppend>::Shared shared;
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int64_t row = blockIdx.x;
  const int kv_head = blockIdx.y, group = p.cache.heads / p.cache.kv_heads;
  int32_t span = blockIdx.z;
  ptx::let_dependents_start();
  const SpanWalker<kAppend> walker(p, row, kv_head);
  const int32_t spans = walker.sight().spans;
  if (span >= spans) return;
  const int head = kv_head * group + warp;
  const float sink = p.op.sinks != nullptr && warp < group ? __ldg(p.op.sinks + head) : 0.0f;
  UnitCache u;
  walker.load_ahead(span, warp, lane, u);
  ptx::wait_for_previous();
  const QueryFragments q = query_fragments(p, row, kv_head, lane);
  const bool in_turn = gridDim.z == 1;
  Running all, state;
  bool ahead = kAppend;
  do {
    state = walker.walk(span, in_turn && span + 1 < spans ? span + 1 : -1, ahead, q, warp, lane, u, shared);
    all.add(state.state.top, state.state.weight, state.sum);
    ahead = true;
  } while (in_turn && ++span < spans);
  if (in_turn || spans == 1) {
    if (warp < group) store_out(p, row, head, lane, sink, all);
    return;
  }
  const int64_t place = row * p.cache.kv_heads + kv_head;
  float* mine = p.partial + (place * gridDim.z + span) * kPartialFloats;
  reinterpret_cast<float2*>(mine + warp * kDim)[lane] = state.sum;
  if (lane == 0) {
    mine[kGroup * kDim + warp] = state.state.top;
    mine[kGroup * (kDim + 1) + warp] = state.state.weight;
  }
  if (!last_to_arrive(p.arrived + place, spans) || warp >= group) return;
  all = Running{};
#pragma unroll 4
  for (int32_t s = 0; s < spans; ++s) {
    const float* from = p.partial + (place * gridDim.z + s) * kPartialFloats;
    all.add(__ldcg(from + kGroup * kDim + warp), __ldcg(from + kGroup * (kDim + 1) + warp),
            __ldcg(reinterpret_cast<const float2*>(from + warp * kDim) + lane));
  }
  store_out(p, row, head, lane, sink, all);
}

}  // namespace

bool fits_packed_attention(DType kv_type, int32_t heads, int32_t kv_heads, int32_t head_dim) {
  return kv_type == DType::kBF16 && head_dim == kDim && kv_heads > 0 && heads % kv_heads == 0 &&
         heads / kv_heads <= kGroup;
}

int32_t attention_spans(int32_t position, int32_t window) { return sight_of(position, window).spans; }

size_t packed_attention_partial_bytes(int64_t rows, int32_t max_spans, int32_t kv_heads) {
  if (max_spans <= 1) return 0;
  return static_cast<size_t>(rows) * static_cast<size_t>(max_spans) * static_cast<size_t>(kv_heads) *
         kPartialFloats * sizeof(float);
}

void launch_packed_attention(const PackedAttention& op, cudaStream_t stream) {
  if (op.rows == 0) return;
  if (op.prompt && op.angles == nullptr) return launch_prompt_attention(op, stream);
  const dim3 grid(static_cast<unsigned>(op.rows), static_cast<unsigned>(op.cache.kv_heads),
                  static_cast<unsigned>(op.partial != nullptr ? op.max_spans : 1));
  const auto kernel = op.angles != nullptr ? packed_attention_kernel<true> : packed_attention_kernel<false>;
  launch_dependent("packed_attention_kernel", kernel, grid, kThreads, 0, stream, op);
}

}  // namespace millrace::cuda
