#include "model/qwen_vision_tower.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/vision_tensors.h"

namespace millrace {
namespace {

using nlohmann::json;

constexpr std::string_view kTower = "model.visual.";  // of a Hugging Face directory
constexpr std::string_view kOlderTower = "visual.";   // as the first files had it
constexpr double kTowerTheta = 10000.0;               // likewise
constexpr double kMaxAspect = 200.0;                  // the published processor's
constexpr int32_t kUsualPatches = 1024;               // an executor's at least: a picture of 512 x 512
constexpr int32_t kSquaresPerStep = 64;               // rows of the mergers' products
constexpr int64_t kProcessorMin = 65536, kProcessorMax = 16777216;  // of the published models' processor
constexpr int64_t kMinGgufTokens = 8, kMaxGgufTokens = 4096;        // llama.cpp's: its files do not tell

int32_t qwen_size(const io::Checkpoint& checkpoint, const std::string& key, int64_t value) {
  if (value < 1 || value > (1 << 20))
    throw_error(ErrorCode::kBadInput, "{}: {}: found {}, expected 1 to {}", checkpoint.path(), key, value,
                1 << 20);
  return static_cast<int32_t>(value);
}

int32_t qwen_hf_size(const io::Checkpoint& checkpoint, const json& from, const char* key, int32_t fallback) {
  const auto it = from.find(key);
  if (it == from.end() || it->is_null()) return fallback;
  if (!it->is_number_integer())
    throw_error(ErrorCode::kBadInput, "{}: config.json: vision_config: {}: found {}, expected a whole number",
                checkpoint.path(), key, it->dump());
  return qwen_size(checkpoint, fmt::format("config.json: vision_config: {}", key), it->get<int64_t>());
}

// What the processor's file says of sizes and colours, where there is one.
void read_qwen_processor(const io::Checkpoint& checkpoint, QwenVisionConfig& c) {
  const json& p = checkpoint.hf->image_processor;
  c.min_pixels = kProcessorMin;
  c.max_pixels = kProcessorMax;
  if (!p.is_object()) return;
  const auto pixels = [&](const json& from, const char* key, int64_t& to) {
    const auto it = from.find(key);
    if (it == from.end() || it->is_null()) return;
    if (!it->is_number_integer() || it->get<int64_t>() < 1)
      throw_error(ErrorCode::kBadInput, "{}: image processor: {}: found {}, expected a number of pixels",
                  checkpoint.path(), key, it->dump());
    to = it->get<int64_t>();
  };
  if (const auto size = p.find("size"); size != p.end() && size->is_object()) {
    pixels(*size, "shortest_edge", c.min_pixels);
    pixels(*size, "longest_edge", c.max_pixels);
  }
  pixels(p, "min_pixels", c.min_pixels);
  pixels(p, "max_pixels", c.max_pixels);
  const auto colours = [&](const char* key, std::array<float, 3>& to) {
    const auto it = p.find(key);
    if (it == p.end() || it->is_null()) return;
    if (!it->is_array() || it->size() != 3 ||
        !std::all_of(it->begin(), it->end(), [](const json& v) { return v.is_number(); }))
      throw_error(ErrorCode::kBadInput, "{}: image processor: {}: found {}, expected three numbers",
                  checkpoint.path(), key, it->dump());
    for (size_t i = 0; i < 3; ++i) to[i] = (*it)[i].get<float>();
  };
  colours("image_mean", c.mean);
  colours("image_std", c.deviation);
}

QwenVisionConfig read_qwen_hf(const io::Checkpoint& checkpoint) {
  const json vision = checkpoint.hf->config.value("vision_config", json::object());
  const auto integer = [&](const char* key, int32_t fallback) {
    return qwen_hf_size(checkpoint, vision, key, fallback);
  };
  // The class's defaults.
  QwenVisionConfig c;
  c.hidden = integer("hidden_size", 1152);
  c.ffn = integer("intermediate_size", 4304);
  c.layers = integer("depth", 27);
  c.heads = integer("num_heads", 16);
  c.patch_size = integer("patch_size", 16);
  c.merge = integer("spatial_merge_size", 2);
  c.frames = integer("temporal_patch_size", 2);
  const int32_t positions = integer("num_position_embeddings", 2304);
  c.side = static_cast<int32_t>(std::lround(std::sqrt(positions)));
  if (c.side * c.side != positions)
    throw_error(ErrorCode::kUnsupported,
                "{}: config.json: vision_config: num_position_embeddings: found {}, expected a square",
                checkpoint.path(), positions);
  const auto deep = vision.find("deepstack_visual_indexes");
  if (deep == vision.end()) {
    c.deep = {8, 16, 24};
  } else if (deep->is_array() &&
             std::all_of(deep->begin(), deep->end(), [](const json& v) { return v.is_number_integer(); })) {
    c.deep = deep->get<std::vector<int32_t>>();
  } else {
    throw_error(ErrorCode::kBadInput,
                "{}: config.json: vision_config: deepstack_visual_indexes: found {}, expected whole numbers",
                checkpoint.path(), deep->dump());
  }
  const std::string activation = vision.value("hidden_act", "gelu_pytorch_tanh");
  if (activation != "gelu_pytorch_tanh" && activation != "gelu")
    throw_error(ErrorCode::kUnsupported, "{}: config.json: vision_config: hidden_act: found {}, expected {}",
                checkpoint.path(), activation, "gelu_pytorch_tanh or gelu");
  c.activation = activation == "gelu" ? Activation::kGelu : Activation::kGeluTanh;
  if (integer("in_channels", 3) != 3)
    throw_error(ErrorCode::kUnsupported, "{}: config.json: vision_config: in_channels: expected 3",
                checkpoint.path());
  read_qwen_processor(checkpoint, c);
  return c;
}

QwenVisionConfig read_qwen_gguf(const io::Checkpoint& checkpoint) {
  const io::Gguf& file = *checkpoint.gguf;
  const auto integer = [&](const char* key) {
    const std::string full = std::string("clip.vision.") + key;
    return qwen_size(checkpoint, full, file.get_int(full));
  };
  QwenVisionConfig c;
  c.hidden = integer("embedding_length");
  c.ffn = integer("feed_forward_length");
  c.layers = integer("block_count");
  c.heads = integer("attention.head_count");
  c.patch_size = integer("patch_size");
  c.merge = qwen_size(checkpoint, "clip.vision.spatial_merge_size",
                      file.get_int("clip.vision.spatial_merge_size", 2));
  if (const TensorView* positions = checkpoint.find_tensor("v.position_embd.weight"))
    c.side = static_cast<int32_t>(std::lround(std::sqrt(positions->shape[0])));
  if (const io::GgufArray* deep = file.get_array("clip.vision.is_deepstack_layers")) {
    for (size_t l = 0; l < deep->integers.size(); ++l) {
      if (deep->integers[l] != 0) c.deep.push_back(static_cast<int32_t>(l));
    }
  }
  const int64_t square = int64_t{c.patch_size} * c.merge * c.patch_size * c.merge;
  c.min_pixels = kMinGgufTokens * square;
  c.max_pixels = kMaxGgufTokens * square;
  read_gguf_colours(file, c.mean, c.deviation);
  return c;
}

void check_qwen(const QwenVisionConfig& c, const std::string& path) {
  const bool fits =
      c.heads > 0 && c.hidden % c.heads == 0 && c.hidden / c.heads % 4 == 0 && c.side > 0 && c.merge <= 16 &&
      c.frames <= 16 && c.patch_size <= 256 && c.min_pixels <= c.max_pixels &&
      std::is_sorted(c.deep.begin(), c.deep.end(), std::less_equal<>()) &&
      std::all_of(c.deep.begin(), c.deep.end(), [&](int32_t l) { return l >= 0 && l < c.layers; });
  if (fits) return;
  throw_error(ErrorCode::kUnsupported,
              "{}: vision tower: found {} heads of {}, patches of {} in squares of {}, pictures of {} to {} "
              "pixels, rows of layers [{}] of {}, expected heads of whole fours and layers in order",
              path, c.heads, c.hidden, c.patch_size, c.merge, c.min_pixels, c.max_pixels,
              fmt::join(c.deep, ", "), c.layers);
}

float exact_gelu(float x) {
  return static_cast<float>(0.5 * x * (1.0 + std::erf(static_cast<double>(x) * 0.70710678118654752440)));
}

}  // namespace

// A square's patches side by side -> norm, of each or of all -> two products with GELU between them.
struct QwenVisionTower::Merger {
  std::vector<float> norm, norm_bias;     // [hidden], of each patch; or
  WeightPtr whole_norm, whole_norm_bias;  // [merged], of all
  WeightPtr first, first_bias, second, second_bias;
};

// Tensors by their names in either kind of file.
struct QwenVisionTower::Names {
  const io::Checkpoint& checkpoint;
  std::string tower;

  explicit Names(const io::Checkpoint& from) : checkpoint(from) {
    if (checkpoint.gguf) return;
    for (const std::string_view prefix : {kTower, kOlderTower}) {
      if (checkpoint.find_tensor(std::string(prefix) + "merger.norm.weight") != nullptr) tower = prefix;
    }
  }
  TensorView require(const std::string& gguf, const std::string& hf,
                     const std::vector<int64_t>& shape) const {
    return require_tensor(checkpoint, checkpoint.gguf ? gguf : tower + hf, shape);
  }
};

bool QwenVisionTower::is_in(const io::Checkpoint& checkpoint) { return !Names(checkpoint).tower.empty(); }

QwenVisionTower::QwenVisionTower(const io::Checkpoint& checkpoint, int32_t text_hidden, Backend& backend)
    : config_(checkpoint.gguf ? read_qwen_gguf(checkpoint) : read_qwen_hf(checkpoint)), backend_(backend) {
  config_.text_hidden = text_hidden;
  check_qwen(config_, checkpoint.path());
  load(checkpoint);
  // The first half of a head's pairs is turned by a patch's row, the other by its column.
  const int32_t quarter = config_.hidden / config_.heads / 4;
  for (int32_t i = 0; i < 2 * quarter; ++i) {
    angles_.push_back(static_cast<float>(std::pow(kTowerTheta, -static_cast<double>(i % quarter) / quarter)));
    axes_.push_back(i < quarter ? 1 : 2);
  }
  // Products of squares: a row of logits is what becomes of one.
  ExecutorSpec spec;
  spec.max_tokens = spec.max_logit_rows = spec.max_context = kSquaresPerStep;
  spec.hidden = config_.merged();
  spec.heads = spec.kv_heads = 1;
  spec.head_dim = 32;
  spec.kv_type = DType::kF32;
  spec.kv_groups = {{.window = 0, .num_layers = 1, .num_blocks = kSquaresPerStep / kBlockTokens}};
  spec.layers = {{0, 0}};
  fixed_bytes_ = sizeof(float) * (patch_weight_.size() + positions_.size());
  for (const bool first : {true, false}) {
    spec.vocab = first ? config_.merged() : text_hidden;
    (first ? first_product_ : second_product_) = backend_.make_executor(spec);
    fixed_bytes_ += backend_.workspace_bytes(spec);
  }
  make_room(kUsualPatches);
}

QwenVisionTower::~QwenVisionTower() = default;

void QwenVisionTower::make_room(int32_t patches) {
  if (patches <= room_) return;
  const int32_t whole = (patches + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
  const ExecutorSpec spec = vision_spec(config_, whole);
  executor_.reset();  // before the next one takes as much again
  room_ = 0;
  executor_ = backend_.make_executor(spec);
  room_ = spec.max_tokens;
  workspace_bytes_ = fixed_bytes_ + backend_.workspace_bytes(spec) +
                     spec.kv_block_bytes(0) * static_cast<size_t>(spec.kv_groups[0].num_blocks);
  tokens_.assign(static_cast<size_t>(std::max(room_, kSquaresPerStep)), 0);
  for (auto block = static_cast<int32_t>(table_.size()); block < room_ / kBlockTokens; ++block)
    table_.push_back(block);
}

// Weights by their names in both formats, to the backend that computes with them.
struct QwenVisionTower::Loader {
  Names names;
  Backend& backend;

  WeightPtr take(const TensorView& view, WeightUse use) const { return backend.load_weight(view, use); }
  void linear(const std::string& gguf, const std::string& hf, int64_t rows, int64_t cols, WeightPtr& weight,
              WeightPtr& bias) const {
    weight = take(names.require(gguf + ".weight", hf + ".weight", {rows, cols}), WeightUse::kMatrix);
    bias = take(names.require(gguf + ".bias", hf + ".bias", {rows}), WeightUse::kVector);
  }
  void norm(const std::string& gguf, const std::string& hf, int64_t size, WeightPtr& weight,
            WeightPtr& bias) const {
    weight = take(names.require(gguf + ".weight", hf + ".weight", {size}), WeightUse::kVector);
    bias = take(names.require(gguf + ".bias", hf + ".bias", {size}), WeightUse::kVector);
  }
};

void QwenVisionTower::load(const io::Checkpoint& checkpoint) {
  const Loader loader{Names(checkpoint), backend_};
  load_patches(loader.names, checkpoint.gguf.has_value());
  for (int32_t l = 0; l < config_.layers; ++l) load_layer(loader, l);
  load_mergers(loader);
}

// A picture is every frame: the frames' weights add up. [hidden, 3, frames, patch, patch], or, in GGUF files,
// a tensor [hidden, 3, patch, patch] for each of two frames.
void QwenVisionTower::load_patches(const Names& names, bool is_gguf) {
  const int64_t n = config_.hidden, pixels = int64_t{config_.patch_size} * config_.patch_size;
  const int64_t in_one = is_gguf ? 1 : config_.frames;
  patch_weight_.assign(static_cast<size_t>(3 * pixels * n), 0.0f);
  for (int64_t tensor = 0; tensor < (is_gguf ? 2 : 1); ++tensor) {
    const std::string gguf = tensor == 0 ? "v.patch_embd.weight" : "v.patch_embd.weight.1";
    const std::vector<float> patch =
        floats_of(names.require(gguf, "patch_embed.proj.weight", {n, 3 * in_one * pixels}));
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t i = 0; i < 3 * in_one * pixels; ++i) {
        const int64_t at = i / (in_one * pixels) * pixels + i % pixels;
        patch_weight_[static_cast<size_t>(at * n + row)] +=
            patch[static_cast<size_t>(row * 3 * in_one * pixels + i)];
      }
    }
  }
  patch_bias_ = floats_of(names.require("v.patch_embd.bias", "patch_embed.proj.bias", {n}));
  positions_ = floats_of(
      names.require("v.position_embd.weight", "pos_embed.weight", {int64_t{config_.side} * config_.side, n}));
}

void QwenVisionTower::load_layer(const Loader& from, int32_t l) {
  const int64_t n = config_.hidden, ffn = config_.ffn;
  const std::string gguf = fmt::format("v.blk.{}.", l), hf = fmt::format("blocks.{}.", l);
  VisionLayer& layer = layers_.emplace_back();
  from.norm(gguf + "ln1", hf + "norm1", n, layer.norm1, layer.norm1_bias);
  from.norm(gguf + "ln2", hf + "norm2", n, layer.norm2, layer.norm2_bias);
  const TensorView qkv = from.names.require(gguf + "attn_qkv.weight", hf + "attn.qkv.weight", {3 * n, n});
  const TensorView bias = from.names.require(gguf + "attn_qkv.bias", hf + "attn.qkv.bias", {3 * n});
  layer.q = from.take(part_of(qkv, 0, n), WeightUse::kMatrix);
  layer.k = from.take(part_of(qkv, n, n), WeightUse::kMatrix);
  layer.v = from.take(part_of(qkv, 2 * n, n), WeightUse::kMatrix);
  layer.q_bias = from.take(part_of(bias, 0, n), WeightUse::kVector);
  layer.k_bias = from.take(part_of(bias, n, n), WeightUse::kVector);
  layer.v_bias = from.take(part_of(bias, 2 * n, n), WeightUse::kVector);
  from.linear(gguf + "attn_out", hf + "attn.proj", n, n, layer.out, layer.out_bias);
  from.linear(gguf + "ffn_up", hf + "mlp.linear_fc1", ffn, n, layer.up, layer.up_bias);
  from.linear(gguf + "ffn_down", hf + "mlp.linear_fc2", n, ffn, layer.down, layer.down_bias);
}

// What the last product adds and its first rows tell towers apart (identity()).
void QwenVisionTower::load_mergers(const Loader& from) {
  const int64_t n = config_.hidden, merged = config_.merged();
  const Names& names = from.names;
  merger_ = std::make_unique<Merger>();
  merger_->norm = floats_of(names.require("v.post_ln.weight", "merger.norm.weight", {n}));
  merger_->norm_bias = floats_of(names.require("v.post_ln.bias", "merger.norm.bias", {n}));
  from.linear("mm.0", "merger.linear_fc1", merged, merged, merger_->first, merger_->first_bias);
  from.linear("mm.2", "merger.linear_fc2", config_.text_hidden, merged, merger_->second,
              merger_->second_bias);
  for (size_t i = 0; i < config_.deep.size(); ++i) {
    const std::string gguf = fmt::format("v.deepstack.{}.", config_.deep[i]);
    const std::string hf = fmt::format("deepstack_merger_list.{}.", i);
    Merger& merger = *deep_mergers_.emplace_back(std::make_unique<Merger>());
    from.norm(gguf + "norm", hf + "norm", merged, merger.whole_norm, merger.whole_norm_bias);
    from.linear(gguf + "fc1", hf + "linear_fc1", merged, merged, merger.first, merger.first_bias);
    from.linear(gguf + "fc2", hf + "linear_fc2", config_.text_hidden, merged, merger.second,
                merger.second_bias);
  }
  identity_ = floats_of(names.require("mm.2.bias", "merger.linear_fc2.bias", {config_.text_hidden}));
  for (const float value : merger_->norm) identity_.push_back(value);
  const TensorView last =
      names.require("mm.2.weight", "merger.linear_fc2.weight", {config_.text_hidden, merged});
  const std::vector<float> first_rows = floats_of(part_of(last, 0, std::min(16, config_.text_hidden)));
  identity_.insert(identity_.end(), first_rows.begin(), first_rows.end());
}

std::string QwenVisionTower::identity() const {
  std::string bytes(sizeof(float) * identity_.size(), '\0');
  std::memcpy(bytes.data(), identity_.data(), bytes.size());
  // What a file's picture is resized to is a part of what becomes of it.
  return bytes + fmt::format("{} {}", config_.min_pixels, config_.max_pixels);
}

// Whole squares of patches, about as many pixels as before, or what is allowed: the published processor's
// rule, with Python's round (to even).
ImageGrid QwenVisionTower::grid_of(int32_t width, int32_t height) const {
  const double longer = std::max(width, height), shorter = std::min(width, height);
  if (longer / shorter > kMaxAspect) {
    throw_error(ErrorCode::kBadInput,
                "image: found {} x {} pixels, expected one side at most {} times the other", width, height,
                kMaxAspect);
  }
  const int64_t square = int64_t{config_.patch_size} * config_.merge;
  const auto by = static_cast<double>(square);
  const double pixels = static_cast<double>(width) * height;
  auto rows = static_cast<int64_t>(std::nearbyint(height / by)) * square;
  auto columns = static_cast<int64_t>(std::nearbyint(width / by)) * square;
  if (rows * columns > config_.max_pixels) {
    const double beta = std::sqrt(pixels / static_cast<double>(config_.max_pixels));
    rows = std::max(square, static_cast<int64_t>(std::floor(height / beta / by)) * square);
    columns = std::max(square, static_cast<int64_t>(std::floor(width / beta / by)) * square);
  } else if (rows * columns < config_.min_pixels) {
    const double beta = std::sqrt(static_cast<double>(config_.min_pixels) / pixels);
    rows = static_cast<int64_t>(std::ceil(height * beta / by)) * square;
    columns = static_cast<int64_t>(std::ceil(width * beta / by)) * square;
  }
  if (rows < square || columns < square || rows * columns > (int64_t{1} << 28)) {
    throw_error(ErrorCode::kBadInput, "image: found {} x {} pixels, resized to {} x {}, expected {} at least",
                width, height, columns, rows, square);
  }
  const auto down = static_cast<int32_t>(rows / square), across = static_cast<int32_t>(columns / square);
  return {.width = static_cast<int32_t>(columns),
          .height = static_cast<int32_t>(rows),
          .cubic = true,
          .tokens = down * across,
          .rows = down,
          .columns = across};
}

std::vector<int32_t> QwenVisionTower::places_of(const ImageGrid& grid) const {
  std::vector<int32_t> places;
  for (int32_t row = 0; row < grid.rows; ++row) {
    for (int32_t column = 0; column < grid.columns; ++column) {
      for (int32_t i = 0; i < config_.merge * config_.merge; ++i) {
        places.insert(places.end(), {0, row * config_.merge + i / config_.merge,
                                     column * config_.merge + i % config_.merge});
      }
    }
  }
  return places;
}

// Of the four learned positions around where (row, column) falls in their square, each by its nearness.
void QwenVisionTower::add_position(int32_t row, int32_t column, int32_t rows, int32_t columns,
                                   float* to) const {
  const int32_t last = config_.side - 1;
  const auto falls = [&](int32_t at, int32_t count) {
    return static_cast<float>(at) * static_cast<float>(last) / static_cast<float>(std::max(count - 1, 1));
  };
  const float y = falls(row, rows), x = falls(column, columns);
  const float top = std::floor(y), left = std::floor(x);
  for (int i = 0; i < 4; ++i) {
    const int32_t down = i / 2, across = i % 2;
    const float by = (down == 1 ? y - top : 1.0f - (y - top)) * (across == 1 ? x - left : 1.0f - (x - left));
    const int64_t at = int64_t{std::min(static_cast<int32_t>(top) + down, last)} * config_.side +
                       std::min(static_cast<int32_t>(left) + across, last);
    add_scaled(to, by, positions_.data() + at * config_.hidden, config_.hidden);
  }
}

std::vector<float> QwenVisionTower::embedded(const uint8_t* rgb, const ImageGrid& grid,
                                             const std::vector<int32_t>& places) const {
  const int64_t n = config_.hidden, p = config_.patch_size;
  const int64_t patches = std::ssize(places) / 3;
  std::vector<float> out(static_cast<size_t>(patches * n));
  backend_.parallel(patches, [&](int64_t begin, int64_t end) {
    for (int64_t patch = begin; patch < end; ++patch) {
      float* y = out.data() + patch * n;
      const int32_t row = places[static_cast<size_t>(3 * patch + 1)];
      const int32_t column = places[static_cast<size_t>(3 * patch + 2)];
      add_scaled(y, 1.0f, patch_bias_.data(), n);
      for (int64_t i = 0; i < 3 * p * p; ++i) {
        const auto colour = static_cast<size_t>(i / (p * p));
        const int64_t v = row * p + i / p % p, u = column * p + i % p;
        const float value = static_cast<float>(rgb[(v * grid.width + u) * 3 + i / (p * p)]) * (1.0f / 255.0f);
        add_scaled(y, (value - config_.mean[colour]) / config_.deviation[colour],
                   patch_weight_.data() + i * n, n);
      }
      add_position(row, column, grid.rows * config_.merge, grid.columns * config_.merge, y);
    }
  });
  return out;
}

void QwenVisionTower::merge(const Merger& merger, const std::vector<float>& hidden, int64_t tokens, float* to,
                            int64_t stride) {
  const int64_t n = config_.hidden, merged = config_.merged(), out = config_.text_hidden;
  std::vector<float> x = hidden;
  for (int64_t at = 0; !merger.norm.empty() && at < std::ssize(x); at += n) {  // LayerNorm of a patch
    double sum = 0.0, squares = 0.0;
    float* row = x.data() + at;
    for (int64_t i = 0; i < n; ++i) sum += row[i];
    const double mean = sum / static_cast<double>(n);
    for (int64_t i = 0; i < n; ++i) squares += (row[i] - mean) * (row[i] - mean);
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(n) + config_.eps);
    for (int64_t i = 0; i < n; ++i) {
      const auto k = static_cast<size_t>(i);
      row[i] = static_cast<float>((row[i] - mean) * scale * merger.norm[k] + merger.norm_bias[k]);
    }
  }
  std::vector<int32_t> rows;
  for (int64_t at = 0; at < tokens; at += kSquaresPerStep) {
    const auto count = static_cast<int32_t>(std::min<int64_t>(kSquaresPerStep, tokens - at));
    rows.clear();
    for (int32_t i = 0; i < count; ++i) rows.push_back(i);
    SequenceSlice slice{.first_row = 0, .num_tokens = count};
    slice.tables[0] = table_.data();
    Batch batch;
    batch.tokens = std::span(tokens_).first(static_cast<size_t>(count));
    batch.sequences = std::span(&slice, 1);
    batch.logit_rows = rows;
    const auto product = [&](Executor& executor, std::span<const float> in, const Logits& op) {
      executor.begin(batch);
      executor.write_slot(Slot::kResidual, in);
      executor.norm_logits(op);
      const std::span<const float> made = executor.logits();
      return std::vector<float>(made.begin(), made.end());
    };
    Logits first, second;
    first.output = {merger.first.get(), merger.first_bias.get()};
    if (merger.whole_norm)
      first.norm = {merger.whole_norm.get(), config_.eps, merger.whole_norm_bias.get(), Norm::Kind::kLayer};
    second.output = {merger.second.get(), merger.second_bias.get()};
    std::vector<float> inner = product(
        *first_product_,
        std::span(x).subspan(static_cast<size_t>(at * merged), static_cast<size_t>(count * merged)), first);
    for (float& value : inner) value = exact_gelu(value);
    const std::vector<float> made = product(*second_product_, inner, second);
    for (int64_t i = 0; i < count; ++i) std::copy_n(made.data() + i * out, out, to + (at + i) * stride);
  }
}

std::vector<float> QwenVisionTower::rows_of(const uint8_t* rgb, const ImageGrid& grid) {
  const std::vector<int32_t> places = places_of(grid);
  const auto patches = static_cast<int32_t>(places.size() / 3);
  make_room(patches);
  SequenceSlice slice{.first_row = 0, .num_tokens = patches};
  slice.tables[0] = table_.data();
  Batch batch;
  batch.tokens = std::span(tokens_).first(static_cast<size_t>(patches));
  batch.sequences = std::span(&slice, 1);
  batch.rope_positions = places;
  executor_->begin(batch);
  executor_->write_slot(Slot::kResidual, embedded(rgb, grid, places));
  const int64_t stride = int64_t{1 + further()} * config_.text_hidden;
  std::vector<float> out(static_cast<size_t>(grid.tokens * stride));
  size_t deep = 0;
  const auto hidden = [&] {
    std::vector<float> values = executor_->read_slot(Slot::kResidual);
    values.resize(static_cast<size_t>(int64_t{patches} * config_.hidden));
    return values;
  };
  for (size_t l = 0; l < layers_.size(); ++l) {
    run_vision_layer(*executor_, layers_[l], static_cast<int>(l), config_, angles_, axes_);
    if (deep >= config_.deep.size() || config_.deep[deep] != static_cast<int32_t>(l)) continue;
    ++deep;
    merge(*deep_mergers_[deep - 1], hidden(), grid.tokens,
          out.data() + static_cast<int64_t>(deep) * config_.text_hidden, stride);
  }
  merge(*merger_, hidden(), grid.tokens, out.data(), stride);
  return out;
}

}  // namespace millrace
