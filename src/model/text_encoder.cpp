#include "model/text_encoder.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/decoder_layer.h"

namespace millrace {
namespace {

using Pooling = ModelConfig::Pooling;
using nlohmann::json;

// llama.cpp's numbers.
constexpr int32_t kGgufMean = 1, kGgufFirst = 2, kGgufLast = 3, kGgufRank = 4;

json read_beside(const std::string& path) {
  std::ifstream file(path);
  if (!file) return nullptr;
  json out = json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (out.is_discarded()) throw_error(ErrorCode::kBadInput, "{}: found no JSON, expected it", path);
  return out;
}

bool is_true(const json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_boolean() && it->get<bool>();
}

// {"pooling_mode_mean_tokens": true, ...}, or newer {"pooling_mode": "mean"}.
Pooling pooling_of(const json& config, const std::string& path) {
  std::string modes;
  Pooling found = Pooling::kMean;
  const auto mode = [&](bool chosen, const char* name, Pooling pooling) {
    if (!chosen) return;
    modes += (modes.empty() ? "" : ", ") + std::string(name);
    found = pooling;
  };
  const json named = config.value("pooling_mode", json());
  mode(is_true(config, "pooling_mode_mean_tokens") || named == "mean", "mean", Pooling::kMean);
  mode(is_true(config, "pooling_mode_cls_token") || named == "cls", "cls", Pooling::kFirst);
  mode(is_true(config, "pooling_mode_lasttoken") || named == "lasttoken", "lasttoken", Pooling::kLast);
  const char* others[] = {"pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens",
                          "pooling_mode_weightedmean_tokens"};
  for (const char* other : others) mode(is_true(config, other), other, Pooling::kMean);
  if (modes != "mean" && modes != "cls" && modes != "lasttoken") {
    throw_error(ErrorCode::kUnsupported, "{}: found pooling {}, expected one of mean, cls and lasttoken",
                path, modes.empty() ? "by nothing known" : modes);
  }
  return found;
}

void read_modules(const std::string& folder, ModelConfig& config) {
  const std::string path = folder + "/modules.json";
  const json modules = read_beside(path);
  if (modules.is_null()) return;
  if (!modules.is_array()) throw_error(ErrorCode::kBadInput, "{}: expected a list of modules", path);
  for (const json& module : modules) {
    const std::string type = module.is_object() ? module.value("type", "") : "";
    const std::string kind = type.substr(type.rfind('.') + 1);
    if (kind == "Pooling") {
      const std::string named = folder + "/" + module.value("path", "") + "/config.json";
      const json pooling = read_beside(named);
      if (!pooling.is_object()) throw_error(ErrorCode::kBadInput, "{}: expected the pooling's modes", named);
      config.pooling = pooling_of(pooling, named);
    } else if (kind != "Transformer" && kind != "Normalize") {  // vectors are made unit vectors anyway
      throw_error(ErrorCode::kUnsupported,
                  "{}: found module {}, expected Transformer, Pooling and Normalize alone", path, type);
    }
  }
}

// How sentence-transformers says what its cross-encoder makes of a score: the name of a class of torch.
bool sigmoid_of(const json& config, const std::string& path) {
  std::string name = config.value("sbert_ce_default_activation_function", "");
  const auto own = config.find("sentence_transformers");
  if (own != config.end() && own->is_object()) name = own->value("activation_fn", name);
  const std::string kind = name.substr(name.rfind('.') + 1);
  if (kind.empty() || kind == "Sigmoid") return true;
  if (kind == "Identity") return false;
  throw_error(ErrorCode::kUnsupported, "{}: config.json: activation of scores: found {}, expected {}", path,
              name, "Sigmoid or Identity");
}

void read_head(const ConfigReader& reader, ModelConfig& config) {
  const io::Checkpoint& checkpoint = reader.checkpoint();
  if (!reader.is_gguf()) {
    const json classes = reader.hf().value("architectures", json::array());
    const bool classifies = std::any_of(classes.begin(), classes.end(), [](const json& name) {
      return name.is_string() && name.get<std::string>().ends_with("ForSequenceClassification");
    });
    if (!classifies) return;
  }
  const TensorView* output =
      checkpoint.find_tensor(reader.is_gguf() ? "cls.output.weight" : "classifier.weight");
  if (output == nullptr || output->rank != 2 || output->shape[0] > 1024) return;
  config.head.labels = static_cast<int32_t>(output->shape[0]);
  config.head.sigmoid =
      config.head.labels == 1 && (reader.is_gguf() ? reader.flag_or("classifier.sigmoid", "", true)
                                                   : sigmoid_of(reader.hf(), checkpoint.path()));
}

}  // namespace

void read_encoder(const ConfigReader& reader, ModelConfig& config) {
  config.encoder = true;
  read_head(reader, config);
  if (!reader.is_gguf()) {
    if (config.head.labels > 0) config.pooling = Pooling::kFirst;
    return read_modules(reader.checkpoint().path(), config);
  }
  const int32_t type = reader.integer_or("pooling_type", "", 0, 16, kGgufMean);
  if (type > kGgufRank)
    throw_error(ErrorCode::kUnsupported, "{}: pooling_type: found {}, expected 1 (mean), 2 (cls) or 3 (last)",
                reader.checkpoint().path(), type);
  config.pooling = type == kGgufFirst || type == kGgufRank ? Pooling::kFirst
                   : type == kGgufLast                     ? Pooling::kLast
                                                           : Pooling::kMean;
}

void write_encoder(GgufKeys& keys) {
  keys.flag("attention.causal", false);
  const Pooling pooling = keys.config().pooling;
  if (keys.config().head.labels > 0) {
    if (pooling != Pooling::kFirst)
      throw_error(ErrorCode::kUnsupported, "classifier_pooling: found mean, expected cls: GGUF has no other");
    if (!keys.config().head.sigmoid) keys.flag("classifier.sigmoid", false);
    keys.size("pooling_type", kGgufRank);
    return;
  }
  keys.size("pooling_type", pooling == Pooling::kFirst  ? kGgufFirst
                            : pooling == Pooling::kLast ? kGgufLast
                                                        : kGgufMean);
}

Attend attend_both_ways(const LayerWeights& w, const ModelConfig& config, int layer) {
  Attend attend = attend_of(w, config, layer);
  attend.bidirectional = true;
  return attend;
}

}  // namespace millrace
