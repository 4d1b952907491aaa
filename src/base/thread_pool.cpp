#include "base/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>
#include <utility>

namespace millrace {
namespace {

// About 20 us of spinning: longer than the gap between two operations of a step, far shorter than a time
// slice.
constexpr int kSpins = 4000;

// ThreadPool::state_: workers inside (16 bits), open (1 bit), loop number.
constexpr uint64_t kInside = 0xffff, kOpen = 0x10000, kNextLoop = 0x20000, kLoop = ~(kInside | kOpen);

inline void relax() {
#if defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#elif defined(__x86_64__)
  asm volatile("pause" ::: "memory");
#endif
}

}  // namespace

namespace {

// "max 100000" or "150000 100000" of version 2; 0 when there is none.
double quota_v2(const std::string& folder) {
  std::ifstream file(folder + "/cpu.max");
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max" || period <= 0) return 0;
  return std::strtod(quota.c_str(), nullptr) / period;
}

double quota_v1(const std::string& folder) {
  std::ifstream quota_file(folder + "/cpu.cfs_quota_us"), period_file(folder + "/cpu.cfs_period_us");
  double quota = 0, period = 0;
  if (!(quota_file >> quota) || !(period_file >> period) || quota <= 0 || period <= 0) return 0;
  return quota / period;
}

// The tightest quota of a group and those above it: `path` below `root`, then its parents.
template <class Quota>
double tightest(const std::string& root, std::string path, Quota quota_of) {
  double tight = 0;
  for (;;) {
    const double quota = quota_of(root + path);
    if (quota > 0 && (tight == 0 || quota < tight)) tight = quota;
    if (path.empty()) return tight;
    path.erase(path.rfind('/'));
  }
}

}  // namespace

double cgroup_cpus(const std::string& proc_cgroup, const std::string& root) {
  std::ifstream groups(proc_cgroup);
  double tight = 0;
  const auto note = [&](double quota) {
    if (quota > 0 && (tight == 0 || quota < tight)) tight = quota;
  };
  // "0::/a/b" in version 2, "4:cpu,cpuacct:/a/b" in version 1.
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    std::string path = line.substr(second + 1);
    if (path.empty() || path[0] != '/' || path.find("..") != std::string::npos) path.clear();
    while (!path.empty() && path.back() == '/') path.pop_back();
    if (controllers == ",,") note(tightest(root, path, quota_v2));
    if (controllers.find(",cpu,") != std::string::npos) {
      note(tightest(root + "/cpu", path, quota_v1));
      note(tightest(root + "/cpu,cpuacct", path, quota_v1));
    }
  }
  note(quota_v2(root));  // inside a container the own group is mounted as the root
  return tight;
}

int available_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  int cpus = 1;
  if (sched_getaffinity(0, sizeof set, &set) == 0) cpus = std::max(1, CPU_COUNT(&set));
  const double quota = cgroup_cpus("/proc/self/cgroup", "/sys/fs/cgroup");
  if (quota > 0) cpus = std::min(cpus, std::max(1, static_cast<int>(std::ceil(quota))));
  return cpus;
}

ThreadPool::ThreadPool(int threads) : size_(threads > 0 ? threads : available_cpus()) {
  workers_.reserve(size_ - 1);
  for (int t = 1; t < size_; ++t) workers_.emplace_back([this, t] { worker(t); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (std::thread& w : workers_) w.join();
}

void ThreadPool::take_chunks(int thread) {
  try {
    for (;;) {
      const int64_t begin = next_.fetch_add(chunk_, std::memory_order_relaxed);
      if (begin >= count_) return;
      call_(body_, begin, std::min(begin + chunk_, count_), thread);
    }
  } catch (...) {
    next_.store(count_, std::memory_order_relaxed);  // the others stop at their next chunk
    std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::current_exception();
  }
}

void ThreadPool::run(int64_t count, int64_t chunk, Call call, void* body) {
  call_ = call;
  body_ = body;
  count_ = count;
  chunk_ = std::max<int64_t>(1, chunk);
  next_.store(0, std::memory_order_relaxed);
  // The loop's fields are published by this release to the acquire of a worker that joins. The order of this
  // store and the load of sleepers_ against a worker's increment and last look (both seq_cst) is what loses
  // no wake-up.
  const uint64_t loop = state_.load(std::memory_order_relaxed) + kNextLoop;
  state_.store(loop | kOpen, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    {
      std::lock_guard lock(mutex_);
    }  // a worker between its last look and its sleep has the lock: wait for it
    wake_.notify_all();
  }
  take_chunks(0);
  // No chunk is left to hand out: close the loop, then wait for the workers that are still inside. The
  // acquire pairs with their release on leaving, so that their writes are visible here.
  state_.fetch_and(~kOpen, std::memory_order_relaxed);
  int spins = 0;
  while ((state_.load(std::memory_order_acquire) & kInside) != 0) {
    relax();
    if (++spins > kSpins) std::this_thread::yield();
  }
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

// Enters the current loop if it is open and not the one seen last.
bool ThreadPool::join(uint64_t& seen) {
  uint64_t state = state_.load(std::memory_order_acquire);
  while ((state & kOpen) != 0 && (state & kLoop) != seen) {
    if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acquire)) {
      seen = state & kLoop;
      return true;
    }
  }
  return false;
}

void ThreadPool::worker(int thread) {
  uint64_t seen = 0;
  const auto open = [&] {
    const uint64_t state = state_.load(std::memory_order_seq_cst);
    return (state & kOpen) != 0 && (state & kLoop) != seen;
  };
  int idle = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    if (join(seen)) {
      take_chunks(thread);
      state_.fetch_sub(1, std::memory_order_release);
      idle = 0;
    } else if (++idle < kSpins) {
      relax();
    } else {
      std::unique_lock lock(mutex_);
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [&] { return stop_.load(std::memory_order_relaxed) || open(); });
      sleepers_.fetch_sub(1, std::memory_order_relaxed);
      idle = 0;
    }
  }
}

}  // namespace millrace
