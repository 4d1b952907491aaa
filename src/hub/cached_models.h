// Models that are here: what `millrace list` and `rm` do.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "hub/model_name.h"
#include "hub/settings.h"

namespace millrace::hub {

// A model of the cache: a GGUF file (with all its parts) or a directory of safetensors.
struct CachedModel {
  ModelName name;  // with the label as its choice, and the commit where no branch leads to it
  std::string commit, label, path;
  std::string architecture;        // as the file says: gpt-oss, qwen3; of list_cached only
  std::vector<std::string> files;  // paths in the snapshot
  uint64_t bytes = 0;
  int64_t last_used = 0;  // seconds since 1970
};
// The model that a name means among what is here; nothing is asked of the network.
std::optional<CachedModel> find_cached(const ModelName& name, const Settings& settings);
std::vector<CachedModel> list_cached(const Settings& settings);
// So that list_cached knows when it was used. Failures do not matter: a cache may be read-only.
void mark_used(const CachedModel& model);

// Downloads that were interrupted: repository -> bytes on disk.
struct PartialDownload {
  std::string repo;
  uint64_t bytes = 0;
};
std::vector<PartialDownload> list_partial(const Settings& settings);

struct Removal {
  std::string what;                // for people: hf:owner/name:Q4_K_M
  std::vector<std::string> paths;  // files and folders that go
  std::vector<std::string> refs;   // that lead nowhere then
  uint64_t bytes = 0;              // that become free
};
// A name without a choice means all of its repository. Throws Error{kBadInput} when nothing of it is here,
// kBusy while somebody fetches it.
Removal plan_removal(const ModelName& name, const Settings& settings);
void remove(const Removal& removal);

}  // namespace millrace::hub
