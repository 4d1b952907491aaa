// The rules of EngineOptions: what is refused, by which name, and what the parts make of the rest.
#include "engine/engine_options.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace millrace {
namespace {

std::string refusal(const EngineOptions& options, OptionNames names = OptionNames::kFields) {
  try {
    check_options(options, names);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kBadInput);
    return error.what();
  }
  return "";
}

TEST(EngineOptions, DefaultsNeedAModelOnly) {
  EXPECT_EQ(refusal({}), "model: found no path, expected one");
  EXPECT_EQ(refusal({.model = "m"}), "");
}

TEST(EngineOptions, ARefusalUsesTheNamesOfWhoeverAsks) {
  const struct {
    EngineOptions options;
    const char *field, *flag;
  } kCases[] = {
      {{.model = "m", .gpu_memory = 0.0}, "gpu_memory: ", "--gpu-memory: "},
      {{.model = "m", .gpu_memory = 0.5}, "gpu_memory: found device cpu", "--gpu-memory: found --device cpu"},
      {{.model = "m", .gpu_layers = 2}, "gpu_layers: found device cpu", "--gpu-layers: found --device cpu"},
      {{.model = "m", .device = "auto", .cpu_experts = "1"},
       "cpu_experts: found device auto",
       "--cpu-experts: found --device auto"},
      {{.model = "m", .fallback = "cpu"}, "fallback: found device cpu", "--fallback: found --device cpu"},
      {{.model = "m", .device = "auto", .fallback = "tpu"},
       "fallback: found 'tpu'",
       "--fallback: found 'tpu'"},
      {{.model = "m", .device = "auto", .fallback = "cpu", .kv_dir = "d"},
       "fallback: found kv_dir with it",
       "--fallback: found --kv-dir with it"},
      {{.model = "m", .threads = -1}, "threads: ", "--threads: "},
      {{.model = "m", .context = -1}, "context: ", "--ctx: "},
      {{.model = "m", .kv_type = "int7"}, "kv_type: found", "--kv-type: found"},
      {{.model = "m", .quantize = "q9"}, "quantize: found", "--quantize: found"},
      {{.model = "m", .quantize = "auto"}, "quantize_budget: found none", "--budget: found none"},
      {{.model = "m", .quantize_budget = "4bpw"}, "quantize_budget: found", "--budget: found"},
      {{.model = "m", .quantize_sample = "text"}, "quantize_sample: found one", "--sample: found one"},
      {{.model = "m", .max_running = 0}, "max_running: found 0", "--max-running: found 0"},
      {{.model = "m", .max_waiting = -1}, "max_waiting: ", "--max-queue: "},
      {{.model = "m", .chunk_s = 0}, "chunk_s: ", "--chunk-s: "},
      {{.model = "m", .speculation = Speculation::kDraft}, "draft_model: ", "--draft-model: "},
      {{.model = "m", .max_draft = 65}, "max_draft: found 65", "--max-draft: found 65"},
  };
  for (const auto& c : kCases) {
    EXPECT_EQ(refusal(c.options).find(c.field), 0u) << refusal(c.options);
    const std::string flags = refusal(c.options, OptionNames::kFlags);
    EXPECT_EQ(flags.find(c.flag), 0u) << flags;
  }
}

TEST(EngineOptions, ADraftModelRunsWhereItsTargetRunsAndKeepsNothing) {
  const EngineOptions options{.model = "large",
                              .device = "cuda:1",
                              .threads = 3,
                              .quantize = "auto",
                              .quantize_budget = "4bpw",
                              .max_running = 7,
                              .kv_tokens = 4096,
                              .states_apart = 512,
                              .ram_tier_bytes = 1 << 20,
                              .kv_dir = "directory",
                              .speculation = Speculation::kDraft,
                              .draft_model = "small"};
  const EngineOptions draft = draft_model_options(options, 512);
  EXPECT_EQ(refusal(draft), "");
  EXPECT_EQ(draft.model, "small");
  EXPECT_EQ(draft.device, "cuda:1");
  EXPECT_EQ(draft.threads, 3);
  EXPECT_EQ(draft.context, 512);
  EXPECT_EQ(draft.max_running, 7);
  EXPECT_EQ(draft.quantize, "");
  EXPECT_EQ(draft.kv_tokens, 0);
  EXPECT_FALSE(draft.prefix_cache);
  EXPECT_EQ(draft.ram_tier_bytes, 0u);
  EXPECT_EQ(draft.states_apart, 0);
  EXPECT_EQ(draft.kv_dir, "");
  EXPECT_EQ(draft_rows(draft), 0);
  EXPECT_GT(draft_rows(options), 0);
}

}  // namespace
}  // namespace millrace
