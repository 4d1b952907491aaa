// adapter_config.json, PEFT's description of a LoRA adapter: what of it changes the arithmetic.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace millrace {

class AdapterConfig {
 public:
  // What an update of this module and rank is multiplied by. Throws Error{kBadInput} where the file says
  // another rank.
  double scale_of(const std::string& module, int64_t rank) const;
  // Is this parameter among target_parameters, by its whole name or its end behind a dot?
  bool names_parameter(std::string_view parameter) const;

 private:
  friend AdapterConfig read_adapter_config(const std::string& directory);
  struct Pattern {
    std::string pattern;  // a regular expression of a module's name, or of its end behind a dot
    double value;
  };
  double value_of(const std::vector<Pattern>& patterns, const char* key, const std::string& module,
                  double otherwise) const;

  std::string path_;
  double rank_ = 8, alpha_ = 8;
  bool root_scaled_ = false;  // use_rslora: alpha / sqrt(rank) instead of alpha / rank
  std::vector<Pattern> rank_pattern_, alpha_pattern_;
  std::vector<std::string> parameters_;  // target_parameters
};

// Throws Error naming the key of what PEFT would do and we do not: DoRA, trained biases, whole modules, ...
AdapterConfig read_adapter_config(const std::string& directory);

}  // namespace millrace
