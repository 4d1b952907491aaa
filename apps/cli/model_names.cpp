#include "model_names.h"

#include <fmt/format.h>

#include <filesystem>
#include <system_error>

#include "base/error.h"
#include "confirm.h"
#include "download_progress.h"
#include "fetch_estimate.h"
#include "hub/cached_models.h"
#include "hub/http_client.h"
#include "hub/known_models.h"
#include "output.h"

namespace millrace::cli {
namespace {

namespace fs = std::filesystem;

// Where files with a model's name are looked for before anything is fetched.
const std::vector<std::string>& own_folders() {
  static const std::vector<std::string> folders = {".", "models"};
  return folders;
}

bool is_path(const std::string& given) {
  std::error_code ignored;
  return fs::exists(given, ignored) || given.find('/') != std::string::npos || given.ends_with(".gguf") ||
         given.ends_with(".safetensors");
}

[[noreturn]] void throw_offline(const hub::ModelName& name, const hub::Settings& settings) {
  std::vector<std::string> here;
  for (const hub::CachedModel& model : hub::list_cached(settings)) here.push_back(model.name.text());
  throw_error(ErrorCode::kBadInput, "{}: is not in {} and HF_HUB_OFFLINE is set; {}", name.text(),
              settings.cache,
              here.empty() ? std::string("nothing is there")
                           : fmt::format("what is there: {}", fmt::join(here, ", ")));
}

void check_network(const hub::ModelName& name, const hub::Settings& settings) {
  if (settings.offline) throw_offline(name, settings);
  if (const std::string why = hub::why_no_network(); !why.empty()) {
    throw_error(ErrorCode::kUnsupported, "{}: is not in {}, and {}", name.text(), settings.cache, why);
  }
}

std::string fetch_if_wanted(const std::string& given, const hub::ModelName& name,
                            const hub::Settings& settings, const EngineOptions& options) {
  check_network(name, settings);
  const hub::PullPlan plan = hub::plan_pull(name, settings);
  if (plan.missing_bytes > 0) {
    write_stderr(describe_fetch(plan, estimate_fetch(plan, settings, options), settings));
    const std::string refusal =
        fmt::format("{}: is not on this machine: fetch its {} with `millrace pull {}`, or say --yes", given,
                    human_bytes(plan.missing_bytes), given);
    if (!confirmed("Fetch it?", refusal)) throw_error(ErrorCode::kBadInput, "{}: was not fetched", given);
  }
  return fetch_model(plan, settings);
}

}  // namespace

std::string find_on_this_machine(const std::string& given, const hub::ModelName& name,
                                 const hub::Settings& settings) {
  if (const hub::KnownModel* known = hub::find_known(given)) {
    std::string file = hub::find_in_folders(*known, own_folders());
    if (!file.empty()) {
      write_stderr(fmt::format("millrace: {} is {}\n", given, file));
      return file;
    }
  }
  const std::optional<hub::CachedModel> cached = hub::find_cached(name, settings);
  if (!cached) return {};
  hub::mark_used(*cached);
  return cached->path;
}

std::optional<hub::ModelName> hub_name(const std::string& given) {
  std::error_code ignored;
  if (fs::exists(given, ignored)) return std::nullopt;
  if (std::optional<hub::ModelName> name = hub::parse_name(given)) return name;
  if (is_path(given)) return std::nullopt;
  if (const hub::KnownModel* known = hub::find_known(given)) return hub::parse_name(known->hub);
  const std::vector<std::string_view> similar = hub::similar_names(given);
  throw_error(
      ErrorCode::kBadInput,
      "{}: found no such file and no model of this name{}, expected a path, hf:owner/name or a name of "
      "`millrace list --known`",
      given, similar.empty() ? "" : fmt::format(" (did you mean {}?)", fmt::join(similar, ", ")));
}

std::string find_model(const std::string& given, const EngineOptions& options) {
  const std::optional<hub::ModelName> name = hub_name(given);
  if (!name) return given;
  const hub::Settings settings = hub::settings_from_environment();
  if (std::string path = find_on_this_machine(given, *name, settings); !path.empty()) return path;
  return fetch_if_wanted(given, *name, settings, options);
}

FoundHead find_head(const std::string& given) {
  const std::optional<hub::ModelName> name = hub_name(given);
  if (!name) return {given, nullptr};
  const hub::Settings settings = hub::settings_from_environment();
  if (std::string path = find_on_this_machine(given, *name, settings); !path.empty()) return {path, nullptr};
  check_network(*name, settings);
  const hub::PullPlan plan = hub::plan_pull(*name, settings);
  write_stderr(describe_fetch(plan, settings));
  auto head = std::make_unique<hub::RemoteHead>(plan, settings);
  return {head->path(), std::move(head)};
}

std::string model_title(const std::string& given) {
  std::error_code ignored;
  const hub::KnownModel* known = fs::exists(given, ignored) ? nullptr : hub::find_known(given);
  if (known != nullptr) return std::string(known->name);
  const std::optional<hub::ModelName> name = hub_name(given);
  if (!name) {
    const fs::path path(given);
    return path.has_filename() ? path.stem().string() : path.parent_path().filename().string();
  }
  const std::string repo = name->repo.substr(name->repo.find('/') + 1);
  return name->choice.empty() ? repo : repo + ":" + name->choice;
}

std::string fetch_model(const hub::PullPlan& plan, const hub::Settings& settings, bool json) {
  DownloadProgress progress(json);
  const std::optional<std::string> path = hub::pull(plan, settings, [&](const hub::PullProgress& at) {
    progress.update(at);
    return true;
  });
  progress.finish();
  return path.value();  // it is not stopped by the callback, which throws
}

}  // namespace millrace::cli
