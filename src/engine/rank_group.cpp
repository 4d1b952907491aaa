#include "engine/rank_group.h"

#include <charconv>
#include <cstdlib>

#include "base/error.h"
#include "dist/mpi_communicator.h"
#include "engine/checkpoint_identity.h"
#include "engine/engine_options.h"
#include "engine/leader_executor.h"
#include "engine/open_backend.h"

namespace millrace {
namespace {

// Processors whose results are the same bits (docs/architecture.md, "Same bits").
std::string same_bits_family(const Backend& backend) {
#if defined(__x86_64__)
  const std::string_view architecture = "x86-64";
#else
  const std::string_view architecture = "arm64";
#endif
  const bool amx = backend.isa().find("amx") != std::string_view::npos;
  return fmt::format("{} {}{}", backend.name(), architecture, amx ? " with AMX" : "");
}

}  // namespace

std::shared_ptr<dist::Communicator> job_group(int ranks) {
  static std::weak_ptr<dist::Communicator> known;  // MPI is per process
  std::shared_ptr<dist::Communicator> group = known.lock();
  if (group == nullptr) {
    if (!dist::started_by_mpi()) {
      throw_error(ErrorCode::kBadInput,
                  "--tensor-parallel {}: found one process, expected {}: start it with mpirun -n {}", ranks,
                  ranks, ranks);
    }
    known = group = dist::make_mpi_world();
  }
  if (group->size() != ranks) {
    throw_error(ErrorCode::kBadInput, "--tensor-parallel {}: mpirun started {} processes, expected {}", ranks,
                group->size(), ranks);
  }
  return group;
}

std::vector<double> parse_rank_speeds(std::string_view name, const EngineOptions& options) {
  const auto ranks = static_cast<size_t>(options.tensor_parallel);
  if (options.rank_speeds.empty()) return std::vector<double>(ranks, 1.0);
  std::vector<double> speeds;
  for (std::string_view rest = options.rank_speeds;;) {
    const std::string_view word = rest.substr(0, rest.find(','));
    double speed = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), speed);
    if (error != std::errc() || end != word.data() + word.size() || !(speed > 0) || speed > 1e9) {
      throw_error(ErrorCode::kBadInput, "{}: found \"{}\", expected numbers above 0 with commas between them",
                  name, options.rank_speeds);
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

void check_ranks_agree(dist::Communicator& group, const io::Checkpoint& checkpoint, const ModelConfig& config,
                       const EngineOptions& options, const Backend& backend) {
  const dist::Claim claims[] = {
      {"version of the program", MILLRACE_VERSION},
      {"model", checkpoint_identity(checkpoint, config)},
      {"--tensor-parallel", std::to_string(options.tensor_parallel)},
      {"--rank-speeds", options.rank_speeds},
      {"processor", same_bits_family(backend)},
  };
  dist::check_agreement(group, claims);
}

void follow_rank_zero(const EngineOptions& options, dist::Communicator& group) {
  check_options(options);
  const io::Checkpoint checkpoint = io::Checkpoint::open(options.model);
  const ModelConfig config = read_config(checkpoint);
  const dist::Shares shares(group.rank(), parse_rank_speeds("rank_speeds", options));
  const ChosenBackend chosen = open_backend(checkpoint, config, options, {}, {&group, &shares});
  check_ranks_agree(group, checkpoint, config, options, *chosen.backend);
  const std::unique_ptr<Model> model = Model::load(checkpoint, *chosen.backend);
  follow(group, *chosen.backend, *model);
}

}  // namespace millrace
