// plan_pull and pull: from a name to files in the cache.
#include "hub/puller.h"

#include <fmt/core.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "base/error.h"
#include "hub/blob_download.h"
#include "hub/file_choice.h"
#include "hub/hub_client.h"
#include "hub/model_cache.h"
#include "hub/model_name.h"
#include "hub/repo_file.h"
#include "hub/safe_path.h"
#include "hub/settings.h"

namespace millrace::hub {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

const std::string& hash_of(const RepoFile& file) {
  return file.sha256.empty() ? file.blob_sha1 : file.sha256;
}

bool has_content(const std::string& path, uint64_t size) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) &&
         static_cast<uint64_t>(status.st_size) == size;
}

bool is_here(const RepoFolder& folder, const std::string& commit, const RepoFile& file) {
  return has_content(folder.snapshot(commit) + "/" + file.path, file.size) ||
         (!hash_of(file).empty() && has_content(folder.blob(hash_of(file)), file.size));
}

// What the list of files did not say, from the file's own headers.
void complete(RepoFile& file, const HubClient::Location& location) {
  if (hash_of(file).empty()) {
    if (is_hex(location.etag, 64)) file.sha256 = location.etag;
    if (is_hex(location.etag, 40)) file.blob_sha1 = location.etag;
  }
  if (file.size == 0 && location.has_size) file.size = location.size;
  if (hash_of(file).empty()) {
    throw_error(ErrorCode::kIo, "{}: found no hash of it at the hub, expected one to check it by", file.path);
  }
}

// Bytes that an earlier pull has reserved on the disk.
uint64_t reserved(const RepoFolder& folder, const RepoFile& file) {
  struct stat status {};
  if (hash_of(file).empty() || ::stat(folder.partial(hash_of(file)).c_str(), &status) != 0) return 0;
  return std::min(file.size, static_cast<uint64_t>(status.st_blocks) * 512);
}

void check_disk(const PullPlan& plan, const RepoFolder& folder, const Settings& settings) {
  uint64_t needed = 0;
  for (const RepoFile& file : plan.files) {
    if (!is_here(folder, plan.commit, file)) needed += file.size - reserved(folder, file);
  }
  struct statvfs status {};
  if (::statvfs(folder.path().c_str(), &status) != 0) return;  // opening the file says why
  const uint64_t available = static_cast<uint64_t>(status.f_bavail) * status.f_frsize;
  if (available < needed) {
    throw_error(ErrorCode::kIo, "{}: {:.2f} GiB of disk space are free, expected {:.2f} GiB for {}",
                settings.cache, static_cast<double>(available) / (1 << 30),
                static_cast<double>(needed) / (1 << 30), plan.name.text());
  }
}

class Puller {
 public:
  Puller(const PullPlan& plan, const Settings& settings, const OnProgress& on_progress)
      : plan_(plan), settings_(settings), on_progress_(on_progress), folder_(settings, plan.name.repo) {
    progress_.total = plan.bytes;
  }

  void run() {
    folder_.make_folders();
    check_disk(plan_, folder_, settings_);
    // Small ones first: they say what the large one is.
    std::vector<RepoFile> files = plan_.files;
    std::stable_sort(files.begin(), files.end(),
                     [](const RepoFile& a, const RepoFile& b) { return a.size < b.size; });
    for (RepoFile& file : files) {
      progress_.file = file.path;
      progress_.file_bytes = file.size;
      one(file);
      before_ += file.size;
      report(PullProgress::Phase::kDownloading, 0);
    }
    folder_.write_ref(plan_.name.revision, plan_.commit);
  }

 private:
  void one(RepoFile& file) {
    if (has_content(folder_.snapshot(plan_.commit) + "/" + file.path, file.size)) return;
    std::string hash = hash_of(file);
    if (hash.empty() || !has_content(folder_.blob(hash), file.size)) {
      hash = fetch(file);
    }
    folder_.link(plan_.commit, file.path, hash);
  }

  std::string fetch(RepoFile& file) {
    if (!client_) client_.emplace(settings_, [this] { return on_progress_(progress_); });
    HubClient& client = *client_;
    HubClient::Location location = client.locate(plan_.name, plan_.commit, file.path);
    complete(file, location);
    if (location.etag.empty()) location.etag = hash_of(file);
    if (location.has_size && location.size != file.size) {
      throw_error(ErrorCode::kIo, "{}: found {} bytes at the hub, expected {}", file.path, location.size,
                  file.size);
    }
    const Descriptor lock = locked(folder_.lock(location.etag));
    if (has_content(folder_.blob(location.etag), file.size)) return location.etag;  // by who had the lock
    BlobDownload download(client, plan_.name, plan_.commit, file, folder_, location, settings_.connections,
                          [&](uint64_t done, bool checking) {
                            using Phase = PullProgress::Phase;
                            report(checking ? Phase::kChecking : Phase::kDownloading, done);
                          });
    download.run();
    return location.etag;
  }

  Descriptor locked(const std::string& path) {
    while (true) {
      if (std::optional<Descriptor> lock = try_lock(path)) return std::move(*lock);
      report(PullProgress::Phase::kWaiting, 0);
      client_->pause(milliseconds(200));
    }
  }

  void report(PullProgress::Phase phase, uint64_t done) {
    progress_.phase = phase;
    progress_.file_done = done;
    progress_.done = before_ + (phase == PullProgress::Phase::kChecking ? progress_.file_bytes : done);
    if (!on_progress_(progress_)) throw Stopped{};
  }

  const PullPlan& plan_;
  const Settings& settings_;
  const OnProgress& on_progress_;
  RepoFolder folder_;
  std::optional<HubClient> client_;  // only when something is missing: what is here needs no network
  PullProgress progress_;
  uint64_t before_ = 0;  // bytes of the files that are done
};

}  // namespace

PullPlan plan_pull(const ModelName& name, const Settings& settings) {
  HubClient client(settings);
  HubClient::Repository repository = client.repository(name);
  FileChoice choice = choose_files(repository.files, name.choice);
  if (!choice.problem.empty()) throw_error(ErrorCode::kBadInput, "{}: {}", name.text(), choice.problem);
  PullPlan plan{.name = name,
                .commit = repository.commit,
                .label = choice.group.label,
                .why = choice.why,
                .others = choice.others,
                .license = repository.license,
                .files = std::move(choice.group.files)};
  const RepoFolder folder(settings, name.repo);
  for (RepoFile& file : plan.files) {
    if (file.size == 0 || hash_of(file).empty()) complete(file, client.locate(name, plan.commit, file.path));
    plan.bytes += file.size;
    if (!is_here(folder, plan.commit, file)) plan.missing_bytes += file.size;
  }
  return plan;
}

std::optional<std::string> pull(const PullPlan& plan, const Settings& settings,
                                const OnProgress& on_progress) {
  const OnProgress always = [](const PullProgress&) { return true; };
  try {
    Puller(plan, settings, on_progress ? on_progress : always).run();
  } catch (const Stopped&) {
    return std::nullopt;
  }
  const std::string snapshot = RepoFolder(settings, plan.name.repo).snapshot(plan.commit);
  const std::string& first = plan.files[0].path;
  return first.ends_with(".gguf") ? snapshot + "/" + first : snapshot;
}

}  // namespace millrace::hub
