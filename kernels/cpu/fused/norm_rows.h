// RMSNorm and LayerNorm of a row, with a residual before and codes behind, and their gradients. A row is read
// again for every pass: it is in the first- or second-level cache then.
#pragma once

#include "kernels/cpu/fused/float_rows.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// ---------------------------------------------------------------- codes

// To E4M3, nearest even, of finite numbers up to 448 and a rounding more. Added to 2^(e + 20), e the exponent
// but not below -6, a number loses all but its last three bits; what is left, k, lies in the last bits of the
// sum, and the code is 8 (e + 6) + k.
#if defined(MILLRACE_SIMD_AVX512)
inline void to_e4m3(V16 x, uint8_t* codes) {
  const __m512i u = _mm512_castps_si512(x), magnitude = _mm512_and_si512(u, _mm512_set1_epi32(0x7fffffff));
  const __m512i exponent = _mm512_max_epi32(_mm512_and_si512(u, _mm512_set1_epi32(0x7f800000)),
                                            _mm512_set1_epi32(0x3c800000));  // not below 2^-6
  const __m512i large = _mm512_add_epi32(exponent, _mm512_set1_epi32(20 << 23));
  const __m512i sum =
      _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(magnitude), _mm512_castsi512_ps(large)));
  // The sum's exponent is e + 20 + 127: 8 times it, less what it has at e = -6. One byte counts.
  const __m512i code = _mm512_add_epi32(_mm512_add_epi32(sum, _mm512_srli_epi32(sum, 20)),
                                        _mm512_set1_epi32(-8 * (127 + 20 - 6)));
  // Seven bits of it, and one of the sign.
  const __m512i with_sign =
      _mm512_ternarylogic_epi32(_mm512_srli_epi32(u, 24), code, _mm512_set1_epi32(0x7f), 0xd8);
  Simd::store_low_bytes(_mm512_castsi512_ps(with_sign), reinterpret_cast<int8_t*>(codes));
}
#else
inline void to_e4m3(V16 x, uint8_t* codes) {
  alignas(64) float lanes[kLanes];
  Simd::store(lanes, x);
  U32x16 u, sum_bits;
  __builtin_memcpy(&u, lanes, sizeof u);
  const U32x16 magnitude = u & 0x7fffffffu, exponent = u & 0x7f800000u;
  const auto small = reinterpret_cast<U32x16>(exponent < 0x3c800000u);  // below 2^-6
  const U32x16 large_bits = ((exponent & ~small) | (small & 0x3c800000u)) + (20u << 23);
  F32x16 size, large;
  __builtin_memcpy(&size, &magnitude, sizeof size);
  __builtin_memcpy(&large, &large_bits, sizeof large);
  size += large;
  __builtin_memcpy(&sum_bits, &size, sizeof size);
  // The sum's exponent is e + 20 + 127: 8 times it, less what it has at e = -6. One byte counts.
  const U32x16 code = sum_bits + (sum_bits >> 20) - 8u * (127 + 20 - 6);
  const U32x16 with_sign = (code & 0x7fu) | (u >> 24 & 0x80u);
  __builtin_memcpy(lanes, &with_sign, sizeof lanes);
  Simd::store_low_bytes(Simd::load(lanes), reinterpret_cast<int8_t*>(codes));
}
#endif

// y / scale with the bits of a division, from 1 / scale (rounded): Markstein's two steps, which are exact
// unless the fraction of scale is all ones or numbers leave the range of floats. Where they could, `exact` is
// false and codes come from divisions, element by element.
struct Quotients {
  V16 inverse, minus_scale;
  bool exact;

  explicit Quotients(float scale)
      : inverse(Simd::broadcast(1.0f / scale)), minus_scale(Simd::broadcast(-scale)) {
    uint32_t bits;
    __builtin_memcpy(&bits, &scale, 4);
    exact = scale > 1e-25f && scale < 1e25f && (bits & 0x7fffffu) != 0x7fffffu;
  }
  [[gnu::always_inline]] V16 of(V16 y) const {
    const V16 q = Simd::mul(y, inverse);
    return Simd::fma(Simd::fma(q, minus_scale, y), inverse, q);
  }
};

inline uint8_t e4m3_of(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  const uint32_t sign = u >> 24 & 0x80u;
  uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  if (magnitude > 0x43e00000u) magnitude = 0x43e00000u;  // 448
  if (magnitude >= 0x3c800000u)
    return static_cast<uint8_t>(sign | (magnitude + 0x7ffffu + (magnitude >> 20 & 1u) - 0x3c000000u) >> 20);
  float shifted;
  __builtin_memcpy(&shifted, &magnitude, 4);
  shifted += 0x1p14f;  // its last bit is worth 2^-9, the smallest E4M3
  __builtin_memcpy(&magnitude, &shifted, 4);
  return static_cast<uint8_t>(sign | (magnitude - 0x46800000u));
}

// A block's codes, `count` of them, from what y(part, i) gives; a scale that is not above zero (or NaN) gives
// zeros.
template <class Y, class Code>
[[gnu::always_inline]] inline void store_codes(int64_t count, uint8_t* to, const Y& y, const Code& code) {
  each16_of(
      count, [&](const auto& part, int64_t i) __attribute__((always_inline)) {
        if (part.count() == kLanes) return code(y(part, i), to + i);
        uint8_t codes[kLanes];
        code(y(part, i), codes);
        __builtin_memcpy(to + i, codes, static_cast<size_t>(part.count()));
      });
}
template <class Y>
[[gnu::always_inline]] inline void store_codes(float scale, bool int8, int64_t count, uint8_t* to,
                                               const Y& y) {
  const Quotients by(scale);
  if (!(scale > 0.0f)) {
    __builtin_memset(to, 0, static_cast<size_t>(count));
  } else if (int8) {
    const V16 most = Simd::broadcast(127.0f), least = Simd::broadcast(-127.0f), all = Simd::broadcast(scale);
    store_codes(
        count, to, y, [&](V16 v, uint8_t * codes) __attribute__((always_inline)) {
          const V16 q = by.exact ? by.of(v) : Simd::div(v, all);
          Simd::round_to_int8(Simd::at_least(Simd::at_most(q, most), least),
                              reinterpret_cast<int8_t*>(codes));
        });
  } else if (by.exact) {
    store_codes(
        count, to,
        y, [&](V16 v, uint8_t * codes) __attribute__((always_inline)) { to_e4m3(by.of(v), codes); });
  } else {
    store_codes(count, to, y, [&](V16 v, uint8_t* codes) {
      float lanes[kLanes];
      Simd::store(lanes, Simd::div(v, Simd::broadcast(scale)));
      for (int j = 0; j < kLanes; ++j) codes[j] = e4m3_of(lanes[j]);
    });
  }
}

// ---------------------------------------------------------------- forward

struct Normed {
  const NormRow& op;
  const FloatRow& s;
  V16 mean, rstd;

  // n * (weight + offset) + bias; zeros behind the last
  template <class Part>
  [[gnu::always_inline]] V16 at(const Part& part, int64_t i) const {
    V16 y = part.load(s, i);
    if (op.kind == MR_NORM_LAYER) y = Simd::sub(y, mean);
    y = Simd::mul(y, rstd);
    if (op.weight.data != nullptr) {
      y = Simd::mul(y, Simd::add(part.load(op.weight, i), Simd::broadcast(op.weight_offset)));
    }
    if (op.bias.data != nullptr) y = Simd::add(y, part.load(op.bias, i));
    return part.mask(y);
  }
  [[gnu::always_inline]] void prefetch(int64_t i) const {
    prefetch16(op.next[0], i);
    if (op.next[1].data != nullptr) prefetch16(op.next[1], i);
  }
};

constexpr int64_t kKeptOutputs = 4096;  // floats that wait for their scale: 16 KiB
constexpr int64_t kBlockColumns = 128;  // with a scale

// The blocks whose outputs are kept go through each step together: the maximum of one is a chain of a hundred
// cycles, beside which the others' run.
void norm_quantize_row(const NormRow& op, const Normed& of) {
  const bool int8 = op.quantize == MR_QUANTIZE_INT8_ROW;
  const int64_t width = op.quantize == MR_QUANTIZE_FP8_1X128 ? kBlockColumns : op.cols;
  alignas(64) float kept[kKeptOutputs];
  V16 most[kKeptOutputs / kBlockColumns];
  const bool keep = width <= kKeptOutputs;  // else outputs are computed again
  const int64_t blocks = keep && width == kBlockColumns ? kKeptOutputs / kBlockColumns : 1;
  const FloatRow row{kept, MR_F32};
  for (int64_t begin = 0; begin < op.cols; begin += blocks * width) {
    const int64_t end = begin + blocks * width < op.cols ? begin + blocks * width : op.cols;
    const auto each_block = [&](const auto& body) __attribute__((always_inline)) {
      for (int64_t first = begin, b = 0; first < end; first += width, ++b)
        body(b, first, end - first < width ? end - first : width);
    };
    each_block([&](int64_t b, int64_t first, int64_t count) __attribute__((always_inline)) {
      V16 largest = Simd::zero();
      each16_of(
          count, [&](const auto& part, int64_t i) __attribute__((always_inline)) {
            of.prefetch(first + i);
            const V16 y = of.at(part, first + i);
            largest = Simd::larger_size(largest, y);
            if (keep) part.store(row, first - begin + i, y);
          });
      most[b] = largest;
    });
    float* const scales = op.scales + begin / width;
    each_block([&](int64_t b, int64_t, int64_t) __attribute__((always_inline)) {
      scales[b] = Simd::reduce_max(most[b]) / (int8 ? 127.0f : 448.0f);
    });
    each_block([&](int64_t b, int64_t first, int64_t count) {
      store_codes(
          scales[b], int8, count,
          op.codes + first, [&](const auto& part, int64_t i) __attribute__((always_inline)) {
            return keep ? part.load(row, first - begin + i) : of.at(part, first + i);
          });
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
  each16_of(op.cols, [&](const auto& part, int64_t i) {
    of.prefetch(i);
    part.store(op.y, i, of.at(part, i));
  });
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
    t.n = part.load(op.x, i);
    if (op.kind == MR_NORM_LAYER) t.n = Simd::sub(t.n, mean);
    t.n = part.mask(Simd::mul(t.n, rstd));
    t.dy = t.g = part.load(op.dy, i);
    if (op.weight.data != nullptr) t.g = Simd::mul(t.dy, Simd::add(part.load(op.weight, i), offset));
    return t;
  };
  V16 sum_gn = Simd::zero(), sum_g = Simd::zero();
  each16_of(op.cols, [&](const auto& part, int64_t i) {
    const Terms t = terms(part, i);
    sum_gn = Simd::fma(t.g, t.n, sum_gn);
    if (op.kind == MR_NORM_LAYER) sum_g = Simd::add(sum_g, t.g);
  });
  const auto size = static_cast<float>(op.cols);
  const V16 mean_gn = Simd::broadcast(Simd::reduce_sum(sum_gn) / size);
  const V16 mean_g = Simd::broadcast(op.kind == MR_NORM_LAYER ? Simd::reduce_sum(sum_g) / size : 0.0f);
  const FloatRow dweight{op.dweight, MR_F32}, dbias{op.dbias, MR_F32};
  each16_of(op.cols, [&](const auto& part, int64_t i) {
    prefetch16(op.next[0], i);
    prefetch16(op.next[1], i);
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
