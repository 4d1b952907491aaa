#include "base/thread_choice.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <fstream>
#include <memory>
#include <set>
#include <utility>

#include "base/read_loop.h"
#include "base/thread_pool.h"

namespace millrace {
namespace {

constexpr int64_t kReadPiece = int64_t{1} << 20;

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// How fast a CPU's core is by what the system says, in whatever unit; 0: it does not.
int64_t speed_of(const std::string& folder) {
  // ARM's measure of a core's work, then the highest clock.
  for (const char* name : {"/cpu_capacity", "/cpufreq/cpuinfo_max_freq"}) {
    std::ifstream file(folder + name);
    int64_t value = 0;
    if (file >> value && value > 0) return value;
  }
  return 0;
}

// Memory that caches do not hold, or as much as a start can spare.
int64_t measured_bytes() {
  constexpr size_t kLeast = size_t{64} << 20, kMost = size_t{512} << 20;
  const size_t cache = largest_cache("/sys/devices/system/cpu/cpu0/cache");
  const auto memory =
      static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t bytes = std::min({std::max(2 * cache, kLeast), kMost, memory / 8});
  return static_cast<int64_t>(bytes) / kReadPiece * kReadPiece;
}

// A buffer that threads read together.
class ReadMeter {
 public:
  ReadMeter(Topology topology, double seconds)
      : topology_(std::move(topology)), seconds_(seconds), bytes_(measured_bytes()) {
    if (bytes_ == 0) return;
    void* at = ::mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return;
    memory_ = std::shared_ptr<void>(at, [size = static_cast<size_t>(bytes_)](void* m) { ::munmap(m, size); });
    (void)::madvise(at, static_cast<size_t>(bytes_), MADV_HUGEPAGE);
  }
  // 0 where there is no memory to read.
  double operator()(int threads) {
    if (memory_ == nullptr) return 0;
    ThreadPool pool(threads, topology_);
    if (!filled_) fill(pool);
    std::atomic<uint64_t> sum{0};
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    double best = 0, spent = 0, read = 0;
    // The best pass, or, where a quota's clock is waited for, all of them together.
    for (int pass = 0; pass < 3 || spent < seconds_; ++pass) {
      const auto begin = Clock::now();
      pool.parallel_for(bytes_ / kReadPiece, 1, [&](int64_t first, int64_t last, int) {
        sum += sum_words(static_cast<const std::byte*>(memory_.get()) + first * kReadPiece,
                         (last - first) * kReadPiece, pass % 2 == 0);
      });
      const auto end = Clock::now();
      best = std::max(best, static_cast<double>(bytes_) / std::chrono::duration<double>(end - begin).count());
      read += static_cast<double>(bytes_);
      spent = std::chrono::duration<double>(end - start).count();
    }
    return seconds_ > kPlain ? read / spent : best;
  }
  static constexpr double kPlain = 0.01, kTwoPeriods = 0.2;  // seconds

 private:
  void fill(ThreadPool& pool) {
    auto* const words = static_cast<uint64_t*>(memory_.get());
    constexpr int64_t kWords = kReadPiece / 8;
    pool.parallel_for(bytes_ / kReadPiece, 1, [&](int64_t first, int64_t last, int) {
      std::fill(words + first * kWords, words + last * kWords, uint64_t{1});
    });
    filled_ = true;
  }
  const Topology topology_;
  double seconds_;
  int64_t bytes_;
  std::shared_ptr<void> memory_;
  bool filled_ = false;
};

}  // namespace

CoreCounts read_cores(const std::string& root, const std::vector<int>& allowed) {
  std::set<int> cores, fast;
  int64_t best = 0;
  for (const int cpu : allowed) {
    const std::string folder = root + "/cpu" + std::to_string(cpu);
    const std::vector<int> siblings = parse_cpu_list(first_line(folder + "/topology/thread_siblings_list"));
    // A core is known by the first of its threads that is ours.
    int core = cpu;
    for (const int sibling : siblings) {
      if (std::find(allowed.begin(), allowed.end(), sibling) != allowed.end()) core = std::min(core, sibling);
    }
    cores.insert(core);
    // A tenth below the fastest is the same kind: some cores of one may be clocked a little higher.
    const int64_t speed = speed_of(folder);
    if (10 * speed < 9 * best) continue;
    if (9 * speed > 10 * best) fast.clear();
    best = std::max(best, speed);
    fast.insert(core);
  }
  const auto count = [](const std::set<int>& of) { return std::max(1, static_cast<int>(of.size())); };
  return {std::max(1, static_cast<int>(allowed.size())), count(cores), count(fast)};
}

std::vector<int> thread_candidates(const CoreCounts& cores, double quota) {
  std::set<int> counts;
  for (const int count : {cores.fast_cores, cores.cores, cores.cpus}) {
    if (quota <= 0 || count <= quota) {
      counts.insert(count);
    } else {
      counts.insert(std::max(1, static_cast<int>(std::floor(quota))));
      counts.insert(std::min(count, static_cast<int>(std::ceil(quota))));
    }
  }
  return {counts.begin(), counts.end()};
}

ThreadChoice choose_threads(const std::vector<int>& candidates, const ReadSpeed& speed) {
  constexpr double kAsGood = 0.97;
  if (candidates.empty()) return {};
  if (candidates.size() == 1) return {candidates[0], {}};
  std::vector<double> speeds;
  for (const int threads : candidates) speeds.push_back(speed(threads));
  const double best = *std::max_element(speeds.begin(), speeds.end());
  if (best <= 0) return {candidates.back(), {}};
  ThreadChoice choice;
  size_t chosen = 0;
  while (speeds[chosen] < kAsGood * best) ++chosen;
  choice.threads = candidates[chosen];
  const auto text = [&](size_t i) {
    return fmt::format("{} read{} {:.1f} GB/s", candidates[i], candidates[i] == 1 ? "s" : "",
                       speeds[i] * 1e-9);
  };
  choice.note = fmt::format("{} thread{}: {}", choice.threads, choice.threads == 1 ? "" : "s", text(chosen));
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (i != chosen) choice.note += ", " + text(i);
  }
  return choice;
}

ReadSpeed read_speed(const Topology& topology, bool quota) {
  const auto meter =
      std::make_shared<ReadMeter>(topology, quota ? ReadMeter::kTwoPeriods : ReadMeter::kPlain);
  return [meter](int threads) { return (*meter)(threads); };
}

ThreadChoice choose_threads(const Topology& topology) {
  std::vector<int> cpus;
  for (const MemoryNode& node : topology) cpus.insert(cpus.end(), node.cpus.begin(), node.cpus.end());
  const double quota = cgroup_cpus("/proc/self/cgroup", "/sys/fs/cgroup");
  const std::vector<int> candidates = thread_candidates(read_cores("/sys/devices/system/cpu", cpus), quota);
  if (candidates.size() == 1) return {candidates[0], {}};
  return choose_threads(candidates,
                        read_speed(topology, quota > 0 && quota < static_cast<double>(cpus.size())));
}

}  // namespace millrace
