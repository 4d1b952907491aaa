#include "model/adapter_config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <regex>

#include "base/error.h"
#include "io/json_file.h"
#include "io/printable.h"

namespace millrace {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxPattern = 512;  // characters: std::regex recurses over what it matches

bool is_set(const Json& value) {
  if (value.is_null() || value == false) return false;
  return !(value.is_array() || value.is_object() || value.is_string()) || !value.empty();
}

[[noreturn]] void refuse(const std::string& path, const std::string& key, const std::string& found,
                         const std::string& expected) {
  throw_error(ErrorCode::kUnsupported, "{}: {}: found {}, expected {}", path, key, io::printable(found),
              expected);
}

void check_kind(const std::string& path, const Json& config) {
  const auto text_of = [&](const char* key, const char* otherwise) -> std::string {
    const auto found = config.find(key);
    if (found == config.end() || found->is_null()) return otherwise;
    return found->is_string() ? found->get<std::string>() : found->dump();
  };
  if (const std::string type = text_of("peft_type", "nothing"); type != "LORA")
    refuse(path, "peft_type", type, "LORA");
  if (const std::string bias = text_of("bias", "none"); bias != "none")
    refuse(path, "bias", bias, "none: the model's own biases stay");
  // Others change the model's own weights when they are set up, or are not what these numbers are added to.
  const std::string init = text_of("init_lora_weights", "true");
  constexpr const char* kPlain[] = {"true", "false", "gaussian", "eva", "orthogonal"};
  if (std::none_of(std::begin(kPlain), std::end(kPlain), [&](const char* name) { return init == name; }))
    refuse(path, "init_lora_weights", init, "true, false, gaussian, eva or orthogonal");
  // What any value but none makes something else than y += scale * B (A x) of projections.
  for (const char* key : {"modules_to_save", "use_dora", "lora_bias", "trainable_token_indices",
                          "layer_replication", "alora_invocation_tokens", "arrow_config", "use_qalora",
                          "use_bdlora", "megatron_config", "velora_config", "monteclora_config"}) {
    const auto found = config.find(key);
    if (found != config.end() && is_set(*found))
      refuse(path, key, found->dump(), "none: it is not supported");
  }
}

double number_of(const std::string& path, const std::string& key, const Json& value, double least) {
  if (value.is_number() && value.get<double>() >= least && value.get<double>() <= 1e9)
    return value.get<double>();
  throw_error(ErrorCode::kBadInput, "{}: {}: found {}, expected a number from {}", path, key,
              io::printable(value.dump()), least);
}

}  // namespace

AdapterConfig read_adapter_config(const std::string& directory) {
  AdapterConfig config;
  config.path_ = (std::filesystem::path(directory) / "adapter_config.json").string();
  const Json json = io::read_json_object(config.path_);
  check_kind(config.path_, json);
  if (const auto r = json.find("r"); r != json.end()) config.rank_ = number_of(config.path_, "r", *r, 1);
  if (const auto alpha = json.find("lora_alpha"); alpha != json.end())
    config.alpha_ = number_of(config.path_, "lora_alpha", *alpha, -1e9);
  if (const auto root = json.find("use_rslora"); root != json.end() && !root->is_null()) {
    if (!root->is_boolean()) refuse(config.path_, "use_rslora", root->dump(), "true or false");
    config.root_scaled_ = root->get<bool>();
  }
  if (const auto named = json.find("target_parameters"); named != json.end() && !named->is_null()) {
    const bool names = named->is_array() && std::all_of(named->begin(), named->end(),
                                                        [](const Json& name) { return name.is_string(); });
    if (!names) refuse(config.path_, "target_parameters", named->dump(), "a list of names");
    config.parameters_ = named->get<std::vector<std::string>>();
  }
  const auto read_patterns = [&](const char* key, double least, std::vector<AdapterConfig::Pattern>& to) {
    const auto found = json.find(key);
    if (found == json.end() || found->is_null()) return;
    if (!found->is_object()) refuse(config.path_, key, found->dump(), "an object");
    for (const auto& [pattern, value] : found->items()) {
      if (pattern.size() > kMaxPattern)
        refuse(config.path_, key, pattern.substr(0, 40), fmt::format("up to {} characters", kMaxPattern));
      to.push_back({pattern, number_of(config.path_, fmt::format("{} of {}", key, io::printable(pattern)),
                                       value, least)});
    }
  };
  read_patterns("rank_pattern", 1, config.rank_pattern_);
  read_patterns("alpha_pattern", -1e9, config.alpha_pattern_);
  return config;
}

// PEFT takes the first pattern that matches, in the file's order; we do not know that order, and refuse where
// it matters.
double AdapterConfig::value_of(const std::vector<Pattern>& patterns, const char* key,
                               const std::string& module, double otherwise) const {
  const Pattern* found = nullptr;
  for (const Pattern& pattern : patterns) {
    bool matches = false;
    try {
      matches = std::regex_match(module, std::regex(fmt::format("(.*\\.)?({})", pattern.pattern)));
    } catch (const std::regex_error&) {
      refuse(path_, key, pattern.pattern, "a regular expression that is understood here too");
    }
    if (!matches) continue;
    if (found != nullptr && found->value != pattern.value)
      refuse(path_, key, found->pattern + " and " + pattern.pattern,
             fmt::format("one pattern for {}", module));
    found = &pattern;
  }
  return found == nullptr ? otherwise : found->value;
}

bool AdapterConfig::names_parameter(std::string_view parameter) const {
  return std::any_of(parameters_.begin(), parameters_.end(), [&](const std::string& name) {
    if (!parameter.ends_with(name)) return false;
    return parameter.size() == name.size() || parameter[parameter.size() - name.size() - 1] == '.';
  });
}

double AdapterConfig::scale_of(const std::string& module, int64_t rank) const {
  const double wanted = value_of(rank_pattern_, "rank_pattern", module, rank_);
  if (wanted != static_cast<double>(rank)) {
    throw_error(ErrorCode::kBadInput, "{}: module {}: found a rank of {}, expected {}", path_,
                io::printable(module), rank, wanted);
  }
  const double alpha = value_of(alpha_pattern_, "alpha_pattern", module, alpha_);
  return alpha / (root_scaled_ ? std::sqrt(static_cast<double>(rank)) : static_cast<double>(rank));
}

}  // namespace millrace
