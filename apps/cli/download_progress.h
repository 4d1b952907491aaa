// How far a download is, on standard error: a bar on a terminal, a line now and then elsewhere; with json,
// objects on standard output, one a line.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <string>

#include "hub/puller.h"

namespace millrace::cli {

class DownloadProgress {
 public:
  explicit DownloadProgress(bool json);
  ~DownloadProgress();
  DownloadProgress(const DownloadProgress&) = delete;
  DownloadProgress& operator=(const DownloadProgress&) = delete;

  void update(const hub::PullProgress& at);  // throws Interrupted after Ctrl-C
  void finish();                             // says how much it was and how fast

 private:
  using Clock = std::chrono::steady_clock;
  struct Sample {
    Clock::time_point time;
    uint64_t done;
  };
  void draw(const hub::PullProgress& at);
  void clear();
  double rate() const;  // bytes a second, of the last seconds

  bool json_, terminal_, drawn_ = false;
  Clock::time_point start_ = Clock::now(), next_;
  std::deque<Sample> samples_;
  uint64_t first_ = 0, last_ = 0;  // bytes that were there at the start, and that are now
  bool started_ = false;
};

}  // namespace millrace::cli
