// Rows of a table by token, and the gradient of the table: positions are sorted by token, stably, so that
// every row of the gradient is one sum in order of position. Roofline: memory; the sort moves 32 bytes a
// position and pass.
#include <utility>

#include "kernels/cuda/fused/each_row.cuh"
#include "kernels/cuda/fused/fused.h"
#include "kernels/cuda/tile/launch.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"

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

constexpr int kDigitBits = 9, kDigits = 1 << kDigitBits;  // two passes up to 262,143 tokens
constexpr int kChunk = 1024;                              // positions of a CTA, one per thread
constexpr int kWarps = kChunk / kWarpLanes;

// Keys and the positions they came from.
struct Pairs {
  uint32_t* key;
  int32_t* position;
};

// A token outside the table has the key `vocab`, behind all others.
__device__ inline uint32_t key_of(int32_t token, int64_t vocab) {
  return static_cast<uint32_t>(token >= 0 && token < vocab ? token : vocab);
}
__global__ void __launch_bounds__(kChunk)
    keys_kernel(const int32_t* tokens, int64_t count, int64_t vocab, Pairs out) {
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kChunk + threadIdx.x;
  if (i >= count) return;
  out.key[i] = key_of(tokens[i], vocab);
  out.position[i] = static_cast<int32_t>(i);
}

// All of it by one CTA, of few positions: pairs are compared key first, so that no two are equal and any sort
// is stable. A bitonic one, in shared memory.
constexpr int kFewPositions = 2048;
__global__ void __launch_bounds__(kChunk)
    sort_few_kernel(const int32_t* tokens, int count, int size, int64_t vocab, Pairs out) {
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  extern __shared__ uint64_t pairs[];  // key, position; size: a power of two
  for (int i = static_cast<int>(threadIdx.x); i < size; i += kChunk)
    pairs[i] = i < count ? uint64_t{key_of(tokens[i], vocab)} << 32 | static_cast<uint32_t>(i) : ~uint64_t{0};
  for (int width = 2; width <= size; width *= 2) {
    for (int apart = width / 2; apart > 0; apart /= 2) {
      __syncthreads();  // the step before is done
      for (int i = static_cast<int>(threadIdx.x); i < size / 2; i += kChunk) {
        const int low = (i & ~(apart - 1)) * 2 + (i & (apart - 1)), high = low + apart;
        const uint64_t a = pairs[low], b = pairs[high];
        if ((a > b) == ((low & width) == 0)) pairs[low] = b, pairs[high] = a;
      }
    }
  }
  __syncthreads();  // sorted
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kChunk) {
    out.key[i] = static_cast<uint32_t>(pairs[i] >> 32);
    out.position[i] = static_cast<int32_t>(pairs[i] & 0xffffffffu);
  }
}

// counts [digits][chunks]
__global__ void __launch_bounds__(kChunk)
    count_digits_kernel(const uint32_t* keys, int64_t count, int shift, int32_t* counts) {
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  __shared__ int32_t of_digit[kDigits];
  if (threadIdx.x < kDigits) of_digit[threadIdx.x] = 0;
  __syncthreads();  // zero before anybody counts
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kChunk + threadIdx.x;
  if (i < count) atomicAdd(&of_digit[keys[i] >> shift & (kDigits - 1)], 1);
  __syncthreads();  // all have counted
  if (threadIdx.x < kDigits)
    counts[static_cast<int64_t>(threadIdx.x) * gridDim.x + blockIdx.x] = of_digit[threadIdx.x];
}

// Each count becomes the sum of those before it. One CTA, four of a thread at a time: size is a multiple of
// four.
__global__ void __launch_bounds__(kChunk) sum_before_kernel(int32_t* counts, int64_t size) {
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  __shared__ int32_t of_warp[kWarps];
  const int lane = threadIdx.x % kWarpLanes, warp = threadIdx.x / kWarpLanes;
  int32_t before = 0;
  for (int64_t begin = 0; begin < size; begin += 4 * kChunk) {
    const int64_t i = begin + 4 * static_cast<int>(threadIdx.x);
    int4 four = i < size ? *reinterpret_cast<const int4*>(counts + i) : make_int4(0, 0, 0, 0);
    const int32_t mine = four.x + four.y + four.z + four.w;
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
    const int32_t first = base + up_to - mine;
    four = {first, first + four.x, first + four.x + four.y, first + four.x + four.y + four.z};
    if (i < size) *reinterpret_cast<int4*>(counts + i) = four;
    before += all;
    __syncthreads();  // read before the next round's are written
  }
}

__global__ void __launch_bounds__(kChunk)
    scatter_kernel(Pairs in, int64_t count, int shift, const int32_t* starts, Pairs out) {
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  __shared__ uint16_t of_warp[kWarps][kDigits];  // how many of a digit, then how many before this warp
  for (int i = threadIdx.x; i < kWarps * kDigits; i += kChunk) of_warp[i / kDigits][i % kDigits] = 0;
  __syncthreads();  // zero before anybody counts
  const int lane = threadIdx.x % kWarpLanes, warp = threadIdx.x / kWarpLanes;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kChunk + threadIdx.x;
  const bool there = i < count;
  const uint32_t key = there ? in.key[i] : 0;
  const uint32_t digit = there ? key >> shift & (kDigits - 1) : kDigits;  // a digit of its own past the end
  const unsigned same = __match_any_sync(kAllLanes, digit);
  const int rank = __popc(same & ((1u << lane) - 1));
  if (there && rank == 0) of_warp[warp][digit] = static_cast<uint16_t>(__popc(same));
  __syncthreads();  // all warps have counted
  if (threadIdx.x < kDigits) {
    uint16_t before = 0;
    for (int w = 0; w < kWarps; ++w) {
      const uint16_t mine = of_warp[w][threadIdx.x];
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
  ptx::let_dependents_start();
  ptx::wait_for_previous();
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

struct TableGradient {
  Rows dy, dtable;
  const int32_t *starts, *positions;
  float scale;
  bool accumulate;
  int64_t vocab, cols;
};

// Eight columns of a token's row: positions `begin` to `end` in their order.
template <Form kForm>
__device__ inline void add_positions(const TableGradient& op, int64_t token, int32_t begin, int32_t end,
                                     int64_t col, int n) {
  Values8 sum{};
  constexpr int kAtOnce = 4;  // loads under way
  for (int32_t i = begin; i < end; i += kAtOnce) {
    Raw8 raw[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (i + j < end) raw[j] = load8<kForm>(op.dy, op.positions[i + j], col, n);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (i + j >= end) continue;
      const Values8 v = to_float<kForm>(op.dy, raw[j]);
#pragma unroll
      for (int k = 0; k < kColumns; ++k) sum.v[k] += v.v[k];
    }
  }
  Values8 old{};
  if (op.accumulate) old = to_float<kForm>(op.dtable, load8<kForm>(op.dtable, token, col, n));
#pragma unroll
  for (int k = 0; k < kColumns; ++k)
    sum.v[k] = op.accumulate ? fmaf(sum.v[k], op.scale, old.v[k]) : sum.v[k] * op.scale;
  store8<kForm>(op.dtable, token, col, n, sum);
}

// A CTA has kTokens rows of the table, a team of kTeam threads one of them at a time. Most tokens are at no
// position: a row of zeros costs a store and little else.
constexpr int kTokens = 8;
template <Form kForm, int kTeam>
__global__ void __launch_bounds__(kEachThreads) table_gradient_kernel(TableGradient op) {
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  constexpr int kTeamsOfCta = kEachThreads / kTeam;
  const int team = static_cast<int>(threadIdx.x) / kTeam, thread = static_cast<int>(threadIdx.x) % kTeam;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTokens;
#pragma unroll 1
  for (int i = team; i < kTokens; i += kTeamsOfCta) {
    const int64_t token = first + i;
    if (token >= op.vocab) return;
    const int32_t begin = op.starts[token], end = op.starts[token + 1];
    if (begin == end && op.accumulate) continue;
    for (int64_t col = thread * kColumns; col < op.cols; col += kTeam * kColumns) {
      const int n = columns_left<kForm>(op.cols, col);
      if (begin == end) {
        store_raw8<kForm>(op.dtable, token, col, n, Raw8{});
      } else {
        add_positions<kForm>(op, token, begin, end, col, n);
      }
    }
  }
}

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
  const auto launch = [&](const char* name, auto kernel, unsigned ctas, unsigned threads, size_t bytes,
                          const auto&... arguments) {
    launch_overlapping(name, 1, kernel, dim3(ctas), threads, bytes, at, arguments...);
  };
  const auto chunks = static_cast<unsigned>((args.rows + kChunk - 1) / kChunk);
  if (chunks > 0 && args.rows <= kFewPositions) {
    int size = 2;
    while (size < args.rows) size *= 2;
    const size_t bytes = size_t{8} * static_cast<size_t>(size);
    launch("sort_few_kernel", sort_few_kernel, 1, kChunk, bytes, args.tokens, static_cast<int>(args.rows),
           size, args.vocab, memory.from);
  } else if (chunks > 0) {
    launch("keys_kernel", keys_kernel, chunks, kChunk, 0, args.tokens, args.rows, args.vocab, memory.from);
    for (int shift = 0; shift < 32 && (args.vocab >> shift) > 0; shift += kDigitBits) {
      launch("count_digits_kernel", count_digits_kernel, chunks, kChunk, 0, memory.from.key, args.rows, shift,
             memory.counts);
      launch("sum_before_kernel", sum_before_kernel, 1, kChunk, 0, memory.counts, int64_t{kDigits} * chunks);
      launch("scatter_kernel", scatter_kernel, chunks, kChunk, 0, memory.from, args.rows, shift,
             memory.counts, memory.to);
      std::swap(memory.from, memory.to);
    }
  }
  const auto starts_ctas = static_cast<unsigned>((args.vocab + 1 + kEachThreads - 1) / kEachThreads);
  launch("token_starts_kernel", token_starts_kernel, starts_ctas, kEachThreads, 0, memory.from.key, args.rows,
         args.vocab, memory.starts);
  const TableGradient op{.dy = rows_of(args.dy),
                         .dtable = rows_of(args.dtable),
                         .starts = memory.starts,
                         .positions = memory.from.position,
                         .scale = args.scale,
                         .accumulate = args.accumulate != 0,
                         .vocab = args.vocab,
                         .cols = args.cols};
  const bool plain = is_plain_bf16(op.dy) && is_plain_bf16(op.dtable) && args.cols % kColumns == 0;
  const bool wide = args.cols > kWarpLanes * kColumns * 2;
  const auto tables = static_cast<unsigned>((args.vocab + kTokens - 1) / kTokens);
  const auto kernel = plain ? (wide ? table_gradient_kernel<Form::kBf16, kEachThreads>
                                    : table_gradient_kernel<Form::kBf16, kWarpLanes>)
                            : (wide ? table_gradient_kernel<Form::kAny, kEachThreads>
                                    : table_gradient_kernel<Form::kAny, kWarpLanes>);
  launch("table_gradient_kernel", kernel, tables, kEachThreads, 0, op);
}

}  // namespace millrace::cuda
