// A thread has a channel and goes down 32 rows; what of a sequence's rows a CTA gets does not change a bit.
// Its loads of the taps - 1 rows before them are in L1 or L2.
#include "kernels/cuda/linear/short_conv.h"

#include <algorithm>

#include "kernels/cuda/moe/activation.cuh"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 128, kTileRows = 32, kAtOnce = 8;  // rows: of a tile, whose loads are under way
constexpr int64_t kEnoughCtas = 2048;

// One channel of one sequence.
struct ConvColumn {
  __device__ ConvColumn(const ShortConv& of, int32_t of_sequence, int64_t of_channel)
      : op(of), sequence(of_sequence), channel(of_channel) {
    const StateSequences& s = op.sequences;
    first_row = s.row_starts != nullptr ? s.row_starts[sequence] : sequence;
    tokens = s.row_starts != nullptr ? s.row_starts[sequence + 1] - first_row : 1;
    context = s.positions != nullptr && tokens > 0 ? s.positions[first_row] : 0;
  }
  // Of the block of a position, this layer's inputs at it; null where nothing is kept.
  __device__ float* kept(int32_t position) const {
    const StatePool& p = op.pool;
    if (p.pool == nullptr) return nullptr;
    const int32_t block = p.tables[p.table_starts[sequence] + position / kStateChunk];
    if (block < 0) return nullptr;
    return p.pool + block * p.block_floats + p.layer_offset + p.at.inputs +
           position % kStateChunk * p.at.row_inputs + channel;
  }
  // Row `row` of the step; those before it have negative numbers.
  __device__ float at(int32_t row) const {
    if (row >= 0) return op.x[(int64_t{first_row} + row) * op.x_stride + channel];
    if (context + row >= 0) return *kept(context + row);
    if (op.initial_rows == nullptr) return 0.0f;
    const int32_t before = op.taps - 1;
    return op.initial_rows[(int64_t{sequence} * before + before + row) * op.channels + channel];
  }

  const ShortConv& op;
  int32_t sequence, first_row, tokens, context;
  int64_t channel;
};

// kTaps 0: so many as the operation says.
template <int kTaps>
__global__ void __launch_bounds__(kThreads)
    short_conv_kernel(const __grid_constant__ ShortConv op, unsigned tiles, unsigned slices) {
  const int64_t channel = int64_t{blockIdx.x % tiles} * kThreads + threadIdx.x;
  if (channel >= op.channels) return;
  const unsigned slice = blockIdx.x / tiles % slices;
  const ConvColumn column(op, static_cast<int32_t>(blockIdx.x / tiles / slices), channel);
  const int taps = kTaps > 0 ? kTaps : op.taps;
  const float bias = op.bias != nullptr ? op.bias[channel] : 0.0f;
  constexpr int kKept = kTaps > 0 ? kTaps : 1;
  float weight[kKept], x[kKept];
  if constexpr (kTaps > 0) {
#pragma unroll
    for (int i = 0; i < kTaps; ++i) weight[i] = op.weight[channel * kTaps + i];
  }
  for (int64_t tile = int64_t{slice} * kTileRows; tile < column.tokens; tile += int64_t{slices} * kTileRows) {
    const auto first = static_cast<int32_t>(tile);
    const int32_t last = min(first + kTileRows, column.tokens);
    if constexpr (kTaps > 0) {
#pragma unroll
      for (int i = 0; i + 1 < kTaps; ++i) x[i] = column.at(first - kTaps + 1 + i);
    }
    for (int32_t r0 = first; r0 < last; r0 += kAtOnce) {
      float in[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) in[i] = r0 + i < last ? column.at(r0 + i) : 0.0f;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int32_t r = r0 + j;
        if (r >= last) break;
        float sum = bias;
        if constexpr (kTaps > 0) {
          x[kTaps - 1] = in[j];
#pragma unroll
          for (int i = 0; i < kTaps; ++i) sum = fmaf(weight[i], x[i], sum);
#pragma unroll
          for (int i = 0; i + 1 < kTaps; ++i) x[i] = x[i + 1];
        } else {
          for (int i = 0; i < taps; ++i)
            sum = fmaf(op.weight[channel * taps + i], column.at(r - taps + 1 + i), sum);
        }
        if (op.silu) sum *= sigmoid(sum);
        const int64_t row = int64_t{column.first_row} + r;
        if (op.gate != nullptr) sum *= op.gate[row * op.gate_stride + channel];
        op.out[row * op.out_stride + channel] = sum;
        if (float* kept = column.kept(column.context + r); kept != nullptr) *kept = in[j];
      }
    }
  }
  for (int32_t i = 0; op.final_rows != nullptr && slice == 0 && i < taps - 1; ++i) {
    op.final_rows[(int64_t{column.sequence} * (taps - 1) + i) * op.channels + channel] =
        column.at(column.tokens - (taps - 1) + i);
  }
}

}  // namespace

void launch_short_conv(const ShortConv& conv, const Launch& at) {
  ShortConv op = conv;
  if (op.out_stride == 0) op.out_stride = op.channels;
  if (op.sequences.count == 0 || op.channels == 0) return;
  const int64_t tiles = (op.channels + kThreads - 1) / kThreads;
  int64_t slices = std::max<int64_t>(1, kEnoughCtas / (tiles * op.sequences.count));
  if (op.most_tokens > 0) slices = std::min<int64_t>(slices, (op.most_tokens + kTileRows - 1) / kTileRows);
  const auto kernel = op.taps == 2   ? short_conv_kernel<2>
                      : op.taps == 3 ? short_conv_kernel<3>
                      : op.taps == 4 ? short_conv_kernel<4>
                                     : short_conv_kernel<0>;
  const auto grid = static_cast<unsigned>(tiles * slices * op.sequences.count);
  kernel<<<grid, kThreads, 0, at.stream>>>(op, static_cast<unsigned>(tiles), static_cast<unsigned>(slices));
  check_launch("short_conv_kernel");
}

}  // namespace millrace::cuda
