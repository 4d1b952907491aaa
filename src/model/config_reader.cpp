#include "model/config_reader.h"

#include <cmath>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/architecture.h"

namespace millrace {

namespace {

nlohmann::json with_defaults(const nlohmann::json& config, const Architecture& architecture) {
  nlohmann::json out = nlohmann::json::parse(architecture.hf_defaults(config.value("model_type", "")));
  for (const auto& [key, value] : config.items()) {
    // Where the class has parameters of its own, no parameters mean those.
    if (key == "rope_parameters" && value.is_null()) continue;
    out[key] = value;
  }
  for (const auto& [found, meant] : architecture.hf_aliases()) {
    const auto it = config.find(found);
    if (it != config.end()) out[std::string(meant)] = *it;
  }
  architecture.settle_hf(out);
  return out;
}

}  // namespace

ConfigReader::ConfigReader(const io::Checkpoint& checkpoint, const Architecture& architecture)
    : checkpoint_(checkpoint), prefix_(architecture.name()) {
  if (checkpoint.hf) {
    hf_ = std::make_shared<const nlohmann::json>(with_defaults(checkpoint.hf->config, architecture));
  }
}

void ConfigReader::fail(std::string_view field, const std::string& found, const std::string& expected) const {
  throw_error(ErrorCode::kBadInput, "{}: {}: found {}, expected {}", checkpoint_.path(), field, found,
              expected);
}

std::string ConfigReader::label(std::string_view gguf, std::string_view hf) const {
  return is_gguf() ? prefix_ + "." + std::string(gguf) : "config.json: " + std::string(hf);
}

std::optional<double> ConfigReader::find(std::string_view gguf, std::string_view hf) const {
  if (is_gguf()) {
    const std::string key = prefix_ + "." + std::string(gguf);
    if (gguf.empty() || !checkpoint_.gguf->has(key)) return std::nullopt;
    return checkpoint_.gguf->get_real(key);
  }
  if (hf.empty()) return std::nullopt;
  const auto it = this->hf().find(hf);
  if (it == this->hf().end() || it->is_null()) return std::nullopt;
  if (!it->is_number()) fail(label(gguf, hf), it->type_name(), "a number");
  return it->get<double>();
}

int32_t ConfigReader::integer(std::string_view gguf, std::string_view hf, int64_t low, int64_t high) const {
  const std::optional<double> value = find(gguf, hf);
  if (!value) fail(label(gguf, hf), "nothing", fmt::format("an integer from {} to {}", low, high));
  if (!(*value >= static_cast<double>(low) && *value <= static_cast<double>(high)) ||
      *value != std::floor(*value)) {
    fail(label(gguf, hf), fmt::format("{}", *value), fmt::format("an integer from {} to {}", low, high));
  }
  return static_cast<int32_t>(*value);
}

int32_t ConfigReader::integer_or(std::string_view gguf, std::string_view hf, int64_t low, int64_t high,
                                 int64_t fallback) const {
  return find(gguf, hf) ? integer(gguf, hf, low, high) : static_cast<int32_t>(fallback);
}

double ConfigReader::real_or(std::string_view gguf, std::string_view hf, double fallback) const {
  const double value = find(gguf, hf).value_or(fallback);
  if (!std::isfinite(value)) fail(label(gguf, hf), fmt::format("{}", value), "a finite number");
  return value;
}

bool ConfigReader::flag_or(std::string_view gguf, std::string_view hf, bool fallback) const {
  if (is_gguf()) {
    return gguf.empty() ? fallback : checkpoint_.gguf->get_bool(prefix_ + "." + std::string(gguf), fallback);
  }
  const auto it = this->hf().find(hf);
  if (it == this->hf().end() || it->is_null()) return fallback;
  if (!it->is_boolean()) fail(label(gguf, hf), it->type_name(), "true or false");
  return it->get<bool>();
}

double ConfigReader::hf_real_or(const nlohmann::json& object, std::string_view field, double fallback) const {
  const auto it = object.find(field);
  if (it == object.end() || it->is_null()) return fallback;
  if (!it->is_number()) fail(fmt::format("config.json: {}", field), it->type_name(), "a number");
  return it->get<double>();
}

double ConfigReader::hf_real(const nlohmann::json& object, std::string_view field) const {
  const double value = hf_real_or(object, field, std::nan(""));
  if (!std::isfinite(value)) fail(fmt::format("config.json: {}", field), "nothing", "a number");
  return value;
}

}  // namespace millrace
