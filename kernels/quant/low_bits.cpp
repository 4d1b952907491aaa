#include "kernels/quant/low_bits.h"

#include <cstddef>

#include "base/float_bits.h"
#include "kernels/quant/codebooks.h"

namespace millrace::quant {
namespace {

float f16(uint16_t bits) { return to_float(Half{bits}); }
int nibble_of(const uint8_t* q, int i) { return (q[i / 2] >> (i % 2 * 4)) & 15; }

// Eight elements (or four): d times an entry, a minus where a bit of `signs` is set.
template <class Entry>
void put_entry(float d, const Entry& entry, uint32_t signs, float* out) {
  for (size_t j = 0; j < entry.size(); ++j) {
    const float x = d * static_cast<float>(entry[j]);
    out[j] = (signs >> j & 1) != 0 ? -x : x;
  }
}

// A word of IQ2_XXS and IQ3_XXS: four times seven signs, four bits of scale.
float scale_of_word(uint32_t word) { return 0.5f + static_cast<float>(word >> 28); }
uint8_t signs_of_word(uint32_t word, int group) { return signs_of_7((word >> (7 * group)) & 127); }

void put_shifted_entry(float d, const Codebook8::Entry& entry, bool minus, float* out) {
  const float shift = minus ? -0.125f : 0.125f;
  for (int j = 0; j < 8; ++j) out[j] = d * (static_cast<float>(entry[j]) + shift);
}

template <class Book>
std::span<const int8_t> run_of(const Book& book) {
  return {book.entries.front().data(), book.entries.size() * book.entries.front().size()};
}

}  // namespace

std::span<const int8_t> codebook_of(DType type) {
  switch (type) {
    case DType::kIQ3_XXS:
      return run_of(codebook_iq3_xxs());
    case DType::kIQ3_S:
      return run_of(codebook_iq3_s());
    case DType::kIQ2_XXS:
      return run_of(codebook_iq2_xxs());
    case DType::kIQ2_XS:
      return run_of(codebook_iq2_xs());
    case DType::kIQ2_S:
      return run_of(codebook_iq2_s());
    case DType::kIQ1_S:
    case DType::kIQ1_M:
      return run_of(codebook_iq1());
    default:
      return {};
  }
}

void decode(const BlockQ2_K& b, float* out) {
  for (int e = 0; e < kSuperBlock; ++e) {
    const float d = f16(b.d) * static_cast<float>(b.scales[e / 16] & 15);
    const float m = f16(b.dmin) * static_cast<float>(b.scales[e / 16] >> 4);
    out[e] = d * static_cast<float>(pair_code(b.q, e)) - m;
  }
}

void decode(const BlockQ3_K& b, float* out) {
  for (int e = 0; e < kSuperBlock; ++e) {
    const float d = f16(b.d) * static_cast<float>(scale_k3(b.scales, e / 16) - 32);
    const int third = (b.high[e % 32] >> (e / 32)) & 1;
    out[e] = d * static_cast<float>((pair_code(b.q, e) | third << 2) - 4);
  }
}

void decode(const BlockIQ4_NL& b, float* out) {
  for (int j = 0; j < kBlock; ++j) {
    const int code = j < 16 ? b.q[j] & 15 : b.q[j - 16] >> 4;
    out[j] = f16(b.d) * static_cast<float>(kIQ4Levels[code]);
  }
}

void decode(const BlockIQ4_XS& b, float* out) {
  for (int s = 0; s < 8; ++s) {
    const float d = f16(b.d) * static_cast<float>(scale_iq4_xs(b, s) - 32);
    for (int j = 0; j < 16; ++j) {
      const int pair = b.q[16 * s + j];
      out[32 * s + j] = d * static_cast<float>(kIQ4Levels[pair & 15]);
      out[32 * s + 16 + j] = d * static_cast<float>(kIQ4Levels[pair >> 4]);
    }
  }
}

void decode(const BlockIQ3_XXS& b, float* out) {
  const Codebook4& book = codebook_iq3_xxs();
  for (int s = 0; s < 8; ++s) {
    const float d = f16(b.d) * scale_of_word(b.signs[s]) * 0.5f;
    for (int g = 0; g < 4; ++g) {
      const uint32_t signs = signs_of_word(b.signs[s], g);
      put_entry(d, book.entries[b.q[8 * s + 2 * g]], signs, out + 32 * s + 8 * g);
      put_entry(d, book.entries[b.q[8 * s + 2 * g + 1]], signs >> 4, out + 32 * s + 8 * g + 4);
    }
  }
}

void decode(const BlockIQ3_S& b, float* out) {
  const Codebook4& book = codebook_iq3_s();
  for (int g = 0; g < kSuperBlock / 4; ++g) {
    const float d = f16(b.d) * static_cast<float>(1 + 2 * nibble_of(b.scales, g / 8));
    const int index = b.q[g] | ((b.high[g / 8] >> (g % 8)) & 1) << 8;
    put_entry(d, book.entries[index], static_cast<uint32_t>(b.signs[g / 2] >> (g % 2 * 4)), out + 4 * g);
  }
}

void decode(const BlockIQ2_XXS& b, float* out) {
  const Codebook8& book = codebook_iq2_xxs();
  for (int s = 0; s < 8; ++s) {
    const uint32_t indices = b.q[s][0], word = b.q[s][1];
    const float d = f16(b.d) * scale_of_word(word) * 0.25f;
    for (int g = 0; g < 4; ++g) {
      const uint32_t index = (indices >> (8 * g)) & 255;
      put_entry(d, book.entries[index], signs_of_word(word, g), out + 32 * s + 8 * g);
    }
  }
}

void decode(const BlockIQ2_XS& b, float* out) {
  const Codebook8& book = codebook_iq2_xs();
  for (int g = 0; g < kSuperBlock / 8; ++g) {
    const float d = f16(b.d) * (0.5f + static_cast<float>(nibble_of(b.scales, g / 2))) * 0.25f;
    put_entry(d, book.entries[b.q[g] & 511], signs_of_7(b.q[g] >> 9), out + 8 * g);
  }
}

void decode(const BlockIQ2_S& b, float* out) {
  const Codebook8& book = codebook_iq2_s();
  for (int g = 0; g < kSuperBlock / 8; ++g) {
    const float d = f16(b.d) * (0.5f + static_cast<float>(nibble_of(b.scales, g / 2))) * 0.25f;
    const int index = b.q[g] | ((b.high[g / 4] >> (g % 4 * 2)) & 3) << 8;
    put_entry(d, book.entries[index], b.signs[g], out + 8 * g);
  }
}

void decode(const BlockIQ1_S& b, float* out) {
  const Codebook8& book = codebook_iq1();
  for (int g = 0; g < kSuperBlock / 8; ++g) {
    const int high = b.high[g / 4], index = b.q[g] | ((high >> (g % 4 * 3)) & 7) << 8;
    const float d = f16(b.d) * static_cast<float>(2 * ((high >> 12) & 7) + 1);
    put_shifted_entry(d, book.entries[index], (high & 0x8000) != 0, out + 8 * g);
  }
}

void decode(const BlockIQ1_M& b, float* out) {
  const Codebook8& book = codebook_iq1();
  const float unit = f16(scale_bits(b));
  for (int g = 0; g < kSuperBlock / 8; ++g) {
    const int s = g / 2, high = nibble_of(b.high, g), index = b.q[g] | (high & 7) << 8;
    const float d = unit * static_cast<float>(2 * ((b.scales[s / 4] >> (s % 4 * 3)) & 7) + 1);
    put_shifted_entry(d, book.entries[index], (high & 8) != 0, out + 8 * g);
  }
}

void decode(const BlockTQ1_0& b, float* out) {
  constexpr uint8_t kPowers[5] = {1, 3, 9, 27, 81};
  const float d = f16(b.d);
  const auto digits = [&](const uint8_t* bytes, int count, int per_byte) {
    for (int t = 0; t < per_byte; ++t) {
      for (int i = 0; i < count; ++i) {
        const auto rest = static_cast<uint8_t>(bytes[i] * kPowers[t]);
        *out++ = d * static_cast<float>((rest * 3 >> 8) - 1);
      }
    }
  };
  digits(b.q, 32, 5);
  digits(b.q + 32, 16, 5);
  digits(b.high, 4, 4);
}

void decode(const BlockTQ2_0& b, float* out) {
  for (int e = 0; e < kSuperBlock; ++e) out[e] = f16(b.d) * static_cast<float>(pair_code(b.q, e) - 1);
}

void decode(const BlockNVFP4& b, float* out) {
  for (int s = 0; s < 4; ++s) {
    const float d = 0x1p-10f * static_cast<float>(ue4m3_units(b.scales[s]));  // codes are doubled
    for (int j = 0; j < 8; ++j) {
      const int pair = b.q[8 * s + j];
      out[16 * s + j] = d * static_cast<float>(kE2M1Doubled[pair & 15]);
      out[16 * s + 8 + j] = d * static_cast<float>(kE2M1Doubled[pair >> 4]);
    }
  }
}

}  // namespace millrace::quant
