#include "model/quantized_weights/integer_codes.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/float_bits.h"
#include "kernels/quant/blocks.h"
#include "kernels/quant/codec.h"

namespace millrace {
namespace {

constexpr int64_t kRun = quant::kBlock;  // columns that share a scale in a block type

// Of code - zero.
struct Range {
  int low, high;
};
Range range_of(const IntegerCodes& c) {
  const int levels = 1 << c.bits;
  if (c.fixed_zero) return {-levels / 2, levels / 2 - 1};
  return {-levels + 1, levels - 1};
}

// What a scan of the scales tells.
struct ScaleBits {
  bool all_f16 = true;
  int significant = 0;  // bits of the longest mantissa
  float smallest = 0.0f, largest = 0.0f;
};

ScaleBits scan_scales(const IntegerCodes& c) {
  ScaleBits bits;
  for (int64_t i = 0; i < c.scales.count; ++i) {
    const float scale = std::fabs(c.scales.at(i));
    if (scale == 0.0f) continue;
    bits.all_f16 = bits.all_f16 && to_float(to_half(scale)) == scale;
    const uint32_t mantissa = (std::bit_cast<uint32_t>(scale) & 0x7fffffu) | 0x800000u;
    bits.significant = std::max(bits.significant, 24 - std::countr_zero(mantissa));
    bits.largest = std::max(bits.largest, scale);
    bits.smallest = bits.smallest == 0.0f ? scale : std::min(bits.smallest, scale);
  }
  return bits;
}

bool runs_share_a_scale(const IntegerCodes& c) {
  if (c.cols % kRun != 0) return false;
  for (int64_t i = 0; i < c.cols; ++i) {
    if (c.group_of[i] != c.group_of[i / kRun * kRun]) return false;
  }
  return true;
}

class IntegerRows : public RowReader {
 public:
  explicit IntegerRows(IntegerCodes codes) : c_(std::move(codes)) {}

  void read(DType type, int64_t first, int64_t count, std::byte* out) const override {
    const auto cols = static_cast<size_t>(c_.cols);
    std::vector<uint8_t> codes(static_cast<size_t>(count) * cols);
    c_.codes(first, count, codes.data());
    std::vector<int> zeros(static_cast<size_t>(c_.groups), 1 << (c_.bits - 1));
    std::vector<float> scales(static_cast<size_t>(c_.groups));
    const size_t row_bytes = bytes_of(type, c_.cols);
    for (int64_t r = 0; r < count; ++r, out += row_bytes) {
      for (int64_t g = 0; g < c_.groups; ++g) {
        scales[g] = c_.scales.at((first + r) * c_.scale_row_step + g * c_.scale_group_step);
        if (!c_.fixed_zero) zeros[g] = c_.zero(first + r, g);
      }
      const uint8_t* row = codes.data() + static_cast<size_t>(r) * cols;
      if (info(type).block_elements == 1) {
        write_floats(type, row, zeros, scales, out);
      } else {
        write_blocks(type, row, zeros, scales, out);
      }
    }
  }

 private:
  void write_floats(DType type, const uint8_t* codes, const std::vector<int>& zeros,
                    const std::vector<float>& scales, std::byte* out) const {
    std::vector<float> values(static_cast<size_t>(c_.cols));
    for (int64_t i = 0; i < c_.cols; ++i) {
      const int32_t g = c_.group_of[i];
      values[i] = static_cast<float>(codes[i] - zeros[g]) * scales[g];
    }
    quant::quantize(type, values.data(), out, c_.cols);
  }

  void write_blocks(DType type, const uint8_t* codes, const std::vector<int>& zeros,
                    const std::vector<float>& scales, std::byte* out) const {
    for (int64_t begin = 0; begin < c_.cols; begin += kRun, out += info(type).block_bytes) {
      const int32_t g = c_.group_of[begin];
      const Half d = to_half(scales[g]);
      if (type == DType::kQ8_0) {
        quant::BlockQ8_0 block{d.bits, {}};
        for (int64_t j = 0; j < kRun; ++j) block.q[j] = static_cast<int8_t>(codes[begin + j] - zeros[g]);
        std::memcpy(out, &block, sizeof block);
      } else if (type == DType::kQ4_0) {
        quant::BlockQ4_0 block{d.bits, {}};
        pack_nibbles(codes + begin, 8 - zeros[g], block.q);
        std::memcpy(out, &block, sizeof block);
      } else {
        MILLRACE_CHECK(type == DType::kQ5_0);
        quant::BlockQ5_0 block{d.bits, {}, {}};
        pack_nibbles(codes + begin, 16 - zeros[g], block.q);
        for (int64_t j = 0; j < kRun; ++j) {
          const int high = (codes[begin + j] + 16 - zeros[g]) >> 4 & 1;
          block.high[j / 8] = static_cast<uint8_t>(block.high[j / 8] | high << (j % 8));
        }
        std::memcpy(out, &block, sizeof block);
      }
    }
  }

  static void pack_nibbles(const uint8_t* codes, int shift, uint8_t* out) {
    for (int j = 0; j < kRun / 2; ++j) {
      out[j] = static_cast<uint8_t>(((codes[j] + shift) & 15) | ((codes[j + kRun / 2] + shift) & 15) << 4);
    }
  }

  IntegerCodes c_;
};

}  // namespace

DType exact_type(const IntegerCodes& c) {
  const Range range = range_of(c);
  const bool f16 = c.scales.type == DType::kF16;
  const bool blocks = runs_share_a_scale(c) && range.low >= -128 && range.high <= 127;
  const ScaleBits bits = f16 && blocks ? ScaleBits{} : scan_scales(c);
  if (blocks && bits.all_f16) {
    return range.low >= -8 ? DType::kQ4_0 : range.low >= -16 ? DType::kQ5_0 : DType::kQ8_0;
  }
  // Floats: as many bits as the longest scale and the longest code have together. (A code of -2^n has one.)
  const int code_bits = std::bit_width(static_cast<unsigned>(range.high));
  const int together = bits.significant + code_bits;
  if (together <= 8) return DType::kBF16;
  const bool in_range =
      bits.smallest >= 0x1p-14f && bits.largest * static_cast<float>(-range.low) <= 65504.0f;
  return together <= 11 && in_range ? DType::kF16 : DType::kF32;
}

std::shared_ptr<const RowReader> make_rows(IntegerCodes codes) {
  return std::make_shared<IntegerRows>(std::move(codes));
}

std::vector<int32_t> groups_in_order(int64_t cols, int64_t group_size) {
  std::vector<int32_t> out(static_cast<size_t>(cols));
  for (int64_t i = 0; i < cols; ++i) out[i] = static_cast<int32_t>(i / group_size);
  return out;
}

}  // namespace millrace
