// Recorder: the statistics while they are made. The engine's thread writes, anybody reads, nobody waits:
// every field is an atomic of its own, so a snapshot may be a step apart in itself and never torn.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "millrace/stats.h"

namespace millrace {

class AtomicHistogram {
 public:
  void add(double seconds);
  Histogram snapshot() const;

 private:
  std::array<std::atomic<uint64_t>, Histogram::kBuckets> counts_{};
  std::atomic<double> sum_{0};
};

// Events per second, over the last few seconds. One writer.
class Rate {
 public:
  void add(double now, double events);
  double at(double now) const;

 private:
  std::atomic<double> weight_{0}, time_{0};
};

struct Recorder {
  using Counter = std::atomic<uint64_t>;
  using Gauge = std::atomic<int64_t>;

  // One writer: no read-modify-write of the bus is needed.
  static void add(Counter& counter, uint64_t n) {
    counter.store(counter.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }
  static void add(std::atomic<double>& sum, double x) {
    sum.store(sum.load(std::memory_order_relaxed) + x, std::memory_order_relaxed);
  }
  double now() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  EngineStats snapshot() const;

  const std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  Counter submitted{0}, finished{0}, cancelled{0}, expired{0}, failed{0};
  Gauge running{0}, waiting{0}, swapped{0};
  Counter prompt_tokens{0}, generated_tokens{0}, computed_tokens{0};
  Rate generated_rate, computed_rate;
  Counter steps{0}, batch_sum{0}, rows_sum{0}, budget_sum{0};
  std::atomic<double> busy_s{0}, wait_s{0}, schedule_s{0}, sample_s{0}, decode_s{0};
  Counter decode_tokens{0};
  Gauge blocks_total{0}, blocks_held{0}, blocks_cached{0}, blocks_free{0};
  Gauge states_held{0}, states_cached{0}, states_free{0};
  Gauge ram_blocks{0}, ram_bytes{0}, disk_blocks{0}, disk_bytes{0};
  Counter cache_queries{0}, hits_pool{0}, hits_ram{0}, hits_disk{0};
  Counter preemptions_swap{0}, preemptions_recompute{0};
  Counter drafted{0}, accepted{0};
  Counter rows_picked_by_ranks{0}, rows_gathered{0};
  AtomicHistogram queue_time, first_token, inter_token, request_time, step_time;
};

}  // namespace millrace
