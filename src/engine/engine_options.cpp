#include "engine/engine_options.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/sparse_pages.h"
#include "dist/shares.h"
#include "engine/rank_group.h"
#include "engine/rank_launcher.h"
#include "io/printable.h"
#include "kernels/quant/kv_types.h"
#include "model/adapter.h"
#include "quant/type_request.h"

namespace millrace {
namespace {

// Options whose flag is not their field's name with dashes.
constexpr struct {
  std::string_view field, flag;
} kFlagNames[] = {{"context", "--ctx"},
                  {"max_waiting", "--max-queue"},
                  {"quantize_budget", "--budget"},
                  {"quantize_sample", "--sample"},
                  {"adapters", "--adapter"},
                  {"ram_tier_bytes", "--ram-tier"},
                  {"speculation", "--speculate"}};

constexpr double kLeastMemory = 1 << 20;  // of a limit in bytes: less is a mistake

constexpr int kMaxReplicas = 16;

class OptionChecker {
 public:
  OptionChecker(const EngineOptions& options, OptionNames names) : o_(options), names_(names) {}

  void check() const {
    if (o_.model.empty()) throw_error(ErrorCode::kBadInput, "model: found no path, expected one");
    check_ranges();
    check_attention();
    check_compute();
    check_device();
    check_quantize();
    check_ranks();
    parse_adapter_options(name("adapters"), o_.adapters);
    if (o_.speculation == Speculation::kDraft && o_.draft_model.empty()) {
      throw_error(ErrorCode::kBadInput, "{}: found no path, expected one for drafts from a model",
                  name("draft_model"));
    }
  }

 private:
  std::string name(std::string_view field) const {
    if (names_ == OptionNames::kFields) return std::string(field);
    for (const auto& known : kFlagNames) {
      if (known.field == field) return std::string(known.flag);
    }
    std::string flag = "--" + std::string(field);
    std::replace(flag.begin(), flag.end(), '_', '-');
    return flag;
  }

  void check_range(std::string_view field, double value, double min, double max) const {
    if (value >= min && value <= max) return;
    throw_error(ErrorCode::kBadInput, "{}: found {}, expected {} to {}", name(field), value, min, max);
  }

  void check_ranges() const {
    if (!(o_.gpu_memory > 1 && o_.gpu_memory >= kLeastMemory && o_.gpu_memory <= 1e15)) {
      check_range("gpu_memory", o_.gpu_memory, 0.01, 1);
    }
    check_range("gpu_layers", o_.gpu_layers, -1, 1 << 20);
    check_range("threads", o_.threads, 0, 1024);
    check_range("context", o_.context, 0, 1 << 28);
    check_range("max_running", o_.max_running, 1, 1 << 16);
    check_range("max_waiting", o_.max_waiting, 0, 1 << 30);
    check_range("step_tokens", o_.step_tokens, 0, 1 << 20);
    check_range("chunk_s", o_.chunk_s, 1e-3, 3600);
    check_range("ageing", o_.ageing, 0, 1e6);
    check_range("kv_tokens", static_cast<double>(o_.kv_tokens), 0, 1e12);
    check_range("states_apart", o_.states_apart, 0, 1 << 20);
    check_states_apart();
    check_range("max_draft", o_.max_draft, 1, 64);
    check_range("attention_budget", o_.attention_budget, kLeastSparseBudget, 1 << 28);
  }

  void check_states_apart() const {
    if (o_.states_apart == 0) return;
    if (o_.states_apart % kBlockTokens != 0) {
      throw_error(ErrorCode::kBadInput, "{}: found {}, expected a multiple of {}, or 0", name("states_apart"),
                  o_.states_apart, kBlockTokens);
    }
  }

  void check_attention() const {
    if (o_.attention == "full" || o_.attention == "sparse" || o_.attention == "request") return;
    throw_error(ErrorCode::kBadInput, "{}: found {}, expected full, sparse or request", name("attention"),
                io::printable(o_.attention));
  }

  void check_compute() const {
    if (o_.compute == "full") return;
    if (o_.compute != "fp8") {
      throw_error(ErrorCode::kBadInput, "{}: found {}, expected full or fp8", name("compute"),
                  io::printable(o_.compute));
    }
    for (const auto& [field, used] : {std::pair{"device", o_.device.find('+') != std::string::npos},
                                      {"adapters", !o_.adapters.empty()},
                                      {"fallback", !o_.fallback.empty()},
                                      {"tensor_parallel", o_.tensor_parallel > 1},
                                      {"pipeline_parallel", o_.pipeline_parallel > 1},
                                      {"context_parallel", o_.context_parallel > 1},
                                      {"gpu_layers", o_.gpu_layers >= 0},
                                      {"cpu_experts", !o_.cpu_experts.empty()}}) {
      if (!used) continue;
      throw_error(ErrorCode::kUnsupported,
                  "{}: found fp8 with {}, expected it alone: one device multiplies all", name("compute"),
                  name(field));
    }
  }

  void check_ranks() const {
    check_range("tensor_parallel", o_.tensor_parallel, 1, dist::kMaxTensorRanks);
    check_range("pipeline_parallel", o_.pipeline_parallel, 1, dist::kMaxTensorRanks);
    check_range("context_parallel", o_.context_parallel, 1, dist::kMaxTensorRanks);
    if (o_.tensor_parallel * o_.pipeline_parallel > dist::kMaxTensorRanks) {
      throw_error(ErrorCode::kBadInput, "{}: found {} with {} {}, expected at most {} ranks together",
                  name("pipeline_parallel"), o_.pipeline_parallel, name("tensor_parallel"),
                  o_.tensor_parallel, dist::kMaxTensorRanks);
    }
    for (const auto& [field, ranks] : {std::pair{"tensor_parallel", o_.tensor_parallel},
                                       std::pair{"pipeline_parallel", o_.pipeline_parallel}}) {
      if (o_.context_parallel == 1 || ranks == 1) continue;
      throw_error(ErrorCode::kUnsupported, "{}: found {} with {} {}, expected one of both",
                  name("context_parallel"), o_.context_parallel, name(field), ranks);
    }
    if (o_.context_parallel > 1 && !o_.rank_speeds.empty()) {
      throw_error(ErrorCode::kUnsupported, "{}: found {} {}, expected none: ranks of a context are alike",
                  name("rank_speeds"), name("context_parallel"), o_.context_parallel);
    }
    if (o_.context_parallel > 1 && o_.shrink) {
      throw_error(ErrorCode::kUnsupported,
                  "{}: found {} {}, expected none: every rank has a part of the context", name("shrink"),
                  name("context_parallel"), o_.context_parallel);
    }
    if (!dist::schedule_kind(o_.context_schedule)) {
      throw_error(ErrorCode::kBadInput, "{}: found {}, expected auto, ring, mesh or wallfacer",
                  name("context_schedule"), io::printable(o_.context_schedule));
    }
    if (o_.context_parallel == 1 && o_.context_schedule != "auto") {
      throw_error(ErrorCode::kBadInput, "{}: found {} with {} 1, expected ranks that share contexts",
                  name("context_schedule"), o_.context_schedule, name("context_parallel"));
    }
    if (o_.expert_parallel && o_.tensor_parallel == 1) {
      throw_error(ErrorCode::kBadInput, "{}: found {} 1, expected ranks that share the experts",
                  name("expert_parallel"), name("tensor_parallel"));
    }
    parse_rank_speeds(name("rank_speeds"), o_);
    if (ranks_of(o_) > 1 && !o_.quantize.empty()) {
      throw_error(ErrorCode::kUnsupported,
                  "{}: found {} {}, expected one process: millrace quantize writes the file first",
                  name("quantize"), name(ranks_option(o_)), ranks_of(o_));
    }
    if (ranks_of(o_) > 1 && o_.device == "reference") {  // before ranks are started that would say so
      throw_error(
          ErrorCode::kUnsupported,
          "{} reference: found {} ranks that share a model, expected one: the cpu and cuda devices do "
          "that",
          name("device"), ranks_of(o_));
    }
    check_launcher();
  }

  void check_launcher() const {
    if (!o_.launcher.empty() && o_.launcher.find_first_not_of(' ') == std::string::npos) {
      throw_error(ErrorCode::kBadInput, "{}: found blanks, expected a command such as mpirun",
                  name("launcher"));
    }
    if (o_.front_address.empty()) {
      throw_error(ErrorCode::kBadInput, "{}: found none, expected an address of this machine",
                  name("front_address"));
    }
    check_replicas();
    const bool launches = !o_.launcher.empty() || !o_.rank_hosts.empty() || o_.restart || o_.shrink;
    if (launches && ranks_of(o_) == 1) {
      throw_error(ErrorCode::kBadInput, "{}: found one process, expected ranks to start", name("launcher"));
    }
    if (o_.rank_hosts.empty()) return;
    const std::vector<std::string> hosts = parse_rank_hosts(o_);
    const bool empty = std::any_of(hosts.begin(), hosts.end(), [](const auto& host) { return host.empty(); });
    const int wanted = ranks_of(o_) * o_.data_parallel;
    if (empty || hosts.size() != static_cast<size_t>(wanted)) {
      throw_error(ErrorCode::kBadInput, "{}: found {} in \"{}\", expected {}, one for each rank",
                  name("rank_hosts"), hosts.size(), o_.rank_hosts, wanted);
    }
  }

  void check_replicas() const {
    check_range("data_parallel", o_.data_parallel, 1, kMaxReplicas);
    if (o_.data_parallel == 1) return;
    if (o_.device.starts_with("cuda")) {
      throw_error(ErrorCode::kUnsupported, "{}: found {} replicas on {}, expected them on CPUs",
                  name("data_parallel"), o_.data_parallel, o_.device);
    }
    if (ranks_of(o_) > 1 && o_.launcher.empty()) {
      throw_error(ErrorCode::kUnsupported,
                  "{}: found {} replicas of ranks that mpirun started, expected millrace serve to start them",
                  name("data_parallel"), o_.data_parallel);
    }
  }

  void check_device() const {
    if (!o_.kv_type.empty()) parse_kv_type(name("kv_type"), o_.kv_type);
    const bool no_gpu = o_.device == "cpu" || o_.device == "reference";
    const EngineOptions defaults;
    if (no_gpu && o_.gpu_memory != defaults.gpu_memory) throw_device("gpu_memory", "a GPU or auto");
    const bool named_gpu = !no_gpu && o_.device != "auto";
    if (!named_gpu && o_.gpu_layers != defaults.gpu_layers) throw_device("gpu_layers", "a GPU");
    if (!named_gpu && !o_.cpu_experts.empty()) throw_device("cpu_experts", "a GPU");
    if (!named_gpu && !o_.expert_counts.empty()) throw_device("expert_counts", "a GPU");
    if (o_.fallback.empty()) return;
    if (o_.fallback != "cpu") {
      throw_error(ErrorCode::kBadInput, "{}: found {}, expected cpu", name("fallback"),
                  io::printable(o_.fallback));
    }
    if (no_gpu) throw_device("fallback", "a GPU or auto");
    for (const auto& [field, used] : {std::pair{"ram_tier_bytes", o_.ram_tier_bytes > 0},
                                      {"kv_dir", !o_.kv_dir.empty()},
                                      {"adapters", !o_.adapters.empty()},
                                      {"tensor_parallel", o_.tensor_parallel > 1},
                                      {"pipeline_parallel", o_.pipeline_parallel > 1},
                                      {"context_parallel", o_.context_parallel > 1},
                                      {"speculation", o_.speculation == Speculation::kDraft}}) {
      if (!used) continue;
      throw_error(ErrorCode::kBadInput,
                  "{}: found {} with it, expected none: what a GPU has made of it is lost", name("fallback"),
                  name(field));
    }
  }

  [[noreturn]] void throw_device(std::string_view field, std::string_view expected) const {
    throw_error(ErrorCode::kBadInput, "{}: found {} {}, expected {}", name(field), name("device"), o_.device,
                expected);
  }

  void check_quantize() const {
    const bool automatic = o_.quantize == "auto";
    if (automatic == o_.quantize_budget.empty()) {
      throw_error(ErrorCode::kBadInput, "{}: found {}, expected {} {} auto{}", name("quantize_budget"),
                  automatic ? "none" : io::printable(o_.quantize_budget), automatic ? "one for" : "it with",
                  name("quantize"), automatic ? ", such as 4.5bpw or 800M" : " only");
    }
    if (!automatic && !o_.quantize_sample.empty()) {
      throw_error(ErrorCode::kBadInput, "{}: found one, expected it with {} auto only",
                  name("quantize_sample"), name("quantize"));
    }
    if (!automatic && !o_.quantize.empty()) quant::parse_request(name("quantize"), o_.quantize);
  }

  const EngineOptions& o_;
  const OptionNames names_;
};

}  // namespace

void check_options(const EngineOptions& options, OptionNames names) { OptionChecker(options, names).check(); }

DType parse_kv_type(std::string_view option, std::string_view name) {
  for (const KvTypeName& known : kKvTypeNames) {
    if (known.name == name) return known.type;
  }
  throw_error(ErrorCode::kBadInput, "{}: found {}, expected f32, f16, bf16, int8 or fp8", option,
              io::printable(name));
}

// More would cost more than they save: a batch of this many rows is no longer bound by reading the weights.
int32_t draft_rows(const EngineOptions& options) {
  return options.speculation == Speculation::kOff ? 0 : std::max(options.max_draft, 32);
}

EngineOptions draft_model_options(const EngineOptions& options, int32_t context) {
  const EngineOptions defaults;
  EngineOptions draft = options;
  draft.model = options.draft_model;
  draft.context = context;
  draft.kv_type = defaults.kv_type;
  draft.attention = defaults.attention;
  draft.compute = defaults.compute;
  draft.quantize = defaults.quantize;
  draft.quantize_budget = defaults.quantize_budget;
  draft.quantize_sample = defaults.quantize_sample;
  draft.adapters = defaults.adapters;
  draft.mmproj = defaults.mmproj;
  draft.lock = defaults.lock;
  draft.gpu_layers = defaults.gpu_layers;
  draft.cpu_experts = defaults.cpu_experts;
  draft.expert_counts = defaults.expert_counts;
  draft.fallback = defaults.fallback;
  draft.kv_tokens = defaults.kv_tokens;
  draft.kv_bytes = defaults.kv_bytes;
  draft.prefix_cache = false;
  draft.states_apart = defaults.states_apart;
  draft.tensor_parallel = defaults.tensor_parallel;  // rank 0 guesses alone
  draft.pipeline_parallel = defaults.pipeline_parallel;
  draft.context_parallel = defaults.context_parallel;
  draft.context_schedule = defaults.context_schedule;
  draft.expert_parallel = defaults.expert_parallel;
  draft.rank_speeds = defaults.rank_speeds;
  draft.launcher = defaults.launcher;
  draft.data_parallel = defaults.data_parallel;
  draft.rank_hosts = defaults.rank_hosts;
  draft.restart = draft.shrink = false;
  draft.ram_tier_bytes = defaults.ram_tier_bytes;
  draft.kv_dir = defaults.kv_dir;
  draft.speculation = defaults.speculation;
  draft.on_load = nullptr;
  return draft;
}

sched::Limits limits_of(const EngineOptions& options, const ExecutorSpec& spec, bool whole_prompts) {
  sched::Limits limits;
  limits.groups = 0;
  for (const KvGroupSpec& group : spec.kv_groups) limits.groups += group.shelves;
  limits.step_tokens = spec.max_tokens;
  limits.logit_rows = spec.max_logit_rows;
  limits.max_running = options.max_running;
  limits.draft_rows = draft_rows(options);
  limits.chunk_s = options.chunk_s;
  limits.ageing = options.ageing;
  limits.whole_prompts = whole_prompts;
  return limits;
}

}  // namespace millrace
