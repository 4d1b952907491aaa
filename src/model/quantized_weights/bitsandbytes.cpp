// bitsandbytes. 4 bits: codes of a table of sixteen numbers (NF4, FP4), two in a byte, the first in the high
// half, through all rows as one line, with a scale (absmax) per block of it:
//   weight U8 [elements / 2, 1]            weight.quant_map F32 [16]
//   weight.absmax F32 [blocks], or U8 with weight.nested_absmax, weight.nested_quant_map: quantized once more
//   weight.quant_state.bitsandbytes__nf4   JSON: blocksize, dtype, shape, nested_blocksize, nested_offset
// Its dequantizer rounds every value to `dtype`, and so it is done here.
// LLM.int8: weight I8 [rows, cols], SCB F32 [rows]: the largest magnitude of each row, which is code 127.
#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "io/printable.h"
#include "kernels/quant/codec.h"
#include "model/quantized_weights/schemes.h"

namespace millrace {
namespace {

// The scale of each block, quantized once more or not.
struct Absmax {
  Floats plain = {};
  const std::byte* codes = nullptr;
  Floats table = {}, scales = {};
  int64_t block = 0;
  float offset = 0.0f;

  float at(int64_t index) const {
    if (codes == nullptr) return plain.at(index);
    const float value = table.at(load_number<uint8_t>(codes, index)) * scales.at(index / block);
    return value + offset;
  }
};

struct TableRows final : RowReader {
  std::string unreadable;  // not empty: why nothing can be read
  const std::byte* codes = nullptr;
  int64_t cols = 0, block = 0;
  DType rounded = DType::kF32;
  Floats table;
  Absmax absmax;

  void read(DType type, int64_t first, int64_t count, std::byte* out) const override {
    if (!unreadable.empty()) throw Error(ErrorCode::kBadInput, unreadable);
    const int64_t begin = first * cols, n = count * cols;
    std::vector<float> values(static_cast<size_t>(n));
    float scale = absmax.at(begin / block);
    for (int64_t i = 0; i < n; ++i) {
      if ((begin + i) % block == 0) scale = absmax.at((begin + i) / block);
      const auto byte = static_cast<unsigned>(codes[(begin + i) / 2]);
      values[i] = table.at((begin + i) % 2 == 0 ? byte >> 4 : byte & 15u) * scale;
    }
    if (type != rounded) {  // kF32 of a narrower type
      std::vector<std::byte> narrow(bytes_of(rounded, n));
      quant::quantize(rounded, values.data(), narrow.data(), n);
      quant::dequantize(rounded, narrow.data(), values.data(), n);
    }
    quant::quantize(type, values.data(), out, n);
  }
};

struct Int8Rows final : RowReader {
  const std::byte* codes = nullptr;
  int64_t cols = 0;
  Floats scales;

  void read(DType type, int64_t first, int64_t count, std::byte* out) const override {
    std::vector<float> values(static_cast<size_t>(count * cols));
    for (int64_t i = 0; i < count * cols; ++i) {
      const auto code = static_cast<float>(load_number<int8_t>(codes, first * cols + i));
      values[i] = code * scales.at(first + i / cols) * 7.874015718698502e-3f;  // 1 / 127, in this order
    }
    quant::quantize(type, values.data(), out, count * cols);
  }
};

struct QuantState {
  bool there = true;
  int64_t block = 0, nested_block = 0;
  float nested_offset = 0.0f;
  DType type = DType::kF32;
};

QuantState read_state(const Parts& parts, const std::string& part, int64_t rows, int64_t cols) {
  const io::StoredTensor& stored = parts.require(part, {"U8"});
  const auto* text = reinterpret_cast<const char*>(stored.data);
  if (elements_of(stored) > 0 && *text == '\0') {  // of a file that is not fetched yet (hub): its defaults
    const bool nested = parts.find("weight.nested_absmax") != nullptr;
    return {.there = false, .block = 64, .nested_block = nested ? 256 : 0, .type = DType::kBF16};
  }
  const auto json = nlohmann::json::parse(text, text + elements_of(stored), nullptr, false);
  const auto positive = [&](const char* key) {
    const bool good = json.is_object() && json.contains(key) && json[key].is_number_integer() &&
                      json[key].get<int64_t>() > 0;
    if (!good) parts.fail(part, fmt::format("no {}", key), "JSON with a positive one");
    return json[key].get<int64_t>();
  };
  QuantState state;
  state.block = positive("blocksize");
  if (!json.contains("shape") || json["shape"] != nlohmann::json{rows, cols}) {
    parts.fail(part, "another shape", fmt::format("[{}, {}]", rows, cols));
  }
  const std::string dtype =
      json.contains("dtype") && json["dtype"].is_string() ? json["dtype"].get<std::string>() : std::string();
  if (dtype == "bfloat16") {
    state.type = DType::kBF16;
  } else if (dtype == "float16") {
    state.type = DType::kF16;
  } else if (dtype != "float32") {
    parts.fail(part, fmt::format("dtype {}", io::printable(dtype)), "float32, float16 or bfloat16");
  }
  if (parts.find("weight.nested_absmax") != nullptr) {
    state.nested_block = positive("nested_blocksize");
    if (!json.contains("nested_offset") || !json["nested_offset"].is_number()) {
      parts.fail(part, "no nested_offset", "JSON with one");
    }
    state.nested_offset = static_cast<float>(json["nested_offset"].get<double>());
  }
  return state;
}

Absmax read_absmax(const Parts& parts, const QuantState& state, int64_t elements) {
  const int64_t blocks = (elements + state.block - 1) / state.block;
  if (state.nested_block == 0) return {.plain = floats_of(parts.require("weight.absmax", {"F32"}, {blocks}))};
  const int64_t nested = (blocks + state.nested_block - 1) / state.nested_block;
  return {.plain = {},
          .codes = parts.require("weight.absmax", {"U8"}, {blocks}).data,
          .table = floats_of(parts.require("weight.nested_quant_map", {"F32"}, {256})),
          .scales = floats_of(parts.require("weight.nested_absmax", {"F32"}, {nested})),
          .block = state.nested_block,
          .offset = state.nested_offset};
}

}  // namespace

QuantizedWeight read_bitsandbytes_4bit(const Parts& parts, const nlohmann::json& /*config*/, int64_t rows,
                                       int64_t cols) {
  const bool nf4 = parts.find("weight.quant_state.bitsandbytes__nf4") != nullptr;
  const QuantState state =
      read_state(parts, nf4 ? "weight.quant_state.bitsandbytes__nf4" : "weight.quant_state.bitsandbytes__fp4",
                 rows, cols);
  const io::StoredTensor& codes = parts.require("weight", {"U8"}, {(rows * cols + 1) / 2, 1});
  auto out = std::make_shared<TableRows>();
  if (!state.there) out->unreadable = parts.name("weight.quant_state") + ": found zeros, expected JSON";
  out->codes = codes.data;
  out->cols = cols;
  out->block = state.block;
  out->rounded = state.type;
  out->table = floats_of(parts.require("weight.quant_map", {"F32"}, {16}));
  out->absmax = read_absmax(parts, state, rows * cols);
  return {parts.name("weight"), nf4 ? "bitsandbytes, nf4" : "bitsandbytes, fp4", state.type, std::move(out)};
}

QuantizedWeight read_bitsandbytes_int8(const Parts& parts, const nlohmann::json& /*config*/, int64_t rows,
                                       int64_t cols) {
  auto out = std::make_shared<Int8Rows>();
  out->codes = parts.require("weight", {"I8"}, {rows, cols}).data;
  out->cols = cols;
  out->scales = floats_of(parts.require("SCB", {"F32"}, {rows}));
  return {parts.name("weight"), "bitsandbytes, int8", DType::kF32, std::move(out)};
}

}  // namespace millrace
