// Eight query rows over an int8 cache with the dot product instruction (kernels_attention_int8.h): eight
// tokens, or eight dimensions of values, by eight rows are sixteen registers of sums, and a row's codes come
// sixteen to a register, of which an instruction takes four by lane. Included by kernels_attention_int8.h.
// Roofline: per token and KV head of 64 dimensions 64 dot products, 16 loads of codes and 136 bytes: 32
// cycles of two vector units; conversions, scales, exponentials and the weights' codes are as much again.
#pragma once

template <>
inline constexpr int kSharedRows<KvInt8> = 8;
template <>
inline constexpr bool kLoopsAsk<KvInt8> = true;

template <>
struct IntegerRows<8> {
  static constexpr int32_t kAskedBytes = 128;  // of the next tile, with every sixteen dimensions or tokens
  [[gnu::always_inline]] static void ask(const uint8_t* at) {
    for (int32_t line = 0; line < kAskedBytes; line += 64) __builtin_prefetch(at + line, 0, 3);
    asm volatile("");  // g++ takes a function that only asks for one that does nothing
  }

  // Sums begin with the bits of 1.5 * 2^23 as a float, and so they need not be converted, which is four times
  // the work of a subtraction: 64 products of 127 * 127 are below 2^22.
  alignas(16) static constexpr int32_t kOrigin[4] = {0x4b400000, 0x4b400000, 0x4b400000, 0x4b400000};
  static constexpr float kFloatOfOrigin = 12582912.0f;
  [[gnu::always_inline]] static int32x4_t begin() {
    int32x4_t sum;  // from memory: a copy of a register takes a vector unit
    asm volatile("ldr %q0, %1" : "=w"(sum) : "m"(*reinterpret_cast<const int32x4_t*>(kOrigin)));
    return sum;
  }
  [[gnu::always_inline]] static void clear(int32x4_t (&sums)[8][2]) {
    unroll<8>([&](auto r) {
      sums[r][0] = begin();
      sums[r][1] = begin();
    });
  }
  static float32x4_t to_float(int32x4_t sum, float32x4_t origin) {
    return vsubq_f32(vreinterpretq_f32_s32(sum), origin);
  }
  // Four times four codes, of eight lanes, `step` bytes further each time.
  [[gnu::always_inline]] static void add(int32x4_t (&sums)[8][2], const uint8_t* codes, int64_t step,
                                         const int8x16_t (&by)[8]) {
    unroll<4>([&](auto lane) {
      const auto* at = reinterpret_cast<const int8_t*>(codes + lane * step);
      const int8x16_t lo = vld1q_s8(at), hi = vld1q_s8(at + 16);
      unroll<8>([&](auto r) {
        sums[r][0] = vdotq_laneq_s32(sums[r][0], lo, by[r], lane);
        sums[r][1] = vdotq_laneq_s32(sums[r][1], hi, by[r], lane);
      });
    });
  }

  static void score_tile(const AttendSpan& s, const Tile& tile, int row) {
    const int64_t stride = kTileTokens + kLanes;
    const float32x4_t origin = vdupq_n_f32(kFloatOfOrigin);
    for (int32_t part = 0; part < s.head_dim / KvInt8::kScaleDims; ++part) {
      const ActivationBlock* q[8];
      float by[8];
      unroll<8>([&](auto r) {
        q[r] = s.query_blocks[row + r] + part;
        by[r] = q[r]->scale * s.scale;
      });
      for (int32_t b = tile.lo; b < tile.hi; ++b) {
        float* scores = s.scores + row * stride + b * kLanes;
        const uint8_t *keys = tile.block[b] + s.key_offset, *next = tile.next[b] + s.key_offset;
        if (row == 0) __builtin_prefetch(next, 0, 3);
        next = KvInt8::codes(next, s.head_dim) + part * KvInt8::kScaleDims * kLanes;
        for (int32_t half = 0; half < kLanes; half += 8) {
          const uint8_t* codes =
              KvInt8::codes(keys, s.head_dim) + part * KvInt8::kScaleDims * kLanes + half * 4;
          int32x4_t sums[8][2];
          clear(sums);
          unroll<2>([&](auto sixteen) {
            if (row == 0) {
              ask(next);
              next += kAskedBytes;
            }
            int8x16_t x[8];
            unroll<8>([&](auto r) { x[r] = vld1q_s8(q[r]->q + sixteen * 16); });
            add(sums, codes + sixteen * 4 * KvInt8::kGroupBytes, KvInt8::kGroupBytes, x);
          });
          const float16x8_t d = vreinterpretq_f16_u16(vld1q_u16(KvInt8::scales(keys, part) + half));
          const float32x4_t d0 = vcvt_f32_f16(vget_low_f16(d)), d1 = vcvt_high_f32_f16(d);
          unroll<8>([&](auto r) {
            float* to = scores + r * stride + half;
            const float32x4_t lo = vmulq_f32(to_float(sums[r][0], origin), d0),
                              hi = vmulq_f32(to_float(sums[r][1], origin), d1);
            vst1q_f32(to, part == 0 ? vmulq_n_f32(lo, by[r]) : vfmaq_n_f32(vld1q_f32(to), lo, by[r]));
            vst1q_f32(to + 4, part == 0 ? vmulq_n_f32(hi, by[r]) : vfmaq_n_f32(vld1q_f32(to + 4), hi, by[r]));
          });
        }
      }
    }
  }

  // What `soften` and `weights_to_codes` do, for eight rows that see a whole tile: the same numbers. Rows go
  // two by two: a processor that looks 128 instructions ahead finds no second exponential of sixteen lanes in
  // them, and would wait for the first one's chain of multiply-adds.
  static constexpr int32_t kMostParts = 8;
  struct TileWeights {
    alignas(16) float scales[kMostParts][kTileTokens];
    alignas(16) float most[kMostParts][8][4];
    alignas(16) int8_t codes[kMostParts][8][kTileTokens];
    alignas(16) float unit[kMostParts][8];
    alignas(16) float inverse[kMostParts][8];
  };
  static bool weigh(const AttendSpan& s, const Tile& tile, int row, TileWeights& t) {
    const int32_t parts = s.head_dim / KvInt8::kScaleDims;
    for (int32_t part = 0; part < parts; ++part) {
      for (int32_t b = 0; b < kTileTokens / kLanes; ++b) {
        const uint16_t* half = KvInt8::scales(tile.block[b] + s.value_offset, part);
        Simd::store(t.scales[part] + b * kLanes, Simd::load_f16(half));
      }
    }
    for (int r = 0; r < 8; r += 2) soften_two(s, row + r, parts, r, t);
    for (int32_t part = 0; part < parts; ++part) codes_of_part(s, row, part, t);
    return true;
  }

  static float32x4_t largest_of(V16 x) { return vmaxq_f32(vmaxq_f32(x.a, x.b), vmaxq_f32(x.c, x.d)); }
  static float32x4_t least_of(V16 x) { return vminq_f32(vminq_f32(x.a, x.b), vminq_f32(x.c, x.d)); }

  static void soften_two(const AttendSpan& s, int row, int32_t parts, int32_t at, TileWeights& t) {
    const int64_t stride = kTileTokens + kLanes;
    constexpr int32_t kBlocks = kTileTokens / kLanes;
    const float never = -__builtin_inff();
    float* scores[2] = {s.scores + row * stride, s.scores + (row + 1) * stride};
    float32x4_t most[2], least[2];
    unroll<2>([&](auto r) {
      const V16 first = Simd::load(scores[r]);
      most[r] = largest_of(first);
      least[r] = least_of(first);
    });
    unroll<kBlocks - 1>([&](auto b) {
      unroll<2>([&](auto r) {
        const V16 more = Simd::load(scores[r] + (b + 1) * kLanes);
        most[r] = vmaxq_f32(most[r], largest_of(more));
        least[r] = vminq_f32(least[r], least_of(more));
      });
    });
    float largest[2];
    bool near = true;  // no exponent so small that its exponential is zero
    unroll<2>([&](auto r) {
      const float tile_largest = vmaxvq_f32(most[r]), before = s.largest[row + r];
      largest[r] = before > tile_largest ? before : tile_largest;
      near = near && vminvq_f32(least[r]) - largest[r] >= -86.0f;
      if (!(before == largest[r] && largest[r] > never)) rescale(s, row + r, before - largest[r]);
      s.largest[row + r] = largest[r];
    });
    for (int32_t b = 0; b < kBlocks; ++b) {
      V16 x[2];
      unroll<2>(
          [&](auto r) { x[r] = Simd::sub(Simd::load(scores[r] + b * kLanes), Simd::broadcast(largest[r])); });
      if (near) [[likely]] {
        exp_of_two(x);
      } else {
        unroll<2>([&](auto r) { x[r] = exp16_below(x[r]); });
      }
      unroll<2>([&](auto r) {
        float* sums = scores[r] + kTileTokens;
        Simd::store(scores[r] + b * kLanes, x[r]);
        Simd::store(sums, Simd::add(Simd::load(sums), x[r]));
      });
      for (int32_t part = 0; part < parts; ++part) {
        const V16 scale = Simd::load(t.scales[part] + b * kLanes);
        unroll<2>([&](auto r) {
          float* largest_yet = t.most[part][at + r];
          const float32x4_t here = largest_of(Simd::mul(x[r], scale));
          vst1q_f32(largest_yet, b == 0 ? here : vmaxq_f32(vld1q_f32(largest_yet), here));
        });
      }
    }
  }

  // exp16 of numbers from -86 to 0, of two rows step by step.
  [[gnu::always_inline]] static void exp_of_two(V16 (&x)[2]) {
    V16 shifted[2], p[2];
    const auto both = [](const auto& step) __attribute__((always_inline)) { unroll<2>(step); };
    both([&](auto r) { shifted[r] = fma_constant(x[r], Simd::broadcast(kExp.log2_e), kExp.magic); });
    both([&](auto r) {
      const V16 n = Simd::sub(shifted[r], Simd::broadcast(kExp.magic.lanes[0]));
      x[r] = Simd::fma(n, Simd::broadcast(kExp.minus_ln2_high), x[r]);
      x[r] = Simd::fma(n, Simd::broadcast(kExp.minus_ln2_low), x[r]);
    });
    both([&](auto r) { p[r] = fma_constant(Simd::broadcast(kExp.sixth), x[r], kExp.fifth); });
    both([&](auto r) { p[r] = fma_constant(p[r], x[r], kExp.fourth); });
    both([&](auto r) { p[r] = fma_constant(p[r], x[r], kExp.third); });
    both([&](auto r) { p[r] = fma_constant(p[r], x[r], kExp.half); });
    both([&](auto r) { p[r] = fma_constant(p[r], x[r], kExp.one); });
    both([&](auto r) { p[r] = fma_constant(p[r], x[r], kExp.one); });
    both([&](auto r) { x[r] = Simd::add_exponent(p[r], shifted[r]); });
  }

  static void codes_of_part(const AttendSpan& s, int row, int32_t part, TileWeights& t) {
    for (int r = 0; r < 8; r += 4) {
      const auto most = [&](int i) { return vld1q_f32(t.most[part][r + i]); };
      const float32x4_t largest = vpmaxq_f32(vpmaxq_f32(most(0), most(1)), vpmaxq_f32(most(2), most(3)));
      const uint32x4_t zero = vcltq_f32(largest, vdupq_n_f32(1e-35f));
      const auto unless_zero = [&](float32x4_t x) {
        return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), zero));
      };
      vst1q_f32(t.inverse[part] + r, unless_zero(vdivq_f32(vdupq_n_f32(127.0f), largest)));
      vst1q_f32(t.unit[part] + r, unless_zero(vdivq_f32(largest, vdupq_n_f32(127.0f))));
    }
    for (int32_t b = 0; b < kTileTokens; b += kLanes) {
      const V16 scale = Simd::load(t.scales[part] + b);
      for (int r = 0; r < 8; ++r) {
        const V16 weight = Simd::load(s.scores + (row + r) * static_cast<int64_t>(kTileTokens + kLanes) + b);
        const V16 steps = Simd::mul(Simd::mul(weight, scale), Simd::broadcast(t.inverse[part][r]));
        Simd::round_to_int8(steps, t.codes[part][r] + b);
      }
    }
  }

  static void add_part(const AttendSpan& s, const Tile& tile, int row, const int8_t (*codes)[kTileTokens],
                       const float* unit, int32_t first) {
    const int64_t group = static_cast<int64_t>(s.head_dim) * KvInt8::kTogether;
    const float32x4_t origin = vdupq_n_f32(kFloatOfOrigin);
    for (int32_t c = first; c < first + KvInt8::kScaleDims; c += 8) {
      int32x4_t sums[8][2];
      clear(sums);
      for (int32_t b = tile.lo; b < tile.hi; ++b) {
        const uint8_t *values = tile.block[b] + s.value_offset, *next = tile.next[b] + s.value_offset;
        if (row == 0) {
          if (c == first) __builtin_prefetch(next, 0, 3);
          ask(KvInt8::codes(next, s.head_dim) + c / 8 * kAskedBytes);
        }
        int8x16_t x[8];
        unroll<8>([&](auto r) { x[r] = vld1q_s8(codes[r] + b * kLanes); });
        add(sums, KvInt8::codes(values, s.head_dim) + c * KvInt8::kTogether, group, x);
      }
      unroll<8>([&](auto r) {
        if (unit[r] == 0.0f) return;
        float* to = s.values + (row + r) * static_cast<int64_t>(s.padded_dim) + c;
        vst1q_f32(to, vfmaq_n_f32(vld1q_f32(to), to_float(sums[r][0], origin), unit[r]));
        vst1q_f32(to + 4, vfmaq_n_f32(vld1q_f32(to + 4), to_float(sums[r][1], origin), unit[r]));
      });
    }
  }
};
