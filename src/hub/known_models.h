// Short names for models that Millrace runs.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace millrace::hub {

struct KnownModel {
  std::string_view name;     // gpt-oss-20b
  std::string_view hub;      // hf:owner/name[:choice]
  std::string_view license;  // as its publisher names it
};
const std::vector<KnownModel>& known_models();
const KnownModel* find_known(std::string_view name);  // case does not matter; nullptr: not known
// A GGUF file in one of these folders that bears the model's name and a quantization; empty: none.
std::string find_in_folders(const KnownModel& model, const std::vector<std::string>& folders);
// Known names that resemble `name`, best first, at most three.
std::vector<std::string_view> similar_names(std::string_view name);

}  // namespace millrace::hub
