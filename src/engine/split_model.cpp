#include "engine/split_model.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "backend/mixed_backend.h"
#include "base/error.h"
#include "engine/pool_size.h"
#include "io/imatrix.h"

namespace millrace {
namespace {

// Contexts of a shared pool that experts make room for.
constexpr int32_t kContextsKept = 4;

// [layers][experts]: tokens that each expert saw while an importance matrix was made.
std::vector<std::vector<double>> read_expert_counts(const std::string& path, const ModelConfig& config) {
  const io::ImportanceMatrix matrix = io::read_imatrix(path);
  std::vector<std::vector<double>> counts(static_cast<size_t>(config.layers));
  bool any = false;
  for (int32_t l = 0; l < config.layers; ++l) {
    for (const char* role : {"ffn_down_exps", "ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps"}) {
      const auto found = matrix.entries.find(fmt::format("blk.{}.{}.weight", l, role));
      if (found == matrix.entries.end()) continue;
      if (found->second.counts.size() != static_cast<size_t>(config.experts)) {
        throw_error(ErrorCode::kBadInput, "{}: {}: found counts of {} experts, expected {}", path,
                    found->first, found->second.counts.size(), config.experts);
      }
      counts[static_cast<size_t>(l)].assign(found->second.counts.begin(), found->second.counts.end());
      any = true;
      break;
    }
  }
  if (!any) {
    throw_error(ErrorCode::kBadInput,
                "{}: found no counts of experts, expected those of blk.N.ffn_down_exps.weight", path);
  }
  return counts;
}

}  // namespace

SplitDevices split_devices(const std::string& device) {
  const size_t plus = device.find('+');
  if (plus == std::string::npos) return {device, device.starts_with("cuda") ? "cpu" : "", false};
  SplitDevices out{device.substr(0, plus), device.substr(plus + 1), true};
  if (out.first.empty() || out.second.empty() || out.first == "auto" || out.second == "auto" ||
      out.first == out.second) {
    throw_error(ErrorCode::kBadInput, "device: found {}, expected two different ones by name", device);
  }
  return out;
}

bool splits_by_options(const EngineOptions& options) {
  return options.gpu_layers >= 0 || !options.cpu_experts.empty();
}

mixed::Placement plan_split(const io::Checkpoint& checkpoint, const ModelConfig& config,
                            const EngineOptions& options, const RuntimeSetup& setup, const Backend& first,
                            size_t memory) {
  const WeightSizes sizes = weight_sizes(checkpoint, config, first, setup.weights.choice);
  ExecutorLimits limits = runtime_limits(config, first, options, setup);
  if (setup.shared()) limits.sequences = std::min(limits.sequences, kContextsKept);
  const ExecutorSpec spec = make_executor_spec(config, limits);
  ExecutorLimits longest = limits;  // takes the largest workspace: what runtime_spec looks at
  if (options.context == 0) longest.max_context = config.context_length;
  const ExecutorSpec largest = make_executor_spec(config, longest);
  const size_t workspace = first.workspace_bytes(largest) + mixed_rows_bytes(largest);
  mixed::PlacementInput input;
  input.memory = memory > workspace ? memory - workspace : 0;
  input.embedding = sizes.embedding;
  input.output = sizes.output;
  input.experts = config.experts;
  for (size_t l = 0; l < sizes.layers.size(); ++l) {
    const auto group = static_cast<int>(spec.layers[l].group);
    const KvGroupSpec& of = spec.kv_groups[static_cast<size_t>(group)];
    const size_t kv = of.num_layers == 0 ? 0
                                         : spec.kv_block_bytes(group) / static_cast<size_t>(of.num_layers) *
                                               static_cast<size_t>(of.num_blocks);
    input.layers.push_back({sizes.layers[l].dense, kv, sizes.layers[l].experts});
  }
  if (options.gpu_layers >= 0) {
    if (options.gpu_layers > config.layers) {
      throw_error(ErrorCode::kBadInput, "gpu layers: found {}, expected at most {}: {} has no more",
                  options.gpu_layers, config.layers, config.name);
    }
    input.first_layers = options.gpu_layers;
  }
  for (const auto& [name, value] :
       {std::pair<const char*, const std::string&>{"cpu experts", options.cpu_experts},
        {"expert counts", options.expert_counts}}) {
    if (value.empty() || config.experts > 0) continue;
    throw_error(ErrorCode::kBadInput, "{}: found {}, expected none: {} has no experts", name, value,
                config.name);
  }
  if (!options.cpu_experts.empty()) mixed::parse_experts("cpu experts", options.cpu_experts, input);
  if (!options.expert_counts.empty()) input.counts = read_expert_counts(options.expert_counts, config);
  return mixed::plan_placement(input);
}

std::unique_ptr<Backend> split_model(const io::Checkpoint& checkpoint, const ModelConfig& config,
                                     const EngineOptions& options, const RuntimeSetup& setup,
                                     std::unique_ptr<Backend> first, const std::string& second,
                                     const BackendOptions& wanted) {
  if (second.empty() || wanted.shares != nullptr) {
    throw_error(ErrorCode::kUnsupported, "device {}: a model is split over a GPU and the CPU of one process",
                first->name());
  }
  std::optional<size_t> memory = first->own_memory();
  if (!memory && wanted.memory_bytes > 0) memory = wanted.memory_bytes;
  mixed::Placement placement = plan_split(checkpoint, config, options, setup, *first,
                                          memory.value_or(std::numeric_limits<size_t>::max() / 2));
  return make_mixed_backend(std::move(first), make_backend(second, wanted), std::move(placement), memory);
}

std::unique_ptr<Backend> try_split_model(const io::Checkpoint& checkpoint, const ModelConfig& config,
                                         const EngineOptions& options, const RuntimeSetup& setup,
                                         std::unique_ptr<Backend>& first, const SplitDevices& devices,
                                         const BackendOptions& wanted) {
  if (wanted.shares != nullptr || !first->own_memory()) return nullptr;
  try {
    mixed::Placement placement = plan_split(checkpoint, config, options, setup, *first, *first->own_memory());
    std::unique_ptr<Backend> side = make_backend(devices.second, wanted);
    std::unique_ptr<Backend> both =
        make_mixed_backend(std::move(first), std::move(side), std::move(placement));
    runtime_spec(checkpoint, config, *both, options, setup);
    return both;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNoMemory) throw;
    if (first == nullptr) first = make_backend(devices.first, wanted);
    return nullptr;
  }
}

}  // namespace millrace
