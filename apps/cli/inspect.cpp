// millrace inspect: what a model file holds and what running it takes, without loading it.
#include "inspect.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>

#include "engine/memory_plan.h"
#include "engine/open_backend.h"
#include "engine/rank_group.h"
#include "engine/rank_plan.h"
#include "engine/weight_types.h"
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
  int32_t ranks = 1;
  bool context_parallel = false;
  std::string context_schedule = "auto";
  std::string rank_speeds;
  bool whole_experts = false;
};

constexpr const char* kInspectFooter =
    "Examples:\n"
    "  millrace inspect model.gguf\n"
    "  millrace inspect model.gguf --ctx 131072 --device cuda   # will it fit?\n"
    "  millrace inspect model.gguf --tensors                    # every tensor\n"
    "  millrace inspect gpt-oss-120b                            # before it is fetched: its first megabytes "
    "do\n"
    "  millrace inspect model.gguf --ranks 3                    # shared by three processes\n"
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

std::string heads_text(const dist::Range& heads) {
  return heads.size() == 0 ? "none" : fmt::format("{}-{}", heads.begin, heads.end - 1);
}

std::string plan_text(const dist::Plan& plan, bool weights) {
  const bool experts = plan.ranks.back().experts.end > 0;
  std::string out = fmt::format("\nOver {} ranks, each with some rows of every matrix{}\n", plan.ranks.size(),
                                experts ? " and with whole experts" : "");
  out += fmt::format("  {:<6}{:>12}{:>14}{:>11}{:>18}{:>22}", "rank", "weights", "query heads", "kv heads",
                     "kv per 1k tokens", "received per token") +
         (experts ? fmt::format("{:>10}\n", "experts") : "\n");
  for (size_t r = 0; r < plan.ranks.size(); ++r) {
    const dist::Plan::Rank& rank = plan.ranks[r];
    const uint64_t received =
        plan.received(static_cast<int>(r), 1, 1) + (r == 0 ? plan.logits_received(1) : 0);
    out += fmt::format("  {:<6}{:>12}{:>14}{:>11}{:>18}{:>22}", r, human_bytes(rank.weight_bytes),
                       heads_text(rank.query_heads), heads_text(rank.kv_heads),
                       human_bytes(rank.kv_bytes_per_token * 1024), human_bytes(received));
    out += experts ? fmt::format("{:>10}\n", heads_text(rank.experts)) : "\n";
  }
  out +=
      fmt::format("  exchanges per step: {}; a prompt of 512 tokens: rank 0 receives {}\n",
                  plan.exchanges_per_step(), human_bytes(plan.received(0, 512, 1) + plan.logits_received(1)));
  if (experts) out += "  (bytes of experts' outputs: when every expert is chosen as often as any other)\n";
  if (!weights) return out;
  for (size_t i = 0; i < plan.ranks[0].parts.size(); ++i) {
    out += fmt::format("  {:<32}", plan.ranks[0].parts[i].weight);
    for (const dist::Plan::Rank& rank : plan.ranks)
      out += fmt::format(" {}-{}", rank.parts[i].begin, rank.parts[i].end);
    out += fmt::format(" of {}\n", plan.ranks[0].parts[i].of);
  }
  return out;
}

Json plan_json(const dist::Plan& plan) {
  Json ranks = Json::array();
  for (size_t r = 0; r < plan.ranks.size(); ++r) {
    const dist::Plan::Rank& rank = plan.ranks[r];
    Json parts = Json::array();
    for (const dist::Plan::Part& part : rank.parts) {
      parts.push_back({{"weight", part.weight},
                       {"begin", part.begin},
                       {"end", part.end},
                       {"of", part.of},
                       {"bytes", part.bytes}});
    }
    Json entry = {{"speed", plan.speeds[r]},
                  {"weight_bytes", rank.weight_bytes},
                  {"query_heads", {rank.query_heads.begin, rank.query_heads.end}},
                  {"kv_heads", {rank.kv_heads.begin, rank.kv_heads.end}},
                  {"kv_bytes_per_token", rank.kv_bytes_per_token},
                  {"received_bytes_per_token", plan.received(static_cast<int>(r), 1, 1)},
                  {"sent_bytes_per_token", plan.sent(static_cast<int>(r), 1, 1)},
                  {"received_bytes_per_prompt_of_512", plan.received(static_cast<int>(r), 512, 1)},
                  {"weights", std::move(parts)}};
    if (plan.ranks.back().experts.end > 0) entry["experts"] = {rank.experts.begin, rank.experts.end};
    ranks.push_back(std::move(entry));
  }
  return {{"ranks", std::move(ranks)},
          {"logits_received_bytes_per_token", plan.logits_received(1)},
          {"exchanges_per_step", plan.exchanges_per_step()}};
}

std::string context_text(const ContextPlan& plan, int32_t context) {
  std::string out = fmt::format(
      "\nOver {} ranks, each with the whole model and a part of every context (the memory above is one "
      "rank's)\n",
      plan.ranks);
  const auto line = [&](std::string_view label, size_t bytes) {
    out += fmt::format("  {:<44} {:>12}\n", label, human_bytes(bytes));
  };
  line(fmt::format("kv of one context of {}, at most", context), plan.kv_bytes);
  line("received for a token at its end", plan.received_per_token);
  line(fmt::format("received for a prompt of {}, in steps of {}", context, plan.step_tokens),
       plan.received_per_prompt);
  out += fmt::format("  {:<44} {:>12}\n", "schedule of its last whole step",
                     plan.schedule.empty() ? "none" : plan.schedule);
  return out;
}

Json context_json(const ContextPlan& plan) {
  return {{"ranks", plan.ranks},
          {"kv_bytes_at_context", plan.kv_bytes},
          {"received_bytes_per_token_at_context", plan.received_per_token},
          {"received_bytes_per_prompt_of_context", plan.received_per_prompt},
          {"step_tokens", plan.step_tokens},
          {"schedule", plan.schedule.empty() ? "none" : plan.schedule}};
}

int inspect(const InspectOptions& options) {
  EngineOptions sharing = options.engine;
  sharing.tensor_parallel = options.ranks;
  sharing.rank_speeds = options.rank_speeds;
  const std::vector<double> speeds = parse_rank_speeds("--rank-speeds", sharing);
  EngineOptions given = options.engine;
  if (options.context_parallel) given.context_parallel = options.ranks;
  given.context_schedule = options.context_schedule;
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
  std::optional<dist::Plan> ranks;
  if (options.ranks > 1 && !spread) {
    sharing.expert_parallel = options.whole_experts;
    check_experts("--expert-parallel", config, sharing);
    ranks = plan_ranks(checkpoint, config, plan.kv_type, speeds, options.whole_experts);
  }
  const auto context_plan = [&] {
    const int32_t step = engine.step_tokens > 0 ? engine.step_tokens
                                                : backend->default_step_tokens() * engine.context_parallel;
    return plan_context(
        config, {plan.context, plan.kv_type, engine.context_parallel, shares.context_schedule(), step});
  };
  if (options.json) {
    Json out = {{"path", valid_utf8(path)},
                {"config", config_json(config)},
                {"metadata", metadata_json(checkpoint)},
                {"tensors", tensors_json(checkpoint, options.tensors)},
                {"device", backend->description()},
                {"memory", memory_json(plan)}};
    if (const std::string placement = backend->placement(); !placement.empty()) out["placement"] = placement;
    if (ranks) out["tensor_parallel"] = plan_json(*ranks);
    if (spread) out["context_parallel"] = context_json(context_plan());
    write_json(out);
  } else {
    print_text(options, path, checkpoint, config, *backend, plan);
    if (ranks) write_stdout(plan_text(*ranks, options.tensors));
    if (spread) write_stdout(context_text(context_plan(), plan.context));
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
  command
      .option("--ranks", options->ranks,
              "how so many processes would share it: rows, memory, bytes exchanged")
      .range(1, dist::kMaxTensorRanks)
      .show_default();
  command.flag("--context-parallel", options->context_parallel,
               "these processes have the whole model each, and a part of every context");
  command.refuse_unless(
      "--context-parallel", [options] { return options->ranks > 1; }, "without --ranks");
  command
      .option("--context-schedule", options->context_schedule,
              "how a prompt's rows get the keys of other processes; auto: the fewest bytes")
      .one_of({"auto", "ring", "mesh", "wallfacer"})
      .show_default();
  command.refuse_unless(
      "--context-schedule", [options] { return options->context_parallel; }, "without --context-parallel");
  command.option("--rank-speeds", options->rank_speeds, "their speeds, 3,1,1: who is faster gets more");
  command.flag("--expert-parallel", options->whole_experts, "whole experts in each of them");
  command.refuse_unless(
      "--expert-parallel", [options] { return options->ranks > 1 && !options->context_parallel; },
      "without --ranks, or with --context-parallel");
  command.refuse_unless(
      "--rank-speeds", [options] { return options->ranks > 1 && !options->context_parallel; },
      "without --ranks, or with --context-parallel");
  add_planning_options(command, options->engine);
  add_quantize_option(command, options->engine);
  command.footer(kInspectFooter);
  command.runs([options] { return inspect(*options); });
}

}  // namespace millrace::cli
