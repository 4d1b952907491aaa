// What `millrace pull` and the server's /api/pull do: a name becomes files of Hugging Face's hub (or of a
// mirror with its API), fetched into the cache that the `hf` tool and its Python library share, so that each
// finds what the other has fetched.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "hub/model_name.h"
#include "hub/repo_file.h"
#include "hub/settings.h"

namespace millrace::hub {

// What a name means today: the files to have, and those that are not here yet.
struct PullPlan {
  ModelName name;
  std::string commit;
  std::string label;                // Q4_K_M, MXFP4, safetensors, ...
  std::string why;                  // why this one of several, for people; empty: there was no choice
  std::vector<std::string> others;  // the labels that were not chosen
  std::string license;              // as the repository says; may be empty
  std::vector<RepoFile> files;      // the one that a model is opened by is first, or model files of a folder
  uint64_t bytes = 0, missing_bytes = 0;
};
// Asks the hub. Throws Error: kBadInput for what is not there or may not be read, kIo when it is not reached.
PullPlan plan_pull(const ModelName& name, const Settings& settings);

struct PullProgress {
  enum class Phase { kWaiting, kDownloading, kChecking };  // kWaiting: another process fetches this file
  Phase phase = Phase::kDownloading;
  std::string file;
  uint64_t file_done = 0, file_bytes = 0;
  uint64_t done = 0, total = 0;  // of all files, with what was here before
};
// Called several times a second on the caller's thread; false: stop. It may throw.
using OnProgress = std::function<bool(const PullProgress&)>;

// Fetches what is missing, checks every file's hash, and returns the path to open; empty: it was stopped.
// What was fetched by then is kept, and the next pull goes on from there.
std::optional<std::string> pull(const PullPlan& plan, const Settings& settings,
                                const OnProgress& on_progress);

}  // namespace millrace::hub
