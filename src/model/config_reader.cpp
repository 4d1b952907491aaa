#include "model/config_reader.h"

#include <cmath>

#include "base/error.h"
#include "io/hf_directory.h"

namespace millrace {

ConfigReader::ConfigReader(const io::Checkpoint& checkpoint, std::string prefix)
    : checkpoint_(checkpoint), prefix_(std::move(prefix)) {}

const nlohmann::json& ConfigReader::hf() const { return checkpoint_.hf->config; }

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
