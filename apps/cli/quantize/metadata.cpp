#include "quantize/metadata.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/gguf_keys.h"
#include "quantize/vocabulary.h"

namespace millrace::cli {
namespace {

// general.file_type: what most tensors are.
uint32_t file_type(DType type) {
  static const std::map<DType, uint32_t> kTypes = {
      {DType::kF32, 0},     {DType::kF16, 1},    {DType::kQ4_0, 2},  {DType::kQ4_1, 3},  {DType::kQ8_0, 7},
      {DType::kQ5_0, 8},    {DType::kQ5_1, 9},   {DType::kQ4_K, 15}, {DType::kQ5_K, 17}, {DType::kQ6_K, 18},
      {DType::kBF16, 32},   {DType::kMXFP4, 38}, {DType::kQ2_K, 10}, {DType::kQ3_K, 11}, {DType::kIQ4_NL, 25},
      {DType::kIQ4_XS, 30}, {DType::kNVFP4, 39}};
  const auto found = kTypes.find(type);
  return found == kTypes.end() ? 0 : found->second;
}

void write_quantization_keys(DType type, io::GgufWriter& writer) {
  writer.set_u32("general.file_type", file_type(type));
  writer.set_u32("general.quantization_version", 2);
}

void copy_gguf_keys(const io::Gguf& gguf, io::GgufWriter& writer) {
  for (const io::GgufRawValue& value : gguf.raw_metadata()) {
    const bool ours = value.key == "general.file_type" || value.key == "general.quantization_version" ||
                      value.key == "general.alignment" || value.key.starts_with("split.");
    if (!ours) writer.copy_value(value.key, value.bytes);
  }
}

void write_hf_keys(const io::Checkpoint& checkpoint, const ModelConfig& config, io::GgufWriter& writer) {
  writer.set_string("general.architecture", config.architecture);
  writer.set_string("general.name", config.name);
  write_config_keys(checkpoint, config, writer);
  write_vocabulary(checkpoint, config, writer);
}

// Whether the angles are the same but for the rounding of keys to float32.
bool same_rotation(const ModelConfig& a, const ModelConfig& b) {
  const auto near = [](float x, float y) { return std::abs(x - y) <= 1e-6f * std::abs(y); };
  const bool angles = b.rope_as_tensor || std::equal(a.rope_inv_freq.begin(), a.rope_inv_freq.end(),
                                                     b.rope_inv_freq.begin(), b.rope_inv_freq.end(), near);
  return angles && near(a.rope_magnitude, b.rope_magnitude);
}

// The keys once more, in memory, read as any GGUF file is: a model that would compute something else, or cut
// text otherwise, must not be written.
void check_hf_keys(const io::Checkpoint& checkpoint, const ModelConfig& config) {
  io::GgufWriter trial("/dev/null");
  write_hf_keys(checkpoint, config, trial);
  trial.add_tensor("token_embd.weight", DType::kF32, std::array<int64_t, 2>{config.vocab, 1});
  std::string bytes = trial.header();
  bytes.resize(trial.file_bytes());
  io::Checkpoint again;
  again.gguf = io::Gguf::parse(std::as_bytes(std::span(bytes)), checkpoint.path() + " as GGUF");
  const ModelConfig read = read_config(again);
  const auto fail = [&](const char* what) {
    throw_error(ErrorCode::kUnsupported, "{}: {}: found a setting that GGUF's keys for {} cannot say",
                checkpoint.path(), what, config.architecture);
  };
  if (read.rotary_dims != config.rotary_dims || !same_rotation(read, config)) fail("rotary scaling");
  if (read.layer_windows != config.layer_windows) fail("attention windows");
  if (read.norm_eps != config.norm_eps || read.ffn_activation != config.ffn_activation ||
      read.attention_scale != config.attention_scale || read.swiglu_limit != config.swiglu_limit ||
      read.swiglu_alpha != config.swiglu_alpha) {
    fail("norm or activation");
  }
  if (read.head_dim != config.head_dim || read.experts_per_token != config.experts_per_token ||
      read.expert_weighting != config.expert_weighting) {
    fail("sizes");
  }
  if (read.own != config.own) fail("hyperparameters of this architecture alone");
  check_vocabulary(checkpoint, again);
}

}  // namespace

void write_quantized_metadata(const io::Checkpoint& checkpoint, const std::optional<ModelConfig>& config,
                              DType type, io::GgufWriter& writer) {
  if (checkpoint.gguf) {
    copy_gguf_keys(*checkpoint.gguf, writer);
  } else {
    check_hf_keys(checkpoint, *config);
    write_hf_keys(checkpoint, *config, writer);
  }
  write_quantization_keys(type, writer);
}

}  // namespace millrace::cli
