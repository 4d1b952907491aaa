// A CTA has 64 columns of one head's state of one sequence, four threads each column: of its rows every
// fourth. A thread's part of the state stays in registers; vectors over the keys, of eight tokens at once,
// are in shared memory, which all columns read. The order of a sum depends on the size of keys alone.
#include "kernels/cuda/linear/replayed_scan.h"

#include "kernels/cuda/tile/reduce.cuh"

namespace millrace::cuda {
namespace {

constexpr int kLanes = 4, kColumns = 64, kThreads = kLanes * kColumns;
constexpr int kTokens = 8;  // whose vectors are in shared memory

template <int kKeys, bool kWkv>
struct ScanVectors {
  float key[kTokens][kKeys], query[kTokens][kKeys], decay[kTokens][kKeys];
  float a[kWkv ? kTokens : 1][kKeys], b[kWkv ? kTokens : 1][kKeys];
};

// One head of one sequence.
struct ScanHead {
  __device__ ScanHead(const ReplayedScan& of, int32_t of_sequence, int32_t of_head)
      : op(of), sequence(of_sequence), head(of_head) {
    const StateSequences& s = op.sequences;
    first_row = s.row_starts != nullptr ? s.row_starts[sequence] : sequence;
    tokens = s.row_starts != nullptr ? s.row_starts[sequence + 1] - first_row : 1;
    context = tokens > 0 ? s.positions[first_row] : 0;
    key_head = op.tiled ? head % op.key_heads : head / (op.heads / op.key_heads);
  }
  // This layer's part of the block of a position; null where nothing is kept.
  __device__ float* block(int32_t position) const {
    const int32_t id = op.pool.tables[op.pool.table_starts[sequence] + position / kStateChunk];
    return id < 0 ? nullptr : op.pool.pool + id * op.pool.block_floats + op.pool.layer_offset;
  }
  // What a token has written at a column: w, or v and, behind all heads', u.
  __device__ float* writes(float* of_block, int32_t position) const {
    return of_block + op.pool.at.writes + position % kStateChunk * op.pool.at.row_writes +
           int64_t{head} * op.pool.at.padded_dim;
  }

  const ReplayedScan& op;
  int32_t sequence, head, key_head, first_row, tokens, context;
};

// The vectors of positions [begin, end), zeros behind key_dim: of replayed ones those that blocks have.
template <int kKeys, bool kWkv>
__device__ void load_vectors(const ScanHead& of, int32_t begin, int32_t end, ScanVectors<kKeys, kWkv>& to) {
  const ReplayedScan& op = of.op;
  for (int i = threadIdx.x; i < (end - begin) * kKeys; i += kThreads) {
    const int32_t j = i / kKeys, d = i % kKeys, position = begin + j;
    float key = 0.0f, query = 0.0f, decay = 0.0f, a = 0.0f, b = 0.0f;
    if (d < op.key_dim) {
      const int64_t at_key = int64_t{of.key_head} * op.key_dim + d,
                    at_head = int64_t{of.head} * op.key_dim + d;
      if (position < of.context) {
        const StatePlaces& at = op.pool.at;
        const float* block = of.block(position);
        const int32_t r = position % kStateChunk;
        key = block[at.keys + r * at.row_keys + at_key];
        decay = block[at.decays + r * at.row_decays + at_head];
        if constexpr (kWkv)
          b = block[at.keys + r * at.row_keys + int64_t{op.key_heads} * op.key_dim + at_key];
      } else {
        const int64_t row = int64_t{of.first_row} + position - of.context;
        const int64_t at_row = row * op.heads * op.key_dim + at_head;
        key = op.k[row * op.k_stride + at_key];
        query = op.q[row * op.q_stride + at_key];
        decay = op.decays[at_row];
        if constexpr (kWkv) a = op.a[at_row], b = op.b[at_row];
      }
      if constexpr (!kWkv) decay = expf(decay);
    }
    to.key[j][d] = key, to.query[j][d] = query, to.decay[j][d] = decay;
    if constexpr (kWkv) to.a[j][d] = a, to.b[j][d] = b;
  }
}

template <int kKeys, bool kWkv>
__global__ void __launch_bounds__(kThreads)
    replayed_scan_kernel(const __grid_constant__ ReplayedScan op, int32_t strips) {
  __shared__ ScanVectors<kKeys, kWkv> vectors;
  constexpr int kRows = kKeys / kLanes;  // of the state, of a thread: 4 i + lane
  const auto task = static_cast<int32_t>(blockIdx.x) / strips;
  const ScanHead of(op, task / op.heads, task % op.heads);
  if (of.tokens == 0) return;  // the whole CTA
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int32_t column =
      static_cast<int32_t>(blockIdx.x) % strips * kColumns + static_cast<int32_t>(threadIdx.x) / kLanes;
  const bool in_block = column < op.pool.at.padded_dim;

  float s[kRows];
  const int32_t begin = of.context / kStateChunk * kStateChunk, end = of.context + of.tokens;
  const float* before = begin > 0 ? of.block(begin - 1) : nullptr;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int d = kLanes * i + lane;
    s[i] = before != nullptr && in_block && d < op.key_dim
               ? before[op.pool.at.state + of.head * op.pool.at.head_state +
                        int64_t{d} * op.pool.at.padded_dim + column]
               : 0.0f;
  }

  for (int32_t first = begin; first < end; first += kTokens) {
    const int32_t last = min(first + kTokens, end);
    __syncthreads();  // nobody reads the vectors before these any more
    load_vectors(of, first, last, vectors);
    __syncthreads();  // they are there
    for (int32_t position = first; position < last; ++position) {
      const int32_t j = position - first;
      const bool replayed = position < of.context;
      const int64_t row = int64_t{of.first_row} + position - of.context;
      float* block = of.block(position);
      float* kept = block != nullptr && in_block ? of.writes(block, position) + column : nullptr;
      const int64_t to_u = int64_t{op.heads} * op.pool.at.padded_dim;
      float v = 0.0f;
      if (replayed) {
        if (kept != nullptr) v = *kept;
      } else if (column < op.value_dim) {
        v = op.v[row * op.v_stride + int64_t{of.head} * op.value_dim + column];
      }
      float u = 0.0f;
      if constexpr (kWkv) {
        if (replayed) {
          if (kept != nullptr) u = kept[to_u];
        } else {
#pragma unroll
          for (int i = 0; i < kRows; ++i) u = fmaf(s[i], vectors.a[j][kLanes * i + lane], u);
          u = quad_sum(u);
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const int d = kLanes * i + lane;
          s[i] = fmaf(vectors.key[j][d], v, fmaf(vectors.b[j][d], u, s[i] * vectors.decay[j][d]));
        }
      } else {
#pragma unroll
        for (int i = 0; i < kRows; ++i) s[i] *= vectors.decay[j][kLanes * i + lane];
        if (!replayed) {
          float known = 0.0f;
#pragma unroll
          for (int i = 0; i < kRows; ++i) known = fmaf(s[i], vectors.key[j][kLanes * i + lane], known);
          v = (v - quad_sum(known)) * op.betas[row * op.heads + of.head];
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) s[i] = fmaf(vectors.key[j][kLanes * i + lane], v, s[i]);
      }
      if (!replayed) {
        float o = 0.0f;
#pragma unroll
        for (int i = 0; i < kRows; ++i) o = fmaf(s[i], vectors.query[j][kLanes * i + lane], o);
        o = quad_sum(o);
        if (lane == 0 && column < op.value_dim)
          op.out[(row * op.heads + of.head) * op.value_dim + column] = o * op.scale;
        if (lane == 0 && kept != nullptr) {
          *kept = v;
          if constexpr (kWkv) kept[to_u] = u;
        }
      }
      if (replayed || kept == nullptr || position % kStateChunk != kStateChunk - 1) continue;
      float* state = block + op.pool.at.state + of.head * op.pool.at.head_state + column;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int d = kLanes * i + lane;
        if (d < op.key_dim) state[int64_t{d} * op.pool.at.padded_dim] = s[i];
      }
    }
  }
}

template <int kKeys, bool kWkv>
void launch_as(const ReplayedScan& op, const Launch& at) {
  const int32_t strips = (op.pool.at.padded_dim + kColumns - 1) / kColumns;
  const int64_t ctas = int64_t{op.sequences.count} * op.heads * strips;
  replayed_scan_kernel<kKeys, kWkv><<<static_cast<unsigned>(ctas), kThreads, 0, at.stream>>>(op, strips);
  check_launch("replayed_scan_kernel");
}

template <int kKeys>
void launch_of_keys(const ReplayedScan& op, const Launch& at) {
  if (op.wkv7) return launch_as<kKeys, true>(op, at);
  launch_as<kKeys, false>(op, at);
}

}  // namespace

void launch_replayed_scan(const ReplayedScan& op, const Launch& at) {
  if (op.sequences.count == 0) return;
  if (op.key_dim <= 64) return launch_of_keys<64>(op, at);
  if (op.key_dim <= 128) return launch_of_keys<128>(op, at);
  launch_of_keys<kMaxStateKeyDim>(op, at);
}

}  // namespace millrace::cuda
