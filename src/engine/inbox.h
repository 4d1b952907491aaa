// Inbox: requests and cancellations on their way from clients to the engine's thread. It outlives the engine
// for event streams that do.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace millrace {

struct Job;

struct Inbox {
  std::mutex mutex;
  std::condition_variable news;
  std::vector<std::shared_ptr<Job>> jobs;
  struct Cancel {
    uint64_t request;
    int32_t sample;  // -1: all of them
  };
  std::vector<Cancel> cancelled;
  bool stop = false;     // no more jobs are taken
  bool drain = false;    // those taken are finished first
  bool poked = false;    // something outside has changed: a read from disk is there
  std::string failure;   // of the device: nobody can be answered any more
  std::string fallback;  // a device failed and another goes on: Engine::fallback

  void cancel(uint64_t id, int32_t sample = -1);
  void poke();
};

}  // namespace millrace
