// ConfigReader: one way to ask a checkpoint for a hyperparameter, whether it is a GGUF key or a config.json
// field.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/checkpoint.h"

namespace millrace {

class Architecture;

class ConfigReader {
 public:
  ConfigReader(const io::Checkpoint& checkpoint, const Architecture& architecture);

  const io::Checkpoint& checkpoint() const { return checkpoint_; }
  bool is_gguf() const { return checkpoint_.gguf.has_value(); }
  // config.json over the defaults of the class that its model_type names.
  const nlohmann::json& hf() const { return *hf_; }

  // The GGUF key is given without prefix. The first form throws Error{kBadInput} naming the missing field,
  // and all throw when the value is not in [low, high].
  int32_t integer(std::string_view gguf, std::string_view hf, int64_t low, int64_t high) const;
  int32_t integer_or(std::string_view gguf, std::string_view hf, int64_t low, int64_t high,
                     int64_t fallback) const;
  double real_or(std::string_view gguf, std::string_view hf, double fallback) const;
  bool flag_or(std::string_view gguf, std::string_view hf, bool fallback) const;

  // config.json only: a field of an object, with type checks that throw.
  double hf_real(const nlohmann::json& object, std::string_view field) const;
  double hf_real_or(const nlohmann::json& object, std::string_view field, double fallback) const;

  [[noreturn]] void fail(std::string_view field, const std::string& found, const std::string& expected) const;

 private:
  std::optional<double> find(std::string_view gguf, std::string_view hf) const;
  std::string label(std::string_view gguf, std::string_view hf) const;

  const io::Checkpoint& checkpoint_;
  std::string prefix_;  // GGUF's: "llama"
  std::shared_ptr<const nlohmann::json> hf_;
};

}  // namespace millrace
