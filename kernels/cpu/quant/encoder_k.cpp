// The K types: sub-blocks with small integer scales (and minimums) over one f16 scale of 256 values. Every
// sub-block is first fitted on its own; then the integers are chosen, and what remains - codes, minimums, the
// super-block's own scales - is solved for in turn, each given the others.
#include <cmath>
#include <cstring>

#include "kernels/cpu/quant/encoder_k.h"
#include "kernels/cpu/quant/fit_weighted.h"

namespace millrace::quant {
namespace {

constexpr int kRounds = 2;  // of solving in turn; a third changes the error by less than 0.1%

// 256 values in sub-blocks of kSub, with weights; groups of four sub-blocks are lanes.
template <int kSub>
struct SuperBlock {
  static constexpr int kSubs = kSuperBlock / kSub, kGroups = kSubs / kFloat4Lanes;
  Float4 x[kGroups][kSub], w[kGroups][kSub];

  explicit SuperBlock(const BlockRun& run) {
    for (int g = 0; g < kGroups; ++g) {
      transpose_in(run.x + g * kFloat4Lanes * kSub, kSub, x[g]);
      if (run.importance != nullptr) {
        transpose_in(run.importance + g * kFloat4Lanes * kSub, kSub, w[g]);
      } else {
        for (Float4& weight : w[g]) weight = all4(1.0f);
      }
    }
  }
};

float lane_sum(Float4 x) { return (x[0] + x[2]) + (x[1] + x[3]); }

// ---------------------------------------------------------------- scales and minimums: Q4_K, Q5_K, Q2_K

// The largest integer scale and minimum: six bits for sub-blocks of 32, four for those of 16.
template <int kSub>
constexpr float kMaxScale = kSub == 32 ? 63.0f : 15.0f;

template <int kSub>
struct ScalesAndMins {
  static constexpr int kGroups = SuperBlock<kSub>::kGroups;
  Float4 scale[kGroups], min[kGroups];  // integers of the sub-blocks
  uint16_t d = 0, dmin = 0;
};

// Codes of group g under the stored scales.
template <int kSub>
void code_group(const SuperBlock<kSub>& s, const ScalesAndMins<kSub>& k, int g, float top, Float4* codes) {
  const Float4 scale = k.scale[g] * all4(half_value(k.d)), min = k.min[g] * all4(half_value(k.dmin));
  const Float4 inverse = divide_or_zero(all4(1.0f), scale);
  for (int j = 0; j < kSub; ++j) {
    codes[j] = clamp4(round4((s.x[g][j] + min) * inverse), 0.0f, top);
  }
}

// Each sub-block's minimum again, given its stored scale and the codes that brings: mean of (scale q - x).
template <int kSub>
void refit_mins(const SuperBlock<kSub>& s, ScalesAndMins<kSub>& k, float top) {
  const float dmin = half_value(k.dmin);
  if (dmin == 0.0f) return;
  for (int g = 0; g < SuperBlock<kSub>::kGroups; ++g) {
    Float4 codes[kSub], sum = all4(0.0f), weight = sum;
    code_group(s, k, g, top, codes);
    const Float4 scale = k.scale[g] * all4(half_value(k.d));
    for (int j = 0; j < kSub; ++j) {
      sum += s.w[g][j] * (scale * codes[j] - s.x[g][j]);
      weight += s.w[g][j];
    }
    k.min[g] = clamp4(round4(divide_or_zero(sum, weight * all4(dmin))), 0.0f, kMaxScale<kSub>);
  }
}

// d and dmin of the super-block by least squares over its 256 values: x ~ d (scale q) - dmin (min).
template <int kSub>
void refit_super(const SuperBlock<kSub>& s, ScalesAndMins<kSub>& k, float top) {
  Float4 aa = all4(0.0f), ab = aa, bb = aa, xa = aa, xb = aa;
  for (int g = 0; g < SuperBlock<kSub>::kGroups; ++g) {
    Float4 codes[kSub];
    code_group(s, k, g, top, codes);
    for (int j = 0; j < kSub; ++j) {
      const Float4 a = k.scale[g] * codes[j], b = -k.min[g], wx = s.w[g][j] * s.x[g][j];
      aa += s.w[g][j] * a * a;
      ab += s.w[g][j] * a * b;
      bb += s.w[g][j] * b * b;
      xa += wx * a;
      xb += wx * b;
    }
  }
  const double a2 = lane_sum(aa), m2 = lane_sum(bb), am = lane_sum(ab), xs = lane_sum(xa), xm = lane_sum(xb);
  const double det = a2 * m2 - am * am;
  if (!(a2 > 0.0)) return;
  double d = xs / a2, dmin = 0.0;
  if (m2 > 0.0 && det > 1e-9 * a2 * m2) {
    d = (xs * m2 - xm * am) / det;
    dmin = (xm * a2 - xs * am) / det;
  }
  if (d > 0.0 && dmin >= 0.0) {
    k.d = stored_half(static_cast<float>(d));
    k.dmin = stored_half(static_cast<float>(dmin));
  }
}

template <int kSub>
double squared_error(const SuperBlock<kSub>& s, const ScalesAndMins<kSub>& k, float top) {
  Float4 error = all4(0.0f);
  for (int g = 0; g < SuperBlock<kSub>::kGroups; ++g) {
    Float4 codes[kSub];
    code_group(s, k, g, top, codes);
    const Float4 scale = k.scale[g] * all4(half_value(k.d)), min = k.min[g] * all4(half_value(k.dmin));
    for (int j = 0; j < kSub; ++j) {
      const Float4 off = scale * codes[j] - min - s.x[g][j];
      error += s.w[g][j] * off * off;
    }
  }
  return lane_sum(error);
}

template <int kSub>
ScalesAndMins<kSub> fit_super(const SuperBlock<kSub>& s, float top) {
  ScaleMin fits[SuperBlock<kSub>::kGroups];
  float max_scale = 0.0f, most_min = 0.0f;
  for (int g = 0; g < SuperBlock<kSub>::kGroups; ++g) {
    fits[g] = fit_above_min<kSub>(s.x[g], s.w[g], top, /*below_zero=*/true);
    for (int l = 0; l < kFloat4Lanes; ++l) {
      max_scale = std::max(max_scale, fits[g].scale[l]);
      most_min = std::max(most_min, -fits[g].min[l]);
    }
  }
  ScalesAndMins<kSub> k;
  k.d = stored_half(max_scale / kMaxScale<kSub>);
  k.dmin = stored_half(most_min / kMaxScale<kSub>);
  for (int g = 0; g < SuperBlock<kSub>::kGroups; ++g) {
    const auto integers = [](Float4 values, uint16_t unit) {
      const Float4 inverse = divide_or_zero(all4(1.0f), all4(half_value(unit)));
      return clamp4(round4(values * inverse), 0.0f, kMaxScale<kSub>);
    };
    k.scale[g] = integers(fits[g].scale, k.d);
    k.min[g] = integers(-fits[g].min, k.dmin);
  }
  ScalesAndMins<kSub> best = k;
  double lowest = squared_error(s, k, top);
  for (int round = 0; round < kRounds; ++round) {
    refit_mins(s, k, top);
    refit_super(s, k, top);
    const double error = squared_error(s, k, top);
    if (error < lowest) {
      lowest = error;
      best = k;
    }
  }
  return best;
}

// The mirror of scale_min_k4.
void pack_scales(const ScalesAndMins<32>& k, uint8_t* scales) {
  std::memset(scales, 0, 12);
  for (int s = 0; s < 8; ++s) {
    const auto scale = static_cast<unsigned>(k.scale[s / 4][s % 4]),
               min = static_cast<unsigned>(k.min[s / 4][s % 4]);
    if (s < 4) {
      scales[s] = static_cast<uint8_t>(scales[s] | scale);
      scales[s + 4] = static_cast<uint8_t>(scales[s + 4] | min);
    } else {
      scales[s + 4] = static_cast<uint8_t>((scale & 15) | (min & 15) << 4);
      scales[s - 4] = static_cast<uint8_t>(scales[s - 4] | (scale >> 4) << 6);
      scales[s] = static_cast<uint8_t>(scales[s] | (min >> 4) << 6);
    }
  }
}

template <class Block>
void encode_with_mins(const BlockRun& run, float top, Block& out) {
  const SuperBlock<32> s(run);
  const ScalesAndMins<32> k = fit_super(s, top);
  out.d = k.d;
  out.dmin = k.dmin;
  pack_scales(k, out.scales);
  std::memset(out.q, 0, sizeof out.q);
  if constexpr (requires { out.high; }) std::memset(out.high, 0, sizeof out.high);
  for (int g = 0; g < 2; ++g) {
    Float4 codes[32];
    code_group(s, k, g, top, codes);
    for (int l = 0; l < kFloat4Lanes; ++l) {
      const int sub = g * kFloat4Lanes + l;
      for (int j = 0; j < 32; ++j) {
        const auto code = static_cast<unsigned>(codes[j][l]);
        uint8_t& low = out.q[32 * (sub / 2) + j];
        low = static_cast<uint8_t>(low | (code & 15) << (4 * (sub & 1)));
        if constexpr (requires { out.high; }) {
          out.high[j] = static_cast<uint8_t>(out.high[j] | (code >> 4) << sub);
        }
      }
    }
  }
}

}  // namespace

void encode_q4_k(const BlockRun& run, BlockQ4_K& out) { encode_with_mins(run, 15.0f, out); }
void encode_q5_k(const BlockRun& run, BlockQ5_K& out) { encode_with_mins(run, 31.0f, out); }

void encode_q2_k(const BlockRun& run, BlockQ2_K& out) {
  constexpr int kSub = 16;
  constexpr float kTop = 3.0f;
  const SuperBlock<kSub> s(run);
  const ScalesAndMins<kSub> k = fit_super(s, kTop);
  out.d = k.d;
  out.dmin = k.dmin;
  std::memset(out.q, 0, sizeof out.q);
  for (int g = 0; g < SuperBlock<kSub>::kGroups; ++g) {
    Float4 codes[kSub];
    code_group(s, k, g, kTop, codes);
    for (int l = 0; l < kFloat4Lanes; ++l) {
      const int sub = g * kFloat4Lanes + l;
      const auto scale = static_cast<unsigned>(k.scale[g][l]), min = static_cast<unsigned>(k.min[g][l]);
      out.scales[sub] = static_cast<uint8_t>(scale | min << 4);
      for (int j = 0; j < kSub; ++j) put_pair(out.q, kSub * sub + j, static_cast<unsigned>(codes[j][l]));
    }
  }
}

// ---------------------------------------------------------------- signed scales: Q6_K

void encode_q6_k(const BlockRun& run, BlockQ6_K& out) {
  constexpr int kSub = 16, kGroups = SuperBlock<kSub>::kGroups;
  constexpr float kHalf = 32.0f;
  const SuperBlock<kSub> s(run);
  Float4 fits[kGroups], scales[kGroups], codes[kGroups][kSub];
  float highest = 0.0f;
  for (int g = 0; g < kGroups; ++g) {
    fits[g] = fit_signed<kSub>(s.x[g], s.w[g], kHalf);
    for (int l = 0; l < kFloat4Lanes; ++l) highest = std::max(highest, std::fabs(fits[g][l]));
  }
  out.d = stored_half(highest / 127.0f);
  const Float4 unit = divide_or_zero(all4(1.0f), all4(half_value(out.d)));
  for (int g = 0; g < kGroups; ++g) scales[g] = clamp4(round4(fits[g] * unit), -128.0f, 127.0f);

  const auto code = [&](float d) {
    for (int g = 0; g < kGroups; ++g) {
      const Float4 inverse = divide_or_zero(all4(1.0f), scales[g] * all4(d));
      for (int j = 0; j < kSub; ++j) {
        codes[g][j] = clamp4(round4(s.x[g][j] * inverse), -kHalf, kHalf - 1.0f);
      }
    }
  };
  code(half_value(out.d));
  Float4 xa = all4(0.0f), aa = xa;
  for (int g = 0; g < kGroups; ++g) {
    for (int j = 0; j < kSub; ++j) {
      const Float4 a = scales[g] * codes[g][j];
      xa += s.w[g][j] * a * s.x[g][j];
      aa += s.w[g][j] * a * a;
    }
  }
  if (const float d = lane_sum(xa) / lane_sum(aa); lane_sum(aa) > 0.0f && d > 0.0f) {
    out.d = stored_half(d);
    code(half_value(out.d));
  }

  std::memset(out.low, 0, sizeof out.low);
  std::memset(out.high, 0, sizeof out.high);
  for (int e = 0; e < kSuperBlock; ++e) {
    const int sub = e / kSub, h = e / 128, r = e / 32 % 4, i = e % 32;
    const auto q = static_cast<unsigned>(codes[sub / kFloat4Lanes][e % kSub][sub % kFloat4Lanes] + kHalf);
    uint8_t &low = out.low[64 * h + 32 * (r & 1) + i], &high = out.high[32 * h + i];
    low = static_cast<uint8_t>(low | (q & 15) << (4 * (r >> 1)));
    high = static_cast<uint8_t>(high | (q >> 4) << (2 * r));
  }
  for (int sub = 0; sub < kSuperBlock / kSub; ++sub) {
    out.scales[sub] = static_cast<int8_t>(scales[sub / kFloat4Lanes][sub % kFloat4Lanes]);
  }
}

}  // namespace millrace::quant
