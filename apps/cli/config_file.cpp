#include "config_file.h"

#include <fmt/core.h>

#include <toml++/toml.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string_view>
#include <system_error>

#include "base/error.h"
#include "io/printable.h"

namespace millrace::cli {
namespace {

constexpr uintmax_t kMaxConfigBytes = uintmax_t{1} << 20;  // a person writes less

int line_number(const toml::node& node) { return static_cast<int>(node.source().begin.line); }

[[noreturn]] void fail_at(const std::string& path, int line, const std::string& what) {
  throw_error(ErrorCode::kBadInput, "{}:{}: {}", path, line, what);
}

ConfigEntry::Value scalar_of(const std::string& path, const std::string& key, const toml::node& node) {
  if (const auto* text = node.as_string()) return {Setting::Kind::kText, text->get()};
  if (const auto* integer = node.as_integer()) {
    return {Setting::Kind::kInteger, fmt::format("{}", integer->get())};
  }
  if (const auto* real = node.as_floating_point()) {
    return {Setting::Kind::kReal, fmt::format("{}", real->get())};
  }
  if (const auto* flag = node.as_boolean()) return {Setting::Kind::kFlag, flag->get() ? "true" : "false"};
  fail_at(path, line_number(node),
          fmt::format("{}: found a {}, expected a text, a number, true, false or a list of them", key,
                      node.is_table()   ? "table"
                      : node.is_array() ? "list in a list"
                                        : "date or time"));
}

class TomlReader {
 public:
  explicit TomlReader(const std::string& path) { file_.path = path; }

  ConfigFile read(const toml::table& root) {
    for (const auto& [name, node] : root) {
      const std::string key(name.str());
      const toml::table* const table = node.as_table();
      if (table == nullptr) {
        add("", key, node, static_cast<int>(name.source().begin.line));
        continue;
      }
      file_.tables.push_back({key, line_number(node)});
      for (const auto& [inner, value] : *table) {
        add(key, std::string(inner.str()), value, static_cast<int>(inner.source().begin.line));
      }
    }
    std::stable_sort(file_.entries.begin(), file_.entries.end(),
                     [](const ConfigEntry& a, const ConfigEntry& b) { return a.line < b.line; });
    return std::move(file_);
  }

 private:
  void add(const std::string& table, const std::string& name, const toml::node& node, int line) {
    ConfigEntry entry{.table = table, .key = name, .line = line, .array = node.is_array(), .values = {}};
    std::replace(entry.key.begin(), entry.key.end(), '_', '-');
    const auto same = std::find_if(file_.entries.begin(), file_.entries.end(), [&](const ConfigEntry& other) {
      return other.table == table && other.key == entry.key;
    });
    if (same != file_.entries.end()) {
      fail_at(file_.path, std::max(line, same->line),
              fmt::format("{} is there twice, also in line {}", entry.key, std::min(line, same->line)));
    }
    if (const toml::array* const list = node.as_array()) {
      for (const toml::node& item : *list) entry.values.push_back(scalar_of(file_.path, name, item));
    } else {
      entry.values.push_back(scalar_of(file_.path, name, node));
    }
    file_.entries.push_back(std::move(entry));
  }

  ConfigFile file_;
};

std::string read_config_text(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    throw_error(ErrorCode::kBadInput, "{}: found a directory, expected a configuration file", path);
  }
  std::ifstream in(path, std::ios::binary);
  if (!in) throw_error(ErrorCode::kBadInput, "{}: cannot be read, expected a configuration file", path);
  std::string text;
  char piece[4096];
  while (in.read(piece, sizeof(piece)) || in.gcount() > 0) {
    text.append(piece, static_cast<size_t>(in.gcount()));
    if (text.size() > kMaxConfigBytes) {
      throw_error(ErrorCode::kBadInput, "{}: found over {} bytes, expected a configuration file", path,
                  kMaxConfigBytes);
    }
  }
  return text;
}

}  // namespace

ConfigFile read_config_file(const std::string& path) {
  const std::string text = read_config_text(path);
  try {
    return TomlReader(path).read(toml::parse(std::string_view(text), std::string_view(path)));
  } catch (const toml::parse_error& error) {
    const std::string_view what = error.description();
    fail_at(path, static_cast<int>(error.source().begin.line), fmt::format("not TOML: {}", what));
  }
}

bool beyond_toml(const std::string& number) {
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  if (number.empty() || !std::all_of(number.begin(), number.end(), is_digit)) return false;
  errno = 0;
  const uint64_t value = std::strtoull(number.c_str(), nullptr, 10);
  return errno == 0 && value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
}

std::string toml_string(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\u{:04x}", byte);
    } else {
      out += c;
    }
  }
  return out + "\"";
}

}  // namespace millrace::cli
