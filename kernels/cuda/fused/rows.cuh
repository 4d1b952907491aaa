// Rows of F32, F16 or BF16 as the fused kernels read and write them: eight columns of a row at a time, one or
// two loads of 16 bytes where the rows are aligned for it, else one element at a time.
//
// The type is a value and not a template parameter: a branch that all lanes take together costs two
// instructions per eight columns, of about 200 that the memory leaves time for, and each kernel is compiled
// once. Kernels that have more to do than that leaves time for are compiled a second time for arrays that are
// all BF16 and aligned (Form).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/tile/reduce.cuh"
#include "millrace/kernels/rows.h"

namespace millrace::cuda {

inline constexpr int kColumns = 8;  // of a load

struct Rows {
  uint8_t* data;
  int64_t row_bytes;
  int32_t is_f32, is_f16;  // neither: bf16
  int32_t aligned;         // every row begins at 16 bytes
};

// Whether kernels of Form::kBf16 take it; an array that is not there is no hindrance.
inline bool is_plain_bf16(const Rows& rows) {
  return rows.data == nullptr || (!rows.is_f32 && !rows.is_f16 && rows.aligned);
}

inline Rows rows_of(const mr_rows& from) {
  const int64_t bytes = from.type == MR_F32 ? 4 : 2, row_bytes = from.stride * bytes;
  const bool aligned = reinterpret_cast<uintptr_t>(from.data) % 16 == 0 && row_bytes % 16 == 0;
  return {static_cast<uint8_t*>(from.data), row_bytes, from.type == MR_F32, from.type == MR_F16, aligned};
}
// A vector [cols]: every row of it is the same.
inline Rows rows_of(const mr_vector& from) {
  Rows rows = rows_of(mr_rows{from.data, from.type, 0});
  rows.row_bytes = 0;
  return rows;
}

// What a kernel knows of all its arrays when it is compiled. kBf16: BF16, every row at 16 bytes, columns a
// multiple of eight, so that there are eight of them or none.
enum class Form { kAny, kBf16 };

// Eight elements as they lie in memory; b of float32 alone. Loads of several are issued before the first is
// used.
struct Raw8 {
  uint4 a, b;
};

__device__ inline uint8_t* at_column(const Rows& rows, int64_t row, int64_t col) {
  return rows.data + row * rows.row_bytes + col * (rows.is_f32 ? 4 : 2);
}

// n elements from (row, col) on, zeros behind them.
template <Form kForm = Form::kAny>
__device__ inline Raw8 load8(const Rows& rows, int64_t row, int64_t col, int n) {
  Raw8 raw{};
  if constexpr (kForm == Form::kBf16) {
    if (n > 0) raw.a = *reinterpret_cast<const uint4*>(rows.data + row * rows.row_bytes + col * 2);
    return raw;
  }
  const uint8_t* p = at_column(rows, row, col);
  if (rows.aligned && n >= kColumns) {
    raw.a = *reinterpret_cast<const uint4*>(p);
    if (rows.is_f32) raw.b = *reinterpret_cast<const uint4*>(p + 16);
    return raw;
  }
  uint32_t w[kColumns] = {};
  if (rows.is_f32) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (i < n) w[i] = reinterpret_cast<const uint32_t*>(p)[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (i < n) w[i / 2] |= static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(p)[i]) << (i % 2 * 16);
    }
  }
  raw.a = {w[0], w[1], w[2], w[3]};
  raw.b = {w[4], w[5], w[6], w[7]};
  return raw;
}

struct Values8 {
  float v[kColumns];
};

template <Form kForm = Form::kAny>
__device__ inline Values8 to_float(const Rows& rows, const Raw8& raw) {
  constexpr bool kAny = kForm == Form::kAny;
  const uint32_t w[kColumns] = {raw.a.x, raw.a.y, raw.a.z, raw.a.w, raw.b.x, raw.b.y, raw.b.z, raw.b.w};
  Values8 x;
  if (kAny && rows.is_f32) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) x.v[i] = __uint_as_float(w[i]);
  } else if (kAny && rows.is_f16) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      __half2 pair;
      memcpy(&pair, &w[i], 4);
      const float2 both = __half22float2(pair);
      x.v[2 * i] = both.x;
      x.v[2 * i + 1] = both.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      x.v[2 * i] = __uint_as_float(w[i] << 16);
      x.v[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
    }
  }
  return x;
}

__device__ inline uint32_t half_bits(float a, float b) {
  const __half2 pair = __floats2half2_rn(a, b);
  uint32_t bits;
  memcpy(&bits, &pair, 4);
  return bits;
}
__device__ inline uint32_t bfloat16_bits(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  uint32_t bits;
  memcpy(&bits, &pair, 4);
  return bits;
}

// As stored in `rows`: rounded to nearest even.
template <Form kForm = Form::kAny>
__device__ inline Raw8 from_float(const Rows& rows, const Values8& x) {
  constexpr bool kAny = kForm == Form::kAny;
  uint32_t w[kColumns] = {};
  if (kAny && rows.is_f32) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) w[i] = __float_as_uint(x.v[i]);
  } else if (kAny && rows.is_f16) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) w[i] = half_bits(x.v[2 * i], x.v[2 * i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) w[i] = bfloat16_bits(x.v[2 * i], x.v[2 * i + 1]);
  }
  return {{w[0], w[1], w[2], w[3]}, {w[4], w[5], w[6], w[7]}};
}

template <Form kForm = Form::kAny>
__device__ inline void store_raw8(const Rows& rows, int64_t row, int64_t col, int n, const Raw8& raw) {
  if constexpr (kForm == Form::kBf16) {
    if (n > 0) *reinterpret_cast<uint4*>(rows.data + row * rows.row_bytes + col * 2) = raw.a;
    return;
  }
  uint8_t* p = at_column(rows, row, col);
  if (rows.aligned && n >= kColumns) {
    *reinterpret_cast<uint4*>(p) = raw.a;
    if (rows.is_f32) *reinterpret_cast<uint4*>(p + 16) = raw.b;
    return;
  }
  const uint32_t w[kColumns] = {raw.a.x, raw.a.y, raw.a.z, raw.a.w, raw.b.x, raw.b.y, raw.b.z, raw.b.w};
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (i >= n) continue;
    if (rows.is_f32) {
      reinterpret_cast<uint32_t*>(p)[i] = w[i];
    } else {
      reinterpret_cast<uint16_t*>(p)[i] = static_cast<uint16_t>(w[i / 2] >> (i % 2 * 16));
    }
  }
}
template <Form kForm = Form::kAny>
__device__ inline void store8(const Rows& rows, int64_t row, int64_t col, int n, const Values8& x) {
  store_raw8<kForm>(rows, row, col, n, from_float<kForm>(rows, x));
}

// Columns of (row, col .. col + 7) that there are.
template <Form kForm = Form::kAny>
__device__ inline int columns_left(int64_t cols, int64_t col) {
  if constexpr (kForm == Form::kBf16) return col < cols ? kColumns : 0;
  const int64_t left = cols - col;
  return left >= kColumns ? kColumns : left > 0 ? static_cast<int>(left) : 0;
}

// ---------------------------------------------------------------- a team of threads with a row

// kThreads threads take a row, eight columns each in turn: 32 (a CTA of kTeamCta threads has several rows) or
// a whole CTA. kGroups: how many eights of a thread are kept in registers; 0: the row is longer than that and
// is read again for every pass.
inline constexpr int kTeamCta = 256;
template <int kThreads>
inline constexpr int kTeams = kThreads == kWarpLanes ? kTeamCta / kWarpLanes : 1;  // of a CTA

// f(group, first column, columns that there are: 0 to 8), called by all threads of a team alike.
template <int kThreads, int kGroups, Form kForm = Form::kAny, class F>
__device__ inline void each_group(int64_t cols, int thread, F&& f) {
  if constexpr (kGroups > 0) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int64_t col = static_cast<int64_t>(g * kThreads + thread) * kColumns;
      f(g, col, columns_left<kForm>(cols, col));
    }
  } else {
    for (int64_t begin = 0; begin < cols; begin += kThreads * kColumns) {
      const int64_t col = begin + thread * kColumns;
      f(0, col, columns_left<kForm>(cols, col));
    }
  }
}

__device__ inline float warp_max(float value) {
#pragma unroll
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

// Every thread of the team gets the result, in a fixed order. `partial`: [kThreads / 32] floats of shared
// memory that no other call between two barriers uses; a team of 32 needs none.
template <int kThreads>
__device__ inline float team_sum(float value, float* partial) {
  if constexpr (kThreads == kWarpLanes) {
    return warp_sum(value);
  } else {
    return block_sum<kThreads>(value, partial);
  }
}
template <int kThreads>
__device__ inline float team_max(float value, float* partial) {
  value = warp_max(value);
  if constexpr (kThreads == kWarpLanes) return value;
  if (threadIdx.x % kWarpLanes == 0) partial[threadIdx.x / kWarpLanes] = value;
  __syncthreads();  // all warps' maxima are there
  float most = partial[0];
#pragma unroll
  for (int i = 1; i < kThreads / kWarpLanes; ++i) most = fmaxf(most, partial[i]);
  return most;
}

}  // namespace millrace::cuda
