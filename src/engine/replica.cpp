#include "engine/replica.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/topology.h"
#include "engine/engine_options.h"
#include "engine/rank_front.h"
#include "engine/rank_group.h"
#include "engine/rank_launcher.h"
#include "engine/ranks_lost.h"

namespace millrace {
namespace {

// The part of `all` that replica i of `count` gets, in turn.
template <class T>
std::vector<T> part_of_all(const std::vector<T>& all, size_t i, size_t count) {
  const auto at = [&](size_t k) { return all.begin() + static_cast<std::ptrdiff_t>(all.size() * k / count); };
  return {at(i), at(i + 1)};
}

}  // namespace

std::vector<ReplicaSetup> replica_setups(const EngineOptions& options) {
  const auto count = static_cast<size_t>(options.data_parallel);
  if (count == 1) return {{options, {}}};
  const Topology nodes = machine_topology();
  const std::vector<std::string> hosts = parse_rank_hosts(options);
  std::vector<ReplicaSetup> setups;
  for (size_t i = 0; i < count; ++i) {
    EngineOptions own = options;
    own.data_parallel = 1;
    if (own.device == "auto") own.device = "cpu";
    own.rank_hosts = fmt::format("{}", fmt::join(part_of_all(hosts, i, count), ","));
    const int sharing = options.data_parallel * ranks_of(options);
    if (own.threads == 0 && (ranks_of(options) == 1 || ranks_are_here(options))) {
      own.threads = std::max(1, available_cpus() / sharing);
    }
    own.max_waiting = (options.max_waiting + options.data_parallel - 1) / options.data_parallel;
    own.ram_tier_bytes = options.ram_tier_bytes / count;
    if (!own.kv_dir.empty()) own.kv_dir += fmt::format("/replica-{}", i);
    own.kv_dir_bytes = options.kv_dir_bytes / count;
    if (i > 0) own.on_load = nullptr;  // its weights are those of the first
    setups.push_back({std::move(own), nodes.size() >= count ? part_of_all(nodes, i, count) : Topology()});
  }
  return setups;
}

Replica::Replica(ReplicaSetup setup) : options_(std::move(setup.options)), inbox_(std::make_shared<Inbox>()) {
  RuntimeSetup how{.sequences = RuntimeSetup::kShared};
  how.adjust_cache = [this](kv::CacheOptions& cache) { cache.wake = [inbox = inbox_] { inbox->poke(); }; };
  how.topology = std::move(setup.topology);
  how.wake = [inbox = inbox_] { inbox->poke(); };
  runtime_ = Runtime::open(options_, how);
  loop_ = std::make_unique<Loop>(*runtime_, open_drafter(), options_, inbox_, recorder_);
  thread_ = std::thread([this] {
    loop_->run();
    flush_cache();
  });
}

void Replica::flush_cache() {
  if (loop_->device_lost()) return;
  try {
    runtime_->cache().flush();
  } catch (const RanksLost&) {  // what they held does not come to the disk any more
  }
}

int64_t Replica::load() const {
  const std::lock_guard lock(inbox_->mutex);
  return recorder_.running.load(std::memory_order_relaxed) +
         recorder_.waiting.load(std::memory_order_relaxed) + static_cast<int64_t>(inbox_->jobs.size());
}

bool Replica::away() const {
  const RankFront* front = runtime_->front();
  return front != nullptr && !front->computing();
}

std::string Replica::take(std::shared_ptr<Job> job) {
  {
    const std::lock_guard lock(inbox_->mutex);
    const int64_t waiting =
        recorder_.waiting.load(std::memory_order_relaxed) + static_cast<int64_t>(inbox_->jobs.size());
    if (inbox_->stop) return "the engine is shutting down";
    if (waiting >= options_.max_waiting) {
      return fmt::format("{} requests are waiting, expected fewer than {}", waiting, options_.max_waiting);
    }
    inbox_->jobs.push_back(std::move(job));
  }
  inbox_->news.notify_one();
  return {};
}

EngineStats Replica::stats() const {
  EngineStats stats = recorder_.snapshot();
  if (const auto energy = runtime_->backend().energy()) stats.energy_joules[energy->counter] = energy->joules;
  if (const RankFront* front = runtime_->front()) stats.rank_groups.push_back(front->stats());
  return stats;
}

std::string Replica::failure() const {
  const std::lock_guard lock(inbox_->mutex);
  return inbox_->failure;
}

void Replica::shutdown(bool drain) {
  const std::lock_guard only_one(shutdown_mutex_);
  {
    const std::lock_guard lock(inbox_->mutex);
    inbox_->drain = drain && !inbox_->stop;
    inbox_->stop = true;
  }
  inbox_->news.notify_one();
  if (thread_.joinable()) thread_.join();
}

std::unique_ptr<ModelDrafter> Replica::open_drafter() const {
  if (options_.speculation != Speculation::kDraft) return nullptr;
  const EngineOptions draft = draft_model_options(options_, runtime_->context());
  // It needs no room for more tokens than the target has.
  const auto& groups = runtime_->spec().kv_groups;
  const auto blocks = std::max_element(groups.begin(), groups.end(), [](const auto& a, const auto& b) {
                        return a.num_blocks < b.num_blocks;
                      })->num_blocks;
  return std::make_unique<ModelDrafter>(
      Runtime::open(draft, {.sequences = RuntimeSetup::kShared,
                            .most_tokens = static_cast<int64_t>(blocks) * kBlockTokens}),
      runtime_->config().vocab);
}

}  // namespace millrace
