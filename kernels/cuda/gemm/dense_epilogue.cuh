// What happens to the sums of a dense product (gemm/dense.h) before they are stored: four neighbouring
// outputs of a row at a time, so that they share a reciprocal (the special function unit has a quarter of the
// rate of what an activation takes beside it).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "kernels/cuda/gemm/dense.h"
#include "millrace/kernels/tile/warp.cuh"

namespace millrace::cuda {

struct Float4 {
  float v[4];
};

// 1 / (1 + 2^x) of four by one reciprocal: the denominators are at most 2^31 + 1, so that their product is a
// float32. Beyond, which is sigmoid below 5e-10, it stays there.
__device__ inline Float4 dense_sigmoids(const Float4& x) {
  float d[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] = 1.0f + ptx::exp2_approx(fminf(x.v[i], 31.0f));
  const float low = d[0] * d[1], high = d[2] * d[3], all = ptx::reciprocal_approx(low * high);
  const float of_low = all * high, of_high = all * low;
  return {{of_low * d[1], of_low * d[0], of_high * d[3], of_high * d[2]}};
}
// x Phi(x) = max(x, 0) - |x| / 2 erfc(|x| / sqrt(2)); erfc by Abramowitz and Stegun 7.1.26, to 1.5e-7.
__device__ inline void dense_gelu(Float4& y) {
  float d[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] = fmaf(fminf(fabsf(y.v[i]), 1e6f), 0.3275911f * 0.70710678f, 1.0f);
  const float low = d[0] * d[1], high = d[2] * d[3], all = ptx::reciprocal_approx(low * high);
  const float of_low = all * high, of_high = all * low;
  const float t[4] = {of_low * d[1], of_low * d[0], of_high * d[3], of_high * d[2]};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float x = y.v[i];
    float q = fmaf(1.061405429f, t[i], -1.453152027f);
    q = fmaf(q, t[i], 1.421413741f);
    q = fmaf(q, t[i], -0.284496736f);
    q = fmaf(q, t[i], 0.254829592f) * t[i];
    q *= ptx::exp2_approx(x * x * -0.72134752f);                      // e^(-x^2 / 2)
    y.v[i] = fmaf(-0.5f * fminf(fabsf(x), 1e6f), q, fmaxf(x, 0.0f));  // infinity is no NaN
  }
}
template <DenseActivation kActivation>
__device__ inline void dense_activate(Float4& y) {
  if constexpr (kActivation == DenseActivation::kGelu) dense_gelu(y);
  if constexpr (kActivation == DenseActivation::kSilu || kActivation == DenseActivation::kGeluTanh) {
    // (1 + tanh(z)) / 2 = 1 / (1 + e^(-2z)): GELU by tanh and SiLU are one function of different arguments.
    Float4 z;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = y.v[i];
      z.v[i] = kActivation == DenseActivation::kSilu ? x * -1.44269504f
                                                     : x * fmaf(-0.10294324f, x * x, -2.30220820f);
    }
    const Float4 s = dense_sigmoids(z);
#pragma unroll
    for (int i = 0; i < 4; ++i) y.v[i] *= s.v[i];
  }
}
// The gates g and what they multiply, u: the outputs.
template <DenseActivation kActivation>
__device__ inline Float4 dense_gate(const DenseEpilogue& e, Float4 g, Float4 u) {
  Float4 z;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kActivation == DenseActivation::kClampedSwiglu) {
      const float limit = e.gate_limit;  // NaN stays
      g.v[i] = g.v[i] > limit ? limit : g.v[i];
      u.v[i] = (u.v[i] > limit ? limit : u.v[i] < -limit ? -limit : u.v[i]) + 1.0f;
    }
    z.v[i] = g.v[i] *
             (kActivation == DenseActivation::kClampedSwiglu ? -1.44269504f * e.gate_alpha : -1.44269504f);
  }
  const Float4 s = dense_sigmoids(z);
#pragma unroll
  for (int i = 0; i < 4; ++i) g.v[i] = g.v[i] * s.v[i] * u.v[i];
  return g;
}
// f.operator()<activation>() of the one that `activation` is.
template <class F>
__device__ inline void with_activation(DenseActivation activation, F&& f) {
  switch (activation) {
    case DenseActivation::kGelu:
      return f.template operator()<DenseActivation::kGelu>();
    case DenseActivation::kGeluTanh:
      return f.template operator()<DenseActivation::kGeluTanh>();
    case DenseActivation::kSilu:
      return f.template operator()<DenseActivation::kSilu>();
    case DenseActivation::kSwiglu:
      return f.template operator()<DenseActivation::kSwiglu>();
    case DenseActivation::kClampedSwiglu:
      return f.template operator()<DenseActivation::kClampedSwiglu>();
    default:
      return f.template operator()<DenseActivation::kNone>();
  }
}

__device__ inline float load_out(const void* from, int64_t at, DenseOut type) {
  if (type == DenseOut::kF32) return static_cast<const float*>(from)[at];
  if (type == DenseOut::kBf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(from)[at]);
  return __half2float(static_cast<const __half*>(from)[at]);
}

// Four columns of a vector [columns], zeros behind its end (or where there is none).
__device__ inline Float4 load_columns(const float* from, int32_t column, int32_t columns) {
  Float4 x;
#pragma unroll
  for (int i = 0; i < 4; ++i) x.v[i] = from != nullptr && column + i < columns ? from[column + i] : 0.0f;
  return x;
}

// Outputs of one call: columns, and how four of them may be read and written at once.
struct DenseStore {
  const DenseEpilogue& e;
  void* c;
  int64_t ldc;
  int32_t outputs;
  bool wide, wide_residual;  // every fourth column begins at what four elements take

  __device__ DenseStore(const DenseEpilogue& of, void* to, int64_t stride, int32_t columns)
      : e(of), c(to), ldc(stride), outputs(columns) {
    const int64_t bytes = dense_out_bytes(e.out) * 4;
    wide = reinterpret_cast<uintptr_t>(c) % bytes == 0 && ldc % 4 == 0;
    wide_residual = reinterpret_cast<uintptr_t>(e.residual) % bytes == 0 && e.residual_stride % 4 == 0;
  }
  // Four elements of the residual as they lie, zeros behind the end: a load that may be under way for long.
  __device__ uint4 load_residual(int64_t row, int32_t column) const {
    const int64_t at = row * e.residual_stride + column;
    uint32_t w[4] = {0, 0, 0, 0};
    if (e.out == DenseOut::kF32) {
      const auto* from = static_cast<const uint32_t*>(e.residual) + at;
      if (wide_residual && column + 4 <= outputs) return *reinterpret_cast<const uint4*>(from);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (column + i < outputs) w[i] = from[i];
      }
    } else {
      const auto* from = static_cast<const uint16_t*>(e.residual) + at;
      if (wide_residual && column + 4 <= outputs) {
        const uint2 x = *reinterpret_cast<const uint2*>(from);
        return {x.x, x.y, 0, 0};
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (column + i < outputs) w[i / 2] |= static_cast<uint32_t>(from[i]) << (i % 2 * 16);
      }
    }
    return {w[0], w[1], w[2], w[3]};
  }
  __device__ void add_residual(Float4& y, const uint4& x) const {
    if (e.out == DenseOut::kF32) {
      y.v[0] += __uint_as_float(x.x), y.v[1] += __uint_as_float(x.y);
      y.v[2] += __uint_as_float(x.z), y.v[3] += __uint_as_float(x.w);
    } else {
      const float2 low = unpack(x.x), high = unpack(x.y);
      y.v[0] += low.x, y.v[1] += low.y, y.v[2] += high.x, y.v[3] += high.y;
    }
  }
  // y of all 32 lanes is 128 columns of a row, `column` this lane's first; of kE4m3 all lanes call.
  __device__ void store(Float4 y, int64_t row, int32_t column) const {
    if (e.out == DenseOut::kE4m3) {
      float most = 0.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (column + i < outputs) most = fmaxf(most, fabsf(y.v[i]));
      }
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, distance));
      const float scale = most / 448.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
      if (threadIdx.x % 32 == 0 && column < outputs)
        e.out_scales[row * e.out_scale_stride + column / 128] = scale;
#pragma unroll
      for (int i = 0; i < 4; ++i) y.v[i] *= inverse;
    }
    const int64_t at = row * ldc + column;
    if (!wide || column + 4 > outputs) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (column + i < outputs) store_one(y.v[i], at + i);
      }
    } else if (e.out == DenseOut::kF32) {
      *reinterpret_cast<float4*>(static_cast<float*>(c) + at) = make_float4(y.v[0], y.v[1], y.v[2], y.v[3]);
    } else if (e.out == DenseOut::kE4m3) {
      *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(c) + at) =
          codes(y.v[0], y.v[1]) | static_cast<uint32_t>(codes(y.v[2], y.v[3])) << 16;
    } else {
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(c) + at) = {pack(y.v[0], y.v[1]),
                                                                   pack(y.v[2], y.v[3])};
    }
  }

 private:
  __device__ static uint32_t codes(float low, float high) {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
  }
  __device__ uint32_t pack(float low, float high) const {
    return e.out == DenseOut::kBf16 ? tile::pack<__nv_bfloat16>(low, high) : tile::pack<__half>(low, high);
  }
  __device__ float2 unpack(uint32_t pair) const {
    if (e.out == DenseOut::kBf16) return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
  __device__ void store_one(float y, int64_t at) const {
    if (e.out == DenseOut::kF32) static_cast<float*>(c)[at] = y;
    if (e.out == DenseOut::kBf16) static_cast<__nv_bfloat16*>(c)[at] = __float2bfloat16_rn(y);
    if (e.out == DenseOut::kF16) static_cast<__half*>(c)[at] = __float2half_rn(y);
    if (e.out == DenseOut::kE4m3) static_cast<uint8_t*>(c)[at] = static_cast<uint8_t>(codes(y, 0.0f) & 0xffu);
  }
};

}  // namespace millrace::cuda
