// Encoders of the K types: sub-blocks with small integer scales (and minimums) over one f16 scale of 256
// values. Every sub-block is first fitted on its own; then the integers are chosen, and what remains - codes,
// minimums, the super-block's own scales - is solved for in turn, each given the others. Included inside the
// anonymous namespace of the encoders' tables, after encode_plain.h.
//
// Million values per second of a Neoverse-N1 core, measured (docs/benchmarks.md): q6_k 240, q4_k 213, q5_k
// 193; bound by its two vector units.
#pragma once

constexpr float kMaxScale = 63.0f;  // of Q4_K and Q5_K: six bits
constexpr int kSubs = 8;            // their sub-blocks of 32
constexpr int kRefits = 1;          // a second takes 0.1% off the error and a quarter off the speed

// One number of the super-block as the f16 that is stored.
inline float stored(float wanted, uint16_t* bits) {
  const StoredHalves half(Simd::all(wanted));
  *bits = half.bits[0];
  float value[Simd::kBlocks];
  Simd::store(value, half.value);
  return value[0];
}

struct ScalesAndMins {
  float scale[kSubs], min[kSubs];  // integers 0..63
  uint16_t d_bits = 0, dmin_bits = 0;
  float d = 0.0f, dmin = 0.0f;
};

// How the values of some sub-blocks become codes: y = x * inverse + offset, rounded to [0, top]; what is left
// over is y - code in units of `unit`. A sub-block of scale 0 has the code 0 alone and is left over as it is.
struct Coding {
  V scale, base, unit, inverse, offset, top;
  Coding(const ScalesAndMins& k, int first, float most) {
    const V zero = Simd::all(0.0f), one = Simd::all(1.0f);
    const V min = Simd::mul(Simd::load(k.min + first), Simd::all(k.dmin));
    scale = Simd::mul(Simd::load(k.scale + first), Simd::all(k.d));
    base = Simd::sub(zero, min);
    const Simd::Mask some = Simd::greater(scale, Simd::all(kLeastRange));
    unit = Simd::select(some, scale, one);
    inverse = Simd::div(one, unit);
    offset = Simd::mul(min, inverse);
    top = Simd::select(some, Simd::all(most), zero);
  }
};

// Of each sub-block: sums of codes, of what they leave over, of products.
struct Leftovers {
  V q, r, qq, rq, rr;
};

inline Leftovers left_over(const float* x, const Coding& coding) {
  const V zero = Simd::all(0.0f);
  const Spread by(coding.inverse), plus(coding.offset), most(coding.top);
  V q[kParts], r[kParts], qq[kParts], rq[kParts], rr[kParts];
  for (int p = 0; p < kParts; ++p) {
    q[p] = r[p] = qq[p] = rq[p] = rr[p] = zero;
    for (int t = 0; t < 8; ++t) {
      const V y = Simd::fma(Simd::load_part(x, 32, t, p), by.p[p], plus.p[p]);
      const V code = Simd::round(Simd::min(Simd::max(y, zero), most.p[p])), rest = Simd::sub(y, code);
      q[p] = Simd::add(q[p], code);
      r[p] = Simd::add(r[p], rest);
      qq[p] = Simd::fma(code, code, qq[p]);
      rq[p] = Simd::fma(rest, code, rq[p]);
      rr[p] = Simd::fma(rest, rest, rr[p]);
    }
  }
  return {Simd::add_across(q), Simd::add_across(r), Simd::add_across(qq), Simd::add_across(rq),
          Simd::add_across(rr)};
}

// In the order of the sub-blocks, whatever the vectors' length.
inline float ordered_sum(const float* x) {
  float sum = x[0];
  for (int s = 1; s < kSubs; ++s) sum += x[s];
  return sum;
}

// One pass over the values. With the codes they get under k: each sub-block's minimum so that nothing is left
// over on average, then d and dmin of the super-block by least squares over what is left of all 256 values,
// as d (scale q) - dmin (min). Returns the squared error before.
inline float refit(const float* x, float top, ScalesAndMins& k) {
  float aa[kSubs], ab[kSubs], bb[kSubs], ra[kSubs], rb[kSubs], errors[kSubs];
  const V zero = Simd::all(0.0f), dmin_lanes = Simd::all(k.dmin), most = Simd::all(kMaxScale);
  const V per_min = Simd::all(k.dmin > 0.0f ? 1.0f / k.dmin : 0.0f);
  for (int first = 0; first < kSubs; first += Simd::kBlocks) {
    const Coding coding(k, first, top);
    const Leftovers left = left_over(x + first * 32, coding);
    const V rest = Simd::mul(coding.unit, left.r);
    const V wanted = Simd::fma(rest, Simd::all(-1.0f / 32.0f), Simd::sub(zero, coding.base));
    const V min = Simd::round(Simd::min(Simd::max(Simd::mul(wanted, per_min), zero), most));
    const V moved = Simd::fma(min, dmin_lanes, coding.base);
    const V a = Simd::load(k.scale + first), b = Simd::sub(zero, min);
    Simd::store(k.min + first, min);
    Simd::store(errors + first, Simd::mul(Simd::mul(coding.unit, coding.unit), left.rr));
    Simd::store(aa + first, Simd::mul(Simd::mul(a, a), left.qq));
    Simd::store(ab + first, Simd::mul(Simd::mul(a, b), left.q));
    Simd::store(bb + first, Simd::mul(Simd::mul(b, b), Simd::all(32.0f)));
    Simd::store(ra + first, Simd::mul(a, Simd::fma(moved, left.q, Simd::mul(coding.unit, left.rq))));
    Simd::store(rb + first, Simd::mul(b, Simd::fma(moved, Simd::all(32.0f), rest)));
  }
  const double a2 = ordered_sum(aa), m2 = ordered_sum(bb), am = ordered_sum(ab), ras = ordered_sum(ra),
               rbs = ordered_sum(rb), det = a2 * m2 - am * am;
  if (a2 > 0.0) {
    double d = k.d, dmin = k.dmin;
    if (det > 1e-6 * a2 * m2) {
      d += (ras * m2 - rbs * am) / det;
      dmin += (rbs * a2 - ras * am) / det;
    } else {
      d += ras / a2;
    }
    if (d > 0.0 && dmin >= 0.0) {
      k.d = stored(static_cast<float>(d), &k.d_bits);
      k.dmin = stored(static_cast<float>(dmin), &k.dmin_bits);
    }
  }
  return ordered_sum(errors);
}

inline float largest(const float* x) {
  float most = 0.0f;
  for (int s = 0; s < kSubs; ++s) most = x[s] > most ? x[s] : most;
  return most;
}

// Every sub-block on its own, then in integers.
template <int kTop>
inline ScalesAndMins fit_super(const float* x) {
  float scale[kSubs], below[kSubs];
  for (int first = 0; first < kSubs; first += Simd::kBlocks) {
    const ScaleMin fit = fit_above_min<kTop, true>(x + first * 32);
    Simd::store(scale + first, fit.scale);
    Simd::store(below + first, Simd::sub(Simd::all(0.0f), fit.min));
  }
  ScalesAndMins k;
  k.d = stored(largest(scale) / kMaxScale, &k.d_bits);
  k.dmin = stored(largest(below) / kMaxScale, &k.dmin_bits);
  const float per_scale = k.d > 0.0f ? 1.0f / k.d : 0.0f, per_min = k.dmin > 0.0f ? 1.0f / k.dmin : 0.0f;
  const V zero = Simd::all(0.0f), most = Simd::all(kMaxScale);
  for (int first = 0; first < kSubs; first += Simd::kBlocks) {
    const V s = Simd::mul(Simd::load(scale + first), Simd::all(per_scale));
    const V m = Simd::mul(Simd::load(below + first), Simd::all(per_min));
    Simd::store(k.scale + first, Simd::round(Simd::min(Simd::max(s, zero), most)));
    Simd::store(k.min + first, Simd::round(Simd::min(Simd::max(m, zero), most)));
  }
  return k;
}

// Codes of all values under k, and their squared error.
inline float code_super(const float* x, const ScalesAndMins& k, float top, uint8_t* codes, Misses& misses) {
  float errors[kSubs];
  for (int first = 0; first < kSubs; first += Simd::kBlocks) {
    const Coding coding(k, first, top);
    // A sub-block of scale 0 has y = 0.
    const Simd::Mask some = Simd::greater(coding.top, Simd::all(0.0f));
    const V zero = Simd::all(0.0f);
    Codes group;
    const V error = code_group(x + first * 32, Simd::select(some, coding.inverse, zero),
                               Simd::select(some, coding.offset, zero), coding.scale, coding.base, 0.0f, top,
                               group, misses);
    Simd::store(errors + first, error);
    std::memcpy(codes + first * 32, group.all, sizeof group.all);
  }
  return ordered_sum(errors);
}

// The mirror of scale_min_k4.
inline void pack_scales(const ScalesAndMins& k, uint8_t* scales) {
  for (int s = 0; s < 4; ++s) {
    const auto scale = static_cast<unsigned>(k.scale[s]), min = static_cast<unsigned>(k.min[s]),
               scale4 = static_cast<unsigned>(k.scale[s + 4]), min4 = static_cast<unsigned>(k.min[s + 4]);
    scales[s] = static_cast<uint8_t>(scale | scale4 >> 4 << 6);
    scales[s + 4] = static_cast<uint8_t>(min | min4 >> 4 << 6);
    scales[s + 8] = static_cast<uint8_t>((scale4 & 15) | (min4 & 15) << 4);
  }
}

template <class Block, int kTop>
inline void encode_with_mins(const float* x, Block& out, Misses& misses) {
  ScalesAndMins k = fit_super<kTop>(x), best = k;
  float least = FLT_MAX;
  for (int round = 0; round < kRefits; ++round) {
    const ScalesAndMins before = k;
    const float error = refit(x, kTop, k);
    if (error < least) {
      least = error;
      best = before;
    }
  }
  uint8_t codes[kSuperBlock];
  const Misses misses_before = misses;
  if (code_super(x, k, kTop, codes, misses) >
      least) {  // rounding d and dmin has cost more than refitting gained
    k = best;
    misses = misses_before;
    code_super(x, k, kTop, codes, misses);
  }
  out.d = k.d_bits;
  out.dmin = k.dmin_bits;
  pack_scales(k, out.scales);
  for (int r = 0; r < 4; ++r) {
    for (int i = 0; i < 32; ++i) {
      out.q[32 * r + i] = static_cast<uint8_t>((codes[64 * r + i] & 15) | codes[64 * r + 32 + i] << 4);
    }
  }
  if constexpr (kTop == 31) {
    for (int i = 0; i < 32; ++i) {
      unsigned bits = 0;
      for (int s = 0; s < kSubs; ++s) bits |= static_cast<unsigned>(codes[32 * s + i] >> 4) << s;
      out.high[i] = static_cast<uint8_t>(bits);
    }
  }
}

// ---------------------------------------------------------------- signed scales: Q6_K

constexpr int kSixSubs = 16;  // sub-blocks of 16

// Codes (plus 32) of all values under `d`; sums of (scale q) x and of its square; what they miss, if asked.
struct SixBits {
  float scale[kSixSubs];
  uint8_t codes[kSuperBlock];
};

template <class Take>
inline void code_six_bits(const float* x, const SixBits& six, float d, Take&& take) {
  const V least = Simd::all(-32.0f), most = Simd::all(31.0f);
  for (int first = 0; first < kSixSubs; first += Simd::kBlocks) {
    const V scales = Simd::load(six.scale + first), steps = Simd::mul(scales, Simd::all(d));
    const Spread inverse(inverse_or_zero(steps));
    for (int t = 0; t < 4; ++t) {
      V value[kParts], q[kParts];
      for (int p = 0; p < kParts; ++p) {
        value[p] = Simd::load_part(x + first * 16, 16, t, p);
        q[p] = Simd::round(Simd::min(Simd::max(Simd::mul(value[p], inverse.p[p]), least), most));
      }
      take(first, t, value, q, scales, steps);
    }
  }
}

inline void encode_q6_k(const float* x, BlockQ6_K& out, Misses& misses) {
  SixBits six;
  float fits[kSixSubs], most = 0.0f;
  for (int first = 0; first < kSixSubs; first += Simd::kBlocks) {
    Simd::store(fits + first, fit_6_bits(x + first * 16));
  }
  for (const float fit : fits) {
    const float size = fit < 0.0f ? -fit : fit;
    most = size > most ? size : most;
  }
  uint16_t d_bits;
  float d = stored(most / 127.0f, &d_bits);
  const float unit = d > 0.0f ? 1.0f / d : 0.0f;
  for (int first = 0; first < kSixSubs; first += Simd::kBlocks) {
    const V wanted = Simd::mul(Simd::load(fits + first), Simd::all(unit));
    Simd::store(six.scale + first,
                Simd::round(Simd::max(Simd::min(wanted, Simd::all(127.0f)), Simd::all(-128.0f))));
  }
  // d again, by least squares over the codes: each sub-block's sums, then over all.
  float xq[kSixSubs], qq[kSixSubs];
  V xq_parts[kParts], qq_parts[kParts];
  code_six_bits(x, six, d, [&](int first, int t, const V* value, const V* q, V, V) {
    for (int p = 0; p < kParts; ++p) {
      const V zero = Simd::all(0.0f);
      xq_parts[p] = Simd::fma(value[p], q[p], t == 0 ? zero : xq_parts[p]);
      qq_parts[p] = Simd::fma(q[p], q[p], t == 0 ? zero : qq_parts[p]);
    }
    if (t < 3) return;
    Simd::store(xq + first, Simd::add_across(xq_parts));
    Simd::store(qq + first, Simd::add_across(qq_parts));
  });
  double xa = 0.0, aa = 0.0;
  for (int s = 0; s < kSixSubs; ++s) {
    xa += static_cast<double>(six.scale[s]) * xq[s];
    aa += static_cast<double>(six.scale[s]) * six.scale[s] * qq[s];
  }
  if (aa > 0.0 && xa > 0.0) d = stored(static_cast<float>(xa / aa), &d_bits);
  Bytes quads[4];
  code_six_bits(x, six, d, [&](int first, int t, const V* value, V* q, V, V steps) {
    const Spread step(steps);
    for (int p = 0; p < kParts; ++p) {
      misses.add(Simd::sub(value[p], Simd::mul(q[p], step.p[p])), value[p]);
      q[p] = Simd::add(q[p], Simd::all(32.0f));
    }
    quads[t] = Simd::to_unsigned(q);
    if (t == 3) Simd::store_codes(quads, six.codes + first * 16, 16);
  });
  out.d = d_bits;
  for (int s = 0; s < kSixSubs; ++s) out.scales[s] = static_cast<int8_t>(six.scale[s]);
  for (int h = 0; h < 2; ++h) {
    const uint8_t* c = six.codes + 128 * h;
    for (int i = 0; i < 32; ++i) {
      out.low[64 * h + i] = static_cast<uint8_t>((c[i] & 15) | c[64 + i] << 4);
      out.low[64 * h + 32 + i] = static_cast<uint8_t>((c[32 + i] & 15) | c[96 + i] << 4);
      out.high[32 * h + i] =
          static_cast<uint8_t>(c[i] >> 4 | c[32 + i] >> 4 << 2 | c[64 + i] >> 4 << 4 | c[96 + i] >> 4 << 6);
    }
  }
}

template <class Block, void (*kEncode)(const float*, Block&, Misses&)>
EncodeSums encode_super_blocks(const float* x, int64_t blocks, uint8_t* out) {
  Misses misses;
  for (int64_t i = 0; i < blocks; ++i) {
    kEncode(x + i * kSuperBlock, *reinterpret_cast<Block*>(out + i * static_cast<int64_t>(sizeof(Block))),
            misses);
  }
  return misses.sums();
}
