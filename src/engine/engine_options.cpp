#include "engine/engine_options.h"

#include <algorithm>

#include "base/error.h"
#include "io/printable.h"
#include "kernels/quant/kv_types.h"
#include "quant/request.h"

namespace millrace {
namespace {

// Drafts of all sequences together in one step. More would cost more than they save: a batch of this many
// rows is no longer bound by reading the weights.
int32_t draft_rows(const EngineOptions& options) {
  return options.speculation == Speculation::kOff ? 0 : std::max(options.max_draft, 32);
}

}  // namespace

void check_options(const EngineOptions& options) {
  const auto check = [](const char* name, double value, double least, double most) {
    if (value >= least && value <= most) return;
    throw_error(ErrorCode::kBadInput, "{}: found {}, expected {} to {}", name, value, least, most);
  };
  if (options.model.empty()) throw_error(ErrorCode::kBadInput, "model: found no path, expected one");
  check("gpu_memory", options.gpu_memory, 0.01, 1);
  check("max_running", options.max_running, 1, 1 << 16);
  check("max_waiting", options.max_waiting, 0, 1 << 30);
  check("step_tokens", options.step_tokens, 0, 1 << 20);
  check("chunk_s", options.chunk_s, 1e-3, 3600);
  check("ageing", options.ageing, 0, 1e6);
  check("kv_tokens", static_cast<double>(options.kv_tokens), 0, 1e12);
  check("max_draft", options.max_draft, 1, 64);
  if ((options.quantize == "auto") == options.quantize_budget.empty()) {
    throw_error(
        ErrorCode::kBadInput, "quantize_budget: found {}, expected {}",
        options.quantize_budget.empty() ? "none" : io::printable(options.quantize_budget),
        options.quantize == "auto" ? "one for quantize auto, such as 4.5bpw" : "it with quantize auto only");
  }
  if (options.quantize != "auto" && !options.quantize_sample.empty()) {
    throw_error(ErrorCode::kBadInput, "quantize_sample: found a text, expected it with quantize auto only");
  }
  if (options.speculation == Speculation::kDraft && options.draft_model.empty()) {
    throw_error(ErrorCode::kBadInput, "draft_model: found no path, expected one for drafts from a model");
  }
}

DType parse_kv_type(std::string_view option, std::string_view name) {
  for (const KvTypeName& known : kKvTypeNames) {
    if (known.name == name) return known.type;
  }
  throw_error(ErrorCode::kBadInput, "{}: found {}, expected f32, f16, bf16, int8 or fp8", option,
              io::printable(name));
}

RuntimeOptions runtime_options_of(const EngineOptions& options) {
  RuntimeOptions r;
  r.device = options.device;
  r.threads = options.threads;
  r.gpu_memory = options.gpu_memory;
  r.context = options.context;
  r.lock = options.lock;
  if (options.quantize == "auto") {
    r.quantize_auto = {options.quantize_budget, options.quantize_sample};
  } else if (!options.quantize.empty()) {
    r.quantize = type_choice(quant::parse_request("quantize", options.quantize));
    r.quantized_to = options.quantize;
  }
  r.sequences = options.max_running;
  r.step_tokens = options.step_tokens == 0 ? 0 : std::max(options.step_tokens, options.max_running);
  r.logit_rows = options.max_running + draft_rows(options);
  if (!options.kv_type.empty()) {
    r.kv_type = parse_kv_type("kv_type", options.kv_type);
  }
  r.shared_pool = true;
  r.kv_tokens = options.kv_tokens;
  r.kv_bytes = options.kv_bytes;
  r.cache.prefix_cache = options.prefix_cache;
  r.cache.ram_bytes = options.ram_tier_bytes;
  r.cache.disk_directory = options.kv_dir;
  r.cache.disk_bytes = options.kv_dir_bytes;
  r.progress = options.on_load;
  return r;
}

sched::Limits limits_of(const EngineOptions& options, const ExecutorSpec& spec) {
  sched::Limits limits;
  limits.groups = static_cast<int32_t>(spec.kv_groups.size());
  limits.step_tokens = spec.max_tokens;
  limits.logit_rows = spec.max_logit_rows;
  limits.max_running = options.max_running;
  limits.draft_rows = draft_rows(options);
  limits.chunk_s = options.chunk_s;
  limits.ageing = options.ageing;
  return limits;
}

}  // namespace millrace
