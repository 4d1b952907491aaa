// Replica: a runtime, the loop that runs it and its thread. An engine has one, or several behind one face
// (EngineOptions::data_parallel), each with a cache of its own.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/inbox.h"
#include "engine/job.h"
#include "engine/loop.h"
#include "engine/recorder.h"
#include "engine/runtime.h"

namespace millrace {

// The options of each replica, and the memory nodes it runs on; of one: those of the engine.
struct ReplicaSetup {
  EngineOptions options = {};
  Topology topology = {};
};
std::vector<ReplicaSetup> replica_setups(const EngineOptions& options);

class Replica {
 public:
  explicit Replica(ReplicaSetup setup);  // loads everything
  ~Replica() { shutdown(false); }
  Replica(const Replica&) = delete;
  Replica& operator=(const Replica&) = delete;

  Runtime& runtime() { return *runtime_; }
  const Runtime& runtime() const { return *runtime_; }
  const std::shared_ptr<Inbox>& inbox() const { return inbox_; }
  int64_t load() const;  // requests that it has
  bool away() const;     // its ranks are lost: who it gets waits until there are new ones
  // Empty: it will be answered. Else why not.
  std::string take(std::shared_ptr<Job> job);
  EngineStats stats() const;
  std::string failure() const;
  void shutdown(bool drain);

 private:
  std::unique_ptr<ModelDrafter> open_drafter() const;
  void flush_cache();

  const EngineOptions options_;
  const std::shared_ptr<Inbox> inbox_;
  Recorder recorder_;
  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<Loop> loop_;
  std::mutex shutdown_mutex_;
  std::thread thread_;
};

}  // namespace millrace
