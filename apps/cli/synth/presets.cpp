#include "synth/presets.h"

#include "model/architecture.h"

namespace millrace::cli {

std::optional<nlohmann::json> find_preset(std::string_view name) {
  for (const Architecture* architecture : architectures()) {
    for (const SyntheticPreset& preset : architecture->presets()) {
      if (preset.name == name) return nlohmann::json::parse(preset.config);
    }
  }
  return std::nullopt;
}

std::string preset_names() {
  std::string names;
  for (const Architecture* architecture : architectures()) {
    for (const SyntheticPreset& preset : architecture->presets())
      names += (names.empty() ? "" : ", ") + std::string(preset.name);
  }
  return names;
}

}  // namespace millrace::cli
