#include "model/siglip_tower.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/vision_tensors.h"

namespace millrace {
namespace {

using nlohmann::json;

// What Hugging Face's directories have before the names of the encoder, and before the projector's.
constexpr std::string_view kTowers[] = {"vision_tower.vision_model.", "model.vision_tower.vision_model.",
                                        "model.vision_tower.", "vision_tower."};
constexpr std::string_view kProjectors[] = {"multi_modal_projector.", "model.multi_modal_projector."};

SiglipConfig read_hf(const io::Checkpoint& checkpoint) {
  const json& hf = checkpoint.hf->config;
  const json vision = hf.value("vision_config", json::object());
  const auto integer = [&](const json& from, const char* key, int32_t fallback) {
    const auto it = from.find(key);
    if (it == from.end() || it->is_null()) return fallback;
    if (!it->is_number_integer() || it->get<int64_t>() < 1 || it->get<int64_t>() > (1 << 20)) {
      throw_error(ErrorCode::kBadInput, "{}: config.json: vision_config: {}: found {}, expected 1 to {}",
                  checkpoint.path(), key, it->dump(), 1 << 20);
    }
    return it->get<int32_t>();
  };
  // The class's defaults.
  SiglipConfig c;
  c.hidden = integer(vision, "hidden_size", 768);
  c.ffn = integer(vision, "intermediate_size", 3072);
  c.layers = integer(vision, "num_hidden_layers", 12);
  c.heads = integer(vision, "num_attention_heads", 12);
  c.image_size = integer(vision, "image_size", 224);
  c.patch_size = integer(vision, "patch_size", 16);
  c.tokens = integer(hf, "mm_tokens_per_image", 256);
  c.eps = vision.value("layer_norm_eps", 1e-6f);
  const std::string activation = vision.value("hidden_act", "gelu_pytorch_tanh");
  if (activation != "gelu_pytorch_tanh" && activation != "gelu") {
    throw_error(ErrorCode::kUnsupported, "{}: config.json: vision_config: hidden_act: found {}, expected {}",
                checkpoint.path(), activation, "gelu_pytorch_tanh or gelu");
  }
  c.activation = activation == "gelu" ? Activation::kGelu : Activation::kGeluTanh;
  if (integer(vision, "num_channels", 3) != 3)
    throw_error(ErrorCode::kUnsupported, "{}: config.json: vision_config: num_channels: expected 3",
                checkpoint.path());
  return c;
}

SiglipConfig read_gguf(const io::Checkpoint& checkpoint) {
  const io::Gguf& file = *checkpoint.gguf;
  const auto integer = [&](const char* key) {
    const int64_t value = file.get_int(std::string("clip.vision.") + key);
    if (value < 1 || value > (1 << 20)) {
      throw_error(ErrorCode::kBadInput, "{}: clip.vision.{}: found {}, expected 1 to {}", checkpoint.path(),
                  key, value, 1 << 20);
    }
    return static_cast<int32_t>(value);
  };
  SiglipConfig c;
  c.hidden = integer("embedding_length");
  c.ffn = integer("feed_forward_length");
  c.layers = integer("block_count");
  c.heads = integer("attention.head_count");
  c.image_size = integer("image_size");
  c.patch_size = integer("patch_size");
  c.eps = static_cast<float>(file.get_real("clip.vision.attention.layer_norm_epsilon", 1e-6));
  // llama.cpp averages squares of four by four patches where the file does not say otherwise.
  const int64_t factor = file.get_int("clip.vision.projector.scale_factor", 4);
  if (factor < 1 || c.image_size / c.patch_size % factor != 0) {
    throw_error(ErrorCode::kBadInput,
                "{}: clip.vision.projector.scale_factor: found {}, expected a divisor of {}",
                checkpoint.path(), factor, c.image_size / c.patch_size);
  }
  const auto side = static_cast<int32_t>(c.patches_per_side() / factor);
  c.tokens = side * side;
  read_gguf_colours(file, c.mean, c.deviation);
  return c;
}

void check_config(const SiglipConfig& c, const std::string& path) {
  const auto side = static_cast<int32_t>(std::lround(std::sqrt(c.tokens)));
  const bool fits = c.image_size >= c.patch_size && c.image_size % c.patch_size == 0 &&
                    c.hidden % c.heads == 0 && side * side == c.tokens && side <= c.patches_per_side() &&
                    c.patches_per_side() % side == 0 && c.image_size <= 4096;
  if (fits) return;
  throw_error(ErrorCode::kUnsupported,
              "{}: vision tower: found images of {} pixels in patches of {}, {} rows of them and {} heads of "
              "{}, expected whole patches, squares and heads",
              path, c.image_size, c.patch_size, c.tokens, c.heads, c.hidden);
}

}  // namespace

// Tensors by their names in either kind of file.
struct SiglipTower::Names {
  const io::Checkpoint& checkpoint;
  std::string tower, projector;  // Hugging Face's prefixes

  explicit Names(const io::Checkpoint& from) : checkpoint(from) {
    if (checkpoint.gguf) return;
    for (const std::string_view prefix : kTowers) {
      if (find(std::string(prefix) + "post_layernorm.weight") != nullptr) tower = prefix;
    }
    for (const std::string_view prefix : kProjectors) {
      if (find(std::string(prefix) + "mm_input_projection_weight") != nullptr) projector = prefix;
    }
  }
  const TensorView* find(const std::string& name) const { return checkpoint.find_tensor(name); }
  std::string name(const std::string& gguf, const std::string& hf) const {
    if (checkpoint.gguf) return gguf;
    return (hf.starts_with("mm_") ? projector : tower) + hf;
  }
  TensorView require(const std::string& gguf, const std::string& hf,
                     const std::vector<int64_t>& shape) const {
    return require_tensor(checkpoint, name(gguf, hf), shape);
  }
};

bool SiglipTower::is_in(const io::Checkpoint& checkpoint) {
  const Names names(checkpoint);
  return !names.tower.empty() && !names.projector.empty();
}

SiglipTower::SiglipTower(const io::Checkpoint& checkpoint, int32_t text_hidden, Backend& backend)
    : config_(checkpoint.gguf ? read_gguf(checkpoint) : read_hf(checkpoint)), backend_(backend) {
  config_.text_hidden = text_hidden;
  check_config(config_, checkpoint.path());
  load(checkpoint);
  const ExecutorSpec spec = vision_spec(config_, config_.patches());
  executor_ = backend_.make_executor(spec);
  workspace_bytes_ = backend_.workspace_bytes(spec) +
                     spec.kv_block_bytes(0) * static_cast<size_t>(spec.kv_groups[0].num_blocks) +
                     sizeof(float) * (patch_weight_.size() + positions_.size() + projection_.size());
  tokens_.assign(static_cast<size_t>(config_.patches()), 0);
  for (int32_t block = 0; block < spec.kv_groups[0].num_blocks; ++block) table_.push_back(block);
}

SiglipTower::~SiglipTower() = default;

void SiglipTower::load(const io::Checkpoint& checkpoint) {
  const Names names(checkpoint);
  const int64_t n = config_.hidden, ffn = config_.ffn;
  const int64_t pixels = int64_t{3} * config_.patch_size * config_.patch_size;
  const auto vector = [&](const std::string& gguf, const std::string& hf, int64_t size) {
    return backend_.load_weight(names.require(gguf, hf, {size}), WeightUse::kVector);
  };
  const auto matrix = [&](const std::string& gguf, const std::string& hf, int64_t rows, int64_t cols) {
    return backend_.load_weight(names.require(gguf, hf, {rows, cols}), WeightUse::kMatrix);
  };
  const std::vector<float> patch =
      floats_of(names.require("v.patch_embd.weight", "embeddings.patch_embedding.weight", {n, pixels}));
  patch_weight_.resize(patch.size());
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t i = 0; i < pixels; ++i)
      patch_weight_[static_cast<size_t>(i * n + row)] = patch[static_cast<size_t>(row * pixels + i)];
  }
  patch_bias_ = floats_of(names.require("v.patch_embd.bias", "embeddings.patch_embedding.bias", {n}));
  positions_ = floats_of(names.require("v.position_embd.weight", "embeddings.position_embedding.weight",
                                       {config_.patches(), n}));
  soft_norm_ = floats_of(names.require("mm.soft_emb_norm.weight", "mm_soft_emb_norm.weight", {n}));
  if (!checkpoint.gguf) {
    for (float& weight : soft_norm_) weight += 1.0f;  // stored less one, but not in GGUF files
  }
  projection_ = floats_of(
      names.require("mm.input_projection.weight", "mm_input_projection_weight", {n, config_.text_hidden}));
  post_norm_ = vector("v.post_ln.weight", "post_layernorm.weight", n);
  post_norm_bias_ = vector("v.post_ln.bias", "post_layernorm.bias", n);
  for (int32_t l = 0; l < config_.layers; ++l) {
    const std::string gguf = fmt::format("v.blk.{}.", l), hf = fmt::format("encoder.layers.{}.", l);
    // Older files have the two names of the feed-forward layer the other way round.
    std::string up = gguf + "ffn_up", down = gguf + "ffn_down";
    const TensorView* first = checkpoint.gguf ? names.find(up + ".weight") : nullptr;
    if (first != nullptr && n != ffn && first->shape[0] == n) std::swap(up, down);
    VisionLayer& layer = layers_.emplace_back();
    const auto linear = [&](const std::string& in_gguf, const std::string& in_hf, int64_t rows, int64_t cols,
                            WeightPtr& weight, WeightPtr& bias) {
      weight = matrix(in_gguf + ".weight", hf + in_hf + ".weight", rows, cols);
      bias = vector(in_gguf + ".bias", hf + in_hf + ".bias", rows);
    };
    layer.norm1 = vector(gguf + "ln1.weight", hf + "layer_norm1.weight", n);
    layer.norm1_bias = vector(gguf + "ln1.bias", hf + "layer_norm1.bias", n);
    layer.norm2 = vector(gguf + "ln2.weight", hf + "layer_norm2.weight", n);
    layer.norm2_bias = vector(gguf + "ln2.bias", hf + "layer_norm2.bias", n);
    linear(gguf + "attn_q", "self_attn.q_proj", n, n, layer.q, layer.q_bias);
    linear(gguf + "attn_k", "self_attn.k_proj", n, n, layer.k, layer.k_bias);
    linear(gguf + "attn_v", "self_attn.v_proj", n, n, layer.v, layer.v_bias);
    linear(gguf + "attn_out", "self_attn.out_proj", n, n, layer.out, layer.out_bias);
    linear(up, "mlp.fc1", ffn, n, layer.up, layer.up_bias);
    linear(down, "mlp.fc2", n, ffn, layer.down, layer.down_bias);
  }
}

std::string SiglipTower::identity() const {
  std::string bytes(sizeof(float) * (projection_.size() + soft_norm_.size()), '\0');
  std::memcpy(bytes.data(), projection_.data(), sizeof(float) * projection_.size());
  std::memcpy(bytes.data() + sizeof(float) * projection_.size(), soft_norm_.data(),
              sizeof(float) * soft_norm_.size());
  return bytes;
}

std::vector<float> SiglipTower::patches_of(const uint8_t* rgb) const {
  const int64_t size = config_.image_size, p = config_.patch_size, side = config_.patches_per_side();
  const int64_t pixels = 3 * p * p;
  std::vector<float> out(static_cast<size_t>(side * side * pixels));
  for (int64_t y = 0; y < side * p; ++y) {
    for (int64_t x = 0; x < side * p; ++x) {
      float* patch = out.data() + (y / p * side + x / p) * pixels;
      for (int64_t c = 0; c < 3; ++c) {
        const auto colour = static_cast<size_t>(c);
        const float value = static_cast<float>(rgb[(y * size + x) * 3 + c]) * (1.0f / 255.0f);
        patch[(c * p + y % p) * p + x % p] = (value - config_.mean[colour]) / config_.deviation[colour];
      }
    }
  }
  return out;
}

std::vector<float> SiglipTower::embedded(const std::vector<float>& patches) const {
  const int64_t n = config_.hidden, pixels = std::ssize(patches) / config_.patches();
  std::vector<float> out = positions_;
  backend_.parallel(config_.patches(), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* y = out.data() + row * n;
      add_scaled(y, 1.0f, patch_bias_.data(), n);
      for (int64_t i = 0; i < pixels; ++i)
        add_scaled(y, patches[static_cast<size_t>(row * pixels + i)], patch_weight_.data() + i * n, n);
    }
  });
  return out;
}

std::vector<float> SiglipTower::averaged(const std::vector<float>& hidden) const {
  const int64_t n = config_.hidden, side = config_.patches_per_side();
  const auto rows = static_cast<int64_t>(std::lround(std::sqrt(config_.tokens)));
  const int64_t by = side / rows;
  std::vector<float> out(static_cast<size_t>(config_.tokens * n));
  const float weight = 1.0f / static_cast<float>(by * by);
  for (int64_t y = 0; y < side; ++y) {
    for (int64_t x = 0; x < side; ++x)
      add_scaled(out.data() + (y / by * rows + x / by) * n, weight, hidden.data() + (y * side + x) * n, n);
  }
  return out;
}

ImageGrid SiglipTower::grid_of(int32_t /*width*/, int32_t /*height*/) const {
  return {.width = config_.image_size, .height = config_.image_size, .tokens = config_.tokens};
}

std::vector<float> SiglipTower::rows_of(const uint8_t* rgb, const ImageGrid& /*grid*/) {
  const int64_t n = config_.hidden;
  SequenceSlice slice{.first_row = 0, .num_tokens = config_.patches()};
  slice.tables[0] = table_.data();
  Batch batch;
  batch.tokens = tokens_;
  batch.sequences = std::span(&slice, 1);
  executor_->begin(batch);
  executor_->write_slot(Slot::kResidual, embedded(patches_of(rgb)));
  for (size_t l = 0; l < layers_.size(); ++l)
    run_vision_layer(*executor_, layers_[l], static_cast<int>(l), config_);
  std::vector<float> hidden(static_cast<size_t>(config_.patches() * n));
  const Norm post{post_norm_.get(), config_.eps, post_norm_bias_.get(), Norm::Kind::kLayer};
  for (int32_t row = 0; row < config_.patches(); ++row)
    executor_->read_hidden(post, row,
                           std::span(hidden).subspan(static_cast<size_t>(row * n), static_cast<size_t>(n)));
  const std::vector<float> pooled = averaged(hidden);
  std::vector<float> out(static_cast<size_t>(config_.tokens) * static_cast<size_t>(config_.text_hidden));
  backend_.parallel(config_.tokens, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* x = pooled.data() + row * n;
      double squares = 0.0;
      for (int64_t i = 0; i < n; ++i) squares += static_cast<double>(x[i]) * x[i];
      const auto scale = static_cast<float>(1.0 / std::sqrt(squares / static_cast<double>(n) + config_.eps));
      float* y = out.data() + row * config_.text_hidden;
      for (int64_t i = 0; i < n; ++i)
        add_scaled(y, x[i] * scale * soft_norm_[static_cast<size_t>(i)],
                   projection_.data() + i * config_.text_hidden, config_.text_hidden);
    }
  });
  return out;
}

}  // namespace millrace
