// The command line: commands, their options, their help. CLI11 does the work and is seen by command.cpp
// alone: a file that includes it takes ten seconds more to compile. What is not on the line may stand in the
// environment or in a configuration file (option_sources.h): every option may, by its long name.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "setting.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace millrace::cli {

// A command line that cannot be meant; its text ends by naming the --help that explains.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Option {
 public:
  explicit Option(CLI::Option* option) : option_(option) {}
  Option required();
  Option range(int32_t min, int32_t max);
  Option range(double min, double max);
  Option one_of(const std::vector<std::string>& words);
  Option show_default();                     // the value it has now, in the help
  Option group(const std::string& heading);  // of the help
  Option excludes(Option other);
  Option needs(Option other);
  Option value_may_be_left_out();
  Option separated_by(char comma);  // of a list: "1,2,3" as well as once for each
  bool given() const;

 private:
  CLI::Option* option_;
};

class Command {
 public:
  explicit Command(CLI::App* app);
  // `name`: "-p,--prompt", or "MODEL" for one that is told by its place. T: std::string, a list or an
  // optional of something, or a number; command.cpp lists them. Of a list: one value each time.
  template <typename T>
  Option option(const std::string& name, T& value, const std::string& help);
  Option flag(const std::string& name, bool& value, const std::string& help);
  Option flag_off(const std::string& name, bool& value, const std::string& help);  // given: value is false
  // Told in units, kept in bytes.
  Option size(const std::string& name, size_t& bytes, size_t unit, const std::string& help);
  // A part of something, 0.9, or bytes, 16G: kept as the number that it is.
  Option part_or_bytes(const std::string& name, double& value, const std::string& help);
  // One of these words, each for the enumerator of that place.
  template <typename Enum>
  Option choice(const std::string& name, Enum& value, const std::vector<std::string>& words,
                const std::string& help) {
    return choice_of(
        name, words, [&value] { return static_cast<size_t>(value); },
        [&value](size_t chosen) { value = static_cast<Enum>(chosen); }, help);
  }
  void footer(const std::string& text);
  // All that have a name, with their help: for those who take them by other means than a line.
  struct Description {
    Setting setting;
    std::string help;
  };
  std::vector<Description> describe() const;

  // Option `name` does nothing unless `useful()`: who gives it to this command is told so, with `why`, such
  // as "without --kv-dir". What is said to every command, in the environment or above a file's tables, may
  // idle.
  void refuse_unless(const std::string& name, std::function<bool()> useful, const std::string& why);

  // Called when the whole line has been read; throws UsageError for what does not go together.
  void check(std::function<void()> check);
  // What the command does; returns the exit status and throws Error for what goes wrong.
  void runs(std::function<int()> action);

 private:
  friend class CommandLine;
  struct Parts;
  Option choice_of(const std::string& name, const std::vector<std::string>& words,
                   const std::function<size_t()>& get, const std::function<void(size_t)>& set,
                   const std::string& help);
  Option known(CLI::Option* option, Setting::Kind kind, bool list = false);

  CLI::App* app_;
  std::shared_ptr<Parts> parts_;
};

class CommandLine {
 public:
  CommandLine(const std::string& description, const std::string& version, const std::string& footer);
  ~CommandLine();
  CommandLine(const CommandLine&) = delete;
  CommandLine& operator=(const CommandLine&) = delete;

  Command add(const std::string& name, const std::string& description);
  // What the user asked for: a command, or the printing of help, version or configuration. Throws UsageError,
  // and Error for what a configuration file says.
  std::function<int()> parse(int argc, char** argv);
  // Sets options by these words alone, a command's name first: neither environment nor files are asked.
  // Throws UsageError.
  void parse_alone(const std::vector<std::string>& words);

 private:
  CLI::App* chosen() const;  // the command that was named, or the whole line
  Command* chosen_command();
  UsageError usage_error(std::string_view what) const;
  void read_line(std::vector<std::string> words);
  static void refuse_idle(const Command& command);
  void read_with_settings(Command& command, std::vector<std::string> words, const std::string& missing);
  std::string print_config(const Command& command, const std::string& files) const;

  std::unique_ptr<CLI::App> app_;
  std::string version_;
  std::vector<Command> commands_;
  std::string config_file_;
  bool print_config_ = false;
  std::string config_text_;  // what --print-config prints
};

}  // namespace millrace::cli
