// The shapes with names of every architecture: each is a Hugging Face config.json, so a preset and a file
// take the same way.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace millrace::cli {

std::optional<nlohmann::json> find_preset(std::string_view name);
std::string preset_names();  // "gpt-oss-20b, gpt-oss-120b, ..."

}  // namespace millrace::cli
