// The runtime on damaged and impossible input, and the memory plan against what is then used.
#include "engine/runtime.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "engine/memory_plan.h"
#include "engine/open_backend.h"
#include "engine/pool_size.h"
#include "golden_reader.h"

namespace millrace {
namespace {

namespace fs = std::filesystem;

EngineOptions on(const std::string& device, const std::string& model, int32_t context = 0) {
  return {.model = model, .device = device, .threads = 2, .context = context};
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// A copy of a golden GGUF in which one block's F16 scale of `tensor` is NaN.
std::string with_nan_scale(const std::string& source, const std::string& tensor) {
  const std::string path =
      (fs::path(testing::TempDir()) / fmt::format("nan_scale_{}.gguf", ::getpid())).string();
  std::vector<std::byte> bytes = golden::read_bytes(source);
  const io::Gguf gguf = io::Gguf::parse(bytes, source);
  const TensorView* view = gguf.find_tensor(tensor);
  if (view == nullptr || view->type != DType::kQ8_0)
    throw std::runtime_error(source + " has no Q8_0 " + tensor);
  const uint16_t nan = 0x7e00;
  std::memcpy(bytes.data() + (view->data - bytes.data()), &nan, sizeof nan);
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  return path;
}

class Device : public testing::TestWithParam<const char*> {};

TEST_P(Device, ARepeatedBlockLengthensASequence) {
  const auto runtime = Runtime::open(on(GetParam(), "tests/golden/models/gpt-oss-w32/model.gguf", 256));
  const std::vector<int32_t> tokens(48, 5);
  kv::Sequence sequence = runtime->make_sequence();
  runtime->prefill(sequence, tokens);
  runtime->repeat_last_block(sequence, 160);  // past the window of 32 several times
  EXPECT_EQ(sequence.length(), 208);
  for (const float logit : runtime->prefill(sequence, std::span(tokens).first(16))) {
    ASSERT_TRUE(std::isfinite(logit));
  }
  const std::string error = error_of([&] { runtime->repeat_last_block(sequence, 64); });
  EXPECT_NE(error.find("a context of 256"), std::string::npos) << error;
}

TEST_P(Device, NanScaleIsNamed) {
  const std::string source = "tests/golden/models/gpt-oss-w32/model.gguf";  // Q8_0 outside the experts
  for (const std::string tensor : {"blk.0.attn_q.weight", "blk.1.attn_output.weight"}) {
    const std::string path = with_nan_scale(source, tensor);
    const std::string error = error_of([&] {
      const auto runtime = Runtime::open(on(GetParam(), path));
      kv::Sequence sequence = runtime->make_sequence();
      const std::vector<int32_t> tokens = {1, 2, 3, 4};
      runtime->prefill(sequence, tokens);
    });
    EXPECT_NE(error.find(path), std::string::npos) << error;
    EXPECT_NE(error.find(tensor), std::string::npos) << error;
    EXPECT_NE(error.find("NaN"), std::string::npos) << error;
    fs::remove(path);
  }
}

TEST_P(Device, PromptLongerThanTheContextIsRefusedBeforeAnyWork) {
  const auto runtime = Runtime::open(on(GetParam(), "tests/golden/models/llama2/hf", 20));
  kv::Sequence sequence = runtime->make_sequence();
  const std::vector<int32_t> tokens(21, 1);
  const std::string error = error_of([&] { runtime->prefill(sequence, tokens); });
  EXPECT_NE(error.find("21 tokens"), std::string::npos) << error;
  EXPECT_NE(error.find("20"), std::string::npos) << error;
  EXPECT_EQ(sequence.length(), 0);
  runtime->prefill(sequence, std::span(tokens).first(20));  // still usable
  EXPECT_EQ(sequence.length(), 20);
}

TEST_P(Device, TokensOutsideTheVocabularyAreRefused) {
  const auto runtime = Runtime::open(on(GetParam(), "tests/golden/models/llama2/hf"));
  kv::Sequence sequence = runtime->make_sequence();
  for (const int32_t bad : {-1, runtime->config().vocab, INT32_MAX}) {
    const std::string error = error_of([&] { runtime->prefill(sequence, std::span(&bad, 1)); });
    EXPECT_NE(error.find(std::to_string(bad)), std::string::npos) << error;
  }
}

// Every table must let a NaN through, or a damaged file goes unnoticed; and MILLRACE_ISA must choose the
// table.
TEST(Runtime, NanScaleIsNamedOnTheScalarTableToo) {
  const std::string tensor = "blk.0.attn_q.weight";
  const std::string path = with_nan_scale("tests/golden/models/gpt-oss-w32/model.gguf", tensor);
  ::setenv("MILLRACE_ISA", "scalar", 1);
  const std::string error = error_of([&] {
    const auto runtime = Runtime::open(on("cpu", path));
    EXPECT_EQ(runtime->backend().isa(), "scalar");
    kv::Sequence sequence = runtime->make_sequence();
    const std::vector<int32_t> tokens = {1, 2, 3, 4};
    runtime->prefill(sequence, tokens);
  });
  EXPECT_NE(error.find(tensor), std::string::npos) << error;
  ::setenv("MILLRACE_ISA", "sse9", 1);
  const std::string unknown = error_of([&] { Runtime::open(on("cpu", path)); });
  EXPECT_NE(unknown.find("sse9"), std::string::npos) << unknown;
  EXPECT_NE(unknown.find("scalar"), std::string::npos) << unknown;
  ::unsetenv("MILLRACE_ISA");
  fs::remove(path);
}

INSTANTIATE_TEST_SUITE_P(Devices, Device, testing::Values("reference", "cpu"));

TEST(Runtime, AutoIsTheCpuWhereThereIsNoGpu) {
  const io::Checkpoint checkpoint = io::Checkpoint::open("tests/golden/models/llama3/model.gguf");
  const ModelConfig config = read_config(checkpoint);
  EngineOptions options{.model = checkpoint.path(), .device = "auto"};
  const ChosenBackend chosen = open_backend(checkpoint, config, options);
  if (chosen.backend->name() == "cuda") GTEST_SKIP() << "there is a GPU";
  EXPECT_EQ(chosen.backend->name(), "cpu");
  options.gpu_memory = 0.0;
  EXPECT_THROW(Runtime::open(options), Error);
  options.gpu_memory = 0.5;
  for (const char* device : {"cuda:", "cuda:x", "cuda:-1", "cuda:1x", "gpu"}) {
    options.device = device;
    try {
      open_backend(checkpoint, config, options);
      ADD_FAILURE() << device;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kBadInput) << error.what();
      EXPECT_NE(std::string(error.what()).find(device), std::string::npos) << error.what();
    }
  }
}

// A device with little memory of its own, standing on the CPU; one that dequantizes matrices keeps their
// names.
class SmallDevice final : public Backend {
 public:
  explicit SmallDevice(size_t memory, bool dequantizes = false)
      : memory_(memory), dequantizes_(dequantizes), cpu_(make_backend("cpu", {.threads = 1})) {}
  std::string_view name() const override { return "small"; }
  std::string description() const override { return "small"; }
  std::string_view isa() const override { return cpu_->isa(); }
  int threads() const override { return 1; }
  DType default_kv_type() const override { return DType::kF32; }
  bool supports_kv_type(DType type) const override { return cpu_->supports_kv_type(type); }
  std::optional<size_t> own_memory() const override { return memory_; }
  size_t weight_bytes(const TensorView& view, WeightUse, size_t) const override { return view.bytes(); }
  size_t dequantized_bytes(const TensorView& view) const override {
    return dequantizes_ ? static_cast<size_t>(view.elements()) * 2 : 0;
  }
  WeightPtr load_weight(const TensorView& view, WeightUse use) override {
    if (use != WeightUse::kDequantized) return cpu_->load_weight(view, use);
    dequantized.push_back(view.name);
    held += dequantized_bytes(view);
    return cpu_->load_weight(view, WeightUse::kMatrix);
  }
  size_t workspace_bytes(const ExecutorSpec&) const override { return 1000; }
  std::unique_ptr<Executor> make_executor(const ExecutorSpec& spec) override {
    return cpu_->make_executor(spec);
  }
  void parallel(int64_t count, const std::function<void(int64_t, int64_t)>& body) override {
    cpu_->parallel(count, body);
  }
  std::vector<std::string> dequantized;
  size_t held = 0;  // by them

 private:
  size_t memory_;
  bool dequantizes_;
  std::unique_ptr<Backend> cpu_;
};

TEST(Runtime, APoolOnADeviceFillsWhatItHas) {
  const io::Checkpoint checkpoint = io::Checkpoint::open("tests/golden/models/llama3/model.gguf");
  const ModelConfig config = read_config(checkpoint);
  const EngineOptions options{.context = 64, .max_running = 1000};
  const RuntimeSetup setup{.sequences = RuntimeSetup::kShared};
  const size_t weights = plan_weights(checkpoint, config, SmallDevice(0)).repacked;
  const auto pool = [&](size_t memory) {
    const ExecutorSpec spec = runtime_spec(checkpoint, config, SmallDevice(memory), options, setup);
    return spec.kv_block_bytes(0) * static_cast<size_t>(spec.kv_groups[0].num_blocks);
  };
  const size_t room = 1 << 20;
  EXPECT_LE(pool(weights + 1000 + room), room);
  EXPECT_GT(pool(weights + 1000 + room), room * 9 / 10);
  for (const size_t memory : {weights / 2, weights + 1001}) {  // no weights; no context
    try {
      pool(memory);
      ADD_FAILURE() << memory;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kNoMemory) << error.what();
    }
  }
}

TEST(Runtime, UnknownDeviceAndKvTypeNameTheChoices) {
  const std::string path = "tests/golden/models/llama2/hf";
  EXPECT_NE(
      error_of([&] { Runtime::open(on("tpu", path)); }).find("auto, cpu, reference, cuda, cuda:N or two"),
      std::string::npos);
  EXPECT_NE(error_of([&] {
              EngineOptions options = on("cpu", path);
              options.kv_type = "q4_k";
              Runtime::open(options);
            }).find("q4_k"),
            std::string::npos);
}

TEST(Runtime, MissingTokenizerIsAnErrorOnlyWhereOneIsNeeded) {
  const fs::path copy = fs::path(testing::TempDir()) / fmt::format("no_tokenizer_{}", ::getpid());
  fs::remove_all(copy);
  fs::copy("tests/golden/models/llama2/hf", copy);
  fs::remove(copy / "tokenizer.json");
  const auto runtime = Runtime::open(on("cpu", copy.string()));
  kv::Sequence sequence = runtime->make_sequence();
  const std::vector<int32_t> tokens = {1, 2, 3};
  EXPECT_EQ(runtime->prefill(sequence, tokens).size(), static_cast<size_t>(runtime->config().vocab));
  EXPECT_NE(error_of([&] { runtime->tokenizer(); }).find("tokenizer.json"), std::string::npos);
  fs::remove_all(copy);
}

TEST(MemoryPlan, CountsWhatIsThere) {
  const io::Checkpoint checkpoint = io::Checkpoint::open("tests/golden/models/gpt-oss-w32/model.gguf");
  const ModelConfig config = read_config(checkpoint);
  const auto backend = make_backend("cpu", {.threads = 1});
  const EngineOptions options = on("cpu", checkpoint.path(), 4096);
  const MemoryPlan plan = plan_memory(checkpoint, config, *backend, options);
  ASSERT_EQ(plan.groups.size(), 2u);
  EXPECT_EQ(plan.groups[0].window, 32);
  EXPECT_LT(plan.groups[0].bytes_at_context, plan.groups[1].bytes_at_context) << "a window layer holds less";
  const size_t per_token = 2ull * config.kv_heads * config.head_dim * sizeof(uint16_t);  // BF16 key and value
  EXPECT_EQ(plan.groups[1].bytes_per_1k_tokens, per_token * 1024 * plan.groups[1].layers);
  EXPECT_LE(plan.weights_mapped, checkpoint.mapped_bytes());
  EXPECT_GT(plan.weights_mapped, checkpoint.mapped_bytes() / 2);
  EXPECT_EQ(plan.longest_context, config.context_length) << "a tiny model fits whole";
}

// Whoever asks whether a model fits wants the plan most where it does not.
TEST(MemoryPlan, IsThereWhereItDoesNotFit) {
  const io::Checkpoint checkpoint = io::Checkpoint::open("tests/golden/models/llama3/model.gguf");
  const ModelConfig config = read_config(checkpoint);
  EngineOptions options{.context = 64, .max_running = 1};
  RuntimeSetup setup;
  const size_t fixed = plan_weights(checkpoint, config, SmallDevice(0)).repacked + 1000;
  const auto plan_with = [&](size_t memory) {
    return plan_memory(checkpoint, config, SmallDevice(memory), options, setup);
  };
  const MemoryPlan roomy = plan_with(fixed + (size_t{1} << 30));
  EXPECT_EQ(roomy.does_not_fit, "");
  EXPECT_GE(roomy.longest_context, 64);
  for (const int32_t sequences : {1, RuntimeSetup::kShared}) {
    setup.sequences = sequences;
    const MemoryPlan no_context = plan_with(fixed + roomy.pool / 2);
    EXPECT_NE(no_context.does_not_fit.find("device small: a context of 64 tokens"), std::string::npos)
        << no_context.does_not_fit;
    EXPECT_EQ(no_context.does_not_fit.find('\n'), std::string::npos);
    EXPECT_EQ(no_context.context, 64);
    EXPECT_EQ(no_context.weights_repacked, fixed - 1000);
    EXPECT_GT(no_context.total, no_context.memory_available);
    EXPECT_GT(no_context.longest_context, 0);
    EXPECT_LT(no_context.longest_context, 64);
    EXPECT_EQ(no_context.users_at_context, 0);
    const MemoryPlan no_weights = plan_with(fixed / 2);
    EXPECT_NE(no_weights.does_not_fit.find("weights of"), std::string::npos) << no_weights.does_not_fit;
    EXPECT_EQ(no_weights.longest_context, 0);
  }
  options.kv_type = "q4_k";  // not a matter of memory
  EXPECT_THROW(plan_with(fixed), Error);
}

TEST(MemoryPlan, OpensWeightsWhereAnEighthOfTheRoomHoldsThem) {
  EXPECT_TRUE(keeps_dequantized(100, 1000, 1800));
  EXPECT_FALSE(keeps_dequantized(100, 1000, 1799));
  EXPECT_FALSE(keeps_dequantized(100, 1000, 1000));
  EXPECT_FALSE(keeps_dequantized(1, 1000, 999));
  EXPECT_FALSE(keeps_dequantized(1, 0, 0));  // a device without memory of its own
}

// All of them or none, and what is loaded is what was planned: the matrices of layers, but no experts,
// router, logits or embedding.
TEST(MemoryPlan, CountsDequantizedWeights) {
  for (const char* name : {"llama3", "gpt-oss-w32"}) {
    SCOPED_TRACE(name);
    const io::Checkpoint checkpoint =
        io::Checkpoint::open(fmt::format("tests/golden/models/{}/model.gguf", name));
    const ModelConfig config = read_config(checkpoint);
    const EngineOptions options{.context = 64, .max_running = 1 << 20};
    const size_t hidden = static_cast<size_t>(config.hidden), dim = static_cast<size_t>(config.head_dim);
    const size_t attention = 2 * hidden * dim * static_cast<size_t>(config.heads + config.kv_heads);
    const size_t ffn = config.experts > 0 ? 0 : 3 * hidden * static_cast<size_t>(config.ffn);
    const size_t all = 2 * static_cast<size_t>(config.layers) * (attention + ffn);
    const size_t others = plan_weights(checkpoint, config, SmallDevice(0)).repacked,
                 enough = others + 8 * all;
    for (const size_t memory : {enough, enough - 1}) {
      const bool dequantizes = memory == enough;
      SmallDevice device(memory, true);
      const MemoryPlan plan = plan_memory(checkpoint, config, device, options);
      EXPECT_EQ(plan.weights_dequantized, dequantizes ? all : 0);
      EXPECT_EQ(plan.weights_repacked, others);
      EXPECT_EQ(plan.total, others + plan.weights_dequantized + plan.workspace + plan.pool);
      // A shared pool takes what is left.
      const ExecutorSpec spec =
          runtime_spec(checkpoint, config, device, options, {.sequences = RuntimeSetup::kShared});
      size_t pool = 0;
      for (size_t g = 0; g < spec.kv_groups.size(); ++g) {
        pool += spec.kv_block_bytes(static_cast<int>(g)) * static_cast<size_t>(spec.kv_groups[g].num_blocks);
      }
      const size_t room = memory - others - plan.weights_dequantized - 1000;
      EXPECT_LE(pool, room);
      EXPECT_GT(pool, room * 9 / 10);
      Model::load(checkpoint, device);
      EXPECT_EQ(device.held, plan.weights_dequantized);
      EXPECT_EQ(device.dequantized.size(),
                dequantizes ? static_cast<size_t>(config.layers) * (ffn > 0 ? 7 : 4) : 0);
      for (const std::string& tensor : device.dequantized) {
        EXPECT_TRUE(tensor.find("attn_") != std::string::npos || ffn > 0) << tensor;
        EXPECT_EQ(tensor.compare(0, 4, "blk."), 0) << tensor;
      }
    }
  }
}

}  // namespace
}  // namespace millrace
