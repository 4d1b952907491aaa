// What ranks exchange is what the plan says, to the byte: of rows, of whole experts, of stages of ranks.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "dist/watched_communicator.h"
#include "engine/rank_messages.h"
#include "engine/rank_plan.h"
#include "engine/runtime.h"
#include "tests/dist/rank_options.h"
#include "tests/dist/with_ranks.h"
#include "tests/golden_reader.h"

namespace millrace {
namespace {

using test::open;
using test::options_for;
using test::with_ranks;

// Counts what the exchanges of a step move; messages of the leader pass by.
class CountsGathers final : public dist::Communicator {
 public:
  explicit CountsGathers(dist::Communicator& inner) : inner_(inner) {}
  std::string_view name() const override { return inner_.name(); }
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  void send(int to, std::span<const std::byte> bytes) override { inner_.send(to, bytes); }
  void recv(int from, std::span<std::byte> bytes) override { inner_.recv(from, bytes); }
  void send_recv(int to, std::span<const std::byte> out, int from, std::span<std::byte> in) override {
    inner_.send_recv(to, out, from, in);
  }
  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all,
                  std::span<const size_t> bytes) override {
    const uint64_t received = inner_.traffic().bytes_received, sent = inner_.traffic().bytes_sent;
    inner_.all_gather(mine, all, bytes);
    gathered.bytes_received += inner_.traffic().bytes_received - received;
    gathered.bytes_sent += inner_.traffic().bytes_sent - sent;
    ++gathered.calls;
  }
  void all_to_all(std::span<const std::byte> out, std::span<const size_t> out_bytes, std::span<std::byte> in,
                  std::span<const size_t> in_bytes) override {
    const uint64_t received = inner_.traffic().bytes_received, sent = inner_.traffic().bytes_sent;
    inner_.all_to_all(out, out_bytes, in, in_bytes);
    outputs.bytes_received += inner_.traffic().bytes_received - received;
    outputs.bytes_sent += inner_.traffic().bytes_sent - sent;
    ++outputs.calls;
  }
  void broadcast(int root, std::span<std::byte> bytes) override { inner_.broadcast(root, bytes); }
  void barrier() override { inner_.barrier(); }
  std::unique_ptr<dist::Communicator> split(int colour, int key) override {
    return inner_.split(colour, key);
  }
  dist::Traffic traffic() const override { return inner_.traffic(); }

  dist::Traffic gathered, outputs;  // outputs: of experts

 private:
  dist::Communicator& inner_;
};

// What the plan says goes over the links is what goes, to the byte; and the ranks' parts are the whole model.
TEST(Ranks, ThePlanSaysWhatIsExchanged) {
  for (const char* name : {"llama3", "gpt-oss-w32", "qwen2moe", "gemma2"}) {
    SCOPED_TRACE(name);
    const golden::Model model = golden::load_model(name);
    const EngineOptions options = options_for(model.paths.back(), 3, "2,1,1");
    const io::Checkpoint checkpoint = io::Checkpoint::open(options.model);
    const dist::Plan plan = plan_ranks(checkpoint, read_config(checkpoint), DType::kBF16, {2, 1, 1});
    for (size_t i = 0; i < plan.ranks[0].parts.size(); ++i) {
      const dist::Plan::Part& first = plan.ranks[0].parts[i];
      if (first.begin == 0 && first.end == first.of && plan.ranks[1].parts[i].end == first.of)
        continue;  // on all
      if (first.weight.find("attn_k") != std::string::npos ||
          first.weight.find("attn_v") != std::string::npos)
        continue;
      EXPECT_EQ(plan.ranks[1].parts[i].begin, first.end) << first.weight;
      EXPECT_EQ(plan.ranks[2].parts[i].begin, plan.ranks[1].parts[i].end) << first.weight;
      EXPECT_EQ(plan.ranks[2].parts[i].end, first.of) << first.weight;
    }
    with_ranks(3, {options}, [&](std::shared_ptr<dist::Communicator> group) {
      const auto counts = std::make_shared<CountsGathers>(*group);
      const auto runtime = open(options, counts);
      for (const bool all : {false, true}) {
        kv::Sequence sequence = runtime->make_sequence();
        const std::vector<int32_t> tokens(17, 5);
        const StepInput input = {.sequence = &sequence,
                                 .tokens = tokens,
                                 .want = all ? StepInput::Want::kAll : StepInput::Want::kLast};
        counts->gathered = {};
        runtime->step({&input, 1});
        EXPECT_EQ(counts->gathered.bytes_received, plan.received(0, 17, all ? 17 : 1));
        EXPECT_EQ(counts->gathered.bytes_sent, plan.sent(0, 17, all ? 17 : 1));
        EXPECT_EQ(static_cast<int64_t>(counts->gathered.calls) + 1, plan.exchanges_per_step());
      }
    });
  }
}

// Stages of ranks: each rank's part is of its stage alone, all of them are the model, and what a stage's
// first rank receives of its stage is what is planned.
TEST(Ranks, ThePlanOfStagesOfRanks) {
  for (const char* name : {"llama3", "gpt-oss-w32"}) {
    SCOPED_TRACE(name);
    const golden::Model model = golden::load_model(name);
    EngineOptions options = options_for(model.paths.back(), 2, "2,1,1,1");
    options.pipeline_parallel = 2;
    const io::Checkpoint checkpoint = io::Checkpoint::open(options.model);
    const ModelConfig config = read_config(checkpoint);
    const GridPlan plan = plan_grid(checkpoint, config, DType::kBF16, 2, {2, 1, 1, 1});
    const StagePlan stages = plan_stages(checkpoint, config, DType::kBF16, {3, 2});
    const dist::Plan whole = plan_ranks(checkpoint, config, DType::kBF16, {1, 1});
    ASSERT_EQ(plan.stages.size(), 2u);
    size_t read = 0, kv = 0;
    for (size_t s = 0; s < 2; ++s) {
      EXPECT_EQ(plan.stages[s].layers, stages.stages[s].layers);
      read += plan.stages[s].rows.read_bytes;
      for (const dist::Plan::Rank& rank : plan.stages[s].rows.ranks) kv += rank.kv_bytes_per_token;
    }
    EXPECT_EQ(read, whole.read_bytes);                  // nothing twice, nothing missing
    const size_t copies = config.kv_heads < 2 ? 2 : 1;  // both ranks of a stage hold its only KV head
    EXPECT_EQ(kv, copies * (stages.stages[0].kv_bytes_per_token + stages.stages[1].kv_bytes_per_token));
    std::array<dist::Watch, 4> watches;
    const auto watched = [&](std::unique_ptr<dist::Communicator> group) {
      dist::Watch& watch = watches[static_cast<size_t>(group->rank())];
      return dist::make_watched(std::move(group), watch);
    };
    test::with_ranks(
        4, {options},
        [&](std::shared_ptr<dist::Communicator> group) {
          const auto runtime = open(options, std::move(group));
          kv::Sequence sequence = runtime->make_sequence();
          const std::vector<int32_t> tokens = {5}, table = {0};
          const StepInput input = {.sequence = &sequence, .tokens = tokens, .want = StepInput::Want::kLast};
          const auto received_by = [&](size_t rank) {
            uint64_t bytes = 0;
            for (const auto& from : watches[rank].received) bytes += from;
            return bytes;
          };
          std::array<uint64_t, 4> before{};
          for (size_t r = 0; r < 4; ++r) before[r] = received_by(r);
          runtime->step({&input, 1});
          // Besides what is planned a rank but the first gets the step, and of the last stage the order to
          // hand over logits.
          SequenceSlice slice{.num_tokens = 1};
          slice.tables.fill(table.data());
          const std::vector<int32_t> first_row = {0};
          std::vector<std::byte> step;
          pack({.tokens = tokens, .sequences = {&slice, 1}, .logit_rows = first_row}, runtime->spec(), step);
          for (int r = 0; r < 4; ++r) {
            const auto rank = static_cast<size_t>(r);
            uint64_t expected = plan.received(r, 1, 1) + plan.logits_received(r, 1);
            if (r > 0) expected += sizeof(RankMessage) + step.size();
            if (r >= 2) expected += sizeof(RankMessage);
            EXPECT_EQ(received_by(rank) - before[rank], expected) << "rank " << r;
          }
        },
        watched);
  }
}

// Of whole experts: what goes is the outputs of the chosen ones that others' columns need. How many of the
// pairs are rank 0's is the router's choice; what it sends tells, and what it receives has to be the rest.
TEST(ExpertParallel, ThePlanSaysWhatIsExchanged) {
  for (const char* name : {"gpt-oss-w32", "qwen2moe"}) {
    SCOPED_TRACE(name);
    const golden::Model model = golden::load_model(name);
    EngineOptions options = options_for(model.paths.back(), 3, "2,1,1");
    options.expert_parallel = true;
    const io::Checkpoint checkpoint = io::Checkpoint::open(options.model);
    const ModelConfig config = read_config(checkpoint);
    const dist::Plan plan = plan_ranks(checkpoint, config, DType::kBF16, {2, 1, 1}, true);
    const dist::Plan by_rows = plan_ranks(checkpoint, config, DType::kBF16, {2, 1, 1});
    size_t bytes = 0, by_rows_bytes = 0;
    int64_t experts = 0;
    for (size_t r = 0; r < plan.ranks.size(); ++r) {
      EXPECT_EQ(plan.ranks[r].experts.begin, experts);
      experts = plan.ranks[r].experts.end;
      bytes += plan.ranks[r].weight_bytes;
      by_rows_bytes += by_rows.ranks[r].weight_bytes;
    }
    EXPECT_EQ(experts, config.experts);
    EXPECT_EQ(bytes, by_rows_bytes);  // nothing twice, nothing missing
    const int64_t own = dist::Shares(0, {2, 1, 1}).rows(config.hidden).size();
    const int64_t mine = plan.ranks[0].experts.size();
    int64_t layers = 0;
    for (int l = 0; l < config.layers; ++l) layers += config.is_dense(l) ? 0 : 1;
    with_ranks(3, {options}, [&](std::shared_ptr<dist::Communicator> group) {
      const auto counts = std::make_shared<CountsGathers>(*group);
      const auto runtime = open(options, counts);
      kv::Sequence sequence = runtime->make_sequence();
      const std::vector<int32_t> tokens(17, 5);
      const StepInput input = {.sequence = &sequence, .tokens = tokens, .want = StepInput::Want::kAll};
      counts->gathered = counts->outputs = {};
      runtime->step({&input, 1});
      const int64_t each = static_cast<int64_t>(sizeof(float)),
                    pairs = 17 * config.experts_per_token * layers;
      const auto sent = static_cast<int64_t>(counts->outputs.bytes_sent);
      EXPECT_EQ(sent % (each * (config.hidden - own)), 0);
      const int64_t here = sent / (each * (config.hidden - own));
      EXPECT_EQ(static_cast<int64_t>(counts->outputs.bytes_received), (pairs - here) * own * each);
      EXPECT_EQ(static_cast<int64_t>(counts->outputs.calls), layers);
      EXPECT_EQ(static_cast<int64_t>(counts->gathered.calls + counts->outputs.calls) + 1,
                plan.exchanges_per_step());
      // The plan's share of pairs is mine / experts: with that, the rest of its formula is to the byte.
      const auto planned = static_cast<int64_t>(plan.received(0, 17, 17));
      const int64_t even =
          17 * layers * (config.experts_per_token * (config.experts - mine) * own / config.experts);
      EXPECT_EQ(planned - even * each, static_cast<int64_t>(counts->gathered.bytes_received));
    });
  }
}

}  // namespace
}  // namespace millrace
