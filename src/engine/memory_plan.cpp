#include "engine/memory_plan.h"

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "engine/available_memory.h"
#include "engine/pool_size.h"

namespace millrace {

namespace {

// Bytes of KV pools for `sequences` of `context`.
size_t kv_bytes(const ModelConfig& config, const Backend& backend, const EngineOptions& options,
                ExecutorLimits limits, int32_t context, int32_t sequences) {
  limits.max_context = context;
  limits.sequences = sequences;
  const ExecutorSpec spec = make_executor_spec(config, limits);
  return pool_bytes(spec, options, backend);
}

// The largest n in [0, max] for which fits(n); fits is monotone.
template <class Fits>
int32_t largest(int32_t max, const Fits& fits) {
  int32_t low = 0, high = max;
  while (low < high) {
    const int32_t middle = low + (high - low + 1) / 2;
    if (fits(middle)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// What would run. Where that is refused for want of memory, `reason` says so and the spec has a context for
// every sequence, whatever it takes: a plan is there to be looked at.
ExecutorSpec spec_to_plan(const io::Checkpoint& checkpoint, const ModelConfig& config, const Backend& backend,
                          const EngineOptions& options, const RuntimeSetup& setup, std::string& reason) {
  try {
    check_context(config, backend, options, setup);
    return runtime_spec(checkpoint, config, backend, options, setup);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNoMemory) throw;
    reason = error.what();
    return make_executor_spec(config, runtime_limits(config, backend, options, setup));
  }
}

}  // namespace

MemoryPlan plan_memory(const io::Checkpoint& checkpoint, const ModelConfig& config, const Backend& backend,
                       const EngineOptions& options, const RuntimeSetup& setup) {
  ExecutorLimits limits = runtime_limits(config, backend, options, setup);
  MemoryPlan plan;
  const ExecutorSpec spec = spec_to_plan(checkpoint, config, backend, options, setup, plan.does_not_fit);
  limits.max_context = spec.max_context;
  const WeightBytes weights = plan_weights(checkpoint, config, backend, setup.weights.choice);
  plan.weights_mapped = weights.mapped;
  plan.weights_repacked = weights.repacked;
  plan.weights_dequantized = weights.dequantized;
  plan.workspace = backend.workspace_bytes(spec);
  plan.context = limits.max_context;
  plan.kv_type = limits.kv_type;
  plan.memory_available = backend.own_memory().value_or(available_memory());
  ExecutorLimits alone = limits;
  alone.sequences = 1;
  const ExecutorSpec one = make_executor_spec(config, alone);
  for (size_t g = 0; g < spec.kv_groups.size(); ++g) {
    const KvGroupSpec& group = spec.kv_groups[g];
    const size_t block = spec.pool_block_bytes(static_cast<int>(g));
    const int32_t apart = group.state ? group.states_apart : kBlockTokens;
    plan.groups.push_back({.window = group.window,
                           .layers = group.num_layers,
                           .bytes_per_1k_tokens = block * 1024 / static_cast<size_t>(group.shelves * apart),
                           .bytes_at_context = block * static_cast<size_t>(one.kv_groups[g].blocks_here()),
                           .state = group.state,
                           .states_apart = group.states_apart});
  }
  // A device with memory of its own holds copies; the file's mapping is the machine's.
  const size_t mapped = backend.own_memory() ? 0 : plan.weights_mapped;
  const size_t fixed = mapped + plan.weights_repacked + plan.weights_dequantized + plan.workspace;
  plan.pool = pool_bytes(spec, options, backend);
  plan.total = fixed + plan.pool;
  const size_t room = plan.memory_available > fixed ? plan.memory_available - fixed : 0;
  plan.longest_context = largest(config.context_length, [&](int32_t n) {
    return kv_bytes(config, backend, options, limits, n, 1) <= room;
  });
  const size_t each = kv_bytes(config, backend, options, limits, limits.max_context, 1);
  plan.users_at_context = static_cast<int32_t>(std::min<size_t>(
      each == 0 ? 0 : room / each, static_cast<size_t>(std::numeric_limits<int32_t>::max())));
  return plan;
}

}  // namespace millrace
