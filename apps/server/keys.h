// API keys from a file, and how much each may ask for.
//
// The file has a key per line, or a name and a key separated by white space; # begins a comment. Names appear
// in logs, keys never do. Behind the key may stand limits of its own: rate=, tokens=, running=, priority=,
// each with a number, in place of what the options say. It is read again on SIGHUP.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "client_limits.h"

namespace millrace::server {

// As long for a wrong key as for a right one: only the length of `given` shows.
bool constant_time_equal(std::string_view given, std::string_view expected);

class Keys {
 public:
  Keys() = default;
  struct Key {
    std::string name = {}, secret = {};
    std::optional<double> rate = {}, tokens = {};
    std::optional<int32_t> running = {}, priority = {};
    ClientLimits limits(ClientLimits otherwise) const;
  };
  // Throws Error{kBadInput} for a file without a key and for a line that is none.
  static Keys from_file(const std::string& path);
  static Keys from_text(std::string_view text, const std::string& source);

  bool in_use() const { return !keys_.empty(); }
  size_t size() const { return keys_.size(); }
  // The key in "Bearer KEY"; null when there is no such key.
  const Key* check(std::string_view authorization) const;
  const Key* find(std::string_view secret) const;

 private:
  std::vector<Key> keys_;
};

}  // namespace millrace::server
