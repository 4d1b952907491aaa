#include "command.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <type_traits>
#include <utility>

#include "option_sources.h"
#include "output.h"

namespace millrace::cli {
namespace {

constexpr const char* kOnLine = "command line";

template <typename T>
struct IsList : std::false_type {};
template <typename T>
struct IsList<std::vector<T>> : std::true_type {};

template <typename T>
constexpr Setting::Kind kind_of() {
  if constexpr (requires { typename T::value_type; } && !std::is_same_v<T, std::string>) {
    return kind_of<typename T::value_type>();  // of a list or an optional
  } else if constexpr (std::is_same_v<T, std::string>) {
    return Setting::Kind::kText;
  } else {
    return std::is_integral_v<T> ? Setting::Kind::kInteger : Setting::Kind::kReal;
  }
}

}  // namespace

// An option that files and the environment know too, and who has said what it is.
struct KnownOption {
  Setting setting;
  CLI::Option* option;
  std::string from = {};  // empty: nobody has, it has its default
  bool for_all = false;   // what was said was said to every command

  // A flag that was said to be off is as good as not there.
  bool is_off() const {
    return setting.kind == Setting::Kind::kFlag &&
           (option->count() == 0 || CLI::detail::to_flag_value(option->results().back()) <= 0);
  }
};

struct IdleRule {
  std::string name;
  std::function<bool()> useful;
  std::string why;
};

struct Command::Parts {
  std::vector<KnownOption> options;
  std::vector<IdleRule> idle_rules;
  std::function<void()> check;
  std::function<int()> run;
};

// ---------------------------------------------------------------- options

Option Option::required() { return option_->required(), *this; }
// CLI11 takes -1 for 2^64 - 1, and whatever is beyond that.
static CLI::Validator whole_number(uint64_t max) {
  const auto check = [max](const std::string& text) {
    uint64_t number = 0;
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, number);
    if (error == std::errc() && stop == end && number <= max) return std::string();
    return fmt::format("found {}, expected a whole number from 0 to {}", text, max);
  };
  return CLI::Validator(check, "");
}
// Bounds that nobody comes near are not worth a reader's time.
template <typename T>
static CLI::Validator range_of(T min, T max) {
  constexpr T kWorthShowing = 10000;
  CLI::Validator range = CLI::Range(min, max);
  return max > kWorthShowing ? range.description("") : range;
}
Option Option::range(int32_t min, int32_t max) { return option_->check(range_of(min, max)), *this; }
Option Option::range(double min, double max) {
  option_->check(
      [min, max](const std::string& text) {  // NaN is in every CLI::Range: neither too small nor too large
        if (!std::isnan(std::strtod(text.c_str(), nullptr))) return std::string();
        return fmt::format("Value {} not in range {} to {}", text, min, max);
      });
  return option_->check(range_of(min, max)), *this;
}
Option Option::one_of(const std::vector<std::string>& words) {
  return option_->check(CLI::IsMember(words)), *this;
}
Option Option::show_default() { return option_->capture_default_str(), *this; }
Option Option::group(const std::string& heading) { return option_->group(heading), *this; }
Option Option::excludes(Option other) { return option_->excludes(other.option_), *this; }
Option Option::needs(Option other) { return option_->needs(other.option_), *this; }
Option Option::value_may_be_left_out() { return option_->expected(0, 1), *this; }
Option Option::separated_by(char comma) { return option_->delimiter(comma), *this; }
bool Option::given() const { return option_->count() > 0; }

Command::Command(CLI::App* app) : app_(app), parts_(std::make_shared<Parts>()) {}

// A model may come from a file or the environment; other things that are told by their place may not.
Option Command::known(CLI::Option* option, Setting::Kind kind, bool list) {
  const std::string name = option->get_name();
  if (name.starts_with("--")) parts_->options.push_back({{name.substr(2), kind, list}, option});
  if (name == "MODEL") parts_->options.push_back({{"model", kind, list}, option});
  return Option(option);
}

template <typename T>
Option Command::option(const std::string& name, T& value, const std::string& help) {
  CLI::Option* const option = app_->add_option(name, value, help);
  if (IsList<T>::value && name.starts_with('-')) option->allow_extra_args(false);
  if (std::is_same_v<T, uint64_t> || std::is_same_v<T, std::optional<uint64_t>>)
    option->check(whole_number(UINT64_MAX));
  return known(option, kind_of<T>(), IsList<T>::value);
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
  return known(app_->add_flag(name, value, help), Setting::Kind::kFlag);
}
Option Command::flag_off(const std::string& name, bool& value, const std::string& help) {
  return known(app_->add_flag_callback(
                   name, [&value] { value = false; }, help),
               Setting::Kind::kFlag);
}
Option Command::size(const std::string& name, size_t& bytes, size_t unit, const std::string& help) {
  CLI::Option* option = app_->add_option_function<size_t>(
      name, [&bytes, unit](const size_t& units) { bytes = units * unit; }, help);
  option->default_function([&bytes, unit] { return fmt::format("{}", bytes / unit); });
  option->check(whole_number(SIZE_MAX / unit));
  return known(option, Setting::Kind::kInteger);
}

Option Command::part_or_bytes(const std::string& name, double& value, const std::string& help) {
  const auto take = [&value, name](const std::string& text) {
    constexpr std::pair<const char*, double> kUnits[] = {{"", 1},         {"M", 1e6},  {"MB", 1e6},
                                                         {"G", 1e9},      {"GB", 1e9}, {"MiB", 0x1p20},
                                                         {"GiB", 0x1p30}, {"T", 1e12}};
    double number = 0.0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    const std::string unit(end, text.data() + text.size());
    for (const auto& [known_unit, bytes] : kUnits) {
      if (error != std::errc() || unit != known_unit) continue;
      const double found = number * bytes;
      const bool part = unit.empty() && found >= 0.01 && found <= 1.0;
      if (!part && !(found >= 0x1p20 && found <= 1e15)) break;
      value = found;
      return;
    }
    throw CLI::ValidationError(name,
                               "found " + text + ", expected a part from 0.01 to 1, or bytes such as 16G");
  };
  CLI::Option* option = app_->add_option_function<std::string>(name, take, help);
  option->default_function([&value] { return fmt::format("{}", value); });
  return known(option, Setting::Kind::kAmount);
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
  option->default_function([words, get] { return words[get()]; });
  return known(option, Setting::Kind::kText);
}
void Command::footer(const std::string& text) { app_->footer(text); }
std::vector<Command::Description> Command::describe() const {
  std::vector<Description> all;
  for (const KnownOption& known : parts_->options)
    all.push_back({known.setting, known.option->get_description()});
  return all;
}
void Command::refuse_unless(const std::string& name, std::function<bool()> useful, const std::string& why) {
  parts_->idle_rules.push_back({name, std::move(useful), why});
}
void Command::check(std::function<void()> check) { parts_->check = std::move(check); }
void Command::runs(std::function<int()> action) { parts_->run = std::move(action); }

// ---------------------------------------------------------------- the line

CommandLine::CommandLine(const std::string& description, const std::string& version,
                         const std::string& footer)
    : app_(std::make_unique<CLI::App>(description, "millrace")), version_(version) {
  app_->set_version_flag("--version", version);
  app_->require_subcommand(1);
  app_->footer(footer);
}
CommandLine::~CommandLine() {
  // A check or a rule may hold the command that holds it.
  for (const Command& command : commands_) {
    command.parts_->check = nullptr;
    command.parts_->idle_rules.clear();
  }
}

Command CommandLine::add(const std::string& name, const std::string& description) {
  return commands_.emplace_back(app_->add_subcommand(name, description));
}

CLI::App* CommandLine::chosen() const {
  const auto named = app_->get_subcommands();
  return named.empty() ? app_.get() : named.back();
}

Command* CommandLine::chosen_command() {
  const auto found = std::find_if(commands_.begin(), commands_.end(),
                                  [&](const Command& command) { return command.app_ == chosen(); });
  return found == commands_.end() ? nullptr : &*found;
}

UsageError CommandLine::usage_error(std::string_view what) const {
  const std::string name = chosen() == app_.get() ? "millrace" : "millrace " + chosen()->get_name();
  return UsageError(fmt::format("{} (see {} --help)", what, name));
}

// CLI11 takes words from the back.
void CommandLine::read_line(std::vector<std::string> words) {
  std::reverse(words.begin(), words.end());
  app_->parse(words);
}

namespace {

// An option as it would stand on the line. Where it stands behind "=" nothing else is taken for its value.
void add_words(const KnownOption& known, const SettingValue& value, std::vector<std::string>& words) {
  const std::string name = known.option->get_name();
  for (const std::string& text : value.texts) {
    if (known.setting.kind == Setting::Kind::kFlag) {
      if (text == "true") words.push_back(name);
    } else if (!name.starts_with("--")) {
      words.push_back(text);
    } else if (text.empty()) {
      words.insert(words.end(), {name, text});
    } else {
      words.push_back(name + "=" + text);
    }
  }
}

// Where the option that a message names has its value from; --kv-dir-size is not taken for --kv-dir.
std::string who_said(const std::vector<KnownOption>& options, std::string_view message) {
  const KnownOption* named = nullptr;
  for (const KnownOption& known : options) {
    const std::string name = known.option->get_name();
    if (message.find(name) == std::string_view::npos) continue;
    if (named == nullptr || name.size() > named->option->get_name().size()) named = &known;
  }
  return named == nullptr ? "" : named->from;
}

// The line says something that this option does not go with: then the line counts.
bool excluded_by_line(const CLI::Option* option) {
  const auto& others = option->get_excludes();
  return std::any_of(others.begin(), others.end(), [](const CLI::Option* o) { return o->count() > 0; });
}

std::string whole_number(uint64_t value) {
  const std::string text = fmt::format("{}", value);
  return beyond_toml(text) ? toml_string(text) : text;
}

// A value as TOML writes it; numbers anew, since a command line also takes 0x10 and 010.
std::string toml_value(Setting::Kind kind, const std::string& text) {
  switch (kind) {
    case Setting::Kind::kText:
      return toml_string(text);
    case Setting::Kind::kFlag:
      break;
    case Setting::Kind::kInteger:
      if (text.starts_with('-')) return fmt::format("{}", std::strtoll(text.c_str(), nullptr, 0));
      return whole_number(std::strtoull(text.c_str(), nullptr, 0));
    case Setting::Kind::kReal:
      return fmt::format("{}", std::strtod(text.c_str(), nullptr));
    case Setting::Kind::kAmount: {
      char* end = nullptr;
      const double number = std::strtod(text.c_str(), &end);
      return *end == '\0' ? fmt::format("{}", number) : toml_string(text);
    }
  }
  return text;
}

std::string toml_line(const KnownOption& known) {
  const auto& [setting, option, from, for_all] = known;
  if (setting.kind == Setting::Kind::kFlag) {
    if (from.empty()) return fmt::format("# {} = false  # default\n", setting.key);
    return fmt::format("{} = {}  # {}\n", setting.key, !known.is_off(), from);
  }
  if (from.empty()) {
    option->capture_default_str();
    const std::string text = option->get_default_str();
    if (text.empty() || text == "[]") return fmt::format("# {} is not set\n", setting.key);
    return fmt::format("# {} = {}  # default\n", setting.key,
                       setting.list ? text : toml_value(setting.kind, text));
  }
  std::vector<std::string> values;
  for (const std::string& text : option->results()) values.push_back(toml_value(setting.kind, text));
  if (!setting.list && !values.empty())
    values.erase(values.begin(), values.end() - 1);  // the last one counts
  const std::string joined = fmt::format("{}", fmt::join(values, ", "));
  return fmt::format("{} = {}  # {}\n", setting.key, setting.list ? "[" + joined + "]" : joined, from);
}

}  // namespace

// Reads the line again with what the environment and the files say of options that are not on it.
// `missing`: what it lacks without them.
void CommandLine::read_with_settings(Command& command, std::vector<std::string> words,
                                     const std::string& missing) {
  std::vector<CommandSettings> all;
  for (const Command& each : commands_) {
    CommandSettings& keys = all.emplace_back(CommandSettings{each.app_->get_name(), {}});
    for (const KnownOption& known : each.parts_->options) keys.settings.push_back(known.setting);
  }
  const std::string name = command.app_->get_name();
  const Settings settings(std::move(all), config_file_);
  std::vector<std::string> more;
  for (KnownOption& known : command.parts_->options) {
    if (known.option->count() > 0) {
      known.from = kOnLine;
      continue;
    }
    const std::optional<SettingValue> value = settings.find(name, known.setting);
    if (!value || excluded_by_line(known.option)) continue;
    add_words(known, *value, more);
    known.from = value->from;
    known.for_all = value->for_all;
  }
  if (more.empty() && !missing.empty() && !print_config_) throw UsageError(missing);
  words.insert(std::find(words.begin(), words.end(), name) + 1, more.begin(), more.end());
  try {
    read_line(words);
  } catch (const CLI::RequiredError&) {
    if (!print_config_) throw;  // what holds can be told without a model
  } catch (const CLI::ParseError& error) {
    const std::string said_by = who_said(command.parts_->options, error.what());
    if (said_by.empty() || said_by == kOnLine) throw;
    throw UsageError(fmt::format("{}: {}", said_by, error.what()));
  }
  if (print_config_) config_text_ = print_config(command, settings.description());
}

std::string CommandLine::print_config(const Command& command, const std::string& files) const {
  std::string text = fmt::format("# What millrace {} runs with, and where each value comes from.\n{}[{}]\n",
                                 command.app_->get_name(), files, command.app_->get_name());
  for (const KnownOption& known : command.parts_->options) text += toml_line(known);
  return text;
}

void CommandLine::refuse_idle(const Command& command) {
  const std::vector<KnownOption>& options = command.parts_->options;
  for (const IdleRule& rule : command.parts_->idle_rules) {
    const auto known = std::find_if(options.begin(), options.end(), [&](const KnownOption& option) {
      return option.option->get_name() == rule.name;
    });
    if (known == options.end()) throw std::logic_error("a rule for no option: " + rule.name);
    if (known->from.empty() || known->for_all || known->is_off() || rule.useful()) continue;
    throw UsageError(fmt::format("{} does nothing {}", rule.name, rule.why));
  }
}

void CommandLine::parse_alone(const std::vector<std::string>& words) {
  try {
    read_line(words);
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  const Command& command = *chosen_command();
  for (KnownOption& known : command.parts_->options) {
    if (known.option->count() > 0) known.from = kOnLine;
  }
  refuse_idle(command);
}

std::function<int()> CommandLine::parse(int argc, char** argv) {
  const auto print = [](std::string text) {
    return [text = std::move(text)] {
      write_stdout(text);
      return 0;
    };
  };
  for (const Command& command : commands_) {  // at the end of the help
    command.app_->add_option("--config", config_file_, "TOML file of options; default: see millrace --help")
        ->group("Configuration");
    command.app_->add_flag("--print-config", print_config_, "print what holds, and where it is from, as TOML")
        ->group("Configuration");
  }
  const std::vector<std::string> words(argv + 1, argv + argc);
  try {
    std::string missing;
    try {
      read_line(words);
    } catch (const CLI::RequiredError& error) {
      missing = error.what();
    } catch (const CLI::RequiresError& error) {
      missing = error.what();
    }
    Command* const command = chosen_command();
    if (command == nullptr) {
      if (!words.empty() && !words[0].starts_with('-'))
        throw UsageError(fmt::format("there is no command '{}'", words[0].substr(0, 100)));
      throw UsageError(missing.empty() ? "no command was given" : missing);
    }
    read_with_settings(*command, words, missing);
    if (print_config_) return print(config_text_);
    refuse_idle(*command);
    if (command->parts_->check) command->parts_->check();
    return command->parts_->run;
  } catch (const CLI::CallForHelp&) {
    return print(chosen() == app_.get() ? app_->help() : chosen()->help("millrace"));
  } catch (const CLI::CallForVersion&) {
    return print(version_ + "\n");
  } catch (const CLI::ParseError& error) {
    throw usage_error(error.what());
  } catch (const UsageError& error) {
    throw usage_error(error.what());
  }
}

}  // namespace millrace::cli
