// RMSNorm and LayerNorm of a row, with a residual before and codes behind, and their gradients. A row is read
// again for every pass: it is in the first- or second-level cache then.
#pragma once

#include "kernels/cpu/fused/float_rows.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// ---------------------------------------------------------------- codes

// To E4M3, nearest even, at most +-448: the exponent's bias goes from 127 to 7, the mantissa from 23 bits
// to 3.
inline void to_e4m3(V16 x, uint8_t* codes) {
  alignas(64) float lanes[kLanes];
  Simd::store(lanes, x);
  U32x16 u, subnormal;
  __builtin_memcpy(&u, lanes, sizeof u);
  const U32x16 size = u & 0x7fffffffu;
  const auto over = reinterpret_cast<U32x16>(size > 0x43e00000u),
             nan = reinterpret_cast<U32x16>(size > 0x7f800000u);
  const U32x16 magnitude = (size & ~over) | (over & 0x43e00000u);  // at most 448
  F32x16 shifted;
  __builtin_memcpy(&shifted, &magnitude, sizeof shifted);
  shifted += 0x1p14f;  // its last bit is worth 2^-9, the smallest E4M3
  __builtin_memcpy(&subnormal, &shifted, sizeof shifted);
  const U32x16 normal = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u) - 0x3c000000u) >> 20;
  const auto small = reinterpret_cast<U32x16>(magnitude < 0x3c800000u);
  const U32x16 code = ((subnormal - 0x46800000u) & small) | (normal & ~small);
  const U32x16 with_sign = (code & ~nan) | (nan & 0x7fu) | (u >> 24 & 0x80u);
  __builtin_memcpy(lanes, &with_sign, sizeof lanes);
  Simd::store_low_bytes(Simd::load(lanes), reinterpret_cast<int8_t*>(codes));
}

inline void store_codes(V16 y, float scale, bool int8, int64_t n, uint8_t* to) {
  uint8_t codes[kLanes] = {};
  if (scale > 0.0f) {
    const V16 q = Simd::div(y, Simd::broadcast(scale));
    if (int8) {
      const V16 most = Simd::broadcast(127.0f), least = Simd::broadcast(-127.0f);
      Simd::round_to_int8(Simd::max(Simd::min(q, most), least), reinterpret_cast<int8_t*>(codes));
    } else {
      to_e4m3(q, codes);
    }
  }
  __builtin_memcpy(to, codes, static_cast<size_t>(n));
}

// ---------------------------------------------------------------- forward

struct Normed {
  const NormRow& op;
  const FloatRow& s;
  V16 mean, rstd;

  // n * (weight + offset) + bias; zeros behind the last
  template <class Part>
  [[gnu::always_inline]] V16 at(const Part& part, int64_t i) const {
    V16 y = Simd::mul(Simd::sub(part.load(s, i), mean), rstd);
    if (op.weight.data != nullptr) {
      y = Simd::mul(y, Simd::add(part.load(op.weight, i), Simd::broadcast(op.weight_offset)));
    }
    if (op.bias.data != nullptr) y = Simd::add(y, part.load(op.bias, i));
    return part.mask(y);
  }
};

inline float max_magnitude(const Normed& of, int64_t begin, int64_t end) {
  V16 most = Simd::zero();
  each16_of(end - begin,
            [&](const auto& part, int64_t i) { most = Simd::max(most, Simd::abs(of.at(part, begin + i))); });
  return Simd::reduce_max(most);
}

void norm_quantize_row(const NormRow& op, const Normed& of) {
  const bool int8 = op.quantize == MR_QUANTIZE_INT8_ROW;
  const int64_t width = op.quantize == MR_QUANTIZE_FP8_1X128 ? 128 : op.cols;
  for (int64_t begin = 0; begin < op.cols; begin += width) {
    const int64_t end = begin + width < op.cols ? begin + width : op.cols;
    const float scale = max_magnitude(of, begin, end) / (int8 ? 127.0f : 448.0f);
    op.scales[begin / width] = scale;
    each16_of(end - begin, [&](const auto& part, int64_t i) {
      store_codes(of.at(part, begin + i), scale, int8, part.count(), op.codes + begin + i);
    });
  }
}

void norm_fused_row(const NormRow& op) {
  const bool layer = op.kind == MR_NORM_LAYER;
  V16 total = Simd::zero();
  const auto add = [&](V16 v) { total = layer ? Simd::add(total, v) : Simd::fma(v, v, total); };
  if (op.residual.data != nullptr) {
    each16_of(op.cols, [&](const auto& part, int64_t i) {
      part.store(op.sum, i, Simd::add(part.load(op.x, i), part.load(op.residual, i)));
      add(part.load(op.sum, i));  // as it is stored
    });
  } else {
    each16_of(op.cols, [&](const auto& part, int64_t i) { add(part.load(op.x, i)); });
  }
  const FloatRow& s = op.residual.data != nullptr ? op.sum : op.x;
  const auto size = static_cast<float>(op.cols);
  float sum = Simd::reduce_sum(total), mean = 0.0f;
  if (layer) {
    mean = sum / size;
    const V16 all_mean = Simd::broadcast(mean);
    V16 squares = Simd::zero();
    each16_of(op.cols, [&](const auto& part, int64_t i) {
      const V16 off = part.mask(Simd::sub(part.load(s, i), all_mean));
      squares = Simd::fma(off, off, squares);
    });
    sum = Simd::reduce_sum(squares);
  }
  const float rstd = 1.0f / __builtin_sqrtf(sum / size + op.eps);
  if (op.mean != nullptr) *op.mean = mean;
  if (op.rstd != nullptr) *op.rstd = rstd;
  const Normed of{op, s, Simd::broadcast(mean), Simd::broadcast(rstd)};
  // Codes first: y may lie where x does.
  if (op.quantize != MR_QUANTIZE_NONE) norm_quantize_row(op, of);
  if (op.y.data == nullptr) return;
  each16_of(op.cols, [&](const auto& part, int64_t i) { part.store(op.y, i, of.at(part, i)); });
}

// ---------------------------------------------------------------- backward

void norm_backward_row(const NormBackwardRow& op) {
  const V16 mean = Simd::broadcast(op.mean), rstd = Simd::broadcast(op.rstd);
  const V16 offset = Simd::broadcast(op.weight_offset);
  struct Terms {
    V16 n, g, dy;
  };
  const auto terms = [&](const auto& part, int64_t i) {
    Terms t;
    t.n = part.mask(Simd::mul(Simd::sub(part.load(op.x, i), mean), rstd));
    t.dy = t.g = part.load(op.dy, i);
    if (op.weight.data != nullptr) t.g = Simd::mul(t.dy, Simd::add(part.load(op.weight, i), offset));
    return t;
  };
  V16 sum_gn = Simd::zero(), sum_g = Simd::zero();
  each16_of(op.cols, [&](const auto& part, int64_t i) {
    const Terms t = terms(part, i);
    sum_gn = Simd::fma(t.g, t.n, sum_gn);
    sum_g = Simd::add(sum_g, t.g);
  });
  const auto size = static_cast<float>(op.cols);
  const V16 mean_gn = Simd::broadcast(Simd::reduce_sum(sum_gn) / size);
  const V16 mean_g = Simd::broadcast(op.kind == MR_NORM_LAYER ? Simd::reduce_sum(sum_g) / size : 0.0f);
  const FloatRow dweight{op.dweight, MR_F32}, dbias{op.dbias, MR_F32};
  each16_of(op.cols, [&](const auto& part, int64_t i) {
    const Terms t = terms(part, i);
    V16 dx = Simd::mul(Simd::sub(Simd::sub(t.g, mean_g), Simd::mul(t.n, mean_gn)), rstd);
    if (op.dsum.data != nullptr) dx = Simd::add(dx, part.load(op.dsum, i));
    part.store(op.dx, i, dx);
    if (op.dweight != nullptr) part.store(dweight, i, Simd::fma(t.dy, t.n, part.load(dweight, i)));
    if (op.dbias != nullptr) part.store(dbias, i, Simd::add(t.dy, part.load(dbias, i)));
  });
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
