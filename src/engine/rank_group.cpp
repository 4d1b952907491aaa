#include "engine/rank_group.h"

#include <unistd.h>

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "base/check.h"
#include "base/error.h"
#include "base/read_loop.h"
#include "dist/job_watch.h"
#include "dist/mpi_communicator.h"
#include "dist/rank_speeds.h"
#include "dist/watched_communicator.h"
#include "engine/available_memory.h"
#include "engine/checkpoint_identity.h"
#include "engine/engine_options.h"
#include "engine/leader_executor.h"
#include "engine/lock_memory.h"
#include "engine/open_backend.h"
#include "engine/rank_plan.h"

namespace millrace {
namespace {

// Processors whose results are the same bits (docs/architecture.md, "Same bits").
std::string same_bits_family(const Backend& backend) {
  if (backend.name() == "cuda") return fmt::format("cuda {}", backend.isa());
#if defined(__x86_64__)
  const std::string_view architecture = "x86-64";
#else
  const std::string_view architecture = "arm64";
#endif
  const bool amx = backend.isa().find("amx") != std::string_view::npos;
  return fmt::format("{} {}{}", backend.name(), architecture, amx ? " with AMX" : "");
}

}  // namespace

RankGroups::RankGroups(dist::Communicator& all, const dist::Shares& shares) : all_(all) {
  const dist::Claim numbers[] = {{"--tensor-parallel", std::to_string(shares.ranks())},
                                 {"--pipeline-parallel", std::to_string(shares.stages())}};
  dist::check_agreement(all, numbers);
  if (shares.stages() == 1) {
    of_stage_ = &all;
  } else if (shares.ranks() == 1) {
    of_pipeline_ = &all;
  } else {
    own_stage_ = all.split(shares.stage(), shares.rank());
    own_pipeline_ = all.split(shares.rank(), shares.stage());
    of_stage_ = own_stage_.get();
    if (shares.rank() == 0) of_pipeline_ = own_pipeline_.get();
  }
}

std::string host_name() {
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  return host;
}

HostPlace place_on_host(dist::Communicator& group) {
  const std::string host = host_name();
  const std::vector<std::string> hosts = dist::all_gather_text(group, host);
  HostPlace place{0, 0};
  for (int r = 0; r < group.size(); ++r) {
    if (hosts[static_cast<size_t>(r)] != host) continue;
    place.local_rank += r < group.rank() ? 1 : 0;
    ++place.local_ranks;
  }
  return place;
}

namespace {

// The processes of a job, which watch one another until this one leaves it.
class WatchedJob {
 public:
  explicit WatchedJob(std::unique_ptr<dist::Communicator> world)
      : group_(dist::make_watched(std::move(world), calls_)) {
    if (std::unique_ptr<dist::Post> post = dist::make_mpi_post()) {
      watch_ = std::make_unique<dist::JobWatch>(group_->rank(), group_->size(), std::move(post), calls_,
                                                [this](int rank) { end(rank); });
    }
    std::vector<std::string> names =
        dist::all_gather_text(*group_, fmt::format("process {} on {}", getpid(), host_name()));
    {
      const std::lock_guard lock(mutex_);
      names_ = std::move(names);
    }
    dist::measure_links(*group_, calls_);  // what long messages take
  }

  dist::Communicator& group() { return *group_; }

 private:
  [[noreturn]] void end(int rank) {
    std::string name;
    {
      const std::lock_guard lock(mutex_);
      if (!names_.empty()) name = fmt::format(" ({})", names_[static_cast<size_t>(rank)]);
    }
    // Not fmt::print, which throws where standard error is closed.
    std::fputs(fmt::format("millrace: rank {}{} was not heard of for 3 s: it hangs, or a link to it is down; "
                           "the job ends\n",
                           rank, name)
                   .c_str(),
               stderr);
    dist::abort_mpi(2);
    std::_Exit(2);
  }

  dist::Watch calls_;
  const std::unique_ptr<dist::Communicator> group_;
  std::mutex mutex_;
  std::vector<std::string> names_;         // once everybody has said theirs
  std::unique_ptr<dist::JobWatch> watch_;  // goes first
};

}  // namespace

std::shared_ptr<dist::Communicator> job_group(const EngineOptions& options) {
  static std::weak_ptr<dist::Communicator> known;  // MPI is per process
  const int ranks = ranks_of(options);
  const bool both = options.tensor_parallel > 1 && options.pipeline_parallel > 1;
  const std::string option = options.context_parallel > 1 ? fmt::format("--context-parallel {}", ranks)
                             : both ? fmt::format("--tensor-parallel {} --pipeline-parallel {}",
                                                  options.tensor_parallel, options.pipeline_parallel)
                             : options.pipeline_parallel > 1 ? fmt::format("--pipeline-parallel {}", ranks)
                                                             : fmt::format("--tensor-parallel {}", ranks);
  const auto check_size = [&](const dist::Communicator& group) {
    if (group.size() == ranks) return;
    throw_error(ErrorCode::kBadInput, "{}: mpirun started {} processes, expected {}", option, group.size(),
                ranks);
  };
  if (std::shared_ptr<dist::Communicator> group = known.lock()) {
    check_size(*group);
    return group;
  }
  if (!dist::started_by_mpi()) {
    throw_error(ErrorCode::kBadInput, "{}: found one process, expected {}: start it with mpirun -n {}",
                option, ranks, ranks);
  }
  std::unique_ptr<dist::Communicator> world = dist::make_mpi_world();
  check_size(*world);
  const auto job = std::make_shared<WatchedJob>(std::move(world));
  std::shared_ptr<dist::Communicator> group(job, &job->group());
  known = group;
  return group;
}

namespace {

dist::Shares cut_of(const EngineOptions& options, int rank) {
  std::vector<double> speeds = parse_rank_speeds("rank_speeds", options);
  if (options.context_parallel > 1) {
    const dist::ScheduleKind schedule =
        dist::schedule_kind(options.context_schedule).value_or(dist::ScheduleKind::kAuto);  // checked before
    return dist::Shares::context(rank, options.context_parallel, schedule);
  }
  const dist::Shares shares = dist::Shares::grid(rank, options.tensor_parallel, std::move(speeds));
  return options.expert_parallel ? shares.with_whole_experts() : shares;
}

void check_context(const ModelConfig& config) {
  const char* const what = config.encoder                 ? "sees what is behind a token"
                           : config.latent.rank > 0       ? "has latent attention"
                           : !config.state_layers.empty() ? "has layers with a state"
                                                          : nullptr;
  if (what == nullptr) return;
  throw_error(ErrorCode::kUnsupported,
              "context_parallel: {} {}, expected attention over keys and values of the tokens before",
              config.architecture, what);
}

}  // namespace

dist::Shares shares_of(const EngineOptions& options, int rank, const io::Checkpoint& checkpoint,
                       const ModelConfig& config) {
  dist::Shares shares = cut_of(options, rank);
  if (!options.expert_parallel || can_share_rows(checkpoint, config)) return shares;
  return shares.with_whole_attention();
}

void check_experts(std::string_view name, const ModelConfig& config, const EngineOptions& options) {
  if (!options.expert_parallel || config.experts > 0) return;
  throw_error(ErrorCode::kUnsupported, "{}: {} has no experts, expected a model that has", name,
              config.architecture);
}

void check_stages(const ModelConfig& config, const EngineOptions& options) {
  check_experts("expert_parallel", config, options);
  if (options.context_parallel > 1) check_context(config);
  if (options.pipeline_parallel == 1) return;
  if (config.encoder) {
    throw_error(ErrorCode::kUnsupported,
                "pipeline_parallel: {} is a text encoder, expected a model that writes", config.architecture);
  }
  if (config.state.wkv7) {
    throw_error(ErrorCode::kUnsupported,
                "pipeline_parallel: layers of {} read values of the first one, which other stages do not "
                "have: run it in one process",
                config.architecture);
  }
  const dist::Shares shares = cut_of(options, 0);
  for (int stage = 0; stage < shares.stages(); ++stage) {
    if (shares.layers_of(stage, config.layers).size() > 0) continue;
    throw_error(ErrorCode::kBadInput, "pipeline_parallel: stage {} would have none of the model's {} layers",
                stage, config.layers);
  }
}

std::vector<double> parse_rank_speeds(std::string_view name, const EngineOptions& options) {
  const auto ranks = static_cast<size_t>(ranks_of(options));
  if (options.rank_speeds.empty() || options.rank_speeds == "auto") return std::vector<double>(ranks, 1.0);
  std::vector<double> speeds;
  for (std::string_view rest = options.rank_speeds;;) {
    const std::string_view word = rest.substr(0, rest.find(','));
    double speed = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), speed);
    if (error != std::errc() || end != word.data() + word.size() || !(speed > 0) || speed > 1e9) {
      throw_error(ErrorCode::kBadInput,
                  "{}: found \"{}\", expected auto, or numbers above 0 with commas between them", name,
                  options.rank_speeds);
    }
    speeds.push_back(speed);
    if (word.size() == rest.size()) break;
    rest = rest.substr(word.size() + 1);
  }
  if (speeds.size() != ranks) {
    throw_error(ErrorCode::kBadInput, "{}: found {} numbers, expected {}, one for each rank", name,
                speeds.size(), ranks);
  }
  return speeds;
}

namespace {

// Bytes a second that all threads of a CPU together read, of memory that no cache holds.
double measure_reading(Backend& backend) {
  constexpr int64_t kBytes = int64_t{256} << 20, kPiece = int64_t{1} << 20;
  constexpr int kPasses = 4;
  std::vector<uint64_t> words(kBytes / sizeof(uint64_t), 1);
  const auto* bytes = reinterpret_cast<const std::byte*>(words.data());
  std::atomic<uint64_t> sum{0};  // so that they are read
  double best = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const auto begin = std::chrono::steady_clock::now();
    backend.parallel(kBytes / kPiece, [&](int64_t first, int64_t last) {
      sum += sum_words(bytes + first * kPiece, (last - first) * kPiece, true);
    });
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    best = std::max(best, static_cast<double>(kBytes) / took.count());
  }
  MILLRACE_CHECK(sum == kPasses * words.size());
  return best;
}

struct Measured {
  double bytes_per_s = 0;
  uint64_t memory = 0;
};

}  // namespace

EngineOptions with_measured_speeds(const EngineOptions& options, dist::Communicator& group,
                                   const io::Checkpoint& checkpoint) {
  const dist::Claim said_speeds{"--rank-speeds", options.rank_speeds};
  dist::check_agreement(group, {&said_speeds, 1});  // all measure, or nobody
  EngineOptions with = options;
  if (options.rank_speeds != "auto") return with;
  const HostPlace place = place_on_host(group);
  Measured own;
  {
    const std::unique_ptr<Backend> probe = make_backend(
        options.device == "auto" ? "cpu" : options.device,
        {.threads = options.threads, .local_rank = place.local_rank, .local_ranks = place.local_ranks});
    group.barrier();  // ranks of a host share its memory's rate, as they will
    const std::optional<double> of_device = probe->measure_read_bandwidth();
    own.bytes_per_s = of_device ? *of_device : measure_reading(*probe);
    own.memory = probe->own_memory().value_or(available_memory() /
                                              static_cast<size_t>(std::max(1, place.local_ranks)));
  }
  std::vector<Measured> all(static_cast<size_t>(group.size()));
  const std::vector<size_t> bytes(all.size(), sizeof(Measured));
  group.all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)), bytes);
  std::vector<double> rates;
  std::vector<size_t> memory;
  std::string said;
  for (const Measured& rank : all) {
    rates.push_back(rank.bytes_per_s);
    memory.push_back(static_cast<size_t>(rank.memory));
    said += fmt::format("{}{:.1f}", said.empty() ? "" : ", ", rank.bytes_per_s * 1e-9);
  }
  const std::vector<double> speeds =
      dist::speeds_within(dist::speeds_in_eighths(rates), memory, checkpoint.mapped_bytes());
  with.rank_speeds = fmt::format("{}", fmt::join(speeds, ","));
  if (group.rank() == 0) {
    // Not fmt::print, which throws where standard error is closed.
    std::fputs(fmt::format("millrace: --rank-speeds auto: {} (ranks read {} GB/s)\n", with.rank_speeds, said)
                   .c_str(),
               stderr);
  }
  return with;
}

std::vector<dist::Claim> rank_claims(const io::Checkpoint& checkpoint, const ModelConfig& config,
                                     const EngineOptions& options, const AdapterSet& adapters,
                                     const Backend& backend) {
  return {
      {"version of the program", MILLRACE_VERSION},
      {"model", checkpoint_identity(checkpoint, config)},
      {"--tensor-parallel", std::to_string(options.tensor_parallel)},
      {"--pipeline-parallel", std::to_string(options.pipeline_parallel)},
      {"--context-parallel", std::to_string(options.context_parallel)},
      {"--context-schedule", options.context_schedule},
      {"--expert-parallel", options.expert_parallel ? "yes" : "no"},
      {"--rank-speeds", options.rank_speeds},
      {"--adapter", adapters.identity()},
      {"processor", same_bits_family(backend)},
  };
}

std::vector<dist::Claim> with_options(std::vector<dist::Claim> claims, const EngineOptions& options) {
  for (dist::Claim& claim : claims) {
    if (claim.name == "--tensor-parallel") claim.value = std::to_string(options.tensor_parallel);
    if (claim.name == "--pipeline-parallel") claim.value = std::to_string(options.pipeline_parallel);
    if (claim.name == "--expert-parallel") claim.value = options.expert_parallel ? "yes" : "no";
    if (claim.name == "--rank-speeds") claim.value = options.rank_speeds;
  }
  return claims;
}

void check_ranks_agree(dist::Communicator& group, const io::Checkpoint& checkpoint, const ModelConfig& config,
                       const EngineOptions& options, const AdapterSet& adapters, const Backend& backend) {
  dist::check_agreement(group, rank_claims(checkpoint, config, options, adapters, backend));
}

std::unique_ptr<Model> load_part(const io::Checkpoint& checkpoint, AdapterSet adapters, Backend& backend,
                                 const LoadProgress& progress) {
  std::unique_ptr<Model> model = Model::load(checkpoint, backend, progress, {}, {}, adapters.features);
  if (!adapters.adapters.empty()) model->add_adapters(std::move(adapters.adapters), backend);
  return model;
}

void follow_rank_zero(const EngineOptions& options, dist::Communicator& group) {
  check_options(options);
  const io::Checkpoint checkpoint = io::Checkpoint::open(options.model);
  const ModelConfig config = read_config(checkpoint);
  check_stages(config, options);
  AdapterSet adapters = read_adapters(options, checkpoint, config);
  const dist::Shares shares =
      shares_of(with_measured_speeds(options, group, checkpoint), group.rank(), checkpoint, config);
  const RankGroups groups(group, shares);
  const HostPlace place = place_on_host(group);
  const ChosenBackend chosen = open_backend(
      checkpoint, config, options, {}, {groups.of_stage(), &shares, place.local_rank, place.local_ranks});
  check_ranks_agree(group, checkpoint, config, options, adapters, *chosen.backend);
  const std::unique_ptr<Model> model = load_part(checkpoint, std::move(adapters), *chosen.backend);
  if (options.lock) lock_memory();
  follow(groups, *chosen.backend, *model);
}

}  // namespace millrace
