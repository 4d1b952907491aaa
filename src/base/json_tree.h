// JSON text into nlohmann's ordered tree in one pass and in linear time, within limits that are checked
// before anything is built. nlohmann's own parser searches an ordered object for every key it adds.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>

namespace millrace {

struct JsonLimits {
  size_t depth = 64;                    // what traverses a tree may be recursive
  size_t values = size_t{1} << 20;      // objects, arrays, strings, numbers, ...: all of them
  size_t keys = size_t{1} << 18;        // of one object
  size_t key_bytes = size_t{64} << 10;  // of one key
  bool last_key_wins = false;           // of equal keys, as Python's; else they are refused
};

class JsonTextError : public std::runtime_error {
 public:
  JsonTextError(const std::string& message, bool limit, size_t byte)
      : std::runtime_error(message), limit_(limit), byte_(byte) {}
  bool limit() const { return limit_; }  // it may be JSON, and there is too much of it
  size_t byte() const { return byte_; }  // where bad syntax was found, from 1

 private:
  bool limit_;
  size_t byte_;
};

// Throws JsonTextError: bad syntax with line and column, broken UTF-8, numbers beyond a double, equal keys
// and what is over a limit with its path ("messages[3].content"). Spends work (base/work_budget.h).
nlohmann::ordered_json parse_json_tree(std::string_view text, const JsonLimits& limits = {});

// Adds a member that is known not to be there, without a search.
inline void append_member(nlohmann::ordered_json& object, std::string key, nlohmann::ordered_json value) {
  object.get_ref<nlohmann::ordered_json::object_t&>().emplace_back(std::move(key), std::move(value));
}

}  // namespace millrace
