// The KV cache under a real forward pass: whatever way a prefix came back (from memory, half a block, RAM,
// disk, a fork, a swap), the next token's logits have the bits they have when everything is computed. On
// models with window layers too, where a hit resumes from the tails that were kept.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "engine/executor_store.h"
#include "io/checkpoint.h"
#include "kv/cache.h"
#include "model/model.h"

namespace millrace {
namespace {

class Rig {
 public:
  // sparse_pages: of every sequence; 0: full attention.
  Rig(const std::string& path, const std::string& device, std::optional<DType> kv_type,
      int32_t sparse_pages = 0)
      : checkpoint_(io::Checkpoint::open(path)),
        backend_(make_backend(device, {.threads = 2})),
        sparse_pages_(sparse_pages) {
    ExecutorLimits limits;
    limits.max_tokens = 112;  // seven blocks: more than drafts reach, so that states are left out between
    limits.max_context = 512;
    limits.sequences = 3;
    limits.kv_type = kv_type.value_or(backend_->default_kv_type());
    limits.page_summaries = sparse_pages > 0;
    spec_ = make_executor_spec(read_config(checkpoint_), limits);
    for (KvGroupSpec& group : spec_.kv_groups) group.num_blocks += 40;  // room to remember tails in
    model_ = Model::load(checkpoint_, *backend_);
    executor_ = backend_->make_executor(spec_);
    store_.emplace(*executor_);
    directory_ = (std::filesystem::temp_directory_path() / "millrace-kv-test-XXXXXX").string();
    EXPECT_NE(::mkdtemp(directory_.data()), nullptr);
  }
  ~Rig() { std::filesystem::remove_all(directory_); }

  kv::CacheOptions options(bool remembers) const {
    kv::CacheOptions o;
    for (size_t g = 0; g < spec_.kv_groups.size(); ++g) {
      const KvGroupSpec& group = spec_.kv_groups[g];
      o.groups.push_back(
          {group.window, group.num_blocks, spec_.kv_block_bytes(static_cast<int>(g)), group.state});
    }
    o.prefix_cache = remembers;
    o.ram_bytes = 64 << 20;
    o.boundary_tokens = 64;
    if (remembers) {
      o.disk_directory = directory_;
      o.disk_bytes = 64 << 20;
    }
    return o;
  }
  kv::BlockStore& store() { return *store_; }
  int32_t vocab() const { return spec_.vocab; }

  // Computes what the sequence lacks of these tokens; logits of the last.
  std::vector<float> compute(kv::Cache& cache, kv::Sequence& s, const std::vector<int32_t>& tokens) {
    while (!cache.ready(s)) cache.wait(std::chrono::milliseconds(100));
    while (s.length() < static_cast<int32_t>(tokens.size())) {
      const auto left = std::span(tokens).subspan(static_cast<size_t>(s.length()));
      const auto chunk = left.first(std::min<size_t>(left.size(), 90));
      const auto count = static_cast<int32_t>(chunk.size());
      EXPECT_TRUE(cache.reserve(s, count));
      SequenceSlice slice{.first_row = 0, .num_tokens = count, .context_len = s.length(), .tables = {}};
      slice.sparse_pages = sparse_pages_;
      for (size_t g = 0; g < spec_.kv_groups.size(); ++g) slice.tables[g] = s.table(static_cast<int>(g));
      const int32_t row = count - 1;
      model_->forward(*executor_, {.tokens = chunk, .sequences = {&slice, 1}, .logit_rows = {&row, 1}});
      cache.advance(s, chunk);
      cache.check_invariants();
    }
    const auto logits = executor_->logits();
    return {logits.begin(), logits.end()};
  }
  // The same in small pieces, each with drafts behind it that are wrong and do not count.
  std::vector<float> with_drafts(const std::vector<int32_t>& tokens) {
    kv::Cache cache(options(false), *store_);
    kv::Sequence s = cache.make_sequence();
    while (s.length() < static_cast<int32_t>(tokens.size())) {
      const auto left = std::span(tokens).subspan(static_cast<size_t>(s.length()));
      const auto piece = left.first(std::min<size_t>(left.size(), 13));
      std::vector<int32_t> fed(piece.begin(), piece.end());
      for (int32_t i = 0; i < 9; ++i) fed.push_back((piece.back() + i + 1) % spec_.vocab);
      const auto count = static_cast<int32_t>(fed.size());
      EXPECT_TRUE(cache.reserve(s, count));
      SequenceSlice slice{.first_row = 0, .num_tokens = count, .context_len = s.length(), .tables = {}};
      slice.sparse_pages = sparse_pages_;
      for (size_t g = 0; g < spec_.kv_groups.size(); ++g) slice.tables[g] = s.table(static_cast<int>(g));
      const auto row = static_cast<int32_t>(piece.size()) - 1;
      model_->forward(*executor_, {.tokens = fed, .sequences = {&slice, 1}, .logit_rows = {&row, 1}});
      cache.advance(s, piece);
    }
    const auto logits = executor_->logits();
    return {logits.begin(), logits.end()};
  }
  std::vector<float> cold(const std::vector<int32_t>& tokens) {
    kv::Cache cache(options(false), *store_);
    kv::Sequence s = cache.make_sequence();
    return compute(cache, s, tokens);
  }

 private:
  io::Checkpoint checkpoint_;
  std::unique_ptr<Backend> backend_;
  int32_t sparse_pages_;
  std::unique_ptr<Model> model_;
  ExecutorSpec spec_;
  std::unique_ptr<Executor> executor_;
  std::optional<ExecutorStore> store_;
  std::string directory_;
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void test_all_ways(const std::string& path, const std::string& device,
                   std::optional<DType> kv_type = std::nullopt, int32_t sparse_pages = 0) {
  SCOPED_TRACE(path + " on " + device + (kv_type ? " cache " + std::string(info(*kv_type).name) : ""));
  Rig rig(path, device, kv_type, sparse_pages);
  std::mt19937 random(3);
  std::vector<int32_t> tokens(300);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % static_cast<uint32_t>(rig.vocab()));
  std::vector<int32_t> other(tokens.begin(), tokens.begin() + 200);  // parts from it inside a block
  for (int i = 0; i < 30; ++i)
    other.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(rig.vocab())));
  const std::vector<float> expected = rig.cold(tokens), expected_other = rig.cold(other);
  ASSERT_FALSE(same_bits(expected, expected_other));

  const auto attach = [](kv::Cache& cache, const std::vector<int32_t>& prompt) {
    return cache.attach(cache.make_prompt(prompt));
  };
  {
    kv::Cache cache(rig.options(true), rig.store());
    kv::Sequence s = attach(cache, tokens);
    EXPECT_EQ(s.length(), 0);
    EXPECT_TRUE(same_bits(rig.compute(cache, s, tokens), expected)) << "computed";

    kv::Sequence again = attach(cache, tokens);
    EXPECT_GE(again.length(), 256);
    EXPECT_TRUE(same_bits(rig.compute(cache, again, tokens), expected)) << "from the main pool";

    kv::Sequence branch = attach(cache, other);
    EXPECT_GE(branch.length(), 128);
    EXPECT_TRUE(same_bits(rig.compute(cache, branch, other), expected_other)) << "a branch";
    branch = attach(cache, other);
    EXPECT_GE(branch.length(), 224);
    EXPECT_TRUE(same_bits(rig.compute(cache, branch, other), expected_other)) << "the branch again";

    cache.flush();
  }
  rig.cold(other);  // writes over the main pool: nothing there is true now
  {
    kv::Cache cache(rig.options(true), rig.store());
    kv::Sequence s = attach(cache, tokens);
    EXPECT_GE(s.length(), 256);
    EXPECT_TRUE(same_bits(rig.compute(cache, s, tokens), expected)) << "after a restart, from disk";

    kv::Sequence fork = cache.fork(s);
    std::vector<int32_t> left = tokens, right = tokens;
    left.insert(left.end(), {5, 6, 7});
    right.insert(right.end(), {7, 6, 5});
    const std::vector<float> got_left = rig.compute(cache, s, left),
                             got_right = rig.compute(cache, fork, right);
    ASSERT_TRUE(cache.swap_out(s));
    fork.reset();
    for (int g = 0; g < 2; ++g) {
      if (g < static_cast<int>(rig.options(true).groups.size())) cache.evict(g, 1 << 20);
    }
    kv::Sequence filler = cache.make_sequence("other");  // writes over what was left
    rig.compute(cache, filler, std::vector<int32_t>(300, 1));
    filler.reset();
    ASSERT_TRUE(cache.swap_in(s));
    left.push_back(9);
    const std::vector<float> after_swap = rig.compute(cache, s, left);
    kv::Sequence from_ram = attach(cache, tokens);
    EXPECT_GE(from_ram.length(), 256);
    EXPECT_TRUE(same_bits(rig.compute(cache, from_ram, tokens), expected)) << "from RAM";
    s.reset();
    from_ram.reset();
    EXPECT_TRUE(same_bits(after_swap, rig.cold(left))) << "after a swap";
    left.pop_back();
    EXPECT_TRUE(same_bits(got_left, rig.cold(left))) << "a fork";
    EXPECT_TRUE(same_bits(got_right, rig.cold(right))) << "the other fork";
  }
}

// The CPU, the reference and what MILLRACE_TEST_DEVICES adds.
std::vector<std::string> devices_under_test() {
  std::vector<std::string> devices = {"cpu", "reference"};
  const char* variable = std::getenv("MILLRACE_TEST_DEVICES");
  std::istringstream list(variable != nullptr ? variable : "");
  for (std::string name; std::getline(list, name, ',');) {
    if (name != "cpu" && name != "reference") devices.push_back(name);
  }
  return devices;
}

TEST(KvCache, RejectedDraftsLeaveNoTraceInAState) {
  for (const std::string& device : devices_under_test()) {
    for (const char* model :
         {"qwen3next", "lfm2", "granitehybrid", "nemotron-h", "falcon-h1", "kimi-linear", "rwkv7"}) {
      SCOPED_TRACE(std::string(model) + " on " + device);
      Rig rig(std::string("tests/golden/models/") + model + "/model.gguf", device, std::nullopt);
      std::vector<int32_t> tokens(75);
      for (size_t i = 0; i < tokens.size(); ++i)
        tokens[i] = static_cast<int32_t>(i * 37 % static_cast<size_t>(rig.vocab()));
      EXPECT_TRUE(same_bits(rig.with_drafts(tokens), rig.cold(tokens)));
    }
  }
}

// Bounds of pages are beside the blocks, and are there again wherever a block comes from; a page that drafts
// filled has its own again when they are rejected.
TEST(KvCache, EveryWayBackGivesTheSameBitsWithSparseAttention) {
  constexpr int32_t kPages = 6;
  for (const std::string model : {"llama3", "gpt-oss-w32", "qwen3next"}) {
    const std::string path = "tests/golden/models/" + model + "/model.gguf";
    for (const std::string& device : devices_under_test()) {
      if (device == "reference") continue;  // it keeps no bounds
      test_all_ways(path, device, std::nullopt, kPages);
      Rig rig(path, device, DType::kF8E4M3, kPages), full(path, device, DType::kF8E4M3);
      std::vector<int32_t> tokens(230);
      for (size_t i = 0; i < tokens.size(); ++i)
        tokens[i] = static_cast<int32_t>((i * 37 + i * i % 19) % static_cast<size_t>(rig.vocab()));
      const std::vector<float> cold = rig.cold(tokens);
      EXPECT_TRUE(same_bits(rig.with_drafts(tokens), cold)) << model << " on " << device;
      EXPECT_FALSE(same_bits(full.cold(tokens), cold)) << model << " on " << device;
    }
  }
}

TEST(KvCache, EveryWayBackGivesTheSameBits) {
  for (const std::string model : {"gpt-oss-w32", "gpt-oss-w128", "mistral", "llama3", "qwen3next", "lfm2",
                                  "mamba2", "falcon-h1", "rwkv7"}) {
    for (const std::string& device : devices_under_test()) {
      test_all_ways(std::string("tests/golden/models/") + model + "/model.gguf", device);
      if (device != "reference") {  // which has blocks of f32 only
        test_all_ways(std::string("tests/golden/models/") + model + "/model.gguf", device, DType::kF8E4M3);
      }
    }
  }
}

}  // namespace
}  // namespace millrace
