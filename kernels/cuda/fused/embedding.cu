// Rows of a table by token, and the gradient of the table: positions are sorted by token, stably, so that
// every row of the gradient is one sum in order of position. Roofline: memory; the sort moves 32 bytes a
// position and pass.
#include <utility>

#include "kernels/cuda/fused/each_row.cuh"
#include "kernels/cuda/fused/fused.h"

namespace millrace::cuda {
namespace {

struct EmbeddingOp {
  Rows table, y;
  const int32_t* tokens;
  int64_t vocab;
  float scale;
  struct Loaded {
    Raw8 row;
    bool inside;
  };
  __device__ Loaded load(int64_t row, int64_t col, int n) const {
    const int64_t token = tokens[row];
    Loaded l{};
    l.inside = token >= 0 && token < vocab;
    if (l.inside) l.row = load8(table, token, col, n);
    return l;
  }
  __device__ void finish(const Loaded& l, int64_t row, int64_t col, int n) const {
    Values8 v = to_float(table, l.row);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) v.v[i] = l.inside ? v.v[i] * scale : NAN;
    store8(y, row, col, n, v);
  }
};

// ---------------------------------------------------------------- a stable radix sort of positions by token

constexpr int kDigits = 256, kDigitBits = 8;
constexpr int kChunk = 1024;  // positions of a CTA, one per thread
constexpr int kWarps = kChunk / kWarpLanes;

// Keys and the positions they came from.
struct Pairs {
  uint32_t* key;
  int32_t* position;
};

// A token outside the table has the key `vocab`, behind all others.
__global__ void __launch_bounds__(kChunk)
    keys_kernel(const int32_t* tokens, int64_t count, int64_t vocab, Pairs out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kChunk + threadIdx.x;
  if (i >= count) return;
  const int64_t token = tokens[i];
  out.key[i] = static_cast<uint32_t>(token >= 0 && token < vocab ? token : vocab);
  out.position[i] = static_cast<int32_t>(i);
}

// counts [digits][chunks]
__global__ void __launch_bounds__(kChunk)
    count_digits_kernel(const uint32_t* keys, int64_t count, int shift, int32_t* counts) {
  __shared__ int32_t of_digit[kDigits];
  if (threadIdx.x < kDigits) of_digit[threadIdx.x] = 0;
  __syncthreads();  // zero before anybody counts
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kChunk + threadIdx.x;
  if (i < count) atomicAdd(&of_digit[keys[i] >> shift & (kDigits - 1)], 1);
  __syncthreads();  // all have counted
  if (threadIdx.x < kDigits)
    counts[static_cast<int64_t>(threadIdx.x) * gridDim.x + blockIdx.x] = of_digit[threadIdx.x];
}

// Each count becomes the sum of those before it. One CTA.
__global__ void __launch_bounds__(kChunk) sum_before_kernel(int32_t* counts, int64_t size) {
  __shared__ int32_t of_warp[kWarps];
  const int lane = threadIdx.x % kWarpLanes, warp = threadIdx.x / kWarpLanes;
  int32_t before = 0;
  for (int64_t begin = 0; begin < size; begin += kChunk) {
    const int64_t i = begin + threadIdx.x;
    const int32_t mine = i < size ? counts[i] : 0;
    int32_t up_to = mine;
#pragma unroll
    for (int distance = 1; distance < kWarpLanes; distance *= 2) {
      const int32_t from = __shfl_up_sync(kAllLanes, up_to, distance);
      if (lane >= distance) up_to += from;
    }
    if (lane == kWarpLanes - 1) of_warp[warp] = up_to;
    __syncthreads();  // all warps' sums are there
    int32_t base = before, all = 0;
    for (int j = 0; j < kWarps; ++j) {
      if (j < warp) base += of_warp[j];
      all += of_warp[j];
    }
    if (i < size) counts[i] = base + up_to - mine;
    before += all;
    __syncthreads();  // read before the next round's are written
  }
}

__global__ void __launch_bounds__(kChunk)
    scatter_kernel(Pairs in, int64_t count, int shift, const int32_t* starts, Pairs out) {
  __shared__ int32_t of_warp[kWarps][kDigits];  // how many of a digit, then how many before this warp
  for (int i = threadIdx.x; i < kWarps * kDigits; i += kChunk) of_warp[i / kDigits][i % kDigits] = 0;
  __syncthreads();  // zero before anybody counts
  const int lane = threadIdx.x % kWarpLanes, warp = threadIdx.x / kWarpLanes;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kChunk + threadIdx.x;
  const bool there = i < count;
  const uint32_t key = there ? in.key[i] : 0;
  const uint32_t digit = there ? key >> shift & (kDigits - 1) : kDigits;  // a digit of its own past the end
  const unsigned same = __match_any_sync(kAllLanes, digit);
  const int rank = __popc(same & ((1u << lane) - 1));
  if (there && rank == 0) of_warp[warp][digit] = __popc(same);
  __syncthreads();  // all warps have counted
  if (threadIdx.x < kDigits) {
    int32_t before = 0;
    for (int w = 0; w < kWarps; ++w) {
      const int32_t mine = of_warp[w][threadIdx.x];
      of_warp[w][threadIdx.x] = before;
      before += mine;
    }
  }
  __syncthreads();  // sums of the warps before are there
  if (!there) return;
  const int32_t to =
      starts[static_cast<int64_t>(digit) * gridDim.x + blockIdx.x] + of_warp[warp][digit] + rank;
  out.key[to] = key;
  out.position[to] = in.position[i];
}

// starts[v]: the first sorted position whose key is at least v, for v <= vocab.
__global__ void __launch_bounds__(kEachThreads)
    token_starts_kernel(const uint32_t* keys, int64_t count, int64_t vocab, int32_t* starts) {
  const int64_t v = static_cast<int64_t>(blockIdx.x) * kEachThreads + threadIdx.x;
  if (v > vocab) return;
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (keys[middle] < v) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  starts[v] = static_cast<int32_t>(low);
}

struct TableGradientOp {
  Rows dy, dtable;
  const int32_t *starts, *positions;
  float scale;
  bool accumulate;
  struct Loaded {
    int32_t begin, end;
  };
  __device__ Loaded load(int64_t token, int64_t, int) const { return {starts[token], starts[token + 1]}; }
  __device__ void finish(const Loaded& l, int64_t token, int64_t col, int n) const {
    if (accumulate && l.begin == l.end) return;
    Values8 sum{};
    constexpr int kAtOnce = 4;  // loads under way
    for (int32_t i = l.begin; i < l.end; i += kAtOnce) {
      Raw8 raw[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (i + j < l.end) raw[j] = load8(dy, positions[i + j], col, n);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (i + j >= l.end) continue;
        const Values8 v = to_float(dy, raw[j]);
#pragma unroll
        for (int k = 0; k < kColumns; ++k) sum.v[k] += v.v[k];
      }
    }
    const Values8 old = accumulate ? to_float(dtable, load8(dtable, token, col, n)) : Values8{};
#pragma unroll
    for (int k = 0; k < kColumns; ++k)
      sum.v[k] = accumulate ? fmaf(sum.v[k], scale, old.v[k]) : sum.v[k] * scale;
    store8(dtable, token, col, n, sum);
  }
};

struct SortMemory {
  Pairs from, to;
  int32_t *counts, *starts;
  size_t bytes;
};
SortMemory sort_memory(void* base, int64_t rows, int64_t vocab) {
  size_t used = 0;
  const auto take = [&](int64_t count) {
    auto* at = base == nullptr ? nullptr : static_cast<uint8_t*>(base) + used;
    used += (static_cast<size_t>(count) * 4 + 255) / 256 * 256;
    return at;
  };
  const auto pairs = [&] {
    auto* key = reinterpret_cast<uint32_t*>(take(rows));
    return Pairs{key, reinterpret_cast<int32_t*>(take(rows))};
  };
  SortMemory memory{};
  memory.from = pairs();
  memory.to = pairs();
  memory.counts = reinterpret_cast<int32_t*>(take((rows + kChunk - 1) / kChunk * kDigits));
  memory.starts = reinterpret_cast<int32_t*>(take(vocab + 1));
  memory.bytes = used;
  return memory;
}

}  // namespace

void launch_embedding(const mr_embedding_args& args, const Launch& at) {
  const EmbeddingOp op{rows_of(args.table), rows_of(args.y), args.tokens, args.vocab, args.scale};
  launch_each_row("embedding", op, args.rows, args.cols, at);
}

size_t embedding_backward_workspace_bytes(int64_t rows, int64_t vocab) {
  return sort_memory(nullptr, rows, vocab).bytes;
}

void launch_embedding_backward(const mr_embedding_backward_args& args, void* workspace, const Launch& at) {
  SortMemory memory = sort_memory(workspace, args.rows, args.vocab);
  const auto chunks = static_cast<unsigned>((args.rows + kChunk - 1) / kChunk);
  if (chunks > 0) {
    keys_kernel<<<chunks, kChunk, 0, at.stream>>>(args.tokens, args.rows, args.vocab, memory.from);
    check_launch("keys_kernel");
    for (int shift = 0; shift < 32 && (args.vocab >> shift) > 0; shift += kDigitBits) {
      count_digits_kernel<<<chunks, kChunk, 0, at.stream>>>(memory.from.key, args.rows, shift, memory.counts);
      check_launch("count_digits_kernel");
      sum_before_kernel<<<1, kChunk, 0, at.stream>>>(memory.counts, int64_t{kDigits} * chunks);
      check_launch("sum_before_kernel");
      scatter_kernel<<<chunks, kChunk, 0, at.stream>>>(memory.from, args.rows, shift, memory.counts,
                                                       memory.to);
      check_launch("scatter_kernel");
      std::swap(memory.from, memory.to);
    }
  }
  const auto starts_ctas = static_cast<unsigned>((args.vocab + 1 + kEachThreads - 1) / kEachThreads);
  token_starts_kernel<<<starts_ctas, kEachThreads, 0, at.stream>>>(memory.from.key, args.rows, args.vocab,
                                                                   memory.starts);
  check_launch("token_starts_kernel");
  const TableGradientOp op{rows_of(args.dy),     rows_of(args.dtable), memory.starts,
                           memory.from.position, args.scale,           args.accumulate != 0};
  launch_each_row("embedding backward", op, args.vocab, args.cols, at);
}

}  // namespace millrace::cuda
