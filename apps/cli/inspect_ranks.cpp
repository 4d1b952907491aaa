#include "inspect_ranks.h"

#include <fmt/format.h>

#include <utility>

#include "base/error.h"
#include "engine/open_backend.h"
#include "engine/rank_group.h"
#include "output.h"

namespace millrace::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string heads_text(const dist::Range& heads) {
  return heads.size() == 0 ? "none" : fmt::format("{}-{}", heads.begin, heads.end - 1);
}

std::string plan_text(const dist::Plan& plan, const std::vector<size_t>& memory, bool weights) {
  const bool experts = plan.ranks.back().experts.end > 0;
  std::string out = fmt::format("\nOver {} ranks, each with some rows of every matrix{}\n", plan.ranks.size(),
                                experts ? " and with whole experts" : "");
  out += fmt::format("  {:<6}{:>12}{:>12}{:>14}{:>11}{:>18}{:>22}", "rank", "weights", "memory",
                     "query heads", "kv heads", "kv per 1k tokens", "received per token") +
         (experts ? fmt::format("{:>10}\n", "experts") : "\n");
  for (size_t r = 0; r < plan.ranks.size(); ++r) {
    const dist::Plan::Rank& rank = plan.ranks[r];
    const uint64_t received =
        plan.received(static_cast<int>(r), 1, 1) + (r == 0 ? plan.logits_received(1) : 0);
    out += fmt::format("  {:<6}{:>12}{:>12}{:>14}{:>11}{:>18}{:>22}", r, human_bytes(rank.weight_bytes),
                       human_bytes(memory[r]), heads_text(rank.query_heads), heads_text(rank.kv_heads),
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

std::string stages_text(const StagePlan& plan, const std::vector<size_t>& memory) {
  std::string out =
      fmt::format("\nOver {} stages of a pipeline, each with whole layers\n", plan.stages.size());
  out += fmt::format("  {:<6}{:>12}{:>12}{:>12}{:>18}{:>22}\n", "rank", "weights", "memory", "layers",
                     "kv per 1k tokens", "received per token");
  for (size_t r = 0; r < plan.stages.size(); ++r) {
    const StagePlan::Stage& stage = plan.stages[r];
    out += fmt::format("  {:<6}{:>12}{:>12}{:>12}{:>18}{:>22}\n", r, human_bytes(stage.weight_bytes),
                       human_bytes(memory[r]), heads_text(stage.layers),
                       human_bytes(stage.kv_bytes_per_token * 1024), human_bytes(stage.received_per_token));
  }
  return out;
}

std::string grid_text(const GridPlan& plan, const std::vector<size_t>& memory) {
  std::string out = fmt::format("\nOver {} stages of a pipeline, of {} ranks each that share its rows\n",
                                plan.stages.size(), plan.tensor());
  out += fmt::format("  {:<6}{:>12}{:>12}{:>10}{:>14}{:>11}{:>18}{:>22}\n", "rank", "weights", "memory",
                     "layers", "query heads", "kv heads", "kv per 1k tokens", "received per token");
  for (size_t r = 0; r < memory.size(); ++r) {
    const auto number = static_cast<int>(r);
    const GridPlan::Stage& stage = plan.stages[r / static_cast<size_t>(plan.tensor())];
    const dist::Plan::Rank& rank = stage.rows.ranks[r % static_cast<size_t>(plan.tensor())];
    out +=
        fmt::format("  {:<6}{:>12}{:>12}{:>10}{:>14}{:>11}{:>18}{:>22}\n", r, human_bytes(rank.weight_bytes),
                    human_bytes(memory[r]), heads_text(stage.layers), heads_text(rank.query_heads),
                    heads_text(rank.kv_heads), human_bytes(rank.kv_bytes_per_token * 1024),
                    human_bytes(plan.received(number, 1, 1) + plan.logits_received(number, 1)));
  }
  return out;
}

Json grid_json(const GridPlan& plan, const std::vector<size_t>& memory) {
  Json ranks = Json::array();
  for (size_t r = 0; r < memory.size(); ++r) {
    const auto number = static_cast<int>(r);
    const GridPlan::Stage& stage = plan.stages[r / static_cast<size_t>(plan.tensor())];
    const dist::Plan::Rank& rank = stage.rows.ranks[r % static_cast<size_t>(plan.tensor())];
    ranks.push_back({{"layers", {stage.layers.begin, stage.layers.end}},
                     {"weight_bytes", rank.weight_bytes},
                     {"memory_bytes", memory[r]},
                     {"query_heads", {rank.query_heads.begin, rank.query_heads.end}},
                     {"kv_heads", {rank.kv_heads.begin, rank.kv_heads.end}},
                     {"kv_bytes_per_token", rank.kv_bytes_per_token},
                     {"received_bytes_per_token", plan.received(number, 1, 1)},
                     {"received_bytes_per_prompt_of_512", plan.received(number, 512, 1)},
                     {"logits_received_bytes_per_token", plan.logits_received(number, 1)}});
  }
  return {{"stages", plan.stages.size()}, {"ranks_of_stage", plan.tensor()}, {"ranks", std::move(ranks)}};
}

Json stages_json(const StagePlan& plan, const std::vector<size_t>& memory) {
  Json ranks = Json::array();
  for (size_t r = 0; r < plan.stages.size(); ++r) {
    const StagePlan::Stage& stage = plan.stages[r];
    ranks.push_back({{"layers", {stage.layers.begin, stage.layers.end}},
                     {"weight_bytes", stage.weight_bytes},
                     {"memory_bytes", memory[r]},
                     {"kv_bytes_per_token", stage.kv_bytes_per_token},
                     {"received_bytes_per_token", stage.received_per_token}});
  }
  return {{"ranks", std::move(ranks)}};
}

std::string time_text(const dist::TokenTime& time) {
  return fmt::format(
      "  expected: {:.2f} tokens per second, of each token {:.2f} ms computing, {:.2f} ms latencies, {:.2f} "
      "ms "
      "bytes\n",
      1 / time.all(), 1e3 * time.computing_s, 1e3 * time.latency_s, 1e3 * time.moving_s);
}

Json time_json(const dist::TokenTime& time) {
  return {{"tokens_per_s", 1 / time.all()},
          {"computing_s", time.computing_s},
          {"latency_s", time.latency_s},
          {"moving_s", time.moving_s}};
}

Json plan_json(const dist::Plan& plan, const std::vector<size_t>& memory) {
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
                  {"memory_bytes", memory[r]},
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

// Of each rank by itself, on a machine like this one.
std::vector<size_t> memory_of_ranks(const io::Checkpoint& checkpoint, const ModelConfig& config,
                                    EngineOptions engine) {
  std::vector<size_t> memory;
  engine.device = "cpu";
  for (int r = 0; r < ranks_of(engine); ++r) {
    const dist::Shares shares = shares_of(engine, r, checkpoint, config);
    const ChosenBackend rank = open_backend(checkpoint, config, engine, {}, {nullptr, &shares});
    memory.push_back(plan_memory(checkpoint, config, *rank.backend, engine, {}).total);
  }
  return memory;
}

}  // namespace

SharedPlan plan_shared(const SharingOptions& options, const io::Checkpoint& checkpoint,
                       const ModelConfig& config, const EngineOptions& engine, const MemoryPlan& plan,
                       const Backend& backend) {
  SharedPlan shared;
  if (options.ranks == 1) return shared;
  if (options.ranks % options.stages != 0) {
    throw_error(ErrorCode::kBadInput, "--stages: found {} with --ranks {}, expected a divisor of it",
                options.stages, options.ranks);
  }
  if (options.context_parallel) {
    const dist::Shares shares = shares_of(engine, 0, checkpoint, config);
    const int32_t step =
        engine.step_tokens > 0 ? engine.step_tokens : backend.default_step_tokens() * options.ranks;
    shared.context =
        plan_context(config, {plan.context, plan.kv_type, options.ranks, shares.context_schedule(), step});
    return shared;
  }
  EngineOptions sharing = engine;
  sharing.pipeline_parallel = options.pipeline_parallel ? options.ranks : options.stages;
  sharing.tensor_parallel = options.ranks / sharing.pipeline_parallel;
  sharing.expert_parallel = options.whole_experts;
  sharing.rank_speeds = options.rank_speeds;
  sharing.context = plan.context;
  if (options.rank_speeds == "auto") {
    throw_error(ErrorCode::kBadInput, "--rank-speeds: found auto, expected numbers: nothing runs here");
  }
  const std::vector<double> speeds = parse_rank_speeds("--rank-speeds", sharing);
  check_experts("--expert-parallel", config, sharing);
  check_stages(config, sharing);
  const bool rows = options.whole_experts || can_share_rows(checkpoint, config);
  if (sharing.tensor_parallel == 1) {
    shared.stages = plan_stages(checkpoint, config, plan.kv_type, speeds);
  } else if (!rows) {
    throw_error(ErrorCode::kUnsupported,
                "--ranks: {} is not to be shared by rows, expected --pipeline-parallel", config.architecture);
  } else if (options.stages > 1) {
    shared.grid =
        plan_grid(checkpoint, config, plan.kv_type, sharing.tensor_parallel, speeds, options.whole_experts);
  } else {
    shared.rows = plan_ranks(checkpoint, config, plan.kv_type, speeds, options.whole_experts);
  }
  shared.memory = memory_of_ranks(checkpoint, config, sharing);
  if (options.alone > 0) {
    const dist::LinkSpeed link{options.link_us * 1e-6, options.link_mbit * 1e6 / 8};
    shared.time = shared.rows   ? shared.rows->token_time(1 / options.alone, link)
                  : shared.grid ? shared.grid->token_time(1 / options.alone, link)
                                : shared.stages->token_time(1 / options.alone, link);
  }
  return shared;
}

void add_shared(nlohmann::ordered_json& out, const SharedPlan& shared) {
  if (shared.rows) out["tensor_parallel"] = plan_json(*shared.rows, shared.memory);
  if (shared.stages) out["pipeline_parallel"] = stages_json(*shared.stages, shared.memory);
  if (shared.grid) out["tensor_and_pipeline_parallel"] = grid_json(*shared.grid, shared.memory);
  if (shared.context) out["context_parallel"] = context_json(*shared.context);
  if (shared.time) out["expected"] = time_json(*shared.time);
}

std::string shared_text(const SharedPlan& shared, int32_t context, bool weights) {
  std::string out;
  if (shared.rows) out += plan_text(*shared.rows, shared.memory, weights);
  if (shared.stages) out += stages_text(*shared.stages, shared.memory);
  if (shared.grid) out += grid_text(*shared.grid, shared.memory);
  if (shared.context) out += context_text(*shared.context, context);
  if (shared.time) out += time_text(*shared.time);
  return out;
}

void add_sharing_options(Command& command, SharingOptions& o) {
  SharingOptions* const options = &o;  // they outlive the command
  command
      .option("--ranks", options->ranks,
              "how so many processes would share it: rows, memory, bytes exchanged")
      .range(1, dist::kMaxTensorRanks)
      .show_default();
  command.flag("--pipeline-parallel", options->pipeline_parallel,
               "these processes have whole layers each, one behind the other");
  command.refuse_unless(
      "--pipeline-parallel", [options] { return options->ranks > 1 && !options->context_parallel; },
      "without --ranks, or with --context-parallel");
  command
      .option("--stages", options->stages,
              "these processes are so many stages of whole layers, and those of a stage share its rows")
      .range(1, dist::kMaxTensorRanks)
      .show_default();
  command.refuse_unless(
      "--stages",
      [options] { return options->ranks > 1 && !options->context_parallel && !options->pipeline_parallel; },
      "without --ranks, or with --context-parallel or --pipeline-parallel");
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
      "--expert-parallel",
      [options] { return options->ranks > 1 && !options->context_parallel && !options->pipeline_parallel; },
      "without --ranks, or with --context-parallel or --pipeline-parallel");
  command.refuse_unless(
      "--rank-speeds", [options] { return options->ranks > 1 && !options->context_parallel; },
      "without --ranks, or with --context-parallel");
  command
      .option(
          "--alone", options->alone,
          "tokens per second that one of them decodes by itself (millrace bench): what all are expected to")
      .range(1e-6, 1e9);
  command.option("--link-us", options->link_us, "with --alone: latency of their links, in microseconds")
      .range(0.0, 1e7);
  command.option("--link-mbit", options->link_mbit, "with --alone: rate of their links, in Mbit/s; 0: any")
      .range(0.0, 1e9);
  command.refuse_unless(
      "--alone", [options] { return options->ranks > 1 && !options->context_parallel; },
      "without --ranks, or with --context-parallel");
  for (const char* name : {"--link-us", "--link-mbit"}) {
    command.refuse_unless(
        name, [options] { return options->alone > 0; }, "without --alone");
  }
}

}  // namespace millrace::cli
