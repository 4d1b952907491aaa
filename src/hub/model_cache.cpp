#include "hub/model_cache.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "base/error.h"
#include "base/mapped_file.h"
#include "hub/safe_path.h"

namespace millrace::hub {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kModels = "models--";

[[noreturn]] void fail(const std::string& path, const char* what, const std::error_code& error) {
  throw_error(ErrorCode::kIo, "{}: cannot {}: {}", path, what, error.message());
}

void make_directory(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) fail(path, "make this folder", error);
}

}  // namespace

RepoFolder::RepoFolder(const Settings& settings, std::string_view repo) {
  std::string folder(kModels);
  for (const char c : repo) folder += c == '/' ? std::string("--") : std::string(1, c);
  path_ = settings.cache + "/" + folder;
  locks_ = settings.cache + "/.locks/" + folder;
}

std::string repo_of_folder(std::string_view folder) {
  if (!folder.starts_with(kModels)) return {};
  std::string repo(folder.substr(kModels.size()));
  if (const size_t at = repo.find("--"); at != std::string::npos) repo.replace(at, 2, "/");
  return is_safe_path(repo) && repo.find("--") == std::string::npos ? repo : std::string();
}

std::string RepoFolder::commit_of(const std::string& revision) const {
  if (is_commit(revision)) return revision;
  const std::string ref = path_ + "/refs/" + revision;
  std::error_code error;
  if (!fs::is_regular_file(ref, error)) return {};
  std::string commit = read_text_file(ref);
  while (!commit.empty() && (commit.back() == '\n' || commit.back() == ' ')) commit.pop_back();
  return is_commit(commit) ? commit : std::string();
}

std::vector<std::string> RepoFolder::commits() const {
  std::vector<std::pair<fs::file_time_type, std::string>> found;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(path_ + "/snapshots", error)) {
    const std::string name = entry.path().filename().string();
    if (is_commit(name) && entry.is_directory(error)) found.emplace_back(entry.last_write_time(error), name);
  }
  std::sort(found.rbegin(), found.rend());
  std::vector<std::string> commits;
  for (auto& [time, name] : found) commits.push_back(std::move(name));
  return commits;
}

std::vector<RepoFile> RepoFolder::files_of(std::string_view commit) const {
  std::vector<RepoFile> files;
  const fs::path root = snapshot(commit);
  std::error_code error;
  for (fs::recursive_directory_iterator at(root, error), end; !error && at != end; at.increment(error)) {
    std::error_code ignored;
    if (!fs::is_regular_file(at->path(), ignored)) continue;  // also a link whose blob is gone
    files.push_back({.path = at->path().lexically_relative(root).generic_string(),
                     .size = fs::file_size(at->path(), ignored),
                     .sha256 = {},
                     .blob_sha1 = {}});
  }
  std::sort(files.begin(), files.end(), [](const RepoFile& a, const RepoFile& b) { return a.path < b.path; });
  return files;
}

void RepoFolder::make_folders() const {
  for (const char* folder : {"/blobs", "/refs", "/snapshots"}) make_directory(path_ + folder);
  make_directory(locks_);
}

void RepoFolder::link(std::string_view commit, const std::string& file, std::string_view hash) const {
  const fs::path target = fs::path(snapshot(commit)) / file;
  make_directory(target.parent_path().string());
  // blobs/ from where the link lies: the cache may be moved.
  std::string relative = "../../blobs/" + std::string(hash);
  for (const char c : file) {
    if (c == '/') relative = "../" + relative;
  }
  std::error_code error;
  if (fs::read_symlink(target, error) == relative) return;
  fs::remove(target, error);
  error.clear();
  fs::create_symlink(relative, target, error);
  if (!error) return;
  // A file system without links: the content itself goes there, as the hf tool does it.
  error.clear();
  fs::rename(blob(hash), target, error);
  if (error) fail(target.string(), "make this link", error);
}

void RepoFolder::write_ref(const std::string& revision, const std::string& commit) const {
  if (is_commit(revision) || commit_of(revision) == commit) return;
  const std::string path = path_ + "/refs/" + revision;
  make_directory(fs::path(path).parent_path().string());
  AtomicFile file(path);
  file.write(commit.data(), commit.size());
  file.commit();
}

std::optional<Descriptor> try_lock(const std::string& path) {
  while (true) {
    Descriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0664));
    if (file.get() < 0) {
      throw_error(ErrorCode::kIo, "{}: cannot open this lock: {}", path, std::strerror(errno));
    }
    if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK || errno == EINTR) return std::nullopt;
      return file;  // a file system without locks: files appear whole anyway
    }
    // Who removes a repository removes its locks: one that was waited for may be gone.
    struct stat held {
    }, named{};
    if (::fstat(file.get(), &held) == 0 && ::stat(path.c_str(), &named) == 0 && held.st_ino == named.st_ino) {
      return file;
    }
  }
}

}  // namespace millrace::hub
