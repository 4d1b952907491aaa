// The gradients of one chunk of the heads that share a key (linear_backward.h), when S, U, dY and dS' are
// known, with W = B U and dX = B dY. With R = scale e(i, j) (dO W^T) on and below the diagonal and N = -e(i,
// j) (dX W^T) below it,
//
//   dq = scale g dO S^T + R K
//   dk = -g dX S^T + N K  (of rows that read)  + R^T Q + N^T K + e(last) W dS'^T  (of those that write)
//   d beta_i = U_i dY_i                          the diagonal of dY U^T, which N is made of
//
// The logarithm of what is left at row i counts wherever it is a row that reads, against where it writes:
//
//   d log_i = q_i dq_i + k_i dk_i (reading) - k_i dk_i (writing)
//
// and at the last row what is left of the state and of the rows' writes; a row's own logarithm has the sum of
// those from it on. Heads of one key are added in order. A warpgroup has 64 columns of keys; the first makes
// R, the last N. What the next head needs is copied while this one's sums are made.
#pragma once

#include "kernels/cuda/linear/backward_tiles.cuh"

namespace millrace::cuda {

template <int kKeys, bool kDelta>
struct RowStage {
  unsigned char s[kKeys * kTile * 2];   // S^T of 64 columns of values, a tile for 64 columns of keys
  unsigned char ds[kKeys * kTile * 2];  // dS'^T
  unsigned char u[kTileBytes];          // U^T
  unsigned char dy[kTileBytes];         // dY^T
  unsigned char d_out[kTileBytes];      // dO
};
template <int kKeys, bool kDelta>
struct RowShared {
  unsigned char k[kKeys * kTile * 2];
  unsigned char q[kKeys * kTile * 2];
  RowStage<kKeys, kDelta> stages[2];
  unsigned char r[kTileBytes];
  unsigned char n[kDelta ? kTileBytes : 1024];
  TileGates gates[4];  // of heads that follow one another
  float logs[kKeys / kTile][kTile];
  float diagonal[2][2][kTile];  // of this head and the next: of dY U^T, dO U^T
  float partial[2][kKeys / kTile * 4];
  TileHead of;  // the first of the key's
  uint64_t keys_full, full[2];
};

#ifdef MILLRACE_HAS_WGMMA

template <int kKeys, bool kDelta>
struct RowGradients {
  using Shared = RowShared<kKeys, kDelta>;
  using Sums = float[kTile / 2];
  static constexpr int kGroups = kKeys / kTile, kThreads = kGroups * 128;

  __device__ RowGradients(const LinearBackward& of_op, Shared& shared, int32_t sequence, int32_t of_key_head,
                          int32_t of_chunk)
      : op(of_op), s(shared), key_head(of_key_head), chunk(of_chunk) {
    group = static_cast<int>(threadIdx.x) / 128;
    warp = static_cast<int>(threadIdx.x) / kWarpLanes % 4;
    lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    t = lane % 4;
    row = warp * 16 + lane / 4;
    heads = op.heads / op.key_heads;
    strips = (op.value_dim + kTile - 1) / kTile;
    head = key_head * heads;
    const TileHead of(op, sequence, head);
    rows = of.rows(chunk);
    first_row = of.row(chunk);
    if (threadIdx.x == 0) s.of = of;
  }

  // One thread: the `step`th of heads x strips.
  __device__ void copy(int step) {
    const int h = step / strips, strip = step % strips;
    if (h >= heads) return;
    const TileHead& of = s.of;
    const int64_t entry = of.entry(chunk) + h;
    auto& to = s.stages[step % 2];
    uint64_t* const full = &s.full[step % 2];
    constexpr uint32_t kState = kKeys * kTile * 2;
    ptx::barrier_arrive_expect(full, 2 * kState + 3 * kTileBytes + (strip == 0 ? sizeof(TileGates) : 0));
    if (strip == 0)
      ptx::bulk_copy_kept(&s.gates[h % 4],
                          of.base + of.places.gates + entry * static_cast<int64_t>(sizeof(TileGates)),
                          sizeof(TileGates), full);
    const int64_t state_at = strip * int64_t{kState}, rows_at = strip * kTileBytes;
    ptx::bulk_copy(to.d_out, of.base + of.places.d_out + entry * of.places.value_bytes + rows_at, kTileBytes,
                   full);
    ptx::bulk_copy(to.u, of.base + of.places.u + entry * of.places.value_bytes + rows_at, kTileBytes, full);
    ptx::bulk_copy(to.dy, of.base + of.places.dy + entry * of.places.value_bytes + rows_at, kTileBytes, full);
    ptx::bulk_copy(to.s, of.base + of.places.states + entry * of.places.state_bytes + state_at, kState, full);
    ptx::bulk_copy(to.ds, of.base + of.places.d_states + entry * of.places.state_bytes + state_at, kState,
                   full);
  }

  // Sums over this thread's columns of both its rows, row and row + 8, times what `tile` has there.
  __device__ void add_dots(float (&dots)[2], const Sums& x, const unsigned char* tile, float sign) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) {
        const uint32_t pair =
            *reinterpret_cast<const uint32_t*>(tile + ptx::swizzled(static_cast<uint32_t>(row + 8 * half),
                                                                    static_cast<uint32_t>(16 * n + 4 * t)));
        sum = fmaf(x[4 * n + 2 * half], low_of(pair), sum);
        sum = fmaf(x[4 * n + 2 * half + 1], high_of(pair), sum);
      }
      dots[half] = fmaf(sign, sum, dots[half]);
    }
  }
  __device__ static void scale_rows(Sums& x, float upper, float lower) {
#pragma unroll
    for (int i = 0; i < kTile / 2; ++i) x[i] *= i / 2 % 2 == 0 ? upper : lower;
  }

  // Sums of S and dS' in a stage, of this thread.
  __device__ float states_product(const RowStage<kKeys, kDelta>& in) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kKeys * kTile * 2 / 16 / kThreads; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kThreads;
      const uint4 a = reinterpret_cast<const uint4*>(in.s)[at], b = reinterpret_cast<const uint4*>(in.ds)[at];
      sum = fmaf(low_of(a.x), low_of(b.x), fmaf(high_of(a.x), high_of(b.x), sum));
      sum = fmaf(low_of(a.y), low_of(b.y), fmaf(high_of(a.y), high_of(b.y), sum));
      sum = fmaf(low_of(a.z), low_of(b.z), fmaf(high_of(a.z), high_of(b.z), sum));
      sum = fmaf(low_of(a.w), low_of(b.w), fmaf(high_of(a.w), high_of(b.w), sum));
    }
    return sum;
  }

  // dv = B dY, and what goes by the state's side, of 64 columns.
  __device__ void store_values(const RowStage<kKeys, kDelta>& in, const TileGates& gates, int strip) const {
    if (op.dv == nullptr) return;
    const float skip = op.skip != nullptr ? op.skip[head] : 0.0f;
    const int of_cta = static_cast<int>(threadIdx.x) / kWarpLanes;
    const bool wide = op.value_dim % 2 == 0 && reinterpret_cast<uintptr_t>(op.dv) % 8 == 0;
#pragma unroll
    for (int i = 0; i < 4 / kGroups; ++i) {
      const int at = of_cta + i * kGroups * 4;  // of eight blocks of rows, two of 32 columns: 16 in all
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int rows_at = at % 8 * 8, columns_at = side * 32;
        if (at >= 8) continue;
        const uint32_t tile_at =
            ptx::swizzled(static_cast<uint32_t>(columns_at + lane), static_cast<uint32_t>(rows_at) * 2);
        const uint4 x = ptx::ldmatrix_x4_transposed(in.dy + tile_at);
        const int i_row = rows_at + lane / 4;
        if (i_row >= rows) continue;
        const float beta = gates.beta[i_row];
        float* const to = op.dv + ((first_row + i_row) * op.heads + head) * op.value_dim + strip * kTile;
        const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int column = columns_at + m * 8 + 2 * t, left = op.value_dim - strip * kTile - column;
          float low = beta * low_of(pairs[m]), high = beta * high_of(pairs[m]);
          if (!kDelta && op.skip != nullptr) {
            const uint32_t d_out = *reinterpret_cast<const uint32_t*>(
                in.d_out + ptx::swizzled(static_cast<uint32_t>(i_row), static_cast<uint32_t>(column) * 2));
            low = fmaf(skip, low_of(d_out), low);
            high = fmaf(skip, high_of(d_out), high);
          }
          store_pair(to + column, low, high, left, wide);
        }
      }
    }
  }
  __device__ static void store_pair(float* to, float low, float high, int left, bool wide) {
    if (wide && left > 1) {
      *reinterpret_cast<float2*>(to) = make_float2(low, high);
    } else {
      if (left > 0) to[0] = low;
      if (left > 1) to[1] = high;
    }
  }

  // The products of one stage. a: rows of dO of R's warpgroup, of dY of N's, as an operand; own: its sums.
  __device__ void multiply(const RowStage<kKeys, kDelta>& in, const uint32_t (&a)[4][4], Sums& own,
                           Sums& other, Sums& dq, Sums& reading, Sums& writing) const {
    const uint64_t d_out = ptx::wgmma_operand(in.d_out);
    const uint64_t dy = ptx::wgmma_transposed_operand(in.dy, kTileBytes);
    const uint64_t u = ptx::wgmma_transposed_operand(in.u, kTileBytes);
    const uint64_t state = ptx::wgmma_transposed_operand(in.s + group * kTileBytes, kTileBytes);
    const uint64_t d_state = ptx::wgmma_transposed_operand(in.ds + group * kTileBytes, kTileBytes);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      ptx::wgmma_16bit<Bf16, 1>(own, a[step], u + 128 * step, true);
      if constexpr (kGroups == 1) ptx::wgmma_16bit<Bf16, 1, 1>(other, dy + 128 * step, u + 128 * step, true);
      ptx::wgmma_16bit<Bf16, 0, 1>(dq, d_out + 2 * step, state + 128 * step, true);
      if constexpr (kDelta) ptx::wgmma_16bit<Bf16, 1, 1>(reading, dy + 128 * step, state + 128 * step, true);
      ptx::wgmma_16bit<Bf16, 1, 1>(writing, u + 128 * step, d_state + 128 * step, true);
    }
    ptx::wgmma_commit();
  }
  __device__ void load_own(uint32_t (&a)[4][4], const RowStage<kKeys, kDelta>& in) const {
    if (group == 0) {
#pragma unroll
      for (int step = 0; step < 4; ++step)
        put(a[step],
            ptx::ldmatrix_x4(in.d_out + ptx::swizzled(static_cast<uint32_t>(16 * warp + lane % 16),
                                                      static_cast<uint32_t>(32 * step + lane / 16 * 16))));
    } else {
#pragma unroll
      for (int step = 0; step < 4; ++step)
        put(a[step], ptx::ldmatrix_x4_transposed(
                         in.dy + ptx::swizzled(static_cast<uint32_t>(16 * step + lane / 16 * 8 + lane % 8),
                                               static_cast<uint32_t>(32 * warp + lane / 8 % 2 * 16))));
    }
  }
  __device__ static void put(uint32_t (&a)[4], const uint4& x) {
    a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
  }

  // R or N of sums, rounded, to `tile`; their diagonal as it is.
  __device__ void store_square(const Sums& x, const TileGates& gates, bool is_r, unsigned char* tile,
                               float* diagonal) const {
    uint32_t a[4][4];
#pragma unroll
    for (int at = 0; at < kTile / 2; at += 2) {
      const int half = at / 2 % 2, i = row + 8 * half, j = at / 4 * 8 + 2 * t;
      float y[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool counts = is_r ? j + e <= i : j + e < i;
        if (at / 4 * 8 >= 16 * warp + 16) {  // all of the warp's rows are above
          y[e] = 0.0f;
          continue;
        }
        const float decay =
            ptx::exp2_approx(counts ? gates.log2[i] - gates.log2[j + e] : 0.0f) * gates.beta[j + e];
        y[e] = counts ? (is_r ? op.scale : -gates.beta[i]) * (decay * x[at + e]) : 0.0f;
        if (j + e == i) diagonal[i] = x[at + e];
      }
      a[at / 8][at / 2 % 4] = pack_pair(y[0], y[1]);
    }
    if (tile != nullptr)
      store_operand(ptx::shared_address(tile) + static_cast<uint32_t>(warp * kWarpTileBytes), a);
  }

  __device__ void run();
  __device__ void store_gates(const TileGates& gates, int h) const;
  __device__ void store_keys(const Sums& x, float* to) const;

  const LinearBackward& op;
  Shared& s;
  int32_t key_head, chunk;
  int head, group, warp, lane, t, row, heads, strips, rows;
  int64_t first_row;
};

// One warp, two rows a lane: d log and d beta of a head; without the delta rule its sums over the chunk.
template <int kKeys, bool kDelta>
__device__ void RowGradients<kKeys, kDelta>::store_gates(const TileGates& gates, int h) const {
  float ends = 0.0f, states = 0.0f;
  for (int w = 0; w < kGroups * 4; ++w) ends += s.partial[0][w], states += s.partial[1][w];
  ends = fmaf(gates.left[kTile - 1], states, ends);
  float log[2], d_beta[2], d_skip = 0.0f, d_rate = 0.0f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = 2 * lane + i;
    log[i] = s.logs[0][at];
    if constexpr (kGroups > 1) log[i] += s.logs[1][at];
    d_beta[i] = s.diagonal[h % 2][0][at];
    d_skip += s.diagonal[h % 2][1][at];
  }
  float sum = log[0] + log[1];
#pragma unroll
  for (int step = 1; step < kWarpLanes; step *= 2) {
    const float other = __shfl_down_sync(kAllLanes, sum, step);
    if (lane + step < kWarpLanes) sum += other;
  }
  const float down = __shfl_down_sync(kAllLanes, sum, 1), behind = lane == kWarpLanes - 1 ? 0.0f : down;
  log[0] = sum + ends;
  log[1] = behind + log[1] + ends;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = 2 * lane + i;
    if (r >= rows) continue;
    const int64_t at = (first_row + r) * op.heads + head;
    if (!kDelta && op.rates != nullptr) {
      d_rate = fmaf(log[i], gates.beta[r], d_rate);
      d_beta[i] = fmaf(log[i], op.rates[head], d_beta[i]);
    }
    if (op.d_logs != nullptr) op.d_logs[at] = log[i];
    if (op.d_betas != nullptr) op.d_betas[at] = d_beta[i];
  }
  if constexpr (!kDelta) {
    d_rate = warp_sum(d_rate);
    d_skip = warp_sum(d_skip);
    if (lane == 0)
      *reinterpret_cast<float2*>(s.of.base + s.of.places.sums + (s.of.entry(chunk) + h) * 8) =
          make_float2(d_rate, d_skip);
  }
}

template <int kKeys, bool kDelta>
__device__ void RowGradients<kKeys, kDelta>::store_keys(const Sums& x, float* to) const {
  if (to == nullptr) return;
  const int first = group * kTile + 2 * t;
  const bool wide = op.key_dim % 2 == 0 && reinterpret_cast<uintptr_t>(to) % 8 == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= rows) continue;
    float* const at = to + ((first_row + row + 8 * half) * op.key_heads + key_head) * op.key_dim + first;
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n)
      store_pair(at + 8 * n, x[4 * n + 2 * half], x[4 * n + 2 * half + 1], op.key_dim - first - 8 * n, wide);
  }
}

template <int kKeys, bool kDelta>
__device__ void RowGradients<kKeys, kDelta>::run() {
  if (rows <= 0) return;
  if (threadIdx.x == 0) {
    ptx::barrier_init(&s.keys_full, 1);
    ptx::barrier_init(&s.full[0], 1);
    ptx::barrier_init(&s.full[1], 1);
    ptx::barrier_init_fence();
    const TileHead& of = s.of;
    constexpr uint32_t kBytes = kKeys * kTile * 2;
    ptx::barrier_arrive_expect(&s.keys_full, 2 * kBytes);
    ptx::bulk_copy(s.k, of.keys(of.places.keys, chunk), kBytes, &s.keys_full);
    ptx::bulk_copy(s.q, of.keys(of.places.queries, chunk), kBytes, &s.keys_full);
    copy(0);
    copy(1);
  }
  __syncthreads();  // the barriers are there
  Sums dq_sum = {}, dk_sum = {};
  for (int h = 0; h < heads; ++h, ++head) {
    const TileGates& gates = s.gates[h % 4];
    Sums own = {}, other = {}, dq = {}, reading = {}, writing = {};
    float states = 0.0f;
    for (int strip = 0; strip < strips; ++strip) {
      const int step = h * strips + strip;
      ptx::barrier_wait(&s.full[step % 2], static_cast<uint32_t>(step / 2 % 2));
      const auto& in = s.stages[step % 2];
      uint32_t a[4][4];
      load_own(a, in);
      ptx::fence_registers(a);
      ptx::fence_registers(own);
      ptx::fence_registers(dq);
      ptx::fence_registers(writing);
      if constexpr (kDelta) ptx::fence_registers(reading);
      if constexpr (kGroups == 1) ptx::fence_registers(other);
      ptx::wgmma_fence();
      multiply(in, a, own, other, dq, reading, writing);
      store_values(in, gates, strip);
      states += states_product(in);
      ptx::wgmma_wait<0>();
      ptx::fence_registers(a);
      ptx::fence_registers(own);
      ptx::fence_registers(dq);
      ptx::fence_registers(writing);
      if constexpr (kDelta) ptx::fence_registers(reading);
      if constexpr (kGroups == 1) ptx::fence_registers(other);
    }
    if (h == 0) ptx::barrier_wait(&s.keys_full, 0);
    scale_rows(dq, op.scale * gates.left[row], op.scale * gates.left[row + 8]);
    if constexpr (kDelta)
      scale_rows(reading, -gates.left[row] * gates.beta[row], -gates.left[row + 8] * gates.beta[row + 8]);
    scale_rows(writing, gates.until_end[row] * gates.beta[row],
               gates.until_end[row + 8] * gates.beta[row + 8]);
    float end_dots[2] = {0.0f, 0.0f};
    add_dots(end_dots, writing, s.k + group * kTileBytes, 1.0f);
    if constexpr (kGroups == 1) {
      store_square(own, gates, true, s.r, s.diagonal[h % 2][1]);
      store_square(other, gates, false, kDelta ? s.n : nullptr, s.diagonal[h % 2][0]);
    } else {
      if (group == 0) {
        store_square(own, gates, true, s.r, s.diagonal[h % 2][1]);
      } else {
        store_square(own, gates, false, kDelta ? s.n : nullptr, s.diagonal[h % 2][0]);
      }
    }
    ptx::publish_to_async();
    __syncthreads();  // R and N are there, and the head's stages have been read
    if (threadIdx.x == 0) {
      for (int strip = 0; strip < strips; ++strip) copy(h * strips + strip + 2);
    }
    {
      const uint64_t k = ptx::wgmma_transposed_operand(s.k + group * kTileBytes, kTileBytes);
      const uint64_t q = ptx::wgmma_transposed_operand(s.q + group * kTileBytes, kTileBytes);
      const uint64_t r = ptx::wgmma_operand(s.r),
                     r_transposed = ptx::wgmma_transposed_operand(s.r, kTileBytes);
      const uint64_t n = ptx::wgmma_operand(s.n),
                     n_transposed = ptx::wgmma_transposed_operand(s.n, kTileBytes);
      ptx::fence_registers(dq);
      ptx::fence_registers(writing);
      if constexpr (kDelta) ptx::fence_registers(reading);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        ptx::wgmma_16bit<Bf16, 0, 1>(dq, r + 2 * step, k + 128 * step, true);
        ptx::wgmma_16bit<Bf16, 1, 1>(writing, r_transposed + 128 * step, q + 128 * step, true);
        if constexpr (kDelta) {
          ptx::wgmma_16bit<Bf16, 0, 1>(reading, n + 2 * step, k + 128 * step, true);
          ptx::wgmma_16bit<Bf16, 1, 1>(writing, n_transposed + 128 * step, k + 128 * step, true);
        }
      }
      ptx::wgmma_commit();
    }
    const float ends = warp_sum(end_dots[0] + end_dots[1]);
    states = warp_sum(states);
    if (lane == 0) s.partial[0][group * 4 + warp] = ends, s.partial[1][group * 4 + warp] = states;
    ptx::wgmma_wait<0>();
    ptx::fence_registers(dq);
    ptx::fence_registers(writing);
    if constexpr (kDelta) ptx::fence_registers(reading);
    float dots[2] = {0.0f, 0.0f};
    add_dots(dots, dq, s.q + group * kTileBytes, 1.0f);
    if constexpr (kDelta) add_dots(dots, reading, s.k + group * kTileBytes, 1.0f);
    add_dots(dots, writing, s.k + group * kTileBytes, -1.0f);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      dots[half] += __shfl_xor_sync(kAllLanes, dots[half], 1);
      dots[half] += __shfl_xor_sync(kAllLanes, dots[half], 2);
      if (t == 0) s.logs[group][row + 8 * half] = dots[half];
    }
#pragma unroll
    for (int i = 0; i < kTile / 2; ++i) {
      dq_sum[i] += dq[i];
      dk_sum[i] += kDelta ? reading[i] + writing[i] : writing[i];
    }
    __syncthreads();  // the rows' sums are there, and R and N have been read
    if (threadIdx.x < kWarpLanes) store_gates(gates, h);
  }
  store_keys(dq_sum, op.dq);
  store_keys(dk_sum, op.dk);
}

#endif  // MILLRACE_HAS_WGMMA

// grid: key heads, chunks of all sequences.
template <int kKeys, bool kDelta>
__global__ void __launch_bounds__(kKeys / kTile * 128, 1)
    row_gradients_kernel(const __grid_constant__ LinearBackward op) {
#ifdef MILLRACE_HAS_WGMMA
  extern __shared__ __align__(1024) unsigned char shared_tiles[];
  const int64_t chunks = tile_places(op).chunks;
  RowGradients<kKeys, kDelta>(op, *reinterpret_cast<RowShared<kKeys, kDelta>*>(shared_tiles),
                              static_cast<int32_t>(blockIdx.y / chunks), static_cast<int32_t>(blockIdx.x),
                              static_cast<int32_t>(blockIdx.y % chunks))
      .run();
#endif
}

}  // namespace millrace::cuda
