// Ollama's /api/delete: removes a model that was fetched from the cache on disk. Only with --allow-pull, and
// only what no file of a model that was given to the server is part of.
#include <fmt/core.h>

#include <algorithm>
#include <filesystem>

#include "api_error.h"
#include "endpoints.h"
#include "hub/cached_models.h"
#include "hub/settings.h"
#include "json_reply.h"
#include "ollama_fields.h"

namespace millrace::server {
namespace {

namespace fs = std::filesystem;

// As it is written, and where links lead.
std::vector<fs::path> both_forms(const std::string& path) {
  std::error_code ignored;
  return {fs::absolute(path, ignored).lexically_normal(), fs::weakly_canonical(path, ignored)};
}

bool is_below(const fs::path& path, const fs::path& folder) {
  return std::mismatch(folder.begin(), folder.end(), path.begin(), path.end()).first == folder.end();
}

bool touches(const hub::Removal& removal, const std::string& path) {
  const std::vector<fs::path> used = both_forms(path);
  return std::any_of(removal.paths.begin(), removal.paths.end(), [&](const std::string& removed) {
    for (const fs::path& a : both_forms(removed)) {
      for (const fs::path& b : used) {
        if (is_below(a, b) || is_below(b, a)) return true;
      }
    }
    return false;
  });
}

}  // namespace

Reply ollama_delete(Api& api, const HttpRequest& request, const Client& /*client*/) {
  const Json body = parse_object(request.body);
  const std::string name = ollama_model(Fields(body), api);
  if (!api.options().allow_pull) {
    throw ApiError(403, "models are deleted only by a server that was started with --allow-pull", "",
                   "not_allowed");
  }
  if (api.models().has(name) && !api.models().status(name).pulled) {
    throw ApiError(403, fmt::format("the model '{}' was not pulled: its files are not this server's", name),
                   "model", "not_allowed");
  }
  const hub::Settings settings = hub::settings_from_environment();
  const std::optional<hub::CachedModel> cached = hub::find_cached(name_on_hub(name), settings);
  if (!cached) {
    throw ApiError(404, fmt::format("the model '{}' is not here", name.substr(0, 200)), "model",
                   "model_not_found");
  }
  // Of this name alone: a repository may hold others.
  const hub::Removal removal = hub::plan_removal(cached->name, settings);
  api.models().drop([&](const std::string& path) { return touches(removal, path); });
  hub::remove(removal);
  api.log().write("info", "model deleted", {{"model", name}, {"bytes", static_cast<double>(removal.bytes)}});
  return json_reply({{"status", "success"}});
}

}  // namespace millrace::server
