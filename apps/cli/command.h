// The command line: commands, their options, their help. CLI11 does the work and is seen by command.cpp
// alone: a file that includes it takes ten seconds more to compile.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

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
  Option one_value_each_time();     // of a list: "--stop A --stop B", not "--stop A B"
  Option separated_by(char comma);  // of a list: "1,2,3"
  bool given() const;

 private:
  CLI::Option* option_;
};

class Command {
 public:
  explicit Command(CLI::App* app);
  // `name`: "-p,--prompt", or "MODEL" for one that is told by its place. T: std::string, a list or an
  // optional of something, or a number; command.cpp lists them.
  template <typename T>
  Option option(const std::string& name, T& value, const std::string& help);
  Option flag(const std::string& name, bool& value, const std::string& help);
  Option flag_off(const std::string& name, bool& value, const std::string& help);  // given: value is false
  // Told in units, kept in bytes.
  Option size(const std::string& name, size_t& bytes, size_t unit, const std::string& help);
  // One of these words, each for the enumerator of that place.
  template <typename Enum>
  Option choice(const std::string& name, Enum& value, const std::vector<std::string>& words,
                const std::string& help) {
    return choice_of(
        name, words, [&value] { return static_cast<size_t>(value); },
        [&value](size_t chosen) { value = static_cast<Enum>(chosen); }, help);
  }
  bool given(const std::string& name) const;
  void footer(const std::string& text);

  // Called when the whole line has been read; throws UsageError for what does not go together.
  void check(std::function<void()> check);
  // What the command does; returns the exit status and throws Error for what goes wrong.
  void runs(std::function<int()> action);

 private:
  friend class CommandLine;
  struct Actions {
    std::function<void()> check;
    std::function<int()> run;
  };
  Option choice_of(const std::string& name, const std::vector<std::string>& words,
                   const std::function<size_t()>& get, const std::function<void(size_t)>& set,
                   const std::string& help);

  CLI::App* app_;
  std::shared_ptr<Actions> actions_;
};

class CommandLine {
 public:
  CommandLine(const std::string& description, const std::string& version, const std::string& footer);
  ~CommandLine();
  CommandLine(const CommandLine&) = delete;
  CommandLine& operator=(const CommandLine&) = delete;

  Command add(const std::string& name, const std::string& description);
  // What the user asked for: a command, or the printing of help or version. Throws UsageError.
  std::function<int()> parse(int argc, char** argv);

 private:
  CLI::App* chosen() const;  // the command that was named, or the whole line
  UsageError usage_error(std::string_view what) const;
  std::unique_ptr<CLI::App> app_;
  std::string version_;
  std::vector<Command> commands_;
};

}  // namespace millrace::cli
