#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>

#include "base/check.h"
#include "base/error.h"
#include "io/hf_directory.h"
#include "model/architecture.h"
#include "model/weight_source.h"

namespace millrace {
namespace {

// "eos_token_id": 2 or [2, 3] in generation_config.json and config.json.
void add_end_tokens(const nlohmann::json& object, std::vector<int32_t>& ends) {
  if (!object.is_object()) return;
  const auto it = object.find("eos_token_id");
  if (it == object.end()) return;
  const auto add = [&](const nlohmann::json& id) {
    if (id.is_number_integer() && id >= 0 && id <= INT32_MAX) ends.push_back(id.get<int32_t>());
  };
  if (it->is_array()) {
    for (const nlohmann::json& id : *it) add(id);
  } else {
    add(*it);
  }
}

// A number in [low, high] that generation_config.json or a GGUF key names; anything else is no advice.
std::optional<float> advised(const io::Checkpoint& checkpoint, const char* gguf, const char* hf, double low,
                             double high) {
  double value = std::nan("");
  if (checkpoint.gguf) {
    value = checkpoint.gguf->get_real(fmt::format("general.sampling.{}", gguf), value);
  } else if (checkpoint.hf->generation_config.is_object()) {
    const auto it = checkpoint.hf->generation_config.find(hf);
    if (it != checkpoint.hf->generation_config.end() && it->is_number()) value = it->get<double>();
  }
  if (!(value >= low && value <= high)) return std::nullopt;
  return static_cast<float>(value);
}

ModelConfig::Sampling read_sampling(const io::Checkpoint& checkpoint) {
  ModelConfig::Sampling sampling;
  sampling.temperature = advised(checkpoint, "temp", "temperature", 0, 100);
  sampling.top_p = advised(checkpoint, "top_p", "top_p", 1e-6, 1);
  sampling.min_p = advised(checkpoint, "min_p", "min_p", 0, 1);
  sampling.repetition_penalty = advised(checkpoint, "penalty_repeat", "repetition_penalty", 1e-3, 100);
  if (const auto k = advised(checkpoint, "top_k", "top_k", 0, 1 << 24))
    sampling.top_k = static_cast<int32_t>(*k);
  return sampling;
}

// Rows of the embedding: what the files really hold, whatever vocab_size says.
int32_t read_vocab(const ConfigReader& reader, const Architecture& architecture) {
  const HfNames hf = architecture.hf_names();
  const std::string name(reader.is_gguf()                            ? "token_embd.weight"
                         : has_output_alone(reader.checkpoint(), hf) ? hf.output
                                                                     : hf.embedding);
  const TensorView* view = reader.checkpoint().find_tensor(name);
  if (view == nullptr && !reader.is_gguf())
    view = reader.checkpoint().find_tensor(std::string(hf.prefix) + name);
  if (view == nullptr) reader.fail(fmt::format("tensor {}", name), "nothing", "the token embedding");
  if (view->rank != 2 || view->shape[0] < 1 || view->shape[0] > (1 << 26)) {
    reader.fail(fmt::format("tensor {}", name),
                fmt::format("rank {} with {} rows", view->rank, view->shape[0]), "[vocabulary, hidden]");
  }
  return static_cast<int32_t>(view->shape[0]);
}

// The last part. In the hub's cache that is a commit: models--owner--name/snapshots/COMMIT is called name.
std::string name_of_path(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  constexpr std::string_view kSnapshots = "/snapshots";
  const size_t last = path.rfind('/');
  if (last != std::string::npos && std::string_view(path).substr(0, last).ends_with(kSnapshots)) {
    const std::string folder = path.substr(0, last - kSnapshots.size());
    const std::string repository = folder.substr(folder.rfind('/') + 1);
    const size_t owner = repository.rfind("--");
    if (repository.starts_with("models--") && owner != std::string::npos) return repository.substr(owner + 2);
  }
  return path.substr(last + 1);
}

// config.json's per_layer_config: keys of single layers in place of the model's. Sizes are seen in the
// weights' shapes; what else there is would not be seen.
void refuse_layer_keys(const ConfigReader& reader) {
  const auto layers = reader.hf().find("per_layer_config");
  if (layers == reader.hf().end() || !layers->is_object()) return;
  for (const auto& [layer, keys] : layers->items()) {
    for (const auto& [key, value] : keys.items()) {
      if (key == "head_dim" || key == "num_key_value_heads" || key == "intermediate_size") continue;
      throw_error(ErrorCode::kUnsupported,
                  "{}: config.json: per_layer_config of layer {}: found {}, expected none",
                  reader.checkpoint().path(), layer, key);
    }
  }
}

}  // namespace

ModelConfig read_config(const io::Checkpoint& checkpoint) {
  const Architecture& architecture = find_architecture(checkpoint);
  const ConfigReader reader(checkpoint, architecture);
  ModelConfig config;
  config.architecture = architecture.name();
  config.vocab = read_vocab(reader, architecture);
  if (checkpoint.gguf) {
    config.name = checkpoint.gguf->get_string("general.name", "");
  } else {
    add_end_tokens(checkpoint.hf->generation_config, config.end_tokens);
    if (config.end_tokens.empty()) add_end_tokens(checkpoint.hf->config, config.end_tokens);
  }
  if (config.name.empty()) config.name = name_of_path(checkpoint.path());
  config.sampling = read_sampling(checkpoint);
  architecture.read_config(reader, config);
  if (!reader.is_gguf()) refuse_layer_keys(reader);
  if (!config.encoder && !reader.flag_or("attention.causal", "is_causal", true)) {
    throw_error(ErrorCode::kUnsupported, "{}: {}: found false, expected true for architecture {}",
                checkpoint.path(), reader.is_gguf() ? "attention.causal" : "config.json: is_causal",
                config.architecture);
  }
  return config;
}

namespace {

// Tokens between the states that the prefix cache keeps. All states of a place in a sequence are as large as
// the keys and values of thousands of tokens, so they are kept so far apart that they take no more room than
// these do. Nearer than kNearest would save less than a step, farther than kFarthest leave too much to
// compute again where prompts branch.
int32_t states_apart_of(const ExecutorSpec& spec) {
  constexpr int64_t kNearest = 512, kFarthest = 8192, kWithoutKeys = 2048;
  int64_t states = 0, keys = 0;
  for (size_t g = 0; g < spec.kv_groups.size(); ++g) {
    const auto bytes = static_cast<int64_t>(spec.kv_block_bytes(static_cast<int>(g)));
    if (spec.kv_groups[g].state) states += bytes;
    if (spec.kv_groups[g].window == 0) keys += bytes / kBlockTokens;
  }
  if (keys == 0) return kWithoutKeys;
  const int64_t steps = (states / keys + kNearest - 1) / kNearest;
  return static_cast<int32_t>(std::clamp(steps * kNearest, kNearest, kFarthest));
}

using Heads = ModelConfig::HeadShape;

// The next layer of the group of such layers, which is added where there is none yet.
ExecutorSpec::LayerPlace add_to_group(ExecutorSpec& spec, int32_t window, bool state, Heads heads = {}) {
  auto group = std::find_if(spec.kv_groups.begin(), spec.kv_groups.end(), [&](const KvGroupSpec& g) {
    return g.window == window && g.state == state && g.kv_heads == heads.kv_heads &&
           g.head_dim == heads.head_dim;
  });
  if (group == spec.kv_groups.end()) {
    MILLRACE_CHECK(spec.kv_groups.size() < kMaxKvGroups);  // read_hf_layer_types gives one window per model
    group = spec.kv_groups.insert(group, {.window = window,
                                          .num_layers = 0,
                                          .num_blocks = 0,
                                          .state = state,
                                          .kv_heads = heads.kv_heads,
                                          .head_dim = heads.head_dim});
  }
  return {static_cast<int32_t>(group - spec.kv_groups.begin()), group->num_layers++};
}

// Where each layer keeps its keys and values, or its state.
void place_layers(const ModelConfig& config, ExecutorSpec& spec) {
  for (int l = 0; l < config.layers; ++l) {
    if (!config.keeps(l)) {
      spec.layers.push_back({-1, 0});
    } else if (config.has_state(l) && !config.state_beside) {
      spec.layers.push_back(add_to_group(spec, kStateWindow, true));
    } else if (!config.has_keys(l)) {
      spec.layers.push_back(spec.layers[static_cast<size_t>(config.kv_source[static_cast<size_t>(l)])]);
    } else {
      const Heads heads = config.layer_heads.empty() ? Heads{} : config.heads_of(l);
      spec.layers.push_back(add_to_group(spec, config.layer_windows[static_cast<size_t>(l)], false, heads));
    }
    if (config.state_beside) spec.beside.push_back(add_to_group(spec, kStateWindow, true));
  }
}

// Blocks of one sequence. A window group holds its window, a partial block at either end, and the step being
// written.
int64_t blocks_of_sequence(const KvGroupSpec& group, const ExecutorLimits& limits) {
  int64_t tokens = limits.max_context;
  if (group.window > 0) {
    tokens =
        std::min<int64_t>(tokens, static_cast<int64_t>(group.window) + limits.max_tokens + 2 * kBlockTokens);
  }
  const int64_t blocks = blocks_for(tokens);
  if (group.state) {
    return std::min<int64_t>(blocks, state_blocks_of_step(limits.max_tokens, group.states_apart));
  }
  if (group.window > 0) return blocks;  // of a window everybody keeps all
  return int64_t{blocks_on_shelf(static_cast<int32_t>(blocks), 0, group.shelves)} * group.shelves;
}

}  // namespace

ExecutorSpec make_executor_spec(const ModelConfig& config, const ExecutorLimits& limits) {
  ExecutorSpec spec;
  spec.max_tokens = limits.max_tokens;
  spec.max_logit_rows = limits.max_logit_rows;
  spec.max_context = limits.max_context;
  spec.hidden = config.hidden;
  spec.heads = config.heads;
  spec.kv_heads = config.kv_heads;
  spec.head_dim = config.head_dim;
  spec.vocab = config.vocab;
  spec.ffn = std::max(config.ffn, config.shared_ffn);
  spec.experts = config.experts;
  spec.experts_per_token = config.experts_per_token;
  spec.expert_ffn = config.expert_ffn;
  spec.latent = config.latent;
  spec.adapter_rank = limits.adapter_rank;
  spec.kv_type = limits.kv_type;
  spec.gated_attention = config.gated_attention;
  spec.layer_input = config.layer_input;
  spec.expert_norms = config.expert_norms;
  spec.page_summaries = limits.page_summaries;
  if (!config.state_layers.empty()) spec.state = config.state;
  place_layers(config, spec);
  const int32_t apart = limits.states_apart > 0 ? limits.states_apart : states_apart_of(spec);
  for (KvGroupSpec& group : spec.kv_groups) {
    if (group.state) group.states_apart = apart;
    if (group.window == 0 && !group.state) group.shelves = limits.context_ranks;
    const int64_t blocks = blocks_of_sequence(group, limits) * limits.sequences;
    if (blocks > INT32_MAX) {
      throw_error(ErrorCode::kNoMemory,
                  "context: found {} tokens for {} sequences, expected at most {} blocks of {}",
                  limits.max_context, limits.sequences, INT32_MAX, kBlockTokens);
    }
    group.num_blocks = static_cast<int32_t>(blocks);
  }
  return spec;
}

}  // namespace millrace
