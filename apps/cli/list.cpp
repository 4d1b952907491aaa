#include "list.h"

#include <fmt/chrono.h>
#include <fmt/core.h>

#include <algorithm>
#include <ctime>
#include <memory>
#include <nlohmann/json.hpp>

#include "hub/cached_models.h"
#include "hub/known_models.h"
#include "hub/model_name.h"
#include "hub/settings.h"
#include "io/printable.h"
#include "output.h"
#include "prompt.h"

namespace millrace::cli {
namespace {

using Json = nlohmann::ordered_json;

struct ListOptions {
  bool json = false, known = false;
};

constexpr const char* kListFooter =
    "Examples:\n"
    "  millrace list                       # what is here, and the names to run it by\n"
    "  millrace list --known               # short names of models that can be fetched\n"
    "  millrace list --json | jq '.models[] | {name, bytes}'\n"
    "The cache is the hf tool's: what it has fetched is listed too, as far as Millrace reads it.";

using Row = std::vector<std::string>;

// Columns as wide as their widest cell; the last is not filled up.
std::string table(const std::vector<Row>& rows) {
  std::vector<size_t> widths(rows[0].size());
  for (const Row& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const Row& row : rows) {
    for (size_t i = 0; i + 1 < row.size(); ++i) out += fmt::format("{:<{}}  ", row[i], widths[i]);
    out += row.back() + "\n";
  }
  return out;
}

std::string age_text(int64_t then) {
  const int64_t s = std::max<int64_t>(0, std::time(nullptr) - then);
  if (s < 120) return "just now";
  if (s < 7200) return fmt::format("{} minutes ago", s / 60);
  if (s < 48 * 3600) return fmt::format("{} hours ago", s / 3600);
  return fmt::format("{} days ago", s / 86400);
}

// Names of files come from others: no control characters on the terminal.
std::string shown(const std::string& text) {
  const std::string quoted = io::printable(text, 200);
  return quoted.substr(1, quoted.size() - 2);
}

void print_known(const ListOptions& options) {
  const hub::Settings settings = hub::settings_from_environment();
  Json list = Json::array();
  std::vector<Row> rows = {{"NAME", "HERE", "LICENSE", "IS"}};
  for (const hub::KnownModel& model : hub::known_models()) {
    const bool here = hub::find_cached(*hub::parse_name(model.hub), settings).has_value();
    list.push_back({{"name", model.name}, {"model", model.hub}, {"license", model.license}, {"here", here}});
    rows.push_back(
        {std::string(model.name), here ? "yes" : "no", std::string(model.license), std::string(model.hub)});
  }
  if (options.json) {
    write_json({{"known", std::move(list)}});
  } else {
    write_stdout(table(rows));
  }
}

void print_cached(const ListOptions& options) {
  const hub::Settings settings = hub::settings_from_environment();
  std::vector<hub::CachedModel> models = hub::list_cached(settings);
  std::stable_sort(models.begin(), models.end(),
                   [](const auto& a, const auto& b) { return a.last_used > b.last_used; });
  const std::vector<hub::PartialDownload> partial = hub::list_partial(settings);
  if (options.json) {
    Json list = Json::array(), rest = Json::array();
    for (const hub::CachedModel& model : models) {
      list.push_back({{"name", model.name.text()},
                      {"path", model.path},
                      {"files", model.files},
                      {"bytes", model.bytes},
                      {"quantization", model.label},
                      {"architecture", valid_utf8(model.architecture)},
                      {"commit", model.commit},
                      {"last_used", model.last_used}});
    }
    for (const hub::PartialDownload& download : partial) {
      rest.push_back({{"name", "hf:" + download.repo}, {"bytes", download.bytes}});
    }
    write_json({{"cache", settings.cache}, {"models", std::move(list)}, {"incomplete", std::move(rest)}});
    return;
  }
  if (models.empty() && partial.empty()) {
    write_stdout(fmt::format("no models in {}; to fetch one: millrace pull smollm2-135m\n", settings.cache));
    return;
  }
  std::vector<Row> rows = {{"NAME", "SIZE", "FILES", "QUANTIZATION", "ARCHITECTURE", "LAST USED"}};
  for (const hub::CachedModel& model : models) {
    rows.push_back({shown(model.name.text()), human_bytes(model.bytes), std::to_string(model.files.size()),
                    shown(model.label), shown(model.architecture), age_text(model.last_used)});
  }
  for (const hub::PartialDownload& download : partial) {
    rows.push_back({shown("hf:" + download.repo), human_bytes(download.bytes), "", "incomplete", "",
                    "pull it again to go on"});
  }
  write_stdout(table(rows));
}

}  // namespace

void add_list(CommandLine& line) {
  Command command = line.add("list", "the models on this machine, and names of others");
  auto options = std::make_shared<ListOptions>();
  command.flag("--known", options->known, "the short names that Millrace knows");
  command.flag("--json", options->json, "one JSON object");
  command.footer(kListFooter);
  command.runs([options] {
    options->known ? print_known(*options) : print_cached(*options);
    return 0;
  });
}

}  // namespace millrace::cli
