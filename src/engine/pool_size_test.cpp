// The context that nobody named: what the model was trained for, as far as the pool holds it.
#include "engine/pool_size.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "base/error.h"
#include "dist/shares.h"

namespace millrace {
namespace {

const std::string kModel = "tests/golden/models/llama3/model.gguf";

class DefaultContext : public ::testing::Test {
 protected:
  static constexpr int32_t kTrained = 100000, kUsual = 4096;

  DefaultContext() : config_(read_config(checkpoint_)) { config_.context_length = kTrained; }

  ExecutorSpec spec(EngineOptions options, RuntimeSetup setup = {.sequences = RuntimeSetup::kShared}) const {
    options.model = kModel;
    return runtime_spec(checkpoint_, config_, *backend_, options, setup);
  }
  static size_t bytes_of(const ExecutorSpec& spec) {
    return spec.kv_block_bytes(0) * static_cast<size_t>(spec.kv_groups[0].num_blocks);
  }

  io::Checkpoint checkpoint_ = io::Checkpoint::open(kModel);
  ModelConfig config_;
  std::unique_ptr<Backend> backend_ = make_backend("cpu", {.threads = 1});
};

TEST_F(DefaultContext, IsWhatTheModelWasTrainedFor) {
  EXPECT_EQ(spec({}).max_context, kTrained);
  EXPECT_EQ(spec({.max_running = 1}).max_context, kTrained);
  EXPECT_EQ(spec({}, {.sequences = 1}).max_context, kTrained);
  EXPECT_EQ(spec({.context = 77}).max_context, 77);
  config_.context_length = 300;
  EXPECT_EQ(spec({}).max_context, 300);
}

TEST_F(DefaultContext, IsCutToWhatThePoolHolds) {
  const size_t block = spec({}).kv_block_bytes(0);
  for (const size_t blocks : {300, 1000, 5000}) {
    const ExecutorSpec cut = spec({.kv_bytes = blocks * block});
    EXPECT_LE(bytes_of(cut), blocks * block);
    EXPECT_LE(cut.max_context, static_cast<int32_t>(blocks - 1) * kBlockTokens);
    EXPECT_GT(cut.max_context, static_cast<int32_t>(blocks - 1) * kBlockTokens - 1024 - kBlockTokens);
    EXPECT_EQ(cut.max_context % 1024, 0);
  }
  // Less than the usual is refused, as a context that was asked for is.
  EXPECT_THROW(spec({.kv_bytes = 200 * block}), Error);
  EXPECT_EQ(spec({.kv_tokens = 8000}).max_context, 8000 - kBlockTokens);
  EXPECT_EQ(spec({.kv_tokens = 100}).max_context, 96 - kBlockTokens);
  EXPECT_THROW(spec({.context = 100, .kv_tokens = 100}), Error);
}

TEST_F(DefaultContext, DoesNotMakeThePoolsOfManyLonger) {
  // Sixty-four requests of the usual length; one whole context where that is more.
  constexpr int32_t kUsualBlocks = kUsual / kBlockTokens + 1;
  EXPECT_EQ(spec({}).kv_groups[0].num_blocks, 64 * kUsualBlocks);
  EXPECT_EQ(spec({.max_running = 1}).kv_groups[0].num_blocks, kTrained / kBlockTokens + 1);
  EXPECT_EQ(spec({.context = 8192, .max_running = 4}).kv_groups[0].num_blocks, 4 * (8192 / kBlockTokens + 1));
  RuntimeSetup draft{.sequences = RuntimeSetup::kShared};
  draft.most_tokens = 20000;
  EXPECT_EQ(spec({.context = 8192}, draft).kv_groups[0].num_blocks, 20000 / kBlockTokens);
}

TEST_F(DefaultContext, HasALimitOfWhoeverOpens) {
  RuntimeSetup setup{.sequences = 1};
  setup.most_context = 5000;
  EXPECT_EQ(spec({}, setup).max_context, 5000);
  EXPECT_EQ(spec({.context = 6000}, setup).max_context, 6000);
}

// Ranks that share heads, or layers, have a part of every block: as much memory holds more of them.
TEST_F(DefaultContext, OfRanksIsOfTheirParts) {
  const size_t bytes = 1000 * spec({}).kv_block_bytes(0);
  const auto blocks_of = [&](const dist::Shares* shares) {
    const std::unique_ptr<Backend> rank = make_backend("cpu", {.threads = 1, .shares = shares});
    return runtime_spec(checkpoint_, config_, *rank, {.model = kModel, .kv_bytes = bytes},
                        {.sequences = RuntimeSetup::kShared})
        .kv_groups[0]
        .num_blocks;
  };
  ASSERT_EQ(blocks_of(nullptr), 1000);
  const dist::Shares halves = dist::Shares::even(1, 2), uneven(0, {3, 1}),
                     stages = dist::Shares::pipeline(0, {1, 1});
  ASSERT_EQ(config_.kv_heads % 2, 0);
  EXPECT_EQ(blocks_of(&halves), 2000);
  EXPECT_LT(blocks_of(&uneven), 2000);  // the first has most of it
  EXPECT_EQ(blocks_of(&stages), 1000 * config_.layers / ((config_.layers + 1) / 2));
}

// A state takes the room of many blocks of keys and values: where those of everybody who may run leave no
// room for one context, fewer run at the same time.
TEST(PoolSize, HoldsStatesOfFewerWhereThoseOfAllDoNotFit) {
  const std::string model = "tests/golden/models/qwen3next/model.gguf";
  const io::Checkpoint checkpoint = io::Checkpoint::open(model);
  const ModelConfig config = read_config(checkpoint);
  const std::unique_ptr<Backend> backend = make_backend("cpu", {.threads = 1});
  const auto spec_of = [&](EngineOptions options) {
    options.model = model;
    options.context = 8192;
    return runtime_spec(checkpoint, config, *backend, options, {.sequences = RuntimeSetup::kShared});
  };
  const auto state_blocks = [](const ExecutorSpec& spec) {
    for (const KvGroupSpec& group : spec.kv_groups)
      if (group.state) return group.num_blocks;
    return 0;
  };
  const ExecutorSpec all = spec_of({}), one = spec_of({.max_running = 1});
  EXPECT_GE(state_blocks(all), 3 * 64);
  EXPECT_LE(state_blocks(one), 3 + 8 + 1 + 8192 / 512);
  const size_t enough = pool_bytes(one, {}, *backend) + 4096;
  const ExecutorSpec tight = spec_of({.kv_bytes = enough});
  EXPECT_LE(pool_bytes(tight, {}, *backend), enough);
  EXPECT_GE(state_blocks(tight), state_blocks(one));
  EXPECT_THROW(spec_of({.kv_bytes = enough / 2}), Error);
  EXPECT_EQ(state_blocks(spec_of({.max_running = 1, .states_apart = 16})),
            blocks_for(8192) + 1);  // as many as there are blocks, and no more
  EXPECT_THROW(spec_of({.kv_bytes = enough, .states_apart = 16}), Error);
}

TEST(PoolSize, RefusesADistanceOfStatesThatAreNotThere) {
  const io::Checkpoint checkpoint = io::Checkpoint::open(kModel);
  const std::unique_ptr<Backend> backend = make_backend("cpu", {.threads = 1});
  EXPECT_THROW(runtime_spec(checkpoint, read_config(checkpoint), *backend,
                            {.model = kModel, .states_apart = 512}, {.sequences = RuntimeSetup::kShared}),
               Error);
}

// What the CPU keeps of a split context is bounded: eight times the context, less than twice the workspace.
TEST_F(DefaultContext, TakesNoWorkspaceInProportion) {
  const std::unique_ptr<Backend> many = make_backend("cpu", {.threads = 4});
  const auto workspace = [&](int32_t context) {
    return many->workspace_bytes(
        runtime_spec(checkpoint_, config_, *many, {.model = kModel, .context = context}, {}));
  };
  EXPECT_LT(workspace(32768), 2 * workspace(4096));
}

}  // namespace
}  // namespace millrace
