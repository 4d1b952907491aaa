// The cache's folders, as the `hf` tool lays them out:
//   models--owner--name/blobs/HASH                     a file's content
//   models--owner--name/snapshots/COMMIT/PATH          links into blobs
//   models--owner--name/refs/main                      COMMIT
//   .locks/models--owner--name/HASH.lock               held while HASH is fetched
// and, of Millrace's own, blobs/HASH.millrace.incomplete with HASH.millrace.state beside it for what is under
// way.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/descriptor.h"
#include "hub/repo_file.h"
#include "hub/settings.h"

namespace millrace::hub {

class RepoFolder {
 public:
  RepoFolder(const Settings& settings, std::string_view repo);

  const std::string& path() const { return path_; }
  std::string blob(std::string_view hash) const { return path_ + "/blobs/" + std::string(hash); }
  std::string partial(std::string_view hash) const { return blob(hash) + ".millrace.incomplete"; }
  std::string state(std::string_view hash) const { return blob(hash) + ".millrace.state"; }
  std::string snapshot(std::string_view commit) const { return path_ + "/snapshots/" + std::string(commit); }
  std::string lock(std::string_view hash) const { return locks_ + "/" + std::string(hash) + ".lock"; }
  const std::string& locks() const { return locks_; }

  // The commit that a branch or tag led to when it was last fetched; a commit is itself. Empty: not known.
  std::string commit_of(const std::string& revision) const;
  std::vector<std::string> commits() const;  // with a snapshot, the latest first
  // Paths below a snapshot whose content is here, with their sizes.
  std::vector<RepoFile> files_of(std::string_view commit) const;

  void make_folders() const;
  void link(std::string_view commit, const std::string& file, std::string_view hash) const;
  void write_ref(const std::string& revision, const std::string& commit) const;

 private:
  std::string path_, locks_;
};

// owner/name of a folder of the cache; empty: it is none of a model.
std::string repo_of_folder(std::string_view folder);

// flock on a lock file, which other programs that share the cache respect. An empty result: somebody has it.
std::optional<Descriptor> try_lock(const std::string& path);

}  // namespace millrace::hub
