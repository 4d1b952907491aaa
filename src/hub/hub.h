// The model hub: what `millrace pull`, `list` and `rm` and the server's /api/pull do. A name such as
// hf:owner/name:Q4_K_M becomes files of Hugging Face's hub (or of a mirror with its API), fetched into the
// cache that the `hf` tool and its Python library share, so that each finds what the other has fetched.
// Functions throw Error; nothing here writes to a terminal. docs/models.md describes it for users.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace millrace::hub {

// Where the hub is and where files go.
struct Settings {
  std::string endpoint = "https://huggingface.co";  // without a slash at the end
  std::string token;                                // empty: none
  std::string cache;                                // the folder of models--owner--name
  bool offline = false;                             // never ask the network
  int connections = 8;                              // at the same time, for one large file
};
// HF_ENDPOINT, HF_TOKEN, HF_TOKEN_PATH, HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE and XDG_CACHE_HOME, read as the
// `hf` tool reads them.
Settings settings_from_environment();

// Why this build cannot fetch anything; empty when it can.
std::string why_no_network();

// hf:owner/name[@revision][:file or quantization]
struct ModelName {
  std::string repo;  // owner/name
  std::string revision = "main";
  std::string choice;  // a file of the repository or a quantization as people write it; empty: the default

  std::string text() const;  // hf:...
};
// Also hf.co/owner/name and addresses of the hub's pages. Empty for what is no name of the hub at all; throws
// Error{kBadInput} for one that is malformed.
std::optional<ModelName> parse_name(std::string_view text);

struct RepoFile {
  std::string path;       // in the repository
  uint64_t size = 0;      // bytes
  std::string sha256;     // of files in LFS; else empty
  std::string blob_sha1;  // git's name of the content, of the others
};

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

// The head of a model that is not here: files of the right sizes that hold what describes the tensors and
// holes for their data. Enough for a memory plan. Removed when the object goes.
class RemoteHead {
 public:
  RemoteHead(const PullPlan& plan, const Settings& settings);
  ~RemoteHead();
  RemoteHead(const RemoteHead&) = delete;
  RemoteHead& operator=(const RemoteHead&) = delete;
  const std::string& path() const { return path_; }  // to open

 private:
  void fetch(const PullPlan& plan, const Settings& settings);
  std::string folder_, path_;
};

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

// Short names for models that Millrace runs.
struct KnownModel {
  std::string_view name;     // gpt-oss-20b
  std::string_view hub;      // hf:owner/name[:choice]
  std::string_view license;  // as its publisher names it
};
const std::vector<KnownModel>& known_models();
const KnownModel* find_known(std::string_view name);  // case does not matter; nullptr: not known
// A GGUF file in one of these folders that bears the model's name and a quantization; empty: none.
std::string find_in_folders(const KnownModel& model, const std::vector<std::string>& folders);
// Known names that resemble `name`, best first, at most three.
std::vector<std::string_view> similar_names(std::string_view name);

}  // namespace millrace::hub
