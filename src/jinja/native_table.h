// Functions of ours by the name a template calls them.
#pragma once

#include <string_view>
#include <unordered_map>

#include "jinja/value.h"

namespace millrace::jinja {

using NativeTable = std::unordered_map<std::string_view, Native>;

// Null where there is no such name.
inline Native look_up(const NativeTable& table, std::string_view name) {
  const auto it = table.find(name);
  return it == table.end() ? nullptr : it->second;
}

}  // namespace millrace::jinja
