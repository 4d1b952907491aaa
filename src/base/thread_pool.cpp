#include "base/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>

namespace millrace {
namespace {

// About 20 us of spinning: longer than the gap between two operations of a step, far shorter than a time slice.
constexpr int kSpins = 4000;

inline void relax() {
#if defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#elif defined(__x86_64__)
  asm volatile("pause" ::: "memory");
#endif
}

// Quota of cgroup v2 ("max 100000" or "150000 100000") in CPUs; 0 when there is none.
double cgroup_quota() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max" || period <= 0) return 0;
  return std::strtod(quota.c_str(), nullptr) / period;
}

}  // namespace

int available_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  int cpus = 1;
  if (sched_getaffinity(0, sizeof set, &set) == 0) cpus = std::max(1, CPU_COUNT(&set));
  const double quota = cgroup_quota();
  if (quota > 0) cpus = std::min(cpus, std::max(1, static_cast<int>(std::ceil(quota))));
  return cpus;
}

ThreadPool::ThreadPool(int threads) : size_(threads > 0 ? threads : available_cpus()) {
  workers_.reserve(size_ - 1);
  for (int t = 1; t < size_; ++t) workers_.emplace_back([this, t] { worker(t); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  {
    std::lock_guard lock(mutex_);
    epoch_.fetch_add(1);
  }
  wake_.notify_all();
  for (std::thread& w : workers_) w.join();
}

void ThreadPool::take_chunks(int thread) {
  for (;;) {
    const int64_t begin = next_.fetch_add(chunk_, std::memory_order_relaxed);
    if (begin >= count_) return;
    call_(body_, begin, std::min(begin + chunk_, count_), thread);
  }
}

void ThreadPool::run(int64_t count, int64_t chunk, Call call, void* body) {
  call_ = call;
  body_ = body;
  count_ = count;
  chunk_ = std::max<int64_t>(1, chunk);
  next_.store(0, std::memory_order_relaxed);
  busy_.store(size_ - 1, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_seq_cst);  // publishes the loop to spinning workers
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    { std::lock_guard lock(mutex_); }  // a worker between its last look and its sleep has the lock: wait for it
    wake_.notify_all();
  }
  take_chunks(0);
  // Workers that still hold a chunk: wait for their writes to be visible here.
  int spins = 0;
  while (busy_.load(std::memory_order_acquire) != 0) {
    relax();
    if (++spins > kSpins) std::this_thread::yield();
  }
}

void ThreadPool::worker(int thread) {
  uint32_t seen = 0;
  for (;;) {
    for (int i = 0; i < kSpins && epoch_.load(std::memory_order_acquire) == seen; ++i) relax();
    if (epoch_.load(std::memory_order_acquire) == seen) {
      std::unique_lock lock(mutex_);
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [&] { return epoch_.load(std::memory_order_seq_cst) != seen; });
      sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }
    ++seen;  // loops are started one at a time, and none starts before all workers finished the last
    if (stop_.load()) return;
    take_chunks(thread);
    busy_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace millrace
