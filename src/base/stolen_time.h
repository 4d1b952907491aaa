// Processor time that a hypervisor gives to others while this system wants it, and how many threads to use
// then.
//
// A virtual machine may have fewer processors' time than processors: its host has a quota for it, or work of
// its own on one of them. When all of them work without a pause, the host takes some away for milliseconds at
// a time, and every loop that is shared out waits for the thread that stood there. One thread less, and
// nothing is taken: a gpt-oss-20b decoded 18 tokens a second with 16 threads on 16 such processors (26%
// stolen) and 42 with 15 (none), within seconds.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "base/descriptor.h"

namespace millrace {

class StolenTime {
 public:
  explicit StolenTime(const std::string& path = "/proc/stat");
  // Of the time that the processors worked or wanted to since the last call, the share that was taken away.
  // Nothing where the system does not say, the first time, and when it was less than `least` seconds of one
  // processor.
  std::optional<double> share(double least = 0);

 private:
  Descriptor file_;
  int64_t wanted_ = -1, stolen_ = 0;
};

// How many of a pool's threads take part. Where a second's work lost more than a thread is worth, half of
// what was lost rests, down to three quarters of the threads. After a calm second one comes back, and each
// time that was too early the next calm time is twice as long.
class Crew {
 public:
  explicit Crew(int max_size) : max_size_(max_size), size_(max_size) {}
  int size() const { return size_; }
  // The share of a stretch of work that was stolen. A stretch: twenty ticks of each processor's clock.
  void observe(double stolen);
  static constexpr std::chrono::milliseconds kStretch{200};

 private:
  void decide(double stolen);           // of a second
  static constexpr int kSecond = 5;     // stretches
  static constexpr int kLongest = 128;  // seconds
  int max_size_, size_;
  double sum_ = 0.0;  // of this second's stretches
  int stretches_ = 0;
  bool came_back_ = false;   // one did, a second ago
  int calm_ = 0, wait_ = 1;  // seconds: that it has been calm for, that it must be
};

}  // namespace millrace
