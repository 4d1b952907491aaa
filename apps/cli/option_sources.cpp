#include "option_sources.h"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "base/error.h"
#include "io/printable.h"

namespace millrace::cli {
namespace {

constexpr const char* kSystemFile = "/etc/millrace/config.toml";

std::vector<std::string> usual_places() {
  std::vector<std::string> places;
  const char* const config = std::getenv("XDG_CONFIG_HOME");
  const char* const home = std::getenv("HOME");
  if (config != nullptr && config[0] == '/') {
    places.push_back(std::string(config) + "/millrace/config.toml");
  } else if (home != nullptr && home[0] != '\0') {
    places.push_back(std::string(home) + "/.config/millrace/config.toml");
  }
  places.emplace_back(kSystemFile);
  return places;
}

// Letters to insert, remove or replace, and neighbours to exchange.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        d[i][j] = i + j;
        continue;
      }
      const size_t replaced = d[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, replaced});
      const bool exchanged = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (exchanged) d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  }
  return d[a.size()][b.size()];
}

std::string nearest_name(std::string_view word, const std::vector<std::string>& known) {
  std::string_view best;
  size_t least = word.size() + 1;
  for (const std::string& candidate : known) {
    const size_t distance = edit_distance(word, candidate);
    if (distance < least) {
      least = distance;
      best = candidate;
    }
  }
  return best.empty() ? "" : fmt::format("; the nearest is {}", best);
}

std::vector<std::string> config_keys(const CommandSettings& command) {
  std::vector<std::string> keys;
  for (const Setting& setting : command.settings) keys.push_back(setting.key);
  return keys;
}

bool has_word(const std::vector<std::string>& words, const std::string& word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

std::string_view kind_name(Setting::Kind kind) {
  switch (kind) {
    case Setting::Kind::kText:
      return "a text";
    case Setting::Kind::kInteger:
      return "a whole number";
    case Setting::Kind::kReal:
      return "a number";
    case Setting::Kind::kFlag:
      return "true or false";
    case Setting::Kind::kAmount:
      return "a number or a text such as \"16G\"";
  }
  return "";
}

bool goes_as(const ConfigEntry::Value& found, Setting::Kind wanted) {
  if (found.kind == wanted) return true;
  if (wanted == Setting::Kind::kAmount) return found.kind != Setting::Kind::kFlag;
  if (wanted == Setting::Kind::kReal) return found.kind == Setting::Kind::kInteger;
  return wanted == Setting::Kind::kInteger && found.kind == Setting::Kind::kText && beyond_toml(found.text);
}

SettingValue config_value(const ConfigFile& file, const ConfigEntry& entry, const Setting& setting) {
  const std::string at = fmt::format("{}:{}", file.path, entry.line);
  if (entry.array && !setting.list) {
    throw_error(ErrorCode::kBadInput, "{}: {}: found a list, expected {}", at, entry.key,
                kind_name(setting.kind));
  }
  SettingValue value{.texts = {}, .from = at, .for_all = entry.table.empty()};
  for (const ConfigEntry::Value& item : entry.values) {
    if (!goes_as(item, setting.kind)) {
      throw_error(ErrorCode::kBadInput, "{}: {}: found {} ({}), expected {}", at, entry.key,
                  kind_name(item.kind), io::printable(item.text), kind_name(setting.kind));
    }
    value.texts.push_back(item.text);
  }
  return value;
}

std::vector<std::string> split_at_commas(std::string_view text) {
  std::vector<std::string> pieces;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    pieces.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return pieces;
}

std::optional<SettingValue> from_environment(const Setting& setting) {
  const std::string name = variable_name(setting.key);
  const char* const found = std::getenv(name.c_str());
  if (found == nullptr || found[0] == '\0') return std::nullopt;
  SettingValue value{.texts = {found}, .from = name, .for_all = true};
  if (setting.list) value.texts = split_at_commas(found);
  if (setting.kind == Setting::Kind::kFlag) {
    std::string word = found;
    std::transform(word.begin(), word.end(), word.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    const bool yes = has_word({"1", "true", "on", "yes"}, word);
    if (!yes && !has_word({"0", "false", "off", "no"}, word)) {
      throw_error(ErrorCode::kBadInput, "{}: found {}, expected 1 or 0", name, io::printable(found));
    }
    value.texts = {yes ? "true" : "false"};
  }
  return value;
}

}  // namespace

std::string variable_name(const std::string& key) {
  std::string name = "MILLRACE_";
  for (const char c : key) {
    name += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return name;
}

Settings::Settings(std::vector<CommandSettings> commands, const std::string& named)
    : commands_(std::move(commands)) {
  std::string file = named;
  if (const char* const variable = std::getenv("MILLRACE_CONFIG"); file.empty() && variable != nullptr) {
    file = variable;
  }
  if (!file.empty()) {
    files_.push_back(read_config_file(file));
  } else {
    for (const std::string& place : usual_places()) {
      std::error_code error;
      if (std::filesystem::exists(place, error)) {
        files_.push_back(read_config_file(place));
      } else {
        absent_.push_back(place);
      }
    }
  }
  for (const ConfigFile& read : files_) check_keys(read);
}

void Settings::check_keys(const ConfigFile& file) const {
  std::vector<std::string> names, all;
  for (const CommandSettings& command : commands_) {
    names.push_back(command.command);
    const std::vector<std::string> keys = config_keys(command);
    all.insert(all.end(), keys.begin(), keys.end());
  }
  for (const ConfigTable& table : file.tables) {
    if (has_word(names, table.name)) continue;
    throw_error(ErrorCode::kBadInput, "{}:{}: no command is called {}{}", file.path, table.line,
                io::printable(table.name), nearest_name(table.name, names));
  }
  for (const ConfigEntry& entry : file.entries) {
    if (entry.table.empty()) {
      if (has_word(all, entry.key)) continue;
      throw_error(ErrorCode::kBadInput, "{}:{}: no command has an option {}{}", file.path, entry.line,
                  io::printable(entry.key), nearest_name(entry.key, all));
    }
    const auto command = std::find_if(commands_.begin(), commands_.end(), [&](const CommandSettings& known) {
      return known.command == entry.table;
    });
    const std::vector<std::string> keys = config_keys(*command);
    if (has_word(keys, entry.key)) continue;
    throw_error(ErrorCode::kBadInput, "{}:{}: {} has no option {}{}", file.path, entry.line, entry.table,
                io::printable(entry.key), nearest_name(entry.key, keys));
  }
}

std::optional<SettingValue> Settings::find(const std::string& command, const Setting& setting) const {
  if (std::optional<SettingValue> value = from_environment(setting)) return value;
  for (const ConfigFile& file : files_) {
    const ConfigEntry* found = nullptr;  // of the command's table, else the one above all tables
    for (const ConfigEntry& entry : file.entries) {
      if (entry.key != setting.key || (entry.table != command && !entry.table.empty())) continue;
      if (found == nullptr || found->table.empty()) found = &entry;
    }
    if (found != nullptr) return config_value(file, *found, setting);
  }
  return std::nullopt;
}

std::string Settings::description() const {
  std::string text;
  for (const ConfigFile& file : files_) text += fmt::format("# read: {}\n", file.path);
  for (const std::string& place : absent_) text += fmt::format("# not there: {}\n", place);
  return text;
}

}  // namespace millrace::cli
