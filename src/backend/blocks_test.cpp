// KV blocks out of an executor and back, on every device: what was asked for comes as it was at that time,
// whatever later steps write to the block and however late finish_reads() is called.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "backend/test_support.h"

namespace millrace::kv_blocks {
namespace {

using namespace testing_support;

// More blocks than a device has on their way at once.
constexpr int32_t kBlocks = 70, kLayers = 2, kHeads = 1, kKvHeads = 1, kDim = 64, kRows = 400;

using Bytes = std::vector<std::byte>;

class BlockRig {
 public:
  BlockRig(Backend& backend, DType kv_type) {
    spec_.max_tokens = kRows;
    spec_.max_logit_rows = 1;
    spec_.max_context = kBlocks * kBlockTokens;
    spec_.hidden = 64;
    spec_.heads = kHeads;
    spec_.kv_heads = kKvHeads;
    spec_.head_dim = kDim;
    spec_.vocab = 10;
    spec_.ffn = 64;
    spec_.kv_type = kv_type;
    spec_.kv_groups = {{0, kLayers, kBlocks}};
    for (int32_t l = 0; l < kLayers; ++l) spec_.layers.push_back({0, l});
    executor_ = backend.make_executor(spec_);
    table_.resize(kBlocks);
    std::iota(table_.begin(), table_.end(), 0);
  }
  // Keys and values of all blocks but the last, by steps.
  void fill(uint32_t seed) {
    std::mt19937 random(seed);
    const std::vector<float> inv_freq(kDim / 2, 0.01f);
    const int32_t all = (kBlocks - 1) * kBlockTokens;
    for (int32_t at = 0; at < all; at += kRows) {
      const int32_t rows = std::min(kRows, all - at);
      const std::vector<int32_t> tokens(static_cast<size_t>(rows), 0);
      SequenceSlice slice{.first_row = 0, .num_tokens = rows, .context_len = at, .tables = {}};
      slice.tables[0] = table_.data();
      executor_->begin({tokens, {&slice, 1}, {}});
      const auto count = static_cast<size_t>(rows * kKvHeads * kDim);
      for (int32_t l = 0; l < kLayers; ++l) {
        executor_->write_slot(Slot::kQuery, random_floats(random, static_cast<size_t>(rows * kHeads * kDim)));
        executor_->write_slot(Slot::kKey, random_floats(random, count));
        executor_->write_slot(Slot::kValue, random_floats(random, count));
        executor_->rope_append_kv({l, inv_freq, 1.0f, false});
      }
    }
  }
  // Asked for, not waited for.
  std::vector<Bytes> ask() {
    std::vector<Bytes> blocks(kBlocks - 1, Bytes(spec_.kv_block_bytes(0), std::byte{0xCD}));
    for (int32_t b = 0; b < kBlocks - 1; ++b) executor_->read_block(0, b, blocks[static_cast<size_t>(b)]);
    return blocks;
  }
  std::vector<Bytes> read() {
    std::vector<Bytes> blocks = ask();
    executor_->finish_reads();
    return blocks;
  }
  Executor& executor() { return *executor_; }
  size_t block_bytes() const { return spec_.kv_block_bytes(0); }

 private:
  ExecutorSpec spec_;
  std::unique_ptr<Executor> executor_;
  std::vector<int32_t> table_;
};

TEST(Blocks, ComeAsTheyWereWhenAskedFor) {
  for (Device& device : all_devices(2)) {
    for (const DType kv_type : {device.backend->default_kv_type(), DType::kF8E4M3}) {
      if (!device.backend->supports_kv_type(kv_type)) continue;
      SCOPED_TRACE(device.label + " " + std::string(info(kv_type).name));
      BlockRig rig(*device.backend, kv_type);
      rig.fill(1);
      const std::vector<Bytes> late = rig.ask();
      rig.fill(2);  // writes over all of them
      rig.executor().finish_reads();
      rig.executor().finish_reads();  // nothing is on its way
      const std::vector<Bytes> second = rig.read();
      rig.fill(1);
      ASSERT_TRUE(rig.read() == late) << "not what the blocks held";
      ASSERT_FALSE(late == second);

      for (int32_t b = 0; b < kBlocks - 1; ++b) {
        Bytes from = second[static_cast<size_t>(b)];
        rig.executor().write_block(0, b, from);
        std::fill(from.begin(), from.end(), std::byte{0xEE});  // was consumed
      }
      rig.executor().copy_block(0, 7, kBlocks - 1);
      ASSERT_TRUE(rig.read() == second) << "not what was written";
      Bytes copied(rig.block_bytes());
      rig.executor().read_block(0, kBlocks - 1, copied);
      rig.executor().finish_reads();
      EXPECT_TRUE(copied == second[7]);
    }
  }
}

}  // namespace
}  // namespace millrace::kv_blocks
