// Gradients of layers with a state (linear_backward.h): states forwards and gradients of states backwards, a
// CTA for each head and 32 columns of values, which need nothing of one another; before and after these
// everything else, a CTA for each chunk.
//
// Roofline: a chunk and head has 13 products of 64 x 128 x 128 or half of it in TF32; its two states, written
// and read once each, are 256 KB of traffic and most of it. What follows one another, a chunk of each scan,
// is latency.
#include "kernels/cuda/linear/linear_backward.h"

#include <cmath>

#include "base/check.h"
#include "kernels/cuda/linear/backward_chunk.cuh"
#include "kernels/cuda/linear/chunk_gradients.cuh"
#include "kernels/cuda/tile/launch.cuh"

namespace millrace::cuda {
namespace {

extern __shared__ __align__(16) float shared_floats[];

// ---------------------------------------------------------------- what a chunk needs of itself

template <int kKeys, int kValues>
struct PrepareShared {
  float q[kChunk * row_stride(kKeys)];
  float k[kChunk * row_stride(kKeys)];
  float d_out[kChunk * row_stride(kValues)];
  float a[kChunk * kSquareStride];  // A
  float l[kChunk * kSquareStride];  // L B
  BackwardGates gates;
};

// (I + L B)^-1, column threadIdx.x of the first 64 threads, downwards.
__device__ inline void solve_columns(const float* l, float* to) {
  const int column = static_cast<int>(threadIdx.x);
  float x[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int m = 0; m < i; ++m) sum = fmaf(-l[i * kSquareStride + m], x[m], sum);
    x[i] = sum;
    to[i * kChunk + column] = sum;
  }
}

// grid: heads, chunks of all sequences.
template <int kKeys, int kValues, bool kDelta>
__global__ void __launch_bounds__(kProductThreads) prepare_kernel(const __grid_constant__ LinearBackward op) {
  constexpr int kKeyStride = row_stride(kKeys), kValueStride = row_stride(kValues);
  auto& s = *reinterpret_cast<PrepareShared<kKeys, kValues>*>(shared_floats);
  const BackwardPlaces places = backward_places(op);
  const auto chunk = static_cast<int32_t>(blockIdx.y % places.chunks);
  const BackwardHead of(op, static_cast<int32_t>(blockIdx.y / places.chunks),
                        static_cast<int32_t>(blockIdx.x));
  if (chunk >= of.count) return;
  const BackwardRows rows = of.rows(chunk);
  load_rows<kKeys, kKeyStride>(s.q, op.q, rows, op.key_heads, of.key_head, op.key_dim);
  load_rows<kKeys, kKeyStride>(s.k, op.k, rows, op.key_heads, of.key_head, op.key_dim);
  load_rows<kValues, kValueStride>(s.d_out, op.d_out, rows, op.heads, of.head, op.value_dim);
  ptx::async_commit();
  put_gates(s.gates, gates_of(op, of, rows));
  ptx::async_wait<0>();
  __syncthreads();  // gates and rows are there
  const auto key = [&](int d, int i) { return s.k[i * kKeyStride + d]; };
  ProductTiles<kChunk, kChunk> square;
  square.template add<kKeys>([&](int i, int d) { return s.q[i * kKeyStride + d]; }, key);
  square.each([&](int i, int j, float x) {
    s.a[i * kSquareStride + j] = j <= i ? op.scale * s.gates.between(i, j) * x : 0.0f;
  });
  if constexpr (kDelta) {
    square.clear();
    square.template add<kKeys>([&](int i, int d) { return s.k[i * kKeyStride + d]; }, key);
    square.each([&](int i, int j, float x) {
      s.l[i * kSquareStride + j] = j < i ? s.gates.between(i, j) * x * s.gates.beta[j] : 0.0f;
    });
  }
  __syncthreads();  // A and L B are there
  if constexpr (kDelta) {
    if (threadIdx.x < kChunk) solve_columns(s.l, op.workspace + places.solved + rows.entry * kChunk * kChunk);
  }
  ProductTiles<kChunk, kValues> dw;
  dw.template add<kChunk>([&](int j, int i) { return s.a[i * kSquareStride + j]; },
                          [&](int i, int c) { return s.d_out[i * kValueStride + c]; });
  float* to = op.workspace + places.dw + rows.entry * places.rows;
  dw.each([&](int j, int c, float x) {
    if (c < op.value_dim) to[j * op.value_dim + c] = x;
  });
}

// ---------------------------------------------------------------- states forwards

constexpr int kStrip = 32;                // columns of values of a CTA
constexpr int kWideStride = kStrip + 8;   // read by rows k, columns g of a fragment
constexpr int kStateStride = kStrip + 4;  // as much as there is room for

template <int kKeys>
struct ForwardShared {
  struct Stage {
    float k[kChunk * row_stride(kKeys)];
    float solved[kChunk * kSquareStride];
    float v[kChunk * kWideStride];
  } stages[2];
  float state[kKeys * kWideStride];
  BackwardGates gates;
};

// A state's part of a CTA to and from [key_dim][value_dim] in memory.
template <int kKeys>
__device__ void load_state(const LinearBackward& op, ProductTiles<kKeys, kStrip>& state, const float* from,
                           int first) {
  state.each([&](int d, int c, float& x) {
    x = from != nullptr && d < op.key_dim && first + c < op.value_dim
            ? from[int64_t{d} * op.value_dim + first + c]
            : 0.0f;
  });
}
template <int kKeys>
__device__ void store_state(const LinearBackward& op, ProductTiles<kKeys, kStrip>& state, float* to,
                            int first) {
  state.each([&](int d, int c, float x) {
    if (d < op.key_dim && first + c < op.value_dim) to[int64_t{d} * op.value_dim + first + c] = x;
  });
}

// grid: strips of values, heads, sequences.
template <int kKeys, bool kDelta>
__global__ void __launch_bounds__(kProductThreads) states_kernel(const __grid_constant__ LinearBackward op) {
  constexpr int kKeyStride = row_stride(kKeys);
  auto& s = *reinterpret_cast<ForwardShared<kKeys>*>(shared_floats);
  const BackwardHead of(op, static_cast<int32_t>(blockIdx.z), static_cast<int32_t>(blockIdx.y));
  if (of.count == 0) return;
  const int first = static_cast<int>(blockIdx.x) * kStrip, columns = op.value_dim - first;
  const int64_t packed = (int64_t{of.sequence} * op.heads + of.head) * of.places.state;
  const auto load = [&](int32_t chunk) {
    const BackwardRows rows = of.rows(chunk);
    auto& to = s.stages[chunk % 2];
    load_rows<kKeys, kKeyStride>(to.k, op.k, rows, op.key_heads, of.key_head, op.key_dim);
    load_rows<kStrip, kWideStride>(to.v, op.v, rows, op.heads, of.head, op.value_dim, first);
    if constexpr (kDelta) {
      load_tile<kChunk, kChunk, kSquareStride>(
          to.solved, op.workspace + of.places.solved + rows.entry * kChunk * kChunk, kChunk, kChunk, kChunk);
    }
    ptx::async_commit();
  };
  ProductTiles<kKeys, kStrip> state;
  load_state<kKeys>(op, state, op.initial != nullptr ? op.initial + packed : nullptr, first);
  load(0);
  float2 gates = gates_of(op, of, of.rows(0));
  for (int32_t chunk = 0; chunk < of.count; ++chunk) {
    const BackwardRows rows = of.rows(chunk);
    auto& in = s.stages[chunk % 2];
    store_state<kKeys>(op, state, op.workspace + of.places.states + rows.entry * of.places.state, first);
    put_gates(s.gates, gates);
    state.each([&](int d, int c, float x) { s.state[d * kWideStride + c] = x; });
    ptx::async_wait<0>();
    __syncthreads();  // the chunk, its gates and the state are there; all are done with the chunk before
    if (chunk + 1 < of.count) {
      load(chunk + 1);
      gates = gates_of(op, of, of.rows(chunk + 1));
    }
    if constexpr (kDelta) {
      ProductTiles<kChunk, kStrip> u;
      u.template add<kKeys>([&](int i, int d) { return in.k[i * kKeyStride + d]; },
                            [&](int d, int c) { return s.state[d * kWideStride + c]; });
      u.each([&](int i, int c, float x) { in.v[i * kWideStride + c] -= s.gates.left[i] * x; });
      __syncthreads();  // X is there
      u.clear();
      u.template add<kChunk>([&](int i, int j) { return in.solved[i * kSquareStride + j]; },
                             [&](int j, int c) { return in.v[j * kWideStride + c]; });
      __syncthreads();  // X has been read
      float* to = op.workspace + of.places.u + rows.entry * of.places.rows + first;
      u.each([&](int i, int c, float x) {
        if (c < columns) to[i * op.value_dim + c] = x;
        in.v[i * kWideStride + c] = x * s.gates.until_end[i] * s.gates.beta[i];
      });
    } else {
      ProductTiles<kChunk, kStrip>().each(
          [&](int i, int c, float) { in.v[i * kWideStride + c] *= s.gates.until_end[i] * s.gates.beta[i]; });
    }
    __syncthreads();  // what the rows write is there
    const float left = s.gates.left[kChunk - 1];
    state.each([&](int, int, float& x) { x *= left; });
    state.template add<kChunk>([&](int d, int j) { return in.k[j * kKeyStride + d]; },
                               [&](int j, int c) { return in.v[j * kWideStride + c]; });
    __syncthreads();  // all are done with this chunk's gates and state
  }
}

// ---------------------------------------------------------------- gradients of states backwards

template <int kKeys>
struct BackwardShared {
  struct Stage {
    float q[kChunk * row_stride(kKeys)];
    float k[kChunk * row_stride(kKeys)];
    float solved[kChunk * kSquareStride];
    float d_out[kChunk * kWideStride];
    float dw[kChunk * kWideStride];  // then B dW, then dX
  } stages[2];
  float d_state[kKeys * kStateStride];
  BackwardGates gates;
};

// grid: strips of values, heads, sequences.
template <int kKeys, bool kDelta>
__global__ void __launch_bounds__(kProductThreads)
    d_states_kernel(const __grid_constant__ LinearBackward op) {
  constexpr int kKeyStride = row_stride(kKeys);
  auto& s = *reinterpret_cast<BackwardShared<kKeys>*>(shared_floats);
  const BackwardHead of(op, static_cast<int32_t>(blockIdx.z), static_cast<int32_t>(blockIdx.y));
  const int first = static_cast<int>(blockIdx.x) * kStrip, columns = op.value_dim - first;
  const int64_t packed = (int64_t{of.sequence} * op.heads + of.head) * of.places.state;
  const auto load = [&](int32_t chunk) {
    const BackwardRows rows = of.rows(chunk);
    auto& to = s.stages[chunk % 2];
    load_rows<kKeys, kKeyStride>(to.q, op.q, rows, op.key_heads, of.key_head, op.key_dim);
    load_rows<kKeys, kKeyStride>(to.k, op.k, rows, op.key_heads, of.key_head, op.key_dim);
    load_rows<kStrip, kWideStride>(to.d_out, op.d_out, rows, op.heads, of.head, op.value_dim, first);
    load_tile<kChunk, kStrip, kWideStride>(to.dw,
                                           op.workspace + of.places.dw + rows.entry * of.places.rows + first,
                                           op.value_dim, kChunk, columns);
    if constexpr (kDelta) {
      load_tile<kChunk, kChunk, kSquareStride>(
          to.solved, op.workspace + of.places.solved + rows.entry * kChunk * kChunk, kChunk, kChunk, kChunk);
    }
    ptx::async_commit();
  };
  ProductTiles<kKeys, kStrip> d_state;
  load_state<kKeys>(op, d_state, op.d_final != nullptr ? op.d_final + packed : nullptr, first);
  float2 gates{};
  if (of.count > 0) {
    load(of.count - 1);
    gates = gates_of(op, of, of.rows(of.count - 1));
  }
  for (int32_t chunk = of.count - 1; chunk >= 0; --chunk) {
    const BackwardRows rows = of.rows(chunk);
    auto& in = s.stages[chunk % 2];
    store_state<kKeys>(op, d_state, op.workspace + of.places.d_states + rows.entry * of.places.state, first);
    put_gates(s.gates, gates);
    d_state.each([&](int d, int c, float x) { s.d_state[d * kStateStride + c] = x; });
    ptx::async_wait<0>();
    __syncthreads();  // the chunk, its gates and the state are there; all are done with the chunk behind
    if (chunk > 0) {
      load(chunk - 1);
      gates = gates_of(op, of, of.rows(chunk - 1));
    }
    ProductTiles<kChunk, kStrip> dw;
    dw.template add<kKeys>([&](int j, int d) { return in.k[j * kKeyStride + d]; },
                           [&](int d, int c) { return s.d_state[d * kStateStride + c]; });
    float* to = op.workspace + of.places.dw + rows.entry * of.places.rows + first;
    dw.each([&](int j, int c, float x) {
      const float sum = fmaf(s.gates.until_end[j], x, in.dw[j * kWideStride + c]);
      if (c < columns) to[j * op.value_dim + c] = sum;
      in.dw[j * kWideStride + c] = s.gates.beta[j] * sum;
    });
    if constexpr (kDelta) {
      __syncthreads();  // B dW is there
      dw.clear();
      dw.template add<kChunk>([&](int i, int j) { return in.solved[j * kSquareStride + i]; },
                              [&](int j, int c) { return in.dw[j * kWideStride + c]; });
      __syncthreads();  // B dW has been read
      float* dx = op.workspace + of.places.dx + rows.entry * of.places.rows + first;
      dw.each([&](int i, int c, float x) {
        if (c < columns) dx[i * op.value_dim + c] = x;
        in.dw[i * kWideStride + c] = x;
      });
      __syncthreads();  // dX is there
    }
    const float left = s.gates.left[kChunk - 1];
    d_state.each([&](int, int, float& x) { x *= left; });
    d_state.template add<kChunk>(
        [&](int d, int i) { return in.q[i * kKeyStride + d]; },
        [&](int i, int c) { return op.scale * s.gates.left[i] * in.d_out[i * kWideStride + c]; });
    if constexpr (kDelta) {
      d_state.template add<kChunk>(
          [&](int d, int i) { return in.k[i * kKeyStride + d]; },
          [&](int i, int c) { return -s.gates.left[i] * in.dw[i * kWideStride + c]; });
    }
    __syncthreads();  // all are done with this chunk's gates and state
  }
  if (op.d_initial != nullptr) store_state<kKeys>(op, d_state, op.d_initial + packed, first);
}

// ---------------------------------------------------------------- sums over tokens

// Gradients of what a head has once: a thread each, chunks in order.
__global__ void head_sums_kernel(const __grid_constant__ LinearBackward op) {
  const auto head = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  if (head >= op.heads) return;
  const BackwardPlaces places = backward_places(op);
  float sums[2] = {0.0f, 0.0f};
  for (int32_t sequence = 0; sequence < op.sequences; ++sequence) {
    const BackwardHead of(op, sequence, head);
    for (int32_t chunk = 0; chunk < of.count; ++chunk) {
      const float* from = op.workspace + places.sums + of.rows(chunk).entry * 2;
      sums[0] += from[0], sums[1] += from[1];
    }
  }
  if (op.d_rates != nullptr) op.d_rates[head] = sums[0];
  if (op.d_skip != nullptr) op.d_skip[head] = sums[1];
}

template <class Shared, class Kernel>
void launch_product(Kernel* kernel, const char* name, dim3 grid, const LinearBackward& op, const Launch& at) {
  allow_shared_memory(kernel, sizeof(Shared));
  kernel<<<grid, kProductThreads, sizeof(Shared), at.stream>>>(op);
  check_launch(name);
}

template <int kKeys, int kValues, bool kDelta>
void launch_backward_as(const LinearBackward& op, const Launch& at) {
  const auto heads = static_cast<unsigned>(op.heads), sequences = static_cast<unsigned>(op.sequences);
  const auto chunks = static_cast<unsigned>(backward_places(op).chunks);
  const dim3 strips(static_cast<unsigned>((op.value_dim + kStrip - 1) / kStrip), heads, sequences);
  launch_product<PrepareShared<kKeys, kValues>>(prepare_kernel<kKeys, kValues, kDelta>, "prepare_kernel",
                                                dim3(heads, chunks * sequences), op, at);
  launch_product<ForwardShared<kKeys>>(states_kernel<kKeys, kDelta>, "states_kernel", strips, op, at);
  launch_product<BackwardShared<kKeys>>(d_states_kernel<kKeys, kDelta>, "d_states_kernel", strips, op, at);
  launch_product<GradientShared<kKeys, kValues>>(
      gradients_kernel<kKeys, kValues, kDelta>, "gradients_kernel",
      dim3(static_cast<unsigned>(op.key_heads), chunks * sequences), op, at);
}

template <int kKeys, int kValues>
void launch_backward_of(const LinearBackward& op, const Launch& at) {
  op.delta ? launch_backward_as<kKeys, kValues, true>(op, at)
           : launch_backward_as<kKeys, kValues, false>(op, at);
}

}  // namespace

size_t linear_backward_floats(const LinearBackward& op, const Device& device) {
  return device.has_wgmma() ? warpgroup_backward_floats(op) : static_cast<size_t>(backward_places(op).end);
}

void launch_linear_backward(const LinearBackward& op, const Launch& at) {
  if (op.sequences > 0) {
    MILLRACE_CHECK(op.most_tokens > 0 && op.key_dim <= kMaxBackwardDim && op.value_dim <= kMaxBackwardDim);
    MILLRACE_CHECK(op.sequences * backward_places(op).chunks <= 65535 && op.heads <= 65535);
  }
  if (at.device.has_wgmma()) return launch_warpgroup_backward(op, at);
  if (op.sequences > 0) {
    if (op.key_dim <= 64) {
      op.value_dim <= 64 ? launch_backward_of<64, 64>(op, at) : launch_backward_of<64, 128>(op, at);
    } else {
      op.value_dim <= 64 ? launch_backward_of<128, 64>(op, at) : launch_backward_of<128, 128>(op, at);
    }
  }
  if (op.d_rates == nullptr && op.d_skip == nullptr) return;
  constexpr unsigned kHeadThreads = 64;
  head_sums_kernel<<<(static_cast<unsigned>(op.heads) + kHeadThreads - 1) / kHeadThreads, kHeadThreads, 0,
                     at.stream>>>(op);
  check_launch("head_sums_kernel");
}

}  // namespace millrace::cuda
