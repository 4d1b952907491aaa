// Chat templates against jinja2: our own small templates always, real ones where tools/fetch_templates.py put
// them; and what goes wrong in a template gets a message with its line and stays within bounds.
#include "jinja/chat_template.h"

#include <gtest/gtest.h>

#include <fmt/core.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "base/error.h"

namespace millrace {
namespace {

using nlohmann::ordered_json;
namespace fs = std::filesystem;

const fs::path kFixtures = "tests/golden/templates";
const fs::path kTemplates = "build/models/templates";

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string render(std::string_view source, const ordered_json& variables = ordered_json::object()) {
  return ChatTemplate(source, "test.jinja").render(variables);
}

// The message of the Error that parsing or rendering throws.
std::string error_of(std::string_view source, ErrorCode code,
                     const ordered_json& variables = ordered_json::object()) {
  try {
    std::string text = render(source, variables);
    ADD_FAILURE() << source << " rendered as " << text.substr(0, 200);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return {};
}

void expect_case(std::string_view source, const ordered_json& variables, const ordered_json& expected,
                 const RenderOptions& options, const std::string& label) {
  try {
    std::string text = ChatTemplate(source, "case").render(variables, options);
    ASSERT_TRUE(expected.contains("output"))
        << label << "\njinja2 raises " << expected["error"] << "\nours " << text;
    EXPECT_EQ(text, expected["output"].get<std::string>()) << label;
  } catch (const Error& error) {
    EXPECT_TRUE(expected.contains("error")) << label << "\n" << error.what();
  }
}

RenderOptions options_of(const ordered_json& fixture) {
  setenv("TZ", "UTC", 1);
  tzset();
  RenderOptions options;
  options.now = fixture["now"].get<int64_t>();
  return options;
}

TEST(ChatTemplate, ConstructsRenderAsJinja2Does) {
  const auto fixture = ordered_json::parse(read(kFixtures / "constructs.json"));
  ASSERT_GE(fixture["cases"].size(), 300u);
  const RenderOptions options = options_of(fixture);
  for (const auto& c : fixture["cases"]) {
    const auto source = c["template"].get<std::string>();
    expect_case(source, fixture["variables"], c, options, source);
  }
}

// As make_template_golden.py's digest().
std::string digest(std::string_view text) {
  uint64_t value = 0xcbf29ce484222325u;
  for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return fmt::format("{}:{:016x}", text.size(), value);
}

TEST(ChatTemplate, RealTemplatesRenderAsJinja2Does) {
  const auto conversations = ordered_json::parse(read(kFixtures / "conversations.json"))["cases"];
  std::map<std::string, ordered_json> variables;
  for (const auto& c : conversations) variables[c["name"]] = c["variables"];
  std::vector<std::string> absent;
  size_t rendered = 0;
  const auto fixture = ordered_json::parse(read(kFixtures / "models.json"));
  const RenderOptions options = options_of(fixture);
  for (const auto& model : fixture["cases"]) {
    const fs::path path = kTemplates / model["template"].get<std::string>();
    if (!fs::exists(path)) {
      absent.push_back(path.filename());
      continue;
    }
    const std::string source = read(path);
    for (size_t i = 0; i < model["renderings"].size(); ++i) {
      const auto name = fixture["conversations"][i].get<std::string>();
      std::string text, found;
      try {
        text = ChatTemplate(source, "case").render(variables.at(name), options);
        found = digest(text);
      } catch (const Error& error) {
        found = "error";
        text = error.what();
      }
      EXPECT_EQ(found, model["renderings"][i].get<std::string>()) << path.filename() << " " << name << "\n"
                                                                  << text;
      ++rendered;
    }
  }
  RecordProperty("rendered", static_cast<int>(rendered));
  if (!absent.empty()) {
    GTEST_SKIP() << absent.size() << " templates are not in " << kTemplates << " (" << absent[0]
                 << ", ...): run tools/fetch_templates.py";
  }
}

TEST(ChatTemplate, UnsupportedConstructsAreNamedWithTheirLine) {
  EXPECT_EQ(error_of("a\n{% include 'x' %}", ErrorCode::kUnsupported),
            "test.jinja: chat template line 2: the statement 'include' is not supported");
  EXPECT_EQ(error_of("\n\n{{ x | urlize }}", ErrorCode::kUnsupported),
            "test.jinja: chat template line 3: the filter 'urlize' is not supported");
  EXPECT_EQ(error_of("{{ 1 is\nhappy }}", ErrorCode::kUnsupported),
            "test.jinja: chat template line 1: the test 'happy' is not supported");
  EXPECT_EQ(error_of("{% if true %}\n{{ 1 | wordwrap }}{% endif %}", ErrorCode::kUnsupported),
            "test.jinja: chat template line 2: the filter 'wordwrap' is not supported");
  for (const char* tag : {"block x", "extends 'a'", "import 'a' as b", "from 'a' import b", "do x"}) {
    error_of("{% " + std::string(tag) + " %}", ErrorCode::kUnsupported);
  }
  error_of("{{ 2 ** (2 ** 40) }}", ErrorCode::kUnsupported);
  error_of("{{ 3 ** (2 ** 70) }}", ErrorCode::kUnsupported);
}

TEST(ChatTemplate, ErrorsAreOneLineWithFileAndLine) {
  EXPECT_EQ(error_of("\n{{ raise_exception('a\nb\x01') }}", ErrorCode::kBadInput),
            "test.jinja: chat template line 2: a b ");
  EXPECT_EQ(
      error_of("{% if x %}\n{{ 1 }}", ErrorCode::kBadInput),
      "test.jinja: chat template line 2: unexpected end of template, expected 'elif' or 'else' or 'endif'");
  EXPECT_EQ(error_of("{{ a.b }}", ErrorCode::kBadInput),
            "test.jinja: chat template line 1: 'a' is undefined");
  EXPECT_EQ(error_of("\n\n{{ d.x.y }}", ErrorCode::kBadInput, {{"d", {{"k", 1}}}}),
            "test.jinja: chat template line 3: 'dict object' has no attribute 'x'");
  EXPECT_EQ(error_of("{{ [].append(1) }}", ErrorCode::kBadInput),
            "test.jinja: chat template line 1: access to attribute 'append' of 'list' object is unsafe.");
  error_of("\xff", ErrorCode::kBadInput);
  error_of("{{ x }}", ErrorCode::kBadInput, {{"x", "\xc3"}});
  error_of("x", ErrorCode::kBadInput, ordered_json::array());
}

TEST(ChatTemplate, RunawaysEndInAnErrorQuickly) {
  const std::string loops =
      "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}";
  const std::string doubling =
      "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}";
  const std::string lists =
      "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}";
  const std::string deep =
      "{% set ns = namespace(s=[]) %}{% for i in range(9999) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s }}";
  const std::string recursion = "{% macro m(x) %}{{ m([x]) }}{% endmacro %}{{ m(1) }}";
  const std::string output = "{% set s = 'x' * 60000000 %}{{ s }}{{ s }}";
  const std::string huge = "{{ 'x' * 10 ** 17 }}";
  const std::string hold =
      "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = ns.l + ['x' * 999999 ~ i] %}{% "
      "endfor %}";
  const std::string self = "{% set ns = namespace() %}{% set ns.s = [ns, ns] %}{{ ns }}";
  auto start = std::chrono::steady_clock::now();
  for (const auto& source : {loops, doubling, lists, deep, recursion, output, huge, hold, self}) {
    error_of(source, ErrorCode::kBadInput);
  }
  RecordProperty("seconds",
                 static_cast<int>((std::chrono::steady_clock::now() - start) / std::chrono::seconds(1)));
  auto repeat = [](const std::string& text, int count) {
    std::string out;
    for (int i = 0; i < count; ++i) out += text;
    return out;
  };
  error_of("{{ " + repeat("(", 100000), ErrorCode::kUnsupported);
  error_of("{{ " + repeat("-", 100000) + "1 }}", ErrorCode::kUnsupported);
  error_of("{{ " + repeat("not ", 100000) + "1 }}", ErrorCode::kUnsupported);
  error_of("{{ 1" + repeat("+1", 100000) + " }}", ErrorCode::kUnsupported);
  error_of("{{ x" + repeat(".a", 100000) + " }}", ErrorCode::kUnsupported);
  error_of(repeat("{% if 1 %}", 100000), ErrorCode::kUnsupported);
  ordered_json nested = 1;
  for (int i = 0; i < 500; ++i) nested = ordered_json::array({nested});
  error_of("x", ErrorCode::kBadInput, {{"nested", nested}});
}

TEST(ChatTemplate, ValuesThatHoldThemselvesDoNotLeak) {  // for the leak checker
  EXPECT_EQ(
      render("{% set ns = namespace() %}{% set ns.s = [ns] %}{% macro m() %}{{ ns.s[0].s is defined }}{% "
             "endmacro %}"
             "{% set ns.m = m %}{% for i in [1] %}{% set ns.l = loop %}{{ loop.changed(loop) }}{% endfor %}"
             "{% set again = ns.l %}{{ ns.m() }}"),
      "TrueTrue");
}

TEST(ChatTemplate, TimeIsTheCallersWhereGiven) {
  setenv("TZ", "UTC", 1);
  tzset();
  RenderOptions options;
  options.now = 1753000000;
  EXPECT_EQ(
      ChatTemplate("{{ strftime_now('%d %b %Y %H:%M:%S') }}", "t").render(ordered_json::object(), options),
      "20 Jul 2025 08:26:40");
  EXPECT_EQ(render("{{ strftime_now('%Y') | int > 2024 }}"), "True");
}

TEST(ChatTemplate, OneTemplateRendersInSeveralThreads) {
  const ChatTemplate shared("{% for m in messages %}{{ '<' ~ m.role ~ '>' + m.content }}{% endfor %}", "t");
  std::vector<std::thread> threads;
  std::vector<std::string> results(4);
  for (size_t i = 0; i < results.size(); ++i) {
    threads.emplace_back([&, i] {
      const ordered_json variables = {{"messages", {{{"role", "user"}, {"content", std::to_string(i)}}}}};
      for (int k = 0; k < 200; ++k) results[i] = shared.render(variables);
    });
  }
  for (auto& thread : threads) thread.join();
  for (size_t i = 0; i < results.size(); ++i) EXPECT_EQ(results[i], "<user>" + std::to_string(i));
}

TEST(ChatTemplate, CanBeMoved) {
  ChatTemplate a("{{ 1 }}", "a"), b("{{ 2 }}", "b");
  a = std::move(b);
  EXPECT_EQ(ChatTemplate(std::move(a)).render(ordered_json::object()), "2");
}

}  // namespace
}  // namespace millrace
