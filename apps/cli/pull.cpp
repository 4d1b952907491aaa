#include "pull.h"

#include <fmt/core.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "fetch_estimate.h"
#include "hub/http_client.h"
#include "hub/model_name.h"
#include "hub/puller.h"
#include "hub/repo_file.h"
#include "hub/settings.h"
#include "model_names.h"
#include "model_options.h"
#include "output.h"

namespace millrace::cli {
namespace {

using Json = nlohmann::ordered_json;

struct PullOptions {
  std::string name;
  int32_t connections = hub::Settings().connections;
  bool json = false, any = false, dry_run = false, quiet = false;
};

constexpr const char* kPullFooter =
    "Examples:\n"
    "  millrace pull gpt-oss-20b                            # a short name: millrace list --known\n"
    "  millrace pull hf:Qwen/Qwen3-4B-GGUF:Q4_K_M           # a quantization of a repository\n"
    "  millrace pull hf:Qwen/Qwen3-4B-GGUF                  # the default: Q4_K_M if there is one\n"
    "  millrace pull hf:owner/name:folder/model.gguf        # one file (all its parts, if it is split)\n"
    "  millrace pull hf:HuggingFaceTB/SmolLM2-135M-Instruct # safetensors with config and tokenizer\n"
    "  millrace pull hf:owner/name@v1.0:Q8_0                # a branch, a tag or a commit\n"
    "  millrace pull gpt-oss-20b --dry-run                  # how large, does it fit, how fast\n"
    "The same names stand for MODEL in run, chat, serve and all other commands. Files go into the cache "
    "that\n"
    "the hf tool uses too: $HF_HUB_CACHE, $HF_HOME/hub or ~/.cache/huggingface/hub. What was cut off goes "
    "on\n"
    "where it was; every file is checked by its hash. HF_TOKEN opens private and gated repositories,\n"
    "HF_ENDPOINT names a mirror, HTTPS_PROXY a proxy. The path of the model is printed at the end.";

Json plan_json(const hub::PullPlan& plan) {
  Json files = Json::array();
  for (const hub::RepoFile& file : plan.files) files.push_back({{"path", file.path}, {"bytes", file.size}});
  return {{"event", "plan"},           {"repository", plan.name.repo}, {"commit", plan.commit},
          {"label", plan.label},       {"others", plan.others},        {"license", plan.license},
          {"files", std::move(files)}, {"bytes", plan.bytes},          {"missing_bytes", plan.missing_bytes}};
}

Json estimate_json(const FetchEstimate& estimate) {
  Json out = {{"event", "estimate"},
              {"architecture", estimate.architecture},
              {"device", estimate.device},
              {"memory_bytes", estimate.memory.total},
              {"available_bytes", estimate.memory.memory_available},
              {"context", estimate.memory.context},
              {"fits", estimate.fits},
              {"token_bytes", estimate.token_bytes}};
  if (const std::optional<double> speed = estimate.tokens_per_s()) {
    out["read_gb_s"] = *estimate.read_gb_s;
    out["tokens_per_s"] = *speed;
  }
  return out;
}

void say_plan(const PullOptions& options, const hub::PullPlan& plan, const hub::Settings& settings) {
  if (options.json) write_stdout(plan_json(plan).dump() + "\n");
  if (plan.missing_bytes == 0 && !options.dry_run) return;
  std::optional<FetchEstimate> estimate;
  if (!options.any)
    estimate = estimate_fetch(plan, settings, default_options());  // also: does Millrace load it?
  if (options.json) {
    if (estimate) write_stdout(estimate_json(*estimate).dump() + "\n");
  } else if (!options.quiet) {
    write_stderr(estimate ? describe_fetch(plan, *estimate, settings) : describe_fetch(plan, settings));
  }
}

int pull(const PullOptions& options) {
  if (const std::string why = hub::why_no_network(); !why.empty()) {
    throw_error(ErrorCode::kUnsupported, "{}", why);
  }
  const std::optional<hub::ModelName> name = hub_name(options.name);
  if (!name) {
    throw_error(ErrorCode::kBadInput,
                "{}: found a path, expected hf:owner/name or a name of `millrace list --known`",
                options.name);
  }
  hub::Settings settings = hub::settings_from_environment();
  settings.connections = options.connections;
  const hub::PullPlan plan = hub::plan_pull(*name, settings);
  say_plan(options, plan, settings);
  if (options.dry_run) return 0;
  const std::string path = fetch_model(plan, settings, options.json);
  if (options.json) {
    write_stdout(Json({{"event", "done"}, {"path", path}}).dump() + "\n");
  } else {
    write_stdout(path + "\n");
  }
  return 0;
}

}  // namespace

void add_pull(CommandLine& line) {
  Command command = line.add("pull", "fetch a model from Hugging Face's hub");
  auto options = std::make_shared<PullOptions>();
  command.option("NAME", options->name, "hf:owner/name[@revision][:file or quantization], or a short name")
      .required();
  command.flag("--dry-run", options->dry_run, "only say what would be fetched and how it would run here");
  command.flag("--any", options->any, "fetch it even if Millrace cannot load it");
  command.option("--connections", options->connections, "at the same time, for one large file")
      .range(1, 32)
      .show_default();
  command.flag("-q,--quiet", options->quiet, "say nothing of the model beforehand");
  command.flag("--json", options->json,
               "objects on standard output, one a line: plan, estimate, progress, done");
  command.footer(kPullFooter);
  command.runs([options] { return pull(*options); });
}

}  // namespace millrace::cli
