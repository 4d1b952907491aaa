// What is in the cache: found by name, listed, removed. Other programs put files there too, so nothing is
// assumed of a folder but its layout.
#include "hub/cached_models.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>

#include "base/error.h"
#include "hub/file_choice.h"
#include "hub/gguf_head.h"
#include "hub/model_cache.h"
#include "hub/model_name.h"
#include "hub/repo_file.h"
#include "hub/safe_path.h"
#include "hub/settings.h"

namespace millrace::hub {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPartialEnd = ".millrace.incomplete";

CachedModel cached_model(const RepoFolder& folder, const ModelName& name, const std::string& commit,
                         const FileGroup& group) {
  CachedModel model;
  model.name = name;
  model.name.choice = group.label;
  model.commit = commit;
  model.label = group.label;
  const std::string snapshot = folder.snapshot(commit);
  model.path = group.gguf ? snapshot + "/" + group.files[0].path : snapshot;
  for (const RepoFile& file : group.files) {
    model.files.push_back(file.path);
    model.bytes += file.size;
    struct stat status {};
    if (::stat((snapshot + "/" + file.path).c_str(), &status) != 0) continue;
    model.last_used = std::max<int64_t>({model.last_used, status.st_atime, status.st_mtime});
  }
  return model;
}

// Folders of models, by their repositories' names.
std::map<std::string, std::string> repositories(const Settings& settings) {
  std::map<std::string, std::string> found;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(settings.cache, error)) {
    const std::string repo = repo_of_folder(entry.path().filename().string());
    if (!repo.empty() && entry.is_directory(error)) found.emplace(repo, entry.path().string());
  }
  return found;
}

// The branch or tag that leads to each commit; main where there are several.
std::map<std::string, std::string> revisions_of(const RepoFolder& folder) {
  std::map<std::string, std::string> names;
  const fs::path root = folder.path() + "/refs";
  std::error_code error;
  for (fs::recursive_directory_iterator at(root, error), end; !error && at != end; at.increment(error)) {
    std::error_code ignored;
    if (!at->is_regular_file(ignored)) continue;
    const std::string revision = at->path().lexically_relative(root).generic_string();
    const std::string commit = is_safe_path(revision) ? folder.commit_of(revision) : std::string();
    if (commit.empty()) continue;
    std::string& name = names[commit];
    if (name.empty() || revision == "main") name = revision;
  }
  return names;
}

std::string architecture_of(const CachedModel& model, bool gguf) {
  if (gguf) return gguf_architecture(model.path);
  const std::string config = model.path + "/config.json";
  const nlohmann::json json = nlohmann::json::parse(std::ifstream(config), nullptr, false);
  return json.is_object() && json.contains("model_type") && json["model_type"].is_string()
             ? json["model_type"].get<std::string>()
             : std::string();
}

uint64_t bytes_on_disk(const fs::path& path) {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0 ? static_cast<uint64_t>(status.st_blocks) * 512 : 0;
}

uint64_t bytes_below(const fs::path& root) {
  uint64_t bytes = 0;
  std::error_code error;
  for (fs::recursive_directory_iterator at(root, error), end; !error && at != end; at.increment(error)) {
    std::error_code ignored;
    if (at->is_regular_file(ignored) && !at->is_symlink(ignored)) bytes += bytes_on_disk(at->path());
  }
  return bytes;
}

void check_nobody_fetches(const RepoFolder& folder, const ModelName& name) {
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder.locks(), error)) {
    if (!try_lock(entry.path().string())) {
      throw_error(ErrorCode::kBusy, "{}: found a download under way, expected none", name.text());
    }
  }
}

// The links of a snapshot whose blobs other links of the repository need too keep those blobs.
Removal removal_of_files(const RepoFolder& folder, const std::string& what,
                         const std::set<std::string>& links) {
  Removal removal{.what = what, .paths = {}, .refs = {}, .bytes = 0};
  std::set<std::string> blobs, kept;
  for (const std::string& commit : folder.commits()) {
    bool empty = true;
    for (const RepoFile& file : folder.files_of(commit)) {
      const std::string link = folder.snapshot(commit) + "/" + file.path;
      std::error_code error;
      const std::string blob = fs::canonical(link, error).string();
      (links.contains(link) ? blobs : kept).insert(blob);
      empty = empty && links.contains(link);
    }
    if (!empty) continue;
    for (const auto& [led_to, revision] : revisions_of(folder)) {
      if (led_to == commit) removal.refs.push_back(folder.path() + "/refs/" + revision);
    }
    removal.paths.push_back(folder.snapshot(commit));
  }
  for (const std::string& link : links) removal.paths.push_back(link);
  for (const std::string& blob : blobs) {
    if (kept.contains(blob)) continue;
    if (!links.contains(blob)) removal.paths.push_back(blob);
    removal.bytes += bytes_on_disk(blob);
  }
  return removal;
}

}  // namespace

std::optional<CachedModel> find_cached(const ModelName& name, const Settings& settings) {
  const RepoFolder folder(settings, name.repo);
  std::vector<std::string> commits;
  if (const std::string commit = folder.commit_of(name.revision); !commit.empty()) commits.push_back(commit);
  // Another file may have moved main on: what an earlier commit brought is still there.
  if (name.revision == "main") {
    for (std::string& commit : folder.commits()) commits.push_back(std::move(commit));
  }
  for (const std::string& commit : commits) {
    const FileChoice choice = choose_files(folder.files_of(commit), name.choice);
    if (choice.problem.empty()) return cached_model(folder, name, commit, choice.group);
  }
  return std::nullopt;
}

std::vector<CachedModel> list_cached(const Settings& settings) {
  std::vector<CachedModel> models;
  for (const auto& [repo, path] : repositories(settings)) {
    const RepoFolder folder(settings, repo);
    const std::map<std::string, std::string> revisions = revisions_of(folder);
    for (const std::string& commit : folder.commits()) {
      const auto led = revisions.find(commit);
      const ModelName name{repo, led == revisions.end() ? commit : led->second, {}};
      for (const FileGroup& group : group_files(folder.files_of(commit))) {
        models.push_back(cached_model(folder, name, commit, group));
        models.back().architecture = architecture_of(models.back(), group.gguf);
      }
    }
  }
  return models;
}

void mark_used(const CachedModel& model) {
  const fs::path file(model.path);
  const std::string target = fs::is_directory(file) ? (file / "config.json").string() : file.string();
  const struct timespec times[2] = {{.tv_sec = 0, .tv_nsec = UTIME_NOW},
                                    {.tv_sec = 0, .tv_nsec = UTIME_OMIT}};
  (void)::utimensat(AT_FDCWD, target.c_str(), times, 0);  // a cache of somebody else's may be read-only
}

std::vector<PartialDownload> list_partial(const Settings& settings) {
  std::vector<PartialDownload> partial;
  for (const auto& [repo, path] : repositories(settings)) {
    uint64_t bytes = 0;
    bool any = false;
    std::error_code error;
    for (const fs::directory_entry& entry : fs::directory_iterator(path + "/blobs", error)) {
      if (!entry.path().filename().string().ends_with(kPartialEnd)) continue;
      any = true;
      bytes += bytes_on_disk(entry.path());
    }
    if (any) partial.push_back({repo, bytes});
  }
  return partial;
}

Removal plan_removal(const ModelName& name, const Settings& settings) {
  const RepoFolder folder(settings, name.repo);
  std::error_code error;
  if (!fs::is_directory(folder.path(), error)) {
    throw_error(ErrorCode::kBadInput, "{}: found nothing of it in {}, expected a model of `millrace list`",
                name.text(), settings.cache);
  }
  check_nobody_fetches(folder, name);
  if (name.choice.empty() && name.revision == "main") {
    return {.what = "all of " + name.text(),
            .paths = {folder.path(), folder.locks()},
            .refs = {},
            .bytes = bytes_below(folder.path())};
  }
  const std::vector<std::string> commits =
      name.revision == "main" ? folder.commits() : std::vector<std::string>{folder.commit_of(name.revision)};
  std::set<std::string> links;
  for (const std::string& commit : commits) {
    if (commit.empty()) continue;
    const std::vector<RepoFile> files = folder.files_of(commit);
    if (name.choice.empty()) {
      for (const RepoFile& file : files) links.insert(folder.snapshot(commit) + "/" + file.path);
      continue;
    }
    const FileChoice choice = choose_files(files, name.choice);
    for (const RepoFile& file : choice.group.files) links.insert(folder.snapshot(commit) + "/" + file.path);
  }
  if (links.empty()) {
    throw_error(ErrorCode::kBadInput, "{}: found no such file in {}, expected a model of `millrace list`",
                name.text(), folder.path());
  }
  return removal_of_files(folder, name.text(), links);
}

void remove(const Removal& removal) {
  // What leads to a file goes before the file: whoever looks meanwhile finds less, never something broken.
  const auto remove_all = [](const std::string& path) {
    std::error_code error;
    fs::remove_all(path, error);
    if (error) throw_error(ErrorCode::kIo, "{}: cannot remove: {}", path, error.message());
  };
  for (const std::string& path : removal.refs) remove_all(path);
  for (const std::string& path : removal.paths) remove_all(path);
}

}  // namespace millrace::hub
