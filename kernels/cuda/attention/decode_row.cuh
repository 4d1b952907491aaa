// Decode attention: what a consumer warp does with a row and a tile of the cache, for both kernels
// (decode.cu, decode_split_kv.cu). A lane is (g, t) = (lane / 4, lane % 4): head g of the KV head's group,
// and positions or dimensions 2t and 2t + 1 of each 8.
#pragma once

#include <type_traits>

#include "kernels/cuda/attention/paged_tile.cuh"
#include "millrace/kernels/tile/ptx/mma.cuh"

namespace millrace::cuda {

// Of a tile's probabilities in shared memory, [heads][128] bf16: bytes between heads, so that eight rows lie
// in different banks.
inline constexpr int kProbRowBytes = kKeyTile * 2 + 16;

// How keys or values of kPages pages lie in a stage of shared memory, a tile's or fewer, and how much a split
// leaves for the one who combines.
template <int kDim, bool kFp8, int kPages = kTilePages>
struct DecodeRowShape {
  static constexpr int kParts = kDim / kPartDims;
  static constexpr int kKSteps = kDim / 16;  // products of 16 dimensions in a score, the K steps of Q K^T
  static constexpr int kColumns = kDim / 8;  // products of 8 dimensions in a position's value
  static constexpr int kPartBytes = kPages * kPagePartBytes;  // of 64 dimensions
  static constexpr int kStageBytes = kFp8 ? kPages * fp8_key_bytes(kDim) : kParts * kPartBytes;
  static constexpr int kPartialFloats =
      kMaxHeadGroup * (kDim + 2);  // of a split: accumulators, row_max, row_sum
};

// The key and the value to be stored, and cosines and sines of the position.
template <int kDim>
struct NewRow {
  float key[kDim], value[kDim];
  float2 cos_sin[kDim / 2];
};

// A position in a ring of stages: keys and values of tile after tile, in turn. phase: the parity of the
// barriers.
struct RingPosition {
  int32_t stage = 0;
  uint32_t phase = 0;
  __device__ RingPosition next(int32_t stages) const {
    return stage + 1 == stages ? RingPosition{0, phase ^ 1u} : RingPosition{stage + 1, phase};
  }
};

__device__ inline void rotate_pair(float2 cos_sin, float& a, float& b) {
  const float a0 = a, b0 = b;
  a = fmaf(a0, cos_sin.x, -(b0 * cos_sin.y));
  b = fmaf(b0, cos_sin.x, a0 * cos_sin.y);
}

// A work item: one split of one row and KV head, or all of the row's.
struct DecodeItem {
  int64_t row;
  int kv_head;
  KeyRange visible;
  int32_t split;  // of the row, or -1: all of them
  int32_t first_tile, past_tile;
  const int32_t* table;
};

// The work items of all CTAs: splits outermost, so that rows that have fewer leave no gaps in the middle.
// What they are read from was there before the step, unless a kernel of the step made tables of heads.
struct DecodeItems {
  const PagedAttention& p;
  bool whole;  // rows
  int32_t count, rows_and_heads;

  __device__ explicit DecodeItems(const PagedAttention& op)
      : p(op), whole(op.partial == nullptr), rows_and_heads(op.rows * op.cache.kv_heads) {
    count = whole ? rows_and_heads : rows_and_heads * op.max_splits;
  }
  // False: the row has no such split.
  __device__ bool at(int32_t i, DecodeItem& item) const {
    const int32_t split = i / rows_and_heads, in_split = i - split * rows_and_heads;
    item.row = in_split / p.cache.kv_heads;
    item.kv_head = in_split - static_cast<int32_t>(item.row) * p.cache.kv_heads;
    // With angles every sequence has one row.
    const int32_t position = p.cache.positions[item.row];
    if (p.cache.head_tables != nullptr) {
      item.table = p.cache.head_tables[in_split];
    } else {
      const int64_t sequence = p.angles != nullptr ? item.row : p.cache.sequence_of[item.row];
      item.table = p.cache.tables + p.cache.table_starts[sequence];
    }
    item.visible = visible_keys(position, p.op.window);
    const int32_t splits = item.visible.splits(), absolute = item.visible.first_split() + split;
    if (split >= splits) return false;
    item.split = whole || splits == 1 ? -1 : split;
    item.first_tile = item.visible.first_tile();
    item.past_tile = item.visible.past_tile();
    if (item.split >= 0) {
      item.first_tile = max(item.first_tile, absolute * kSplitTiles);
      item.past_tile = min(item.past_tile, (absolute + 1) * kSplitTiles);
    }
    return true;
  }
};

// with(kDim, kFp8) as types, for whichever instantiation a cache needs.
template <class With>
auto with_decode_shape(DType type, int32_t head_dim, With&& with) {
  using Dim64 = std::integral_constant<int, 64>;
  using Dim128 = std::integral_constant<int, 128>;
  if (type == DType::kF8E4M3) {
    return head_dim == 64 ? with(Dim64{}, std::true_type{}) : with(Dim128{}, std::true_type{});
  }
  return head_dim == 64 ? with(Dim64{}, std::false_type{}) : with(Dim128{}, std::false_type{});
}

// The kernel of decode_split_kv.cu: a warp per split, the splits of a row side by side.
void launch_decode_split_kv(const PagedAttention& op, const Launch& at);

// ---------------------------------------------------------------- the query

// Rows 0 to 7 of A operands: dimensions 16s + 2t, 2t + 1, 2t + 8, 2t + 9; of an fp8 cache, whose keys come
// four to a word, 16s + 4t to 4t + 3.
template <int kDim, bool kFp8>
struct RowQuery {
  static constexpr int kKSteps = DecodeRowShape<kDim, kFp8>::kKSteps;
  static constexpr int kSecond = kFp8 ? 2 : 8;  // from the first two to the others
  uint32_t pairs[kKSteps][2];

  // query: head g's, or null: a group has fewer heads. cos_sin: null if it is rotated already.
  __device__ void load(const float* query, const float2* cos_sin, bool interleaved, float scale) {
    const int t = threadIdx.x % 4;
    float x[kKSteps][4] = {};
    if (query != nullptr) {
      const float* from = query + first_dim(t);
#pragma unroll
      for (int s = 0; s < kKSteps; ++s) {
        if constexpr (kFp8) {
          const float4 four = *reinterpret_cast<const float4*>(from + 16 * s);
          x[s][0] = four.x, x[s][1] = four.y, x[s][2] = four.z, x[s][3] = four.w;
        } else {
          const float2 low = *reinterpret_cast<const float2*>(from + 16 * s),
                       high = *reinterpret_cast<const float2*>(from + 16 * s + 8);
          x[s][0] = low.x, x[s][1] = low.y, x[s][2] = high.x, x[s][3] = high.y;
        }
      }
      if (cos_sin != nullptr) rotate(cos_sin, interleaved, t, x);
    }
#pragma unroll
    for (int s = 0; s < kKSteps; ++s) {
      pairs[s][0] = pack_bf16(x[s][0] * scale, x[s][1] * scale);
      pairs[s][1] = pack_bf16(x[s][2] * scale, x[s][3] * scale);
    }
  }

 private:
  __device__ static int first_dim(int t) { return kFp8 ? 4 * t : 2 * t; }
  // Both kinds of pairs lie within a lane.
  __device__ static void rotate(const float2* cos_sin, bool interleaved, int t, float (&x)[kKSteps][4]) {
    constexpr int kHalf = kKSteps / 2;
    if (interleaved) {
#pragma unroll
      for (int i = 0; i < 2 * kKSteps; ++i) {
        rotate_pair(cos_sin[8 * (i / 2) + (first_dim(t) + i % 2 * kSecond) / 2], x[i / 2][2 * (i % 2)],
                    x[i / 2][2 * (i % 2) + 1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4 * kHalf; ++i) {
        rotate_pair(cos_sin[16 * (i / 4) + first_dim(t) + i % 2 + i % 4 / 2 * kSecond], x[i / 4][i % 4],
                    x[i / 4 + kHalf][i % 4]);
      }
    }
  }
};

// ---------------------------------------------------------------- the new token

// Puts the new token's key and value into the stage that has its position, by one warp, and from there into
// the cache.
template <int kDim, bool kFp8, int kPages = kTilePages>
struct Append {
  using Shape = DecodeRowShape<kDim, kFp8, kPages>;
  const NewRow<kDim>& row;
  bool interleaved;
  int32_t position;

  __device__ int in_stage() const { return position % (kPages * kBlockTokens); }
  __device__ int page() const { return in_stage() / kBlockTokens; }
  // The key (or value), rotated and rounded, into its stage.
  template <bool kValues>
  __device__ void into_stage(uint8_t* to) const {
    if constexpr (kFp8) {
      codes_into_stage<kValues>(to);
    } else {
#pragma unroll
      for (int k = 0; k < kDim / 64; ++k) {
        const Pair pair = pair_of<kValues>(k);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const uint32_t in_part = ptx::swizzled(static_cast<uint32_t>(in_stage()),
                                                 static_cast<uint32_t>(pair.d[e] % kPartDims) * 2);
          *reinterpret_cast<__nv_bfloat16*>(to + pair.d[e] / kPartDims * Shape::kPartBytes + in_part) =
              __float2bfloat16_rn(pair.x[e]);
        }
      }
    }
    __syncwarp();
  }
  // After the tile's products, 16 bytes a lane: no other warp waits for it. The scales of both go with the
  // key.
  template <bool kValues>
  __device__ void into_cache(const LayerCache& cache, int32_t block, int kv_head,
                             const uint8_t* stage) const {
    const int lane = threadIdx.x % kWarpLanes;
    if constexpr (kFp8) {
      codes_into_cache<kValues>(fp8_head(cache, block, kv_head),
                                stage + page() * (kValues ? fp8_value_bytes(kDim) : fp8_key_bytes(kDim)));
    } else if (lane < kDim / 8) {
      auto* cached =
          keys_of_block<__nv_bfloat16>(cache, block, kv_head) + (kValues ? value_distance(cache) : 0);
      const int at = lane / 8 * Shape::kPartBytes + in_stage() * ptx::kSwizzleRowBytes + lane % 8 * 16;
      const int to =
          lane / 8 * (kBlockTokens * kPartDims) + position % kBlockTokens * kPartDims + lane % 8 * 8;
      *reinterpret_cast<uint4*>(cached + to) = *reinterpret_cast<const uint4*>(stage + at);
    }
    ptx::publish_to_async();  // what was written to the stage is, before a copy may follow it
  }

 private:
  // Two dimensions that rotate together, and what they are.
  struct Pair {
    int d[2];
    float x[2];
  };
  template <bool kValues>
  __device__ Pair pair_of(int k) const {
    const int i = static_cast<int>(threadIdx.x % kWarpLanes) + kWarpLanes * k;
    Pair pair;
    pair.d[0] = interleaved ? 2 * i : i, pair.d[1] = interleaved ? 2 * i + 1 : i + kDim / 2;
    const float* from = kValues ? row.value : row.key;
    pair.x[0] = from[pair.d[0]], pair.x[1] = from[pair.d[1]];
    if constexpr (!kValues) rotate_pair(row.cos_sin[i], pair.x[0], pair.x[1]);
    return pair;
  }
  // Both scales go with the key: the value's is needed before the value is.
  template <bool kValues>
  __device__ void codes_into_stage(uint8_t* to) const {
    const int lane = threadIdx.x % kWarpLanes, in_block = position % kBlockTokens;
    uint8_t* codes = to + page() * (kValues ? fp8_value_bytes(kDim) : fp8_key_bytes(kDim));
    const uint8_t value_scale = scale_of<true>(), scale = kValues ? value_scale : scale_of<false>();
    if (!kValues && lane < 2) codes[lane * kBlockTokens + in_block] = lane == 0 ? scale : value_scale;
#pragma unroll
    for (int k = 0; k < kDim / 64; ++k) {
      const Pair pair = pair_of<kValues>(k);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at =
            kValues ? fp8_value_at(in_block, pair.d[e]) : kFp8ScalesBytes + fp8_key_at(in_block, pair.d[e]);
        codes[at] = fp8_code(pair.x[e], scale);
      }
    }
  }
  template <bool kValues>
  __device__ uint8_t scale_of() const {
    uint32_t max_magnitude = 0;
#pragma unroll
    for (int k = 0; k < kDim / 64; ++k) {
      const Pair pair = pair_of<kValues>(k);
      max_magnitude = max(max_magnitude, max(magnitude_bits(pair.x[0]), magnitude_bits(pair.x[1])));
    }
    return fp8_scale_of_warp(max_magnitude);
  }
  // A key's codes are whole rows of 64 bytes; a value's lie between those of the position beside it.
  template <bool kValues>
  __device__ void codes_into_cache(const Fp8Head& head, const uint8_t* from) const {
    const int lane = threadIdx.x % kWarpLanes, in_block = position % kBlockTokens;
    if constexpr (kValues) {
#pragma unroll
      for (int k = 0; k < kDim / kWarpLanes; ++k) {
        const int at = fp8_value_at(in_block, lane + kWarpLanes * k);
        head.values[at] = from[at];
      }
    } else {
      if (lane < kDim / 16) {
        const int at = lane / 4 * kFp8PartBytes + in_block * kFp8PartDims + lane % 4 * 16;
        *reinterpret_cast<uint4*>(head.keys + at) =
            *reinterpret_cast<const uint4*>(from + kFp8ScalesBytes + at);
      }
      if (lane < 2) head.scales[lane * kBlockTokens + in_block] = from[lane * kBlockTokens + in_block];
    }
  }
};

// ---------------------------------------------------------------- scores and values

// Scores of one page of a stage: head g, positions 2t, 2t + 1, 2t + 8, 2t + 9. Of an fp8 cache also the
// scales of their values, a byte each.
struct PageScores {
  float of[4];
  uint32_t value_scales;
  __device__ float value_scale(int i) const { return fp8_scale_of(value_scales >> (8 * i) & 255u); }
  // A position that the row does not see: what nobody stored there may be anything.
  __device__ void mask(int i) { of[i] = -INFINITY, value_scales &= ~(255u << (8 * i)); }
};
template <int kPages, int kDim, bool kFp8>
__device__ __forceinline__ void multiply_qk_page(const RowQuery<kDim, kFp8>& query, const uint8_t* keys,
                                                 int page, PageScores& scores) {
  using Shape = DecodeRowShape<kDim, kFp8, kPages>;
  const int lane = threadIdx.x % kWarpLanes;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    float score[4] = {};
    if constexpr (kFp8) {
      const int g = lane / 4, t = lane % 4;
      const uint8_t* from = keys + page * fp8_key_bytes(kDim);
#pragma unroll
      for (int part = 0; part < Shape::kParts; ++part) {
        const uint4 codes = *reinterpret_cast<const uint4*>(from + kFp8ScalesBytes + part * kFp8PartBytes +
                                                            (8 * n + g) * kFp8PartDims + t * 16);
        const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t* q = query.pairs[4 * part + i];
          const uint32_t a[4] = {q[0], 0, q[1], 0};
          ptx::mma_bf16(score, a, codes_to_bf16<kCodes01>(words[i]), codes_to_bf16<kCodes23>(words[i]));
        }
      }
      const uint32_t scales = *reinterpret_cast<const uint16_t*>(from + 8 * n + 2 * t);
      score[0] *= fp8_scale_of(scales & 255u), score[1] *= fp8_scale_of(scales >> 8);
      const uint32_t of_values = *reinterpret_cast<const uint16_t*>(from + kBlockTokens + 8 * n + 2 * t);
      scores.value_scales = n == 0 ? of_values : scores.value_scales | of_values << 16;
    } else {
      const int row = page * kBlockTokens + 8 * n + lane % 8, chunk = lane / 8;
#pragma unroll
      for (int s = 0; s < Shape::kKSteps; s += 2) {
        const auto at = static_cast<uint32_t>(2 * s % 8 + chunk) * 16;
        const uint4 k = ptx::ldmatrix_x4(keys + 2 * s / 8 * Shape::kPartBytes +
                                         ptx::swizzled(static_cast<uint32_t>(row), at));
        const uint32_t first[4] = {query.pairs[s][0], 0, query.pairs[s][1], 0},
                       second[4] = {query.pairs[s + 1][0], 0, query.pairs[s + 1][1], 0};
        ptx::mma_bf16(score, first, k.x, k.y);
        ptx::mma_bf16(score, second, k.z, k.w);
      }
    }
    scores.of[2 * n] = score[0], scores.of[2 * n + 1] = score[1];
  }
}

// The probabilities of four pages of a tile, `first` and on, of all heads, as A operands.
__device__ __forceinline__ void load_probs(const uint8_t* tile_probs, int first, uint2 (&probs)[4]) {
  const int lane = threadIdx.x % kWarpLanes;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint4 w = ptx::ldmatrix_x4(tile_probs + lane % 8 * kProbRowBytes +
                                     ((first + i) * kBlockTokens + lane / 8 * 8) * 2);
    probs[i] = {w.x, w.y}, probs[i + 1] = {w.z, w.w};
  }
}

// acc += P V over four pages of a stage, `first` and on, for `kCount` columns of 8 dimensions. probs: those
// of a page as an A operand, positions 2t, 2t + 1 and 2t + 8, 2t + 9. Codes of fp8 come in pairs of
// positions, which are loaded in the order t, t + 4.
template <int kDim, bool kFp8, int kPages, int kCount>
__device__ __forceinline__ void multiply_pv_pages(const uint8_t* values, int first, const uint2 (&probs)[4],
                                                  int column, float (&acc)[kCount][4]) {
  const int lane = threadIdx.x % kWarpLanes;
  if constexpr (kFp8) {
    const auto pair = static_cast<uint32_t>(lane % 8 / 2 + lane % 2 * 4);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const uint4 v = ptx::ldmatrix_x4_transposed(
          values + (first + lane / 8) * fp8_value_bytes(kDim) + (column + n) / 8 * kFp8PartBytes +
          ptx::swizzled(pair, static_cast<uint32_t>((column + n) % 8 * 16)));
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int page = 0; page < 4; ++page) {
        const uint32_t a[4] = {probs[page].x, 0, probs[page].y, 0};
        ptx::mma_bf16(acc[n], a, codes_to_bf16<kCodes01>(words[page]), codes_to_bf16<kCodes23>(words[page]));
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const uint32_t low[4] = {probs[i].x, 0, probs[i].y, 0},
                     high[4] = {probs[i + 1].x, 0, probs[i + 1].y, 0};
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        const uint4 v = ptx::ldmatrix_x4_transposed(
            values + (column + n) / 8 * DecodeRowShape<kDim, kFp8, kPages>::kPartBytes +
            ptx::swizzled(static_cast<uint32_t>((first + i) * kBlockTokens + lane),
                          static_cast<uint32_t>((column + n) % 8 * 16)));
        ptx::mma_bf16(acc[n], low, v.x, v.y);
        ptx::mma_bf16(acc[n], high, v.z, v.w);
      }
    }
  }
}

}  // namespace millrace::cuda
