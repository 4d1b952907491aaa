// Names that come from a command line or from a server and become paths: relative, and never leading upwards.
#pragma once

#include <algorithm>
#include <string_view>

namespace millrace::hub {

inline bool is_safe_path(std::string_view path) {
  constexpr size_t kMaxPath = 1024, kMaxPart = 255;  // PATH_MAX leaves room for the cache's folder
  if (path.empty() || path.size() > kMaxPath) return false;
  if (std::any_of(path.begin(), path.end(),
                  [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f || c == '\\'; })) {
    return false;
  }
  while (true) {
    const size_t end = path.find('/');
    const std::string_view part = path.substr(0, end);
    if (part.empty() || part == "." || part == ".." || part.size() > kMaxPart) return false;
    if (end == std::string_view::npos) return true;
    path.remove_prefix(end + 1);
  }
}

inline bool is_hex(std::string_view text, size_t digits) {
  return text.size() == digits && std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

// A commit's full name, as the folders of snapshots/ have it.
inline bool is_commit(std::string_view text) { return is_hex(text, 40); }

}  // namespace millrace::hub
