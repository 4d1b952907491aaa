#include "model_options.h"

#include "base/error.h"
#include "base/sparse_pages.h"
#include "confirm.h"
#include "dist/shares.h"
#include "engine/engine_options.h"
#include "engine/rank_group.h"
#include "input.h"
#include "model/adapter.h"
#include "quant/type_request.h"

namespace millrace::cli {
namespace {

constexpr const char* kModelGroup = "How the model runs";

bool may_use_gpu(const EngineOptions& options) {
  return options.device != "cpu" && options.device != "reference";
}
bool names_gpu(const EngineOptions& options) { return may_use_gpu(options) && options.device != "auto"; }

}  // namespace

void add_model_path(Command& command, EngineOptions& options) {
  command.option("MODEL", options.model, kModelHelp).required();
  add_yes_option(command, "fetch the model without asking if it is not here");
}

void add_planning_options(Command& command, EngineOptions& options) {
  const auto add = [&](const char* name, auto& value, const char* help) {
    return command.option(name, value, help).show_default().group(kModelGroup);
  };
  add("--device", options.device,
      "cpu, cuda, cuda:N (one of several GPUs; what does not fit is the CPU's) or reference (slow, exact); "
      "A+B: over two devices; auto: a GPU with room for the model, else the CPU");
  command
      .part_or_bytes("--gpu-memory", options.gpu_memory,
                     "part of a GPU's free memory that may be taken, or bytes such as 16G")
      .show_default()
      .group(kModelGroup);
  add("--gpu-layers", options.gpu_layers,
      "of a model that is split: so many of the last layers on the GPU; -1: as many as fit")
      .range(-1, 1 << 20);
  add("--cpu-experts", options.cpu_experts,
      "of these layers: so many experts of each on the CPU, a list (0-7,12) or all; default: what does not "
      "fit");
  add("--threads", options.threads, "CPU threads; 0: what reads memory fastest, measured").range(0, 1024);
  add("--ctx", options.context,
      "tokens of context; 0: what the model was trained for, as far as memory holds it")
      .range(0, 1 << 28);
  add("--kv-type", options.kv_type,
      "type of the KV cache: f32, f16, bf16, int8 or fp8; default: the device's");
  add("--attention", options.attention,
      "of layers that see the whole context: full, sparse (each token reads the pages that matter) or "
      "request (full, unless a request says sparse)")
      .one_of({"full", "sparse", "request"});
  add("--attention-budget", options.attention_budget,
      "tokens that sparse attention reads; a context that is no longer is read whole")
      .range(kLeastSparseBudget, 1 << 28);
  add("--compute", options.compute,
      "how prompts are multiplied: full, or fp8 (E4M3 codes; on GPUs from Hopper on, models without experts)")
      .one_of({"full", "fp8"});
  command.refuse_unless(
      "--attention-budget", [&options] { return options.attention != "full"; },
      "without --attention sparse or request");
  command.refuse_unless(
      "--gpu-memory", [&options] { return may_use_gpu(options); }, "with --device cpu or reference");
  add("--expert-counts", options.expert_counts,
      "an importance matrix (millrace calibrate): the experts its text used most are the GPU's");
  for (const char* name : {"--gpu-layers", "--cpu-experts", "--expert-counts"}) {
    command.refuse_unless(
        name, [&options] { return names_gpu(options); }, "without --device cuda or two devices");
  }
}

void add_device_options(Command& command, EngineOptions& options) {
  add_planning_options(command, options);
  command.flag("--lock", options.lock, "keep the model in memory: none of it may be paged out")
      .group(kModelGroup);
}

void add_rank_options(Command& command, EngineOptions& options) {
  command
      .option(
          "--tensor-parallel", options.tensor_parallel,
          "processes that share the model, started by mpirun -n N (serve starts them itself): each has some "
          "rows of every matrix")
      .range(1, dist::kMaxTensorRanks)
      .show_default()
      .group(kModelGroup);
  command
      .option("--pipeline-parallel", options.pipeline_parallel,
              "the same with whole layers in each process, one behind the other")
      .range(1, dist::kMaxTensorRanks)
      .show_default()
      .group(kModelGroup);
  command
      .option(
          "--context-parallel", options.context_parallel,
          "the same with the whole model in each process, and a part of every context: its keys and values, "
          "and of a prompt its tokens")
      .range(1, dist::kMaxTensorRanks)
      .show_default()
      .group(kModelGroup);
  command
      .option(
          "--context-schedule", options.context_schedule,
          "with --context-parallel, how a prompt's ranks get one another's keys: ring (keys and values go "
          "round), mesh (queries along rows, keys and values along columns), wallfacer (teams share "
          "queries), or auto, the fewest bytes")
      .one_of({"auto", "ring", "mesh", "wallfacer"})
      .show_default()
      .group(kModelGroup);
  command.refuse_unless(
      "--context-schedule", [&options] { return options.context_parallel > 1; },
      "without --context-parallel");
  command
      .flag("--expert-parallel", options.expert_parallel,
            "with --tensor-parallel: whole experts in each process, in place of some rows of every expert")
      .group(kModelGroup);
  command.refuse_unless(
      "--expert-parallel", [&options] { return options.tensor_parallel > 1; }, "without --tensor-parallel");
  command
      .option("--rank-speeds", options.rank_speeds,
              "speeds of these processes, 3,1,1: who is faster gets more of the model; auto: measured at the "
              "start; default: all alike")
      .group(kModelGroup);
  command.refuse_unless(
      "--rank-speeds", [&options] { return options.tensor_parallel > 1 || options.pipeline_parallel > 1; },
      "without --tensor-parallel or --pipeline-parallel");
}

void add_replica_option(Command& command, EngineOptions& options) {
  command
      .option("--data-parallel", options.data_parallel,
              "replicas of the model, each with a KV cache of its own: a request goes where its prompt was")
      .range(1, 16)
      .show_default()
      .group(kModelGroup);
}

void add_launch_options(Command& command, EngineOptions& options, const std::function<bool()>& of_use) {
  const std::string group = "Ranks that it starts";
  const auto add = [&](const char* name, auto& value, const char* help) {
    return command.option(name, value, help).group(group);
  };
  add("--launcher", options.launcher,
      "command that starts the processes of --tensor-parallel, --pipeline-parallel or --context-parallel, "
      "with "
      "its options; "
      "default: mpirun, unless it has started this one");
  add("--rank-hosts", options.rank_hosts, "hosts that they are started on, node1,node2,node3: one each");
  add("--front-address", options.front_address, "address of this process that they connect to, with a key")
      .show_default();
  command
      .flag("--restart", options.restart,
            "when a rank is lost, compute what ran again, from the tokens that clients have; else it ends "
            "with an error")
      .group(group);
  command.flag("--shrink", options.shrink, "a lost rank that cannot be started again is left out")
      .group(group);
  for (const char* name : {"--launcher", "--rank-hosts", "--front-address", "--restart", "--shrink"}) {
    command.refuse_unless(name, of_use,
                          "without --tensor-parallel, --pipeline-parallel or --context-parallel");
  }
}

void add_quantize_option(Command& command, EngineOptions& options) {
  command
      .option("--quantize", options.quantize,
              "quantize the weights while loading: " + quant::request_names() + " auto")
      .group(kModelGroup);
  command
      .option("--budget", options.quantize_budget,
              "for --quantize auto: 4.5bpw (bits per weight) or 800M (the weights)")
      .group(kModelGroup);
  command
      .option("--sample", options.quantize_sample,
              "for --quantize auto: a text to measure by; -: standard input")
      .group(kModelGroup);
  for (const char* name : {"--budget", "--sample"}) {
    command.refuse_unless(
        name, [&options] { return options.quantize == "auto"; }, "without --quantize auto");
  }
}

void add_image_option(Command& command, EngineOptions& options) {
  command
      .option("--mmproj", options.mmproj,
              "the vision tower of a model that is a GGUF file: a GGUF file too (llama.cpp's mmproj)")
      .group(kModelGroup);
}

void add_adapter_option(Command& command, EngineOptions& options, bool many) {
  command
      .option(
          "--adapter", options.adapters,
          many ? "a low-rank adapter (LoRA), NAME=PATH or NAME=PATH:SCALE: a PEFT directory or a GGUF file, "
                 "served as MODEL:NAME; may be repeated"
               : "answer with a low-rank adapter (LoRA), NAME=PATH or NAME=PATH:SCALE: a PEFT directory or "
                 "a GGUF file")
      .group(kModelGroup);
}

std::string only_adapter(const EngineOptions& options) {
  if (options.adapters.empty()) return {};
  if (options.adapters.size() > 1) {
    throw_error(ErrorCode::kBadInput, "--adapter: found {}, expected one: only serve takes several",
                options.adapters.size());
  }
  return parse_adapter_option("--adapter", options.adapters.front()).name;
}

void add_loading_options(Command& command, EngineOptions& options) {
  add_device_options(command, options);
  add_rank_options(command, options);
  add_quantize_option(command, options);
  add_adapter_option(command, options);
}

void add_engine_options(Command& command, EngineOptions& options, const std::string& group) {
  constexpr size_t kMiB = size_t{1} << 20;
  const auto add = [&](const char* name, auto& value, const char* help) {
    return command.option(name, value, help).show_default().group(group);
  };
  add("--max-running", options.max_running, "answers computed at the same time").range(1, 1 << 16);
  add("--step-tokens", options.step_tokens,
      "rows of a step: longer prompts go in chunks of this; 0: the device's")
      .range(0, 1 << 20);
  add("--kv-tokens", options.kv_tokens,
      "tokens the KV cache holds; 0: --max-running requests of --ctx (without it of 4096, and one whole), as "
      "far "
      "as half of the free memory, or what a GPU has, allows")
      .range(0, 1 << 30);
  command.size("--ram-tier", options.ram_tier_bytes, kMiB, "MiB for blocks that left the KV cache")
      .show_default()
      .group(group);
  add("--kv-dir", options.kv_dir, "directory for blocks on disk, found again after a restart");
  command.size("--kv-dir-size", options.kv_dir_bytes, kMiB, "MiB of it").show_default().group(group);
  add("--fallback", options.fallback, "cpu: when the GPU fails under way, requests go on there")
      .one_of({"cpu"});
  command.refuse_unless(
      "--fallback", [&options] { return may_use_gpu(options); }, "with --device cpu or reference");
  add_draft_options(command, options, group);
  command.flag_off("--no-prefix-cache", options.prefix_cache, "prompts share nothing").group(group);
  add("--states-apart", options.states_apart,
      "tokens between the states that are kept of layers with one, beside those at the ends of prompts and "
      "answers; 0: as far apart as to take no more room than keys and values")
      .range(0, 1 << 20);
  command.refuse_unless(
      "--states-apart", [&options] { return options.prefix_cache; }, "with --no-prefix-cache");
  command.refuse_unless(
      "--kv-dir-size", [&options] { return !options.kv_dir.empty(); }, "without --kv-dir");
}

void add_draft_options(Command& command, EngineOptions& options, const std::string& group) {
  command
      .choice(
          "--speculate", options.speculation, {"off", "lookup", "draft"},
          "guess tokens and check them in one step, same text: off, lookup (in the request's own text) or "
          "draft (--draft-model)")
      .show_default()
      .group(group);
  command
      .option("--draft-model", options.draft_model,
              "small model with the same vocabulary, for --speculate draft")
      .group(group);
  command.option("--max-draft", options.max_draft, "tokens guessed at once")
      .range(1, 64)
      .show_default()
      .group(group);
  command.refuse_unless(
      "--draft-model", [&options] { return options.speculation == Speculation::kDraft; },
      "without --speculate draft");
  command.refuse_unless(
      "--max-draft", [&options] { return options.speculation != Speculation::kOff; },
      "without --speculate lookup or draft");
}

EngineOptions checked(EngineOptions options) {
  // What was said to every command and is of no use to this one. (Said to this one it was refused.)
  const EngineOptions defaults;
  if (!may_use_gpu(options)) {
    options.gpu_memory = defaults.gpu_memory;
    options.fallback = defaults.fallback;
  }
  if (!names_gpu(options)) {
    options.gpu_layers = defaults.gpu_layers;
    options.cpu_experts = defaults.cpu_experts;
    options.expert_counts = defaults.expert_counts;
  }
  if (options.tensor_parallel == 1) options.expert_parallel = false;
  if (options.context_parallel == 1) options.context_schedule = defaults.context_schedule;
  if (ranks_of(options) == 1) {
    options.rank_speeds = options.launcher = options.rank_hosts = "";
    options.restart = options.shrink = false;
  }
  if (options.quantize != "auto") options.quantize_budget = options.quantize_sample = "";
  if (options.attention == "full") options.attention_budget = defaults.attention_budget;
  check_options(options, OptionNames::kFlags);
  if (!options.quantize_sample.empty()) options.quantize_sample = read_input(options.quantize_sample);
  return options;
}

}  // namespace millrace::cli
