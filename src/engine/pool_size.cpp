#include "engine/pool_size.h"

#include <algorithm>
#include <optional>

#include "base/check.h"
#include "base/error.h"
#include "engine/available_memory.h"
#include "engine/engine_options.h"
#include "engine/rank_launcher.h"
#include "engine/rank_messages.h"
#include "kernels/quant/kv_types.h"

namespace millrace {
namespace {

// A context that nobody named is at least this (or what the model was trained for), and what a shared pool
// has for each sequence: few are longer, and blocks are anybody's.
constexpr int32_t kUsualContext = 4096;
// It is cut to a multiple of this where memory cuts it: a few bytes more or less free do not change it.
constexpr int32_t kContextStep = 1024;

int32_t least_context(const ModelConfig& config) { return std::min(config.context_length, kUsualContext); }

// One block more than the context: the token that is one too many is written before it is found out.
int64_t tokens_for(int32_t context) { return static_cast<int64_t>(blocks_for(context) + 1) * kBlockTokens; }

// So many logical blocks, where every shelf has what the fullest has of them.
int32_t on_shelves(int32_t blocks, int32_t shelves) { return blocks_on_shelf(blocks, 0, shelves) * shelves; }

// Room for `tokens` of all sequences together. A window group needs the window of everybody who runs, the
// step being written, and the tails that the prefix cache keeps (about one window in every 512 tokens).
void set_shared_blocks(ExecutorSpec& spec, int32_t sequences, int64_t tokens) {
  constexpr int64_t kTailEvery = 512;
  for (KvGroupSpec& group : spec.kv_groups) {
    int64_t blocks = blocks_for(tokens);
    if (group.state) {
      // Two of everybody who runs and one on the way, a step, and states that are kept.
      constexpr int64_t kRunning = 3;
      blocks =
          std::min(blocks, sequences * kRunning + state_blocks_of_step(spec.max_tokens, group.states_apart) +
                               tokens / group.states_apart);
    } else if (group.window > 0) {
      const int64_t window = blocks_for(group.window) + 2;
      blocks =
          std::min(blocks, sequences * window + blocks_for(spec.max_tokens) + tokens / kTailEvery * window);
    }
    group.num_blocks = on_shelves(static_cast<int32_t>(blocks), group.shelves);
  }
}

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

// What a device with memory of its own leaves for the pools; `spec` has all sizes but theirs.
size_t free_on_device(size_t memory, const io::Checkpoint& checkpoint, const ModelConfig& config,
                      const Backend& backend, const EngineOptions& options, const RuntimeSetup& setup,
                      const ExecutorSpec& spec) {
  const WeightBytes plan = plan_weights(checkpoint, config, backend, setup.weights.choice);
  const size_t weights = plan.repacked + plan.dequantized;
  const size_t workspace = backend.workspace_bytes(spec);
  if (weights + workspace < memory) return memory - weights - workspace;
  throw_error(
      ErrorCode::kNoMemory,
      "device {}: weights of {:.2f} GiB and a workspace of {:.2f} GiB, expected at most {:.2f} GiB, {} "
      "(--gpu-memory; --quantize makes weights smaller)",
      backend.name(), static_cast<double>(weights) / kGiB, static_cast<double>(workspace) / kGiB,
      static_cast<double>(memory) / kGiB,
      options.gpu_memory > 1 ? "what may be taken"
                             : fmt::format("{:.0f}% of what the device has free", 100 * options.gpu_memory));
}

// Blocks of a shared pool, as many tokens as `max_bytes` bytes hold and no more than `tokens`; how many that
// is.
int64_t set_blocks_within(ExecutorSpec& spec, int32_t sequences, int64_t tokens, size_t max_bytes,
                          const EngineOptions& options, const Backend& backend) {
  int64_t low = 0, high = tokens / kBlockTokens;
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    set_shared_blocks(spec, sequences, middle * kBlockTokens);
    if (pool_bytes(spec, options, backend) <= max_bytes) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  set_shared_blocks(spec, sequences, low * kBlockTokens);
  return low * kBlockTokens;
}

[[noreturn]] void throw_does_not_fit(const Backend& backend, std::string_view what, int64_t tokens,
                                     size_t bytes, size_t available, int64_t fits, std::string_view remedy) {
  throw_error(
      ErrorCode::kNoMemory,
      "device {}: {} of {} tokens takes {:.2f} GiB of KV cache, {:.2f} GiB more than there is room for; {} "
      "tokens would fit ({})",
      backend.name(), what, tokens, static_cast<double>(bytes) / kGiB,
      static_cast<double>(bytes - available) / kGiB, fits, remedy);
}

// The longest context from least_context() to `most` of which fits(context), which is monotone; in whole
// steps.
template <class Fits>
int32_t longest_context(const ModelConfig& config, int32_t most, const Fits& fits) {
  const int32_t least = least_context(config);
  if (most <= least || fits(most)) return most;
  int32_t low = 0, high = (most - least) / kContextStep;
  while (low < high) {
    const int32_t middle = low + (high - low + 1) / 2;
    if (fits(least + middle * kContextStep)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return least + low * kContextStep;
}

// What a KV cache may take for the sake of a long context: half of what the machine has beside the weights.
size_t room_beside_weights(const io::Checkpoint& checkpoint, const ModelConfig& config,
                           const Backend& backend, const RuntimeSetup& setup, size_t available) {
  const WeightBytes weights = plan_weights(checkpoint, config, backend, setup.weights.choice);
  const size_t taken = weights.mapped + weights.repacked + weights.dequantized;
  return available > taken ? (available - taken) / 2 : 0;
}

// The context of options that name none: what the model was trained for, cut to what memory holds of it.
int32_t default_context(const ModelConfig& config, const ExecutorLimits& limits, const Backend& backend,
                        const EngineOptions& options, const RuntimeSetup& setup, size_t room) {
  const int32_t most =
      setup.most_context > 0 ? std::min(config.context_length, setup.most_context) : config.context_length;
  if (setup.shared() && options.kv_tokens > 0) {
    const int64_t held = options.kv_tokens / kBlockTokens * kBlockTokens - kBlockTokens;
    return static_cast<int32_t>(std::clamp<int64_t>(held, 1, most));
  }
  if (setup.shared() && options.kv_bytes > 0) room = std::min(room, options.kv_bytes);
  return longest_context(config, most, [&](int32_t context) {
    ExecutorLimits longer = limits;
    longer.max_context = context;
    if (setup.shared()) longer.sequences = 1;
    ExecutorSpec spec = make_executor_spec(config, longer);
    if (setup.shared()) set_shared_blocks(spec, limits.sequences, tokens_for(context));
    return pool_bytes(spec, options, backend) <= room;
  });
}

// Of a pool with a context of its own for each sequence.
void check_fits(const ModelConfig& config, ExecutorLimits limits, const Backend& backend,
                const EngineOptions& options, size_t available) {
  const int32_t wanted = limits.max_context;
  const auto bytes_of = [&](int64_t context) {
    limits.max_context = static_cast<int32_t>(context);
    return pool_bytes(make_executor_spec(config, limits), options, backend);
  };
  const size_t bytes = bytes_of(wanted);
  if (bytes <= available) return;
  int64_t low = 0, high = wanted;
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (bytes_of(middle) <= available) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  throw_does_not_fit(backend, "a context", wanted, bytes, available, low, "--ctx");
}

}  // namespace

namespace {

// Of the machine that plans: all that a group of ranks has where they are all started here.
int32_t blocks_held(const KvGroupSpec& group, const EngineOptions& options) {
  const bool all = !options.launcher.empty() && ranks_are_here(options);
  return all ? group.num_blocks : group.blocks_here();
}

// Ranks of one machine have an even part of what it has free.
size_t memory_here(const RuntimeSetup& setup) {
  return available_memory() / static_cast<size_t>(setup.local_ranks);
}

void check_positions(const ModelConfig& config, int32_t context) {
  if (!config.learned_positions || context <= config.context_length) return;
  throw_error(ErrorCode::kBadInput,
              "context: found {} tokens, expected at most {}: {} has learned so many positions and no more",
              context, config.context_length, config.name);
}

// Sparse attention is of layers with keys of each head that see the whole context.
void check_sparse(const ModelConfig& config, const Backend& backend, const EngineOptions& options,
                  const RuntimeSetup& setup) {
  const auto refuse = [&](std::string_view why) {
    throw_error(ErrorCode::kUnsupported, "attention: found {}, expected full: {}", options.attention, why);
  };
  if (options.context_parallel > 1) refuse("contexts are spread over ranks");
  if (backend.lacks().has(OpFeature::kSparse)) {
    refuse(fmt::format("the device {} has no sparse attention yet; use --device cpu", backend.name()));
  }
  if (config.encoder) refuse(fmt::format("{} is a text encoder", config.name));
  if (config.latent.rank > 0) refuse(fmt::format("{} has latent attention", config.name));
  const ExecutorSpec spec = make_executor_spec(config, {.page_summaries = true});
  for (const KvGroupSpec& group : spec.kv_groups) {
    if (group.head_dim > 0) refuse(fmt::format("{} has heads of several sizes", config.name));
  }
  bool any = false;
  for (size_t g = 0; g < spec.kv_groups.size(); ++g) any |= spec.page_summary_bytes(static_cast<int>(g)) > 0;
  if (!any) refuse(fmt::format("no layer of {} sees the whole context", config.name));
  if (options.attention == "request" && !setup.shared()) {
    throw_error(ErrorCode::kBadInput, "attention: found request, expected full or sparse: nobody asks here");
  }
}

}  // namespace

double part_of_pool(const ExecutorSpec& spec, int group, const dist::Shares& shares, int rank) {
  const size_t whole = part_bytes(spec, block_part(spec, dist::Shares::even(0, 1), 0, group));
  if (whole == 0) return 1;
  const auto part = [&](const dist::Shares& of, int number) {
    return static_cast<double>(part_bytes(spec, block_part(spec, of, number, group))) /
           static_cast<double>(whole);
  };
  return part(shares.between_stages(), rank / shares.ranks()) *
         part(shares.within_stage(), rank % shares.ranks());
}

size_t pool_bytes(const ExecutorSpec& spec, const EngineOptions& options, const Backend& backend) {
  // Of heads or layers that ranks share what the one has that has most: pools are as long on each of them.
  const dist::Shares* const shares = backend.own_memory() ? nullptr : backend.shares();
  double bytes = 0;
  for (int g = 0; g < std::ssize(spec.kv_groups); ++g) {
    double part = shares == nullptr ? 1 : 0;
    for (int r = 0; shares != nullptr && r < shares->ranks() * shares->stages(); ++r) {
      part = std::max(part, part_of_pool(spec, g, *shares, r));
    }
    bytes += part * static_cast<double>(spec.pool_block_bytes(g)) *
             blocks_held(spec.kv_groups[static_cast<size_t>(g)], options);
  }
  return static_cast<size_t>(bytes);
}

ExecutorLimits runtime_limits(const ModelConfig& config, const Backend& backend, const EngineOptions& options,
                              const RuntimeSetup& setup) {
  const int32_t sequences = setup.shared() ? options.max_running : setup.sequences;
  ExecutorLimits limits;
  limits.max_context = options.context > 0 ? options.context : least_context(config);
  check_positions(config, limits.max_context);
  if (config.encoder && options.context == 0) limits.max_context = config.context_length;
  const int32_t step_tokens = options.step_tokens > 0
                                  ? options.step_tokens
                                  : backend.default_step_tokens() * options.context_parallel;
  limits.max_tokens = static_cast<int32_t>(std::max<int64_t>(
      1, std::min<int64_t>(std::max(step_tokens, sequences), int64_t{limits.max_context} * sequences)));
  // An encoder's text is computed in one step.
  if (config.encoder) limits.max_tokens = std::max(limits.max_tokens, limits.max_context);
  limits.max_logit_rows = setup.logit_rows > 0 ? setup.logit_rows : sequences + draft_rows(options);
  limits.sequences = sequences;
  limits.context_ranks = options.context_parallel;
  limits.adapter_rank = setup.adapter_rank;
  limits.page_summaries = options.attention != "full";
  limits.states_apart = options.states_apart;
  if (options.states_apart > 0 && config.state_layers.empty()) {
    throw_error(ErrorCode::kBadInput, "states_apart: found {}, expected 0: no layer of {} has a state",
                options.states_apart, config.name);
  }
  if (limits.page_summaries) check_sparse(config, backend, options, setup);
  limits.kv_type =
      options.kv_type.empty() ? backend.default_kv_type() : parse_kv_type("kv_type", options.kv_type);
  if (!backend.supports_kv_type(limits.kv_type)) {
    std::string known;
    for (const KvTypeName& type : kKvTypeNames) {
      if (backend.supports_kv_type(type.type))
        known += fmt::format("{}{}", known.empty() ? "" : ", ", type.name);
    }
    throw_error(ErrorCode::kUnsupported, "kv type: found {}, device {} has {}", kv_type_name(limits.kv_type),
                backend.name(), known);
  }
  return limits;
}

void check_context(const ModelConfig& config, const Backend& backend, const EngineOptions& options,
                   const RuntimeSetup& setup) {
  if (setup.shared() || backend.own_memory()) return;  // runtime_spec has looked
  check_fits(config, runtime_limits(config, backend, options, setup), backend, options, memory_here(setup));
}

ExecutorSpec runtime_spec(const io::Checkpoint& checkpoint, const ModelConfig& config, const Backend& backend,
                          const EngineOptions& options, const RuntimeSetup& setup) {
  ExecutorLimits limits = runtime_limits(config, backend, options, setup);
  const size_t of_machine = memory_here(setup);  // looked at once: it changes
  std::optional<size_t> available;
  if (const std::optional<size_t> memory = backend.own_memory()) {
    ExecutorLimits longest = limits;  // takes the largest workspace
    if (options.context == 0) longest.max_context = config.context_length;
    available = free_on_device(*memory, checkpoint, config, backend, options, setup,
                               make_executor_spec(config, longest));
  }
  if (options.context == 0 && setup.kv_blocks.empty() && !config.encoder) {
    size_t room =
        available ? *available : room_beside_weights(checkpoint, config, backend, setup, of_machine);
    if (options.speculation == Speculation::kDraft) room /= 2;  // the draft model has one of the same length
    limits.max_context = default_context(config, limits, backend, options, setup, room);
  }
  if (!setup.shared()) {
    MILLRACE_CHECK(setup.kv_blocks.empty());
    if (available) check_fits(config, limits, backend, options, *available);
    return make_executor_spec(config, limits);
  }
  const int32_t sequences = limits.sequences;
  limits.sequences = 1;
  ExecutorSpec spec = make_executor_spec(config, limits);
  if (!setup.kv_blocks.empty()) {
    MILLRACE_CHECK(setup.kv_blocks.size() == spec.kv_groups.size());
    for (size_t g = 0; g < spec.kv_groups.size(); ++g) {
      KvGroupSpec& group = spec.kv_groups[g];
      group.num_blocks = on_shelves(setup.kv_blocks[g], group.shelves);
    }
    return spec;
  }
  const int64_t context_tokens = tokens_for(spec.max_context);
  if (options.kv_tokens > 0) {
    const size_t max_bytes = available.value_or(of_machine);
    set_shared_blocks(spec, sequences, options.kv_tokens);
    if (const size_t bytes = pool_bytes(spec, options, backend); bytes > max_bytes) {
      const int64_t fits = set_blocks_within(spec, sequences, options.kv_tokens, max_bytes, options, backend);
      throw_does_not_fit(backend, "a pool", options.kv_tokens, bytes, max_bytes, fits, "--kv-tokens");
    }
    if (options.kv_tokens < context_tokens) {
      throw_error(
          ErrorCode::kNoMemory,
          "kv cache: a pool of {} tokens, expected at least {} for one context of {} (--ctx, --kv-tokens)",
          options.kv_tokens, context_tokens, spec.max_context);
    }
    return spec;
  }
  size_t max_bytes = options.kv_bytes > 0 ? options.kv_bytes : available.value_or(of_machine / 2);
  if (available) max_bytes = std::min(max_bytes, *available);
  const int32_t usual = options.context > 0 ? options.context : std::min(spec.max_context, kUsualContext);
  int64_t wanted = std::max(context_tokens, tokens_for(usual) * sequences);
  if (setup.most_tokens > 0) wanted = std::clamp(setup.most_tokens, context_tokens, wanted);
  int64_t tokens = set_blocks_within(spec, sequences, wanted, max_bytes, options, backend);
  // Windows and states of everybody who may run leave no room for one context: fewer run at the same time.
  for (int32_t running = sequences; tokens < context_tokens && running > 1;) {
    running /= 2;
    tokens = set_blocks_within(spec, running, std::max(context_tokens, tokens_for(usual) * running),
                               max_bytes, options, backend);
  }
  if (tokens < context_tokens) {
    set_shared_blocks(spec, 1, context_tokens);
    throw_does_not_fit(backend, "a context", spec.max_context, pool_bytes(spec, options, backend), max_bytes,
                       std::max<int64_t>(0, tokens - kBlockTokens), "--ctx");
  }
  return spec;
}

}  // namespace millrace
