#include "kernels/cpu/quant/encoder_levels.h"

#include <cmath>
#include <cstring>

#include "kernels/cpu/quant/fit_levels.h"
#include "kernels/cpu/quant/fit_weighted.h"

namespace millrace::quant {
namespace {

constexpr float kLeastScale = -32.0f, kMostScale = 31.0f;  // six bits
constexpr int kTurns = 3;  // of solving for the integers and the super-block's scale in turn

// The levels of Q3_K: -4 .. 3.
struct EvenLevels {
  static constexpr int kSub = 16;
  static Float4 nearest(Float4 y) { return clamp4(round4(clamp4(y, -8.0f, 8.0f)), -4.0f, 3.0f); }
  static Float4 fit(const Float4* x, const Float4* w) { return fit_signed<kSub>(x, w, 4.0f); }
};
struct UnevenLevels {
  static constexpr int kSub = 32;
  static Float4 nearest(Float4 y) { return kIQ4.nearest(y); }
  static Float4 fit(const Float4* x, const Float4* w) { return fit_iq4<kSub>(x, w); }
};

// x ~ d * scale * level: sub-blocks in groups of four, one per lane.
template <class L>
class ScaledLevels {
 public:
  static constexpr int kSub = L::kSub, kGroups = kSuperBlock / kSub / kFloat4Lanes;

  explicit ScaledLevels(const BlockRun& run) {
    for (int g = 0; g < kGroups; ++g) {
      transpose_in(run.x + g * kFloat4Lanes * kSub, kSub, x_[g]);
      for (Float4& weight : w_[g]) weight = all4(1.0f);
      if (run.importance != nullptr) transpose_in(run.importance + g * kFloat4Lanes * kSub, kSub, w_[g]);
    }
    search();
  }

  uint16_t d = 0;
  float scale(int sub) const { return scale_[sub / kFloat4Lanes][sub % kFloat4Lanes]; }
  // The levels of the sub-blocks of group g.
  void levels(int g, Float4* out) const {
    const Float4 inverse = divide_or_zero(all4(1.0f), scale_[g] * all4(half_value(d)));
    for (int j = 0; j < kSub; ++j) out[j] = L::nearest(x_[g][j] * inverse);
  }

 private:
  Float4 error(int g, Float4 by) const {
    const Float4 inverse = divide_or_zero(all4(1.0f), by);
    Float4 sum = all4(0.0f);
    for (int j = 0; j < kSub; ++j) {
      const Float4 off = x_[g][j] - by * L::nearest(x_[g][j] * inverse);
      sum += w_[g][j] * off * off;
    }
    return sum;
  }

  // The integer scales nearest to what each sub-block wants, or beside it, given d; and the error.
  double choose_scales(const Float4* fits, float unit) {
    const Float4 inverse = divide_or_zero(all4(1.0f), all4(unit));
    double sum = 0.0;
    for (int g = 0; g < kGroups; ++g) {
      const Float4 wanted = clamp4(round4(clamp4(fits[g] * inverse, -64.0f, 64.0f)), kLeastScale, kMostScale);
      Float4 best = wanted, least = error(g, wanted * all4(unit));
      for (const float off : {-1.0f, 1.0f}) {
        const Float4 beside = clamp4(wanted + all4(off), kLeastScale, kMostScale);
        const Float4 now = error(g, beside * all4(unit));
        best = select(now < least, beside, best);
        least = select(now < least, now, least);
      }
      scale_[g] = best;
      for (int l = 0; l < kFloat4Lanes; ++l) sum += least[l];
    }
    return sum;
  }

  // d by least squares over the 256 values, given the scales and the levels they bring; 0: there is none.
  float refit() const {
    Float4 xa = all4(0.0f), aa = xa, level[kSub];
    for (int g = 0; g < kGroups; ++g) {
      levels(g, level);
      for (int j = 0; j < kSub; ++j) {
        const Float4 a = scale_[g] * level[j];
        xa += w_[g][j] * a * x_[g][j];
        aa += w_[g][j] * a * a;
      }
    }
    const float below = (aa[0] + aa[2]) + (aa[1] + aa[3]);
    return below > 0.0f ? ((xa[0] + xa[2]) + (xa[1] + xa[3])) / below : 0.0f;
  }

  void search() {
    Float4 fits[kGroups], best_scale[kGroups] = {};
    float most = 0.0f;
    for (int g = 0; g < kGroups; ++g) {
      fits[g] = L::fit(x_[g], w_[g]);
      for (int l = 0; l < kFloat4Lanes; ++l) {
        if (std::fabs(fits[g][l]) > std::fabs(most)) most = fits[g][l];
      }
    }
    d = stored_half(most / kLeastScale);  // the largest takes the integer without a counterpart
    double least = INFINITY;
    uint16_t best_d = d;
    for (int turn = 0; turn < kTurns; ++turn) {
      const double now = choose_scales(fits, half_value(d));
      if (now < least || turn == 0) {
        least = now;
        best_d = d;
        std::memcpy(best_scale, scale_, sizeof scale_);
      }
      const float next = refit();
      if (next == 0.0f || stored_half(next) == d) break;
      d = stored_half(next);
    }
    d = best_d;
    std::memcpy(scale_, best_scale, sizeof scale_);
  }

  Float4 x_[kGroups][kSub], w_[kGroups][kSub], scale_[kGroups];
};

}  // namespace

void encode_q3_k(const BlockRun& run, BlockQ3_K& out) {
  const ScaledLevels<EvenLevels> s(run);
  std::memset(&out, 0, sizeof out);
  out.d = s.d;
  for (int sub = 0; sub < 16; ++sub) {  // the mirror of scale_k3
    const auto scale = static_cast<unsigned>(s.scale(sub) - kLeastScale);
    uint8_t &low = out.scales[sub % 8], &high = out.scales[8 + sub % 4];
    low = static_cast<uint8_t>(low | (scale & 15) << (sub / 8 * 4));
    high = static_cast<uint8_t>(high | (scale >> 4) << (sub / 4 * 2));
  }
  for (int g = 0; g < s.kGroups; ++g) {
    Float4 levels[16];
    s.levels(g, levels);
    for (int l = 0; l < kFloat4Lanes; ++l) {
      for (int j = 0; j < 16; ++j) {
        const int e = 16 * (g * kFloat4Lanes + l) + j;
        const auto code = static_cast<unsigned>(levels[j][l] + 4.0f);
        put_pair(out.q, e, code);
        out.high[e % 32] = static_cast<uint8_t>(out.high[e % 32] | (code >> 2) << (e / 32));
      }
    }
  }
}

void encode_iq4_xs(const BlockRun& run, BlockIQ4_XS& out) {
  const ScaledLevels<UnevenLevels> s(run);
  std::memset(&out, 0, sizeof out);
  out.d = s.d;
  for (int g = 0; g < s.kGroups; ++g) {
    Float4 levels[32];
    s.levels(g, levels);
    for (int l = 0; l < kFloat4Lanes; ++l) {
      const int sub = g * kFloat4Lanes + l;
      const auto scale = static_cast<unsigned>(s.scale(sub) - kLeastScale);  // the mirror of scale_iq4_xs
      out.scales_low[sub / 2] = static_cast<uint8_t>(out.scales_low[sub / 2] | (scale & 15) << (sub % 2 * 4));
      out.scales_high = static_cast<uint16_t>(out.scales_high | (scale >> 4) << (2 * sub));
      for (int j = 0; j < 16; ++j) {
        out.q[16 * sub + j] =
            static_cast<uint8_t>(kIQ4.code_of(levels[j][l]) | kIQ4.code_of(levels[j + 16][l]) << 4);
      }
    }
  }
}

// Each sub-block of 16, a lane, takes of the scales around the one that lets its extreme value in (e2m1's
// largest is 6) the one of least error: lower ones saturate extremes and are finer for the rest.
void encode_nvfp4(const BlockRun& run, BlockNVFP4& out) {
  constexpr int kSub = 16, kBelow = 6, kAbove = 5, kMostCode = 0x7e;
  Float4 x[kSub], w[kSub], extreme = all4(0.0f);
  transpose_in(run.x, kSub, x);
  for (Float4& weight : w) weight = all4(1.0f);
  if (run.importance != nullptr) transpose_in(run.importance, kSub, w);
  for (const Float4& v : x) extreme = max4(extreme, abs4(v));
  int first[kFloat4Lanes];  // the largest code whose scale does not exceed extreme / 6
  for (int l = 0; l < kFloat4Lanes; ++l) {
    const float units = extreme[l] / 6.0f * 512.0f;
    first[l] = 0;
    while (first[l] < kMostCode &&
           static_cast<float>(ue4m3_units(static_cast<uint8_t>(first[l] + 1))) <= units) {
      ++first[l];
    }
  }
  Float4 least = all4(INFINITY), best = all4(0.0f), level[kSub] = {};
  for (int step = -kBelow; step <= kAbove; ++step) {
    Float4 code = all4(0.0f), half = code;  // half the scale, for levels are doubled
    for (int l = 0; l < kFloat4Lanes; ++l) {
      const int c = std::clamp(first[l] + step, 0, kMostCode);
      code[l] = static_cast<float>(c);
      half[l] = 0x1p-10f * static_cast<float>(ue4m3_units(static_cast<uint8_t>(c)));
    }
    const Float4 inverse = divide_or_zero(all4(1.0f), half);
    Float4 rounded[kSub], error = all4(0.0f);
    for (int j = 0; j < kSub; ++j) {
      rounded[j] = kE2M1.nearest(x[j] * inverse);
      const Float4 off = x[j] - half * rounded[j];
      error += w[j] * off * off;
    }
    const Int4 better = error < least;
    least = select(better, error, least);
    best = select(better, code, best);
    for (int j = 0; j < kSub; ++j) level[j] = select(better, rounded[j], level[j]);
  }
  for (int s = 0; s < kFloat4Lanes; ++s) {
    out.scales[s] = static_cast<uint8_t>(best[s]);
    for (int j = 0; j < 8; ++j) {
      out.q[8 * s + j] =
          static_cast<uint8_t>(kE2M1.code_of(level[j][s]) | kE2M1.code_of(level[j + 8][s]) << 4);
    }
  }
}

}  // namespace millrace::quant
