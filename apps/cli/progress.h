// Progress: a bar on standard error while something takes long. On a terminal it redraws one line and removes
// it when done; elsewhere (a log, a pipe) it says a line every half minute and nothing for shorter work.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>

namespace millrace::cli {

class Progress {
 public:
  // `bytes`: amounts are shown as sizes and speeds rather than counts.
  explicit Progress(std::string label, bool bytes = true);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Cheap to call often. Throws Interrupted after Ctrl-C.
  void update(size_t done, size_t total);
  // Removes the bar; update() may start it anew.
  void clear();

 private:
  using Clock = std::chrono::steady_clock;
  std::string line(size_t done, size_t total) const;

  std::string label_;
  bool bytes_;
  bool terminal_;
  bool drawn_ = false;
  Clock::time_point start_ = Clock::now();
  Clock::time_point next_;
};

}  // namespace millrace::cli
