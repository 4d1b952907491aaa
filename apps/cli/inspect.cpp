// millrace inspect: what a model file holds and what running it takes, without loading it.
#include "inspect.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>

#include "engine/memory_plan.h"
#include "engine/open_backend.h"
#include "engine/rank_group.h"
#include "engine/weight_types.h"
#include "inspect_ranks.h"
#include "io/hf_directory.h"
#include "io/printable.h"
#include "model_names.h"
#include "model_options.h"
#include "open_model.h"
#include "output.h"
#include "prompt.h"

namespace millrace::cli {
namespace {

using Json = nlohmann::ordered_json;

struct InspectOptions {
  EngineOptions engine = default_options();
  bool tensors = false, json = false;
  SharingOptions sharing;
};

constexpr const char* kInspectFooter =
    "Examples:\n"
    "  millrace inspect model.gguf\n"
    "  millrace inspect model.gguf --ctx 131072 --device cuda   # will it fit?\n"
    "  millrace inspect model.gguf --tensors                    # every tensor\n"
    "  millrace inspect gpt-oss-120b                            # before it is fetched: its first megabytes "
    "do\n"
    "  millrace inspect model.gguf --ranks 3                    # shared by three processes\n"
    "  millrace inspect model.gguf --ranks 2 --alone 12.5 --link-us 50 --link-mbit 1000   # how fast?\n"
    "  millrace inspect model.gguf --ranks 3 --context-parallel # a context three times as long\n"
    "  millrace inspect model.gguf --json | jq .memory";

// A metadata value for people: long text and arrays cut short.
Json summarize(const io::GgufValue& value) {
  struct Visitor {
    Json operator()(uint64_t v) const { return v; }
    Json operator()(int64_t v) const { return v; }
    Json operator()(double v) const { return v; }
    Json operator()(bool v) const { return v; }
    Json operator()(std::string_view v) const {
      return valid_utf8(v.size() > 200 ? std::string(v.substr(0, 200)) + "..." : std::string(v));
    }
    Json operator()(const io::GgufArray& v) const {
      const size_t n = v.integers.size() + v.reals.size() + v.strings.size();
      if (n <= 8 && !v.integers.empty()) return v.integers;
      if (n <= 8 && !v.reals.empty()) return v.reals;
      const char* kind = !v.strings.empty() ? "strings" : !v.reals.empty() ? "reals" : "integers";
      return fmt::format("[{} {}]", human_count(n), kind);
    }
  };
  return std::visit(Visitor{}, value);
}

Json metadata_json(const io::Checkpoint& checkpoint) {
  Json out = Json::object();
  if (checkpoint.gguf) {
    for (const auto& [key, value] : checkpoint.gguf->metadata()) out[valid_utf8(key)] = summarize(value);
  } else {
    for (const auto& [key, value] : checkpoint.hf->config.items()) out[key] = value;
  }
  return out;
}

Json config_json(const ModelConfig& config) {
  Json out = {{"architecture", config.architecture},
              {"name", valid_utf8(config.name)},
              {"layers", config.layers},
              {"hidden", config.hidden},
              {"heads", config.heads},
              {"kv_heads", config.kv_heads},
              {"head_dim", config.head_dim},
              {"vocabulary", config.vocab},
              {"context_length", config.context_length}};
  if (config.ffn > 0) out["ffn"] = config.ffn;
  if (config.experts > 0) {
    out["experts"] = config.experts;
    out["experts_per_token"] = config.experts_per_token;
    out["expert_ffn"] = config.expert_ffn;
  }
  std::map<int32_t, int> windows;
  for (const int32_t window : config.layer_windows) ++windows[window];
  const auto states = std::count(config.state_layers.begin(), config.state_layers.end(), true);
  if (states > 0) out["layers_with_state"] = states;
  for (const auto& [window, layers] : windows) {
    if (window > 0) out[fmt::format("layers_with_window_{}", window)] = layers;
  }
  out["rope_theta"] = config.rope_theta;
  if (!config.end_tokens.empty()) out["end_tokens"] = config.end_tokens;  // GGUF: the tokenizer's business
  return out;
}

Json memory_json(const MemoryPlan& plan) {
  Json groups = Json::array();
  for (const MemoryPlan::Group& group : plan.groups) {
    groups.push_back({{"window", group.window},
                      {"layers", group.layers},
                      {"kv_bytes_per_1k_tokens", group.bytes_per_1k_tokens},
                      {"kv_bytes_at_context", group.bytes_at_context}});
    if (group.state) groups.back()["states_apart"] = group.states_apart;
  }
  Json out = {{"weights_mapped_bytes", plan.weights_mapped},
              {"weights_repacked_bytes", plan.weights_repacked},
              {"weights_opened_bytes", plan.weights_dequantized},
              {"workspace_bytes", plan.workspace},
              {"kv_groups", groups},
              {"context", plan.context},
              {"total_bytes", plan.total},
              {"available_bytes", plan.memory_available},
              {"longest_context", plan.longest_context},
              {"users_at_context", plan.users_at_context}};
  if (!plan.does_not_fit.empty()) out["does_not_fit"] = plan.does_not_fit;
  return out;
}

struct TypeTotal {
  size_t tensors = 0, bytes = 0, elements = 0;
};
std::map<std::string_view, TypeTotal> totals_by_type(const io::Checkpoint& checkpoint) {
  std::map<std::string_view, TypeTotal> totals;
  for (const TensorView& tensor : checkpoint.tensors()) {
    TypeTotal& total = totals[info(tensor.type).name];
    ++total.tensors;
    total.bytes += tensor.bytes();
    total.elements += static_cast<size_t>(tensor.elements());
  }
  return totals;
}

std::string shape_text(const TensorView& tensor) {
  return fmt::format("[{}]", fmt::join(tensor.shape.begin(), tensor.shape.begin() + tensor.rank, ", "));
}

Json tensors_json(const io::Checkpoint& checkpoint, bool each) {
  Json types = Json::object(), list = Json::array();
  for (const auto& [type, total] : totals_by_type(checkpoint)) {
    types[std::string(type)] = {
        {"tensors", total.tensors}, {"elements", total.elements}, {"bytes", total.bytes}};
  }
  Json out = {{"count", checkpoint.tensors().size()}, {"by_type", types}};
  if (!each) return out;
  for (const TensorView& tensor : checkpoint.tensors()) {
    list.push_back({{"name", valid_utf8(tensor.name)},
                    {"type", info(tensor.type).name},
                    {"shape", std::vector(tensor.shape.begin(), tensor.shape.begin() + tensor.rank)},
                    {"bytes", tensor.bytes()}});
  }
  out["list"] = std::move(list);
  return out;
}

std::string plain(const Json& value) {
  // Control characters of metadata must not reach the terminal: JSON escapes them.
  if (!value.is_string()) return value.dump();
  const std::string quoted = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return quoted.substr(1, quoted.size() - 2);
}

std::string memory_text(const MemoryPlan& plan, const Backend& backend) {
  std::string out = fmt::format("Memory on {}\n", backend.description());
  if (const std::string placement = backend.placement(); !placement.empty()) {
    out += fmt::format("  {}\n", placement);
  }
  const auto line = [&](std::string_view label, const std::string& value) {
    out += fmt::format("  {:<44} {:>12}\n", label, value);
  };
  line("weights, mapped from the file", human_bytes(plan.weights_mapped));
  line("weights, repacked copies", human_bytes(plan.weights_repacked));
  if (plan.weights_dequantized > 0)
    line("weights, dequantized for prompts", human_bytes(plan.weights_dequantized));
  line("workspace", human_bytes(plan.workspace));
  for (const MemoryPlan::Group& group : plan.groups) {
    const std::string kind = group.window > 0 ? fmt::format("window of {}", group.window) : "full attention";
    if (group.state) {  // at any length
      line(fmt::format("states of a sequence, {} layers", group.layers), human_bytes(group.bytes_at_context));
      line(fmt::format("one kept every {} tokens, per 1k tokens", group.states_apart),
           human_bytes(group.bytes_per_1k_tokens));
      continue;
    }
    line(fmt::format("kv per 1k tokens, {} {} layers", group.layers, kind),
         human_bytes(group.bytes_per_1k_tokens));
    line(fmt::format("kv at context {}, same layers", plan.context), human_bytes(group.bytes_at_context));
  }
  line(fmt::format("total for one user at {}", plan.context), human_bytes(plan.total));
  line(backend.own_memory() ? "available on the device (--gpu-memory)" : "available on this machine",
       human_bytes(plan.memory_available));
  line("longest context that fits", human_count(static_cast<size_t>(plan.longest_context)));
  line(fmt::format("users that fit at {}", plan.context),
       human_count(static_cast<size_t>(plan.users_at_context)));
  if (!plan.does_not_fit.empty()) out += fmt::format("  does not fit: {}\n", plan.does_not_fit);
  return out;
}

void print_text(const InspectOptions& options, const std::string& path, const io::Checkpoint& checkpoint,
                const ModelConfig& config, const Backend& backend, const MemoryPlan& plan) {
  std::string out = fmt::format("{}\n\nModel\n", path);
  const Json model = config_json(config), metadata = metadata_json(checkpoint);
  for (const auto& [key, value] : model.items()) out += fmt::format("  {:<28} {}\n", key, plain(value));
  out += checkpoint.gguf ? "\nMetadata\n" : "\nconfig.json\n";
  for (const auto& [key, value] : metadata.items()) {
    out += fmt::format("  {:<44} {}\n", plain(key), plain(value));
  }
  out += fmt::format("\nTensors: {}\n", human_count(checkpoint.tensors().size()));
  for (const auto& [type, total] : totals_by_type(checkpoint)) {
    out += fmt::format("  {:<12} {:>6} tensors {:>18} elements {:>12}\n", type, total.tensors,
                       human_count(total.elements), human_bytes(total.bytes));
  }
  if (options.tensors) {
    for (const TensorView& tensor : checkpoint.tensors()) {
      out += fmt::format("  {:<44} {:<12} {:<24} {:>12}\n", plain(Json(valid_utf8(tensor.name))),
                         info(tensor.type).name, shape_text(tensor), human_bytes(tensor.bytes()));
    }
  }
  write_stdout(out + "\n" + memory_text(plan, backend));
}

int inspect(const InspectOptions& options) {
  EngineOptions given = options.engine;
  if (options.sharing.context_parallel) given.context_parallel = options.sharing.ranks;
  given.context_schedule = options.sharing.context_schedule;
  // What "auto" chooses is measured on the weights: for that the model has to be here.
  if (given.quantize == "auto") given.model = find_model(given.model, given);
  const FoundHead head = find_head(given.model);
  const std::string path = head.remote ? given.model : head.path;
  given.model = head.path;
  const io::Checkpoint checkpoint = io::Checkpoint::open(head.path);
  const ModelConfig config = read_config(checkpoint);
  const EngineOptions engine = checked(given);
  const RuntimeSetup setup{.weights = weight_types(engine)};
  tell_quantized(setup.weights.note);
  check_stages(config, engine);
  const bool spread = engine.context_parallel > 1;
  const dist::Shares shares = shares_of(engine, 0, checkpoint, config);
  const ChosenBackend chosen =
      open_backend(checkpoint, config, engine, setup, {nullptr, spread ? &shares : nullptr});
  const std::unique_ptr<Backend>& backend = chosen.backend;
  tell_device(chosen.note);
  const MemoryPlan plan = plan_memory(checkpoint, config, *backend, engine, setup);
  const SharedPlan shared = plan_shared(options.sharing, checkpoint, config, engine, plan, *backend);
  if (options.json) {
    Json out = {{"path", valid_utf8(path)},
                {"config", config_json(config)},
                {"metadata", metadata_json(checkpoint)},
                {"tensors", tensors_json(checkpoint, options.tensors)},
                {"device", backend->description()},
                {"memory", memory_json(plan)}};
    if (const std::string placement = backend->placement(); !placement.empty()) out["placement"] = placement;
    add_shared(out, shared);
    write_json(out);
  } else {
    print_text(options, path, checkpoint, config, *backend, plan);
    write_stdout(shared_text(shared, plan.context, options.tensors));
  }
  return 0;
}

}  // namespace

void add_inspect(CommandLine& line) {
  Command command = line.add("inspect", "metadata, tensors and the memory plan of a model");
  auto options = std::make_shared<InspectOptions>();
  add_model_path(command, options->engine);
  command.flag("--tensors", options->tensors, "list every tensor");
  command.flag("--json", options->json, "one JSON object");
  add_sharing_options(command, options->sharing);
  add_planning_options(command, options->engine);
  add_quantize_option(command, options->engine);
  command.footer(kInspectFooter);
  command.runs([options] { return inspect(*options); });
}

}  // namespace millrace::cli
