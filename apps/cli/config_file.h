// A configuration file (TOML) as a flat list: the keys above all tables, and those of one table per command.
// toml++ does the work and is seen by config_file.cpp alone.
#pragma once

#include <string>
#include <vector>

#include "setting.h"

namespace millrace::cli {

struct ConfigEntry {
  std::string table;  // empty: above all tables
  std::string key;    // with dashes: max_running is max-running
  int line = 0;
  bool array = false;
  struct Value {
    Setting::Kind kind;
    std::string text;  // as on a command line
  };
  std::vector<Value> values;  // of an array; one for everything else
};

struct ConfigTable {
  std::string name;
  int line = 0;
};

struct ConfigFile {
  std::string path;
  std::vector<ConfigTable> tables;
  std::vector<ConfigEntry> entries;  // in the order of the file
};

// Throws Error naming the path and the line.
ConfigFile read_config_file(const std::string& path);

// A whole number, 2^63 or more, that TOML's are too small for: it is written as text.
bool beyond_toml(const std::string& number);

// Text as TOML writes it: in quotes, with escapes.
std::string toml_string(const std::string& text);

}  // namespace millrace::cli
