// Timeline: what the dashboard shows of the past: the last requests, and a sample a second of what the engine
// did. Both bounded.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "json_fields.h"
#include "millrace/request.h"
#include "millrace/stats.h"

namespace millrace::server {

double unix_time();

class Timeline {
 public:
  struct Entry {
    // The id is the answer's own, by which it can be asked for again: it is never shown.
    std::string id = {}, request_id = {}, endpoint = {}, model = {};
    std::string shown_id = {};  // its kind and a number; set by add()
    bool stream = false;
    double start = 0;  // Unix time
    int32_t samples = 1;
    // These change while it runs, under the timeline's mutex.
    std::string state = "queued", finish = {};
    std::optional<double> queue_s = {}, first_token_s = {}, total_s = {};
    int64_t prompt_tokens = 0, cached_tokens = 0, generated_tokens = 0, preemptions = 0;
  };
  explicit Timeline(bool on) : on_(on) {}

  std::shared_ptr<Entry> add(Entry entry);
  // Changes an entry that is shown while others may be reading it.
  template <class Change>
  void update(Entry& entry, const Change& change) {
    const std::lock_guard lock(mutex_);
    change(entry);
  }
  // Once a second. Seconds that were missed (the machine slept, or had no time for us) are samples without
  // figures.
  void sample(const EngineStats& stats, int64_t streams, double now = unix_time());

  Json requests_json() const;  // newest first
  Json history_json() const;

  static constexpr size_t kRequests = 200;
  static constexpr size_t kSamples = 300;

 private:
  struct Sample {
    double time = 0;
    bool missed = false;
    double generated_tok_s = 0, computed_tok_s = 0;
    int64_t running = 0, waiting = 0, blocks_used = 0, blocks_cached = 0, streams = 0;
    std::optional<double> first_token_p50_s = {};
  };
  void keep(const Sample& sample);

  const bool on_;
  mutable std::mutex mutex_;
  std::deque<std::shared_ptr<Entry>> entries_;
  std::deque<Sample> samples_;
  Histogram last_first_token_;
  uint64_t added_ = 0;
  double last_time_ = 0;
  uint64_t last_generated_ = 0, last_computed_ = 0;
};

}  // namespace millrace::server
