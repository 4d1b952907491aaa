// The JSON header of a safetensors file, read as SAX events: no tree is built, and the first thing
// that does not belong there ends the reading. Internal to io.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace millrace::io {

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  // as in the file: "BF16"
  int rank = 0;
  std::array<uint64_t, 4> shape{1, 1, 1, 1};
  uint64_t begin = 0;  // data_offsets, from the end of the header
  uint64_t end = 0;
};

// Names are unique, ranks at most 4, begin <= end; nothing else is known to be right. Throws Error.
std::vector<SafetensorsEntry> parse_safetensors_header(std::string_view json, const std::string& path);

}  // namespace millrace::io
