// FP4 (e2m1) codes, two in a byte, the even column in the low half, with a scale per 16 or 32 columns:
//   nvfp4  weight_packed U8, weight_scale F8_E4M3 [rows, cols / 16], and one number for the whole tensor that
//          the scales are divided by (compressed-tensors: weight_global_scale) or multiplied with (ModelOpt,
//          whose codes are called weight: weight_scale_2). No type of ours has that number: float32.
//   mxfp4  weight_packed U8, weight_scale U8 (e8m0) [rows, cols / 32]: our mxfp4, bytes in another order.
#include <fmt/core.h>

#include <cstring>
#include <vector>

#include "base/check.h"
#include "kernels/quant/blocks.h"
#include "kernels/quant/codec.h"
#include "model/quantized_weights/schemes.h"

namespace millrace {
namespace {

float fp4_value(int code) { return 0.5f * static_cast<float>(quant::kE2M1Doubled[code]); }

struct Fp4Rows : RowReader {
  const std::byte* data = nullptr;  // [rows, cols / 2]
  int64_t cols = 0;
  int code(int64_t row, int64_t col) const {
    const auto byte = static_cast<unsigned>(data[row * (cols / 2) + col / 2]);
    return static_cast<int>(byte >> (col % 2 * 4) & 15u);
  }
};

struct Nvfp4Rows final : Fp4Rows {
  static constexpr int64_t kGroup = 16;
  Floats scales;
  float global = 1.0f;
  bool divided = true;

  void read(DType type, int64_t first, int64_t count, std::byte* out) const override {
    MILLRACE_CHECK(type == DType::kF32);
    for (int64_t r = first; r < first + count; ++r) {
      for (int64_t c = 0; c < cols; ++c, out += sizeof(float)) {
        const float stored = scales.at(r * (cols / kGroup) + c / kGroup);
        const float value = fp4_value(code(r, c)) * (divided ? stored / global : stored * global);
        std::memcpy(out, &value, sizeof value);
      }
    }
  }
};

struct Mxfp4Rows final : Fp4Rows {
  const std::byte* scales = nullptr;  // [rows, cols / 32]

  void read(DType type, int64_t first, int64_t count, std::byte* out) const override {
    std::vector<std::byte> row(bytes_of(DType::kMXFP4, cols));
    const int64_t blocks = cols / quant::kBlock;
    for (int64_t r = first; r < first + count; ++r) {
      for (int64_t b = 0; b < blocks; ++b) {
        quant::BlockMXFP4 block{static_cast<uint8_t>(scales[r * blocks + b]), {}};
        for (int64_t j = 0; j < quant::kBlock / 2; ++j) {
          const int64_t at = b * quant::kBlock + j;
          block.q[j] = static_cast<uint8_t>(code(r, at) | code(r, at + quant::kBlock / 2) << 4);
        }
        std::memcpy(row.data() + b * sizeof block, &block, sizeof block);
      }
      if (type == DType::kMXFP4) {
        std::memcpy(out, row.data(), row.size());
      } else {
        MILLRACE_CHECK(type == DType::kF32);
        std::vector<float> values(static_cast<size_t>(cols));
        quant::dequantize(DType::kMXFP4, row.data(), values.data(), cols);
        std::memcpy(out, values.data(), values.size() * sizeof(float));
      }
      out += bytes_of(type, cols);
    }
  }
};

}  // namespace

QuantizedWeight read_packed_floats(const Parts& parts, const nlohmann::json& /*config*/, int64_t rows,
                                   int64_t cols) {
  const char* name = parts.find("weight_packed") != nullptr ? "weight_packed" : "weight";
  const io::StoredTensor& packed = parts.require(name, {"U8"}, {rows, cols / 2});
  const io::StoredTensor& scales = parts.require("weight_scale", {"F8_E4M3", "U8"});
  if (scales.dtype == "U8") {
    if (cols % quant::kBlock != 0) {
      parts.fail(name, fmt::format("rows of {}", cols), fmt::format("a multiple of {}", quant::kBlock));
    }
    parts.require("weight_scale", {"U8"}, {rows, cols / quant::kBlock});
    auto out = std::make_shared<Mxfp4Rows>();
    out->data = packed.data;
    out->cols = cols;
    out->scales = scales.data;
    return {parts.name(name), "mxfp4", DType::kMXFP4, std::move(out)};
  }
  if (cols % Nvfp4Rows::kGroup != 0) {
    parts.fail(name, fmt::format("rows of {}", cols), fmt::format("a multiple of {}", Nvfp4Rows::kGroup));
  }
  parts.require("weight_scale", {"F8_E4M3"}, {rows, cols / Nvfp4Rows::kGroup});
  const bool divided = parts.find("weight_scale_2") == nullptr;
  const char* global_name = divided ? "weight_global_scale" : "weight_scale_2";
  const io::StoredTensor& global = parts.require(global_name, {"F32"});
  if (elements_of(global) != 1) parts.fail(global_name, describe(global), "one number");
  auto out = std::make_shared<Nvfp4Rows>();
  out->data = packed.data;
  out->cols = cols;
  out->scales = floats_of(scales);
  out->global = floats_of(global).at(0);
  out->divided = divided;
  return {parts.name(name), "nvfp4", DType::kF32, std::move(out)};
}

}  // namespace millrace
