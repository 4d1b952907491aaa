// What options are set to elsewhere than on the command line: in the environment (MILLRACE_PORT for --port)
// and in configuration files. The environment comes first, then the file of --config, or, where none is
// named, the user's and then the machine's.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "config_file.h"
#include "setting.h"

namespace millrace::cli {

// The keys that a command knows, for its table of a file.
struct CommandSettings {
  std::string command;
  std::vector<Setting> settings;
};

struct SettingValue {
  std::vector<std::string> texts;  // as on a command line, one for each time; of a flag: "true" or "false"
  std::string from;                // "MILLRACE_PORT", "/etc/millrace/config.toml:3"
  bool for_all = false;            // said to every command: in the environment, or above all tables
};

class Settings {
 public:
  // `named`: the file of --config; empty: that of MILLRACE_CONFIG, or those of the usual places. Throws Error
  // for a file that cannot be read and for keys that no command has, with the nearest that there is.
  Settings(std::vector<CommandSettings> commands, const std::string& named);

  // Throws Error for a value that is not of the setting's type.
  std::optional<SettingValue> find(const std::string& command, const Setting& setting) const;

  // The files and what became of them, for people.
  std::string description() const;

 private:
  void check_keys(const ConfigFile& file) const;
  std::vector<CommandSettings> commands_;
  std::vector<ConfigFile> files_;    // the first that has a key decides
  std::vector<std::string> absent_;  // usual places where none is
};

// "--max-running" as the environment knows it: MILLRACE_MAX_RUNNING.
std::string variable_name(const std::string& key);

}  // namespace millrace::cli
