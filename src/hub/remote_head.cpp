// RemoteHead: the first megabytes of a model's files, fetched by range requests into sparse files of the
// right size. Whatever reads the description of tensors reads it there as it would in the whole file.
#include "hub/remote_head.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "base/descriptor.h"
#include "base/error.h"
#include "hub/gguf_head.h"
#include "hub/hub_client.h"
#include "hub/puller.h"
#include "hub/repo_file.h"
#include "hub/settings.h"

namespace millrace::hub {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMebi = uint64_t{1} << 20;
constexpr uint64_t kFirstRead = 4 * kMebi;  // the vocabulary of most models fits
constexpr uint64_t kMostHead = 256 * kMebi;

void write_sparse(const std::string& path, const std::string& head, uint64_t size) {
  const Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  const auto length = static_cast<ssize_t>(head.size());
  if (file.get() < 0 || ::write(file.get(), head.data(), head.size()) != length ||
      ::ftruncate(file.get(), static_cast<off_t>(size)) != 0) {
    throw_error(ErrorCode::kIo, "{}: cannot write: {}", path, std::strerror(errno));
  }
}

class HeadReader {
 public:
  HeadReader(HubClient& client, const PullPlan& plan, const RepoFile& file)
      : client_(client), plan_(plan), file_(file) {
    location_ = client.locate(plan.name, plan.commit, file.path);
  }
  const std::string& read_until(uint64_t end) {
    end = std::min(end, file_.size);
    if (end > bytes_.size()) bytes_ += client_.read(plan_.name, location_, bytes_.size(), end);
    return bytes_;
  }
  std::string gguf() {
    for (uint64_t end = kFirstRead;; end *= 2) {
      if (has_whole_gguf_head(read_until(end)) || end >= std::min(file_.size, kMostHead)) return bytes_;
    }
  }
  std::string safetensors() {
    uint64_t header = 0;
    if (read_until(8).size() == 8) std::memcpy(&header, bytes_.data(), 8);
    return read_until(8 + std::min(header, kMostHead));
  }

 private:
  HubClient& client_;
  const PullPlan& plan_;
  const RepoFile& file_;
  HubClient::Location location_;
  std::string bytes_;
};

}  // namespace

RemoteHead::RemoteHead(const PullPlan& plan, const Settings& settings) {
  std::string pattern = (fs::temp_directory_path() / "millrace-head-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) {
    throw_error(ErrorCode::kIo, "{}: cannot make this folder: {}", pattern, std::strerror(errno));
  }
  folder_ = pattern;
  try {
    fetch(plan, settings);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
    throw;
  }
}

RemoteHead::~RemoteHead() {
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

void RemoteHead::fetch(const PullPlan& plan, const Settings& settings) {
  HubClient client(settings);
  path_ = folder_;
  for (const RepoFile& file : plan.files) {
    const std::string name = fs::path(file.path).filename().string();
    const bool gguf = name.ends_with(".gguf"), safetensors = name.ends_with(".safetensors");
    if (!gguf && !safetensors && name != "config.json" && name != "model.safetensors.index.json") continue;
    HeadReader reader(client, plan, file);
    const std::string head = gguf          ? reader.gguf()
                             : safetensors ? reader.safetensors()
                                           : reader.read_until(file.size);
    write_sparse(folder_ + "/" + name, head, file.size);
    if (gguf && path_ == folder_) path_ = folder_ + "/" + name;
  }
}

}  // namespace millrace::hub
