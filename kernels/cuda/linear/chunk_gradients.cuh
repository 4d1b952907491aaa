// The gradients of one chunk of the heads that share a key (linear_backward.h), when S, U, dW, dX and dS' are
// known. With R = scale e(i, j) (dO W^T) on and below the diagonal and N = -e(i, j) (dX W^T) below it,
//
//   dq = scale g dO S^T + R K
//   dk = -g dX S^T + N K  (of rows that read)  + R^T Q + N^T K + e(last) W dS'^T  (of those that write)
//   d beta_i = U_i dW_i - sum over j > i of e(j, i) (k_j . k_i) (dX_j . U_i)
//
// The logarithm of what is left at row i counts wherever it is a row that reads, against where it writes:
//
//   d log_i = q_i dq_i + k_i dk_i (reading) - k_i dk_i (writing)
//
// and at the last row what is left of the state and of the rows' writes; a row's own logarithm has the sum of
// those from it on. Heads of one key are added in order.
#pragma once

#include "kernels/cuda/linear/backward_chunk.cuh"

namespace millrace::cuda {

template <int kKeys, int kValues>
struct GradientShared {
  float q[kChunk * row_stride(kKeys)];
  float k[kChunk * row_stride(kKeys)];
  float state[kKeys * row_stride(kValues)];    // S, then dS'
  float values[kChunk * row_stride(kValues)];  // dO, then dX
  float u[kChunk * row_stride(kValues)];
  float pairs[kChunk * kSquareStride];  // R, then N
  BackwardGates gates;
  float dots[2][3][kChunk];      // of both halves of the columns: of d log, of the end, spare
  float column_sums[4][kChunk];  // of four warps' rows
  float d_log[kChunk];
  float partial[kProductWarps];
};

// Sums over a fragment's columns into dots[half][which], of rows: with(row, column, value).
template <class Tiles, class With>
__device__ void row_dots(Tiles& tiles, float (&dots)[2][3][kChunk], int which, const With& with) {
  float sums[2] = {0.0f, 0.0f};
#pragma unroll
  for (int n = 0; n < Tiles::kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      sums[e / 2] += with(Tiles::row_of(e), Tiles::column_of(n, e)) * tiles.sums[n][e];
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sums[half] += __shfl_xor_sync(kAllLanes, sums[half], 1);
    sums[half] += __shfl_xor_sync(kAllLanes, sums[half], 2);
    if (Tiles::lane() % 4 == 0) dots[Tiles::column_part()][which][Tiles::row_of(half * 2)] = sums[half];
  }
}

template <int kKeys, int kValues, bool kDelta>
class ChunkGradients {
  using Shared = GradientShared<kKeys, kValues>;
  using Square = ProductTiles<kChunk, kChunk>;
  using Rows = ProductTiles<kChunk, kKeys>;
  static constexpr int kKeyStride = row_stride(kKeys), kValueStride = row_stride(kValues);

 public:
  __device__ ChunkGradients(const LinearBackward& op, Shared& shared) : op_(op), s_(shared) {}

  __device__ void run(int32_t sequence, int32_t key_head, int32_t chunk) {
    const int32_t group = op_.heads / op_.key_heads;
    for (int32_t h = key_head * group; h < (key_head + 1) * group; ++h) {
      const BackwardHead of(op_, sequence, h);
      if (chunk >= of.count) return;
      const BackwardRows rows = of.rows(chunk);
      if (h == key_head * group) {
        load_rows<kKeys, kKeyStride>(s_.q, op_.q, rows, op_.key_heads, key_head, op_.key_dim);
        load_rows<kKeys, kKeyStride>(s_.k, op_.k, rows, op_.key_heads, key_head, op_.key_dim);
      }
      add_head(of, rows);
    }
    const BackwardRows rows = BackwardHead(op_, sequence, key_head * group).rows(chunk);
    store(rows, key_head, dq_, op_.dq);
    store(rows, key_head, dk_, op_.dk);
  }

 private:
  // Functions of shared matrices, as the products take them.
  __device__ auto by_rows(const float* from, int stride) const {
    return [from, stride](int row, int k) { return from[row * stride + k]; };
  }
  __device__ auto transposed(const float* from, int stride) const {
    return [from, stride](int k, int column) { return from[column * stride + k]; };
  }
  __device__ auto pairs_transposed() const {
    const float* from = s_.pairs;
    return [from](int row, int k) { return from[k * kSquareStride + row]; };
  }
  __device__ void store(const BackwardRows& rows, int32_t key_head, Rows& gradient, float* to) const {
    if (to == nullptr) return;
    to += (rows.row * op_.key_heads + key_head) * op_.key_dim;
    const int64_t stride = int64_t{op_.key_heads} * op_.key_dim;
    gradient.each([&](int i, int d, float x) {
      if (i < rows.rows && d < op_.key_dim) to[i * stride + d] = x;
    });
  }
  __device__ const float* entry(int64_t array, int64_t size, const BackwardRows& rows) const {
    return op_.workspace + array + rows.entry * size;
  }

  __device__ void add_head(const BackwardHead& of, const BackwardRows& rows);
  __device__ void read_gradients(const BackwardHead& of, const BackwardRows& rows, Rows& writing);
  __device__ float state_gradients(const BackwardHead& of, const BackwardRows& rows, Rows& writing);
  __device__ void store_gates(const BackwardHead& of, const BackwardRows& rows, float of_state);

  const LinearBackward& op_;
  Shared& s_;
  Rows dq_, dk_;  // of all heads so far
};

// The delta rule's reading of the state: N, what comes of it, and the sums of d beta's second part.
template <int kKeys, int kValues, bool kDelta>
__device__ void ChunkGradients<kKeys, kValues, kDelta>::read_gradients(const BackwardHead& of,
                                                                       const BackwardRows& rows,
                                                                       Rows& writing) {
  load_tile<kChunk, kValues, kValueStride>(s_.values, entry(of.places.dx, of.places.rows, rows),
                                           op_.value_dim, rows.rows, op_.value_dim);
  ptx::async_commit();
  ptx::async_wait<0>();
  __syncthreads();  // dX is there
  if (op_.dv != nullptr) {
    for (int i = static_cast<int>(threadIdx.x); i < rows.rows * op_.value_dim; i += kProductThreads) {
      const int row = i / op_.value_dim, c = i % op_.value_dim;
      op_.dv[((rows.row + row) * op_.heads + of.head) * op_.value_dim + c] =
          s_.values[row * kValueStride + c];
    }
  }
  Square products, keys;
  products.template add<kValues>(by_rows(s_.values, kValueStride), transposed(s_.u, kValueStride));
  keys.template add<kKeys>(by_rows(s_.k, kKeyStride), transposed(s_.k, kKeyStride));
  float sums[Square::kTiles][2] = {};
#pragma unroll
  for (int n = 0; n < Square::kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = Square::row_of(e), j = Square::column_of(n, e);
      const float x = j < i ? s_.gates.between(i, j) * products.sums[n][e] : 0.0f;
      s_.pairs[i * kSquareStride + j] = -s_.gates.beta[j] * x;
      sums[n][e % 2] += j < i ? x * keys.sums[n][e] : 0.0f;
    }
  }
#pragma unroll
  for (int n = 0; n < Square::kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float sum = sums[n][e];
#pragma unroll
      for (int step = 4; step < kWarpLanes; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
      if (Square::lane() < 4) s_.column_sums[Square::first_row() / 16][Square::column_of(n, e)] = sum;
    }
  }
  __syncthreads();  // N is there
  Rows reading;
  reading.template add<kValues>(by_rows(s_.values, kValueStride), transposed(s_.state, kValueStride));
  reading.each([&](int i, int, float& x) { x *= -s_.gates.left[i]; });
  reading.template add<kChunk>(by_rows(s_.pairs, kSquareStride), by_rows(s_.k, kKeyStride));
  writing.template add<kChunk>(pairs_transposed(), by_rows(s_.k, kKeyStride));
  row_dots(reading, s_.dots, 1, [&](int i, int d) { return s_.k[i * kKeyStride + d]; });
#pragma unroll
  for (int n = 0; n < Rows::kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) dk_.sums[n][e] += reading.sums[n][e];
  }
  __syncthreads();  // S, dX and the dots have been read
}

// dS' takes the place of S; the sum of both's products.
template <int kKeys, int kValues, bool kDelta>
__device__ float ChunkGradients<kKeys, kValues, kDelta>::state_gradients(const BackwardHead& of,
                                                                         const BackwardRows& rows,
                                                                         Rows& writing) {
  const float* d_state = entry(of.places.d_states, of.places.state, rows);
  float sum = 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < kKeys * kValues; i += kProductThreads) {
    const int d = i / kValues, c = i % kValues;
    float& at = s_.state[d * kValueStride + c];
    const float x = d < op_.key_dim && c < op_.value_dim ? d_state[d * op_.value_dim + c] : 0.0f;
    sum = fmaf(at, x, sum);
    at = x;
  }
  sum = block_sum<kProductThreads>(sum, s_.partial);  // and all of dS' is there
  Rows ends;
  ends.template add<kValues>(by_rows(s_.u, kValueStride), transposed(s_.state, kValueStride));
  ends.each([&](int j, int, float& x) { x *= s_.gates.until_end[j] * s_.gates.beta[j]; });
  row_dots(ends, s_.dots, 2, [&](int j, int d) { return s_.k[j * kKeyStride + d]; });
#pragma unroll
  for (int n = 0; n < Rows::kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      writing.sums[n][e] += ends.sums[n][e];
      dk_.sums[n][e] += writing.sums[n][e];
    }
  }
  return sum;
}

template <int kKeys, int kValues, bool kDelta>
__device__ void ChunkGradients<kKeys, kValues, kDelta>::add_head(const BackwardHead& of,
                                                                 const BackwardRows& rows) {
  load_rows<kValues, kValueStride>(s_.values, op_.d_out, rows, op_.heads, of.head, op_.value_dim);
  if constexpr (kDelta) {
    load_tile<kChunk, kValues, kValueStride>(s_.u, entry(of.places.u, of.places.rows, rows), op_.value_dim,
                                             rows.rows, op_.value_dim);
  } else {
    load_rows<kValues, kValueStride>(s_.u, op_.v, rows, op_.heads, of.head, op_.value_dim);
  }
  load_tile<kKeys, kValues, kValueStride>(s_.state, entry(of.places.states, of.places.state, rows),
                                          op_.value_dim, op_.key_dim, op_.value_dim);
  ptx::async_commit();
  put_gates(s_.gates, gates_of(op_, of, rows));
  ptx::async_wait<0>();
  __syncthreads();  // gates and matrices are there
  {
    Square products;
    products.template add<kValues>(by_rows(s_.values, kValueStride), transposed(s_.u, kValueStride));
    products.each([&](int i, int j, float x) {
      s_.pairs[i * kSquareStride + j] =
          j <= i ? op_.scale * s_.gates.between(i, j) * s_.gates.beta[j] * x : 0.0f;
    });
  }
  __syncthreads();  // R is there
  Rows dq, writing;
  dq.template add<kValues>(by_rows(s_.values, kValueStride), transposed(s_.state, kValueStride));
  dq.each([&](int i, int, float& x) { x *= op_.scale * s_.gates.left[i]; });
  dq.template add<kChunk>(by_rows(s_.pairs, kSquareStride), by_rows(s_.k, kKeyStride));
  row_dots(dq, s_.dots, 0, [&](int i, int d) { return s_.q[i * kKeyStride + d]; });
#pragma unroll
  for (int n = 0; n < Rows::kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) dq_.sums[n][e] += dq.sums[n][e];
  }
  writing.template add<kChunk>(pairs_transposed(), by_rows(s_.q, kKeyStride));
  __syncthreads();   // R and dO have been read; the dots are there
  float log = 0.0f;  // of row threadIdx.x
  const int row = static_cast<int>(threadIdx.x);
  if (row < kChunk) log = s_.dots[0][0][row] + s_.dots[1][0][row];
  if constexpr (kDelta) {
    read_gradients(of, rows, writing);
    if (row < kChunk) log += s_.dots[0][1][row] + s_.dots[1][1][row];
  }
  const float of_state = state_gradients(of, rows, writing);
  row_dots(writing, s_.dots, 0, [&](int j, int d) { return s_.k[j * kKeyStride + d]; });
  __syncthreads();  // the dots are there
  if (row < kChunk) s_.d_log[row] = log - (s_.dots[0][0][row] + s_.dots[1][0][row]);
  __syncthreads();  // all rows' d log are there
  store_gates(of, rows, of_state);
  __syncthreads();  // the next head's matrices may come
}

// d log of rows from their sums; d beta; without the delta rule what values and steps get too.
template <int kKeys, int kValues, bool kDelta>
__device__ void ChunkGradients<kKeys, kValues, kDelta>::store_gates(const BackwardHead& of,
                                                                    const BackwardRows& rows,
                                                                    float of_state) {
  const int warp = Square::warp(), lane = Square::lane();
  const float* dw = entry(of.places.dw, of.places.rows, rows);
  float ends = 0.0f;  // at the last row: the state's, and what rows write there
  for (int j = 0; j < kChunk; ++j) ends += s_.dots[0][2][j] + s_.dots[1][2][j];
  ends = fmaf(s_.gates.left[kChunk - 1], of_state, ends);
  float sums[2] = {0.0f, 0.0f};
  for (int i = warp; i < rows.rows; i += kProductWarps) {
    const int64_t at = (rows.row + i) * op_.heads + of.head;
    const float beta = s_.gates.beta[i], skip = op_.skip != nullptr ? op_.skip[of.head] : 0.0f;
    float d_beta = 0.0f, d_skip = 0.0f;
    for (int c = lane; c < op_.value_dim; c += kWarpLanes) {
      const float u = s_.u[i * kValueStride + c], x = dw[i * op_.value_dim + c];
      d_beta = fmaf(u, x, d_beta);
      if constexpr (!kDelta) {
        const float d_out = s_.values[i * kValueStride + c];
        d_skip = fmaf(u, d_out, d_skip);
        if (op_.dv != nullptr) op_.dv[at * op_.value_dim + c] = fmaf(skip, d_out, beta * x);
      }
    }
    d_beta = warp_sum(d_beta);
    d_skip = warp_sum(d_skip);
    float log = 0.0f;
    for (int j = i + lane; j < kChunk; j += kWarpLanes) log += s_.d_log[j];
    log = warp_sum(log) + ends;
    if constexpr (kDelta) {
      d_beta -= (s_.column_sums[0][i] + s_.column_sums[1][i]) + (s_.column_sums[2][i] + s_.column_sums[3][i]);
    } else if (op_.rates != nullptr) {
      sums[0] = fmaf(log, beta, sums[0]);
      d_beta = fmaf(log, op_.rates[of.head], d_beta);
    }
    sums[1] += d_skip;
    if (lane == 0 && op_.d_logs != nullptr) op_.d_logs[at] = log;
    if (lane == 0 && op_.d_betas != nullptr) op_.d_betas[at] = d_beta;
  }
  if constexpr (kDelta) return;
  __syncthreads();  // the dots have been read
  if (lane == 0) s_.dots[0][0][warp] = sums[0], s_.dots[0][1][warp] = sums[1];
  __syncthreads();  // all warps' sums are there
  if (threadIdx.x != 0) return;
  float* to = op_.workspace + of.places.sums + rows.entry * 2;
  for (int which = 0; which < 2; ++which) {
    float sum = 0.0f;
    for (int w = 0; w < kProductWarps; ++w) sum += s_.dots[0][which][w];
    to[which] = sum;
  }
}

// grid: key heads, chunks of all sequences.
template <int kKeys, int kValues, bool kDelta>
__global__ void __launch_bounds__(kProductThreads)
    gradients_kernel(const __grid_constant__ LinearBackward op) {
  extern __shared__ __align__(16) float shared_floats[];
  auto& shared = *reinterpret_cast<GradientShared<kKeys, kValues>*>(shared_floats);
  const BackwardPlaces places = backward_places(op);
  ChunkGradients<kKeys, kValues, kDelta>(op, shared)
      .run(static_cast<int32_t>(blockIdx.y / places.chunks), static_cast<int32_t>(blockIdx.x),
           static_cast<int32_t>(blockIdx.y % places.chunks));
}

}  // namespace millrace::cuda
