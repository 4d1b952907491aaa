// A model of the hub as people write it. docs/models.md describes names for users.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace millrace::hub {

// hf:owner/name[@revision][:file or quantization]
struct ModelName {
  std::string repo;  // owner/name
  std::string revision = "main";
  std::string choice;  // a file of the repository or a quantization as people write it; empty: the default

  std::string text() const;  // hf:...
};
// Also hf.co/owner/name and addresses of the hub's pages. Empty for what is no name of the hub at all; throws
// Error{kBadInput} for one that is malformed.
std::optional<ModelName> parse_name(std::string_view text);

}  // namespace millrace::hub
