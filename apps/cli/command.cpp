#include "command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <optional>
#include <utility>

#include "output.h"

namespace millrace::cli {

Option Option::required() { return option_->required(), *this; }
Option Option::range(int32_t min, int32_t max) { return option_->check(CLI::Range(min, max)), *this; }
Option Option::range(double min, double max) { return option_->check(CLI::Range(min, max)), *this; }
Option Option::one_of(const std::vector<std::string>& words) {
  return option_->check(CLI::IsMember(words)), *this;
}
Option Option::show_default() { return option_->capture_default_str(), *this; }
Option Option::group(const std::string& heading) { return option_->group(heading), *this; }
Option Option::excludes(Option other) { return option_->excludes(other.option_), *this; }
Option Option::needs(Option other) { return option_->needs(other.option_), *this; }
Option Option::value_may_be_left_out() { return option_->expected(0, 1), *this; }
Option Option::one_value_each_time() { return option_->allow_extra_args(false), *this; }
Option Option::separated_by(char comma) { return option_->delimiter(comma), *this; }
bool Option::given() const { return option_->count() > 0; }

Command::Command(CLI::App* app) : app_(app), actions_(std::make_shared<Actions>()) {}

template <typename T>
Option Command::option(const std::string& name, T& value, const std::string& help) {
  return Option(app_->add_option(name, value, help));
}
template Option Command::option(const std::string&, std::string&, const std::string&);
template Option Command::option(const std::string&, int32_t&, const std::string&);
template Option Command::option(const std::string&, int64_t&, const std::string&);
template Option Command::option(const std::string&, uint16_t&, const std::string&);
template Option Command::option(const std::string&, uint32_t&, const std::string&);
template Option Command::option(const std::string&, uint64_t&, const std::string&);
template Option Command::option(const std::string&, float&, const std::string&);
template Option Command::option(const std::string&, double&, const std::string&);
template Option Command::option(const std::string&, std::optional<int32_t>&, const std::string&);
template Option Command::option(const std::string&, std::optional<uint64_t>&, const std::string&);
template Option Command::option(const std::string&, std::optional<float>&, const std::string&);
template Option Command::option(const std::string&, std::vector<std::string>&, const std::string&);
template Option Command::option(const std::string&, std::vector<int32_t>&, const std::string&);

Option Command::flag(const std::string& name, bool& value, const std::string& help) {
  return Option(app_->add_flag(name, value, help));
}
Option Command::flag_off(const std::string& name, bool& value, const std::string& help) {
  return Option(app_->add_flag_callback(
      name, [&value] { value = false; }, help));
}
Option Command::size(const std::string& name, size_t& bytes, size_t unit, const std::string& help) {
  CLI::Option* option = app_->add_option_function<size_t>(
      name, [&bytes, unit](const size_t& units) { bytes = units * unit; }, help);
  return Option(option->default_function([&bytes, unit] { return fmt::format("{}", bytes / unit); }));
}
Option Command::choice_of(const std::string& name, const std::vector<std::string>& words,
                          const std::function<size_t()>& get, const std::function<void(size_t)>& set,
                          const std::string& help) {
  CLI::Option* option = app_->add_option_function<std::string>(
      name,
      [words, set](const std::string& word) {
        set(static_cast<size_t>(std::find(words.begin(), words.end(), word) - words.begin()));
      },
      help);
  option->check(CLI::IsMember(words));
  return Option(option->default_function([words, get] { return words[get()]; }));
}
bool Command::given(const std::string& name) const { return app_->count(name) > 0; }
void Command::footer(const std::string& text) { app_->footer(text); }
void Command::check(std::function<void()> check) { actions_->check = std::move(check); }
void Command::runs(std::function<int()> action) { actions_->run = std::move(action); }

CommandLine::CommandLine(const std::string& description, const std::string& version,
                         const std::string& footer)
    : app_(std::make_unique<CLI::App>(description, "millrace")), version_(version) {
  app_->set_version_flag("--version", version);
  app_->require_subcommand(1);
  app_->footer(footer);
}
CommandLine::~CommandLine() {
  // A check may hold the command that holds it.
  for (const Command& command : commands_) command.actions_->check = nullptr;
}

Command CommandLine::add(const std::string& name, const std::string& description) {
  return commands_.emplace_back(app_->add_subcommand(name, description));
}

CLI::App* CommandLine::chosen() const {
  const auto named = app_->get_subcommands();
  return named.empty() ? app_.get() : named.back();
}

UsageError CommandLine::usage_error(std::string_view what) const {
  const std::string name = chosen() == app_.get() ? "millrace" : "millrace " + chosen()->get_name();
  return UsageError(fmt::format("{} (see {} --help)", what, name));
}

std::function<int()> CommandLine::parse(int argc, char** argv) {
  const auto print = [](std::string text) {
    return [text = std::move(text)] {
      write_stdout(text);
      return 0;
    };
  };
  try {
    app_->parse(argc, argv);
    for (const Command& command : commands_) {
      if (!command.app_->parsed()) continue;
      if (command.actions_->check) command.actions_->check();
      return command.actions_->run;
    }
  } catch (const CLI::CallForHelp&) {
    return print(chosen() == app_.get() ? app_->help() : chosen()->help("millrace"));
  } catch (const CLI::CallForVersion&) {
    return print(version_ + "\n");
  } catch (const CLI::ParseError& error) {
    throw usage_error(error.what());
  } catch (const UsageError& error) {
    throw usage_error(error.what());
  }
  throw usage_error("no command was given");
}

}  // namespace millrace::cli
