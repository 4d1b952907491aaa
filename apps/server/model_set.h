// ModelSet: the models a server may serve, and which of them are loaded. A model is loaded when somebody asks
// for it, on a thread of the set's own, one after the other; it is unloaded when it has been idle for long,
// or, the least recently used first, when another needs its place. Never while it is leased.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "api_error.h"
#include "log.h"
#include "millrace/options.h"
#include "millrace/stats.h"
#include "model_file.h"
#include "model_plan.h"
#include "served_model.h"

namespace millrace::server {

// A model that can be loaded.
struct ModelSpec {
  std::string name = {};
  std::vector<std::string> aliases = {};      // other names that are taken for it
  EngineOptions engine = {};                  // with the path of its file, or its directory
  bool keep = false;                          // never unloaded by itself, and not by clients
  std::optional<double> unload_after_s = {};  // instead of the set's
  bool pulled = false;                        // fetched at a client's word, who may also have it deleted
};

struct ModelSetOptions {
  int max_models = 0;           // loaded at the same time; 0: as many as fit
  double unload_after_s = 0;    // idle; 0: never
  size_t memory_bytes = 0;      // of main memory for all together; 0: what the machine has
  EngineOptions defaults = {};  // of models that are taken in later; their path is set for each
  bool open_objects = false;    // objects without additionalProperties may hold more than what is named
};

class ModelSet {
 public:
  using Clock = std::chrono::steady_clock;

  // Throws Error{kBadInput} for none at all, and for a name that two have.
  ModelSet(std::vector<ModelSpec> specs, const ModelSetOptions& options, const Log& log);
  ~ModelSet();
  ModelSet(const ModelSet&) = delete;
  ModelSet& operator=(const ModelSet&) = delete;

  // Takes one that was loaded elsewhere: before the server starts, behind a progress bar.
  void adopt(const std::string& name, std::unique_ptr<Engine> engine);

  // Models that have come since the start: called by the set's own thread after rescan(). Those whose names
  // are known stay as they are.
  std::function<std::vector<ModelSpec>()> find_all;
  void rescan();
  // One more, with the set's default options. Throws Error{kBadInput} for a name that is taken.
  void take(const std::string& name, const std::string& path);
  // Those whose files are to be deleted leave the set. Throws ApiError{403} for one that was not pulled and
  // ApiError{409} for one that is loaded or about to be; nobody leaves then.
  void drop(const std::function<bool(const std::string& path)>& is_deleted);
  // Runs it on a thread of its own, which stop() asks to end and waits for.
  void in_background(std::function<void(const std::stop_token&)> work);

  // A model by its name or an alias, and ":" and an adapter's behind it; by no name, where there is only one.
  // Throws ApiError{404} for another name and ApiError{400} for none. Null: it is not loaded.
  ModelLease lease(const std::string& name);
  // The same as soon as it is loaded: with the lease, or with the reason why there is none. `done` is called
  // here when it is loaded already, else on the set's own thread: it must return soon.
  using Done = std::function<void(ModelLease lease, std::optional<ApiError> error)>;
  void load(const std::string& name, Done done);
  // As soon as it is idle. Throws ApiError{400} for one that is to be kept.
  void unload(const std::string& name);
  // How long it stays when it is idle, until it is unloaded: negative: for ever. One that is kept is kept.
  void stay(const std::string& name, double seconds);

  bool has(const std::string& name) const;  // by its name or an alias

  enum class State { kUnloaded, kLoading, kLoaded, kUnloading };
  struct Status {
    std::string name = {};
    std::vector<std::string> aliases = {};
    std::vector<std::string> adapters = {};
    std::string path = {};  // for the log and for who reads the file; never for an answer
    State state = State::kUnloaded;
    bool keep = false, pulled = false;
    int leases = 0;
    ModelFile file = {};
    bool own_memory = false;                 // it lies in the memory of its device
    size_t memory_bytes = 0;                 // that it takes, while loaded or being unloaded
    std::optional<ModelInfo> info = {};      // while loaded
    std::string format = {};                 // while loaded
    int64_t loaded_at = 0;                   // Unix time
    std::optional<double> unload_in_s = {};  // when nobody asks for it any more; absent: not by age
    uint64_t loads = 0, failed_loads = 0;
    std::string last_error = {};  // why it could not be loaded, as clients may read it
  };
  std::vector<Status> list() const;              // in the order they were given
  Status status(const std::string& name) const;  // throws as lease() does
  // What a model's engines have done, those before this one included; gauges are of now.
  EngineStats stats(const std::string& name) const;
  EngineStats stats() const;     // of all together
  std::string failure() const;   // the first engine's that has one (Engine::failure)
  std::string fallback() const;  // the same of Engine::fallback

  // No more loading: who waits is told so. Called when the server ends.
  void stop();

 private:
  struct Slot {
    ModelSpec spec;
    std::vector<std::string> adapters = {};  // the names of its own: "base:adapter" means it with one
    ModelLease model = nullptr;              // ours; leases are made from it
    State state = State::kUnloaded;
    int leases = 0;
    bool unload_wanted = false;
    double stay_s = 0;  // idle, until it is unloaded; negative: for ever
    Clock::time_point last_used = {};
    std::vector<Done> waiting = {};
    ModelFile file = {};
    size_t main_memory = 0;   // that it takes
    bool own_memory = false;  // its device has memory of its own
    EngineStats past = {};    // counters of engines that are gone
    uint64_t loads = 0, failed_loads = 0;
    std::string last_error = {};
  };

  Slot* known(const std::string& name) const;  // null: no such name
  Slot& find(const std::string& name) const;
  // Of a slot that has this name; empty: the name is the model's own.
  static std::string adapter_of(const Slot& slot, const std::string& name);
  ModelLease make_lease(Slot& slot);  // under the lock, as all below that take slots
  Status status_of(const Slot& slot) const;
  EngineStats stats_of(const Slot& slot) const;
  double default_stay(const Slot& slot) const;

  void add(ModelSpec spec, ModelFile file);  // throws Error{kBadInput} for a name that is taken or none

  // The set's thread, and what it does.
  void run();
  void look_again(std::unique_lock<std::mutex>& lock);
  void load_next(std::unique_lock<std::mutex>& lock);
  struct Opened {
    ModelLease model = nullptr;
    size_t main_memory = 0;
    bool own_memory = false;
  };
  void put(Slot& slot, Opened opened);
  Opened open(const Slot& slot);  // without the lock; throws Error and ApiError
  ModelPlan make_room(const Slot& slot);
  void unload(Slot& slot, std::unique_lock<std::mutex>& lock);
  // Of those that are idle, not to be kept and of help. False: there is none.
  bool unload_oldest(std::unique_lock<std::mutex>& lock, const std::function<bool(const Slot&)>& helps);
  std::optional<Clock::time_point> expiry(const Slot& slot) const;  // when it is unloaded for its age
  size_t committed() const;                                         // main memory that the loaded ones take

  const ModelSetOptions options_;
  const Log log_;
  mutable std::mutex mutex_;
  std::condition_variable news_;
  std::deque<std::unique_ptr<Slot>> slots_;
  EngineStats dropped_ = {};  // counters of models that have left
  std::deque<Slot*> queue_;
  bool rescan_wanted_ = false;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
  struct Background {
    std::shared_ptr<std::atomic<bool>> ended;
    std::jthread thread;
  };
  std::list<Background> background_;
};

}  // namespace millrace::server
