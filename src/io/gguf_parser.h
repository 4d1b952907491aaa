// One GGUF file (or one part of a split one) turned into metadata and tensor views. Internal to io.
#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "io/gguf.h"

namespace millrace::io {

using GgufMetadata = std::map<std::string, GgufValue, std::less<>>;

struct GgufPart {
  GgufMetadata metadata;
  std::vector<GgufRawValue> raw_metadata;  // in file order
  std::vector<TensorView> tensors;         // in file order; data points into `bytes`
};

GgufPart parse_gguf_part(std::span<const std::byte> bytes, const std::string& path);

}  // namespace millrace::io
