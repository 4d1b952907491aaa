// Small JSON files (config.json and its like), read whole with their size and depth limited.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>

namespace millrace::io {

// Real ones are under 1 MB; a tree takes some fifty times the bytes of its text at worst.
inline constexpr size_t kMaxJsonBytes = 16 * 1024 * 1024;

// The file must hold one JSON object. Throws Error naming the path.
nlohmann::json read_json_object(const std::string& path, size_t max_bytes = kMaxJsonBytes);

}  // namespace millrace::io
