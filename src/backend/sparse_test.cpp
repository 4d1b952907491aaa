// Sparse attention (base/sparse_pages.h): what a device attends to is what `reference` does, for every type
// of cache and instruction set; and a row has the same bits however its prompt was cut, whatever else is in
// the batch and however many threads there are, those of full attention while the budget holds its context.
// Further devices (MILLRACE_TEST_DEVICES) have bits of their own, and kernels by the size of heads.
// tests/sparse_attention_test.cpp has whole models against torch.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include "backend/reference/reference_backend.h"
#include "backend/step_runner.h"
#include "base/sparse_pages.h"

namespace millrace::sparse_pages_test {
namespace {

using namespace testing_support;

// ---------------------------------------------------------------- the operation, against `reference`

constexpr int32_t kQueryHeads = 6, kHeadsOfKv = 2;

struct Asked {
  DType kv_type;
  int32_t pages, context, dim;
  float softcap = 0.0f;
  bool sinks = false;
};

// The last 20 of `context` tokens attend; keys of some pages are larger, so that there is something to find.
std::vector<float> attend(Backend& backend, const Asked& asked) {
  constexpr int32_t kStep = 64, kAsking = 20;
  ExecutorSpec spec;
  spec.max_tokens = spec.max_logit_rows = kStep;
  spec.max_context = asked.context;
  spec.hidden = spec.vocab = 32;
  spec.heads = kQueryHeads;
  spec.kv_heads = kHeadsOfKv;
  spec.head_dim = asked.dim;
  spec.kv_type = asked.kv_type;
  spec.kv_groups = {{0, 1, blocks_for(asked.context) + 3}};
  spec.layers = {{0, 0}};
  spec.page_summaries = true;
  const auto executor = backend.make_executor(spec);
  std::mt19937 random(3);
  const OwnedTensor sinks = random_vector(random, kQueryHeads, 1.0f, 0.5f);
  const WeightPtr sink_weight = backend.load_weight(sinks.view, WeightUse::kVector);
  TestSequence sequence;
  std::array<int32_t, kMaxKvGroups> next{};
  std::vector<float> attended;
  while (sequence.length < asked.context) {
    const int32_t before = asked.context - kAsking - sequence.length;
    const int32_t tokens = before > 0 ? std::min(kStep, before) : kAsking;
    sequence.reserve(spec, tokens, next);
    SequenceSlice slice = sequence.slice(0, tokens);
    slice.sparse_pages = asked.pages;
    const std::vector<int32_t> ids(static_cast<size_t>(tokens), 0);
    executor->begin({ids, {&slice, 1}, {}});
    const auto floats = [&](int32_t heads) {
      return random_floats(random, static_cast<size_t>(tokens * heads * asked.dim));
    };
    executor->write_slot(Slot::kQuery, floats(kQueryHeads));
    std::vector<float> keys = floats(kHeadsOfKv);
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto token = static_cast<int32_t>(static_cast<int64_t>(i) / (kHeadsOfKv * asked.dim));
      if ((sequence.length + token) / kBlockTokens % 5 == 2) keys[i] *= 2.5f;
    }
    // The reference keeps f32: give it what the cache holds.
    const auto rounded = [&](std::vector<float> x) {
      for (float& v : x) {
        if (asked.kv_type == DType::kF16) v = to_float(to_half(v));
        if (asked.kv_type == DType::kBF16) v = to_float(to_bfloat16(v));
      }
      return x;
    };
    executor->write_slot(Slot::kKey, rounded(keys));
    executor->write_slot(Slot::kValue, rounded(floats(kHeadsOfKv)));
    executor->rope_append_kv({0, {}, 1.0f, false});
    sequence.length += tokens;
    if (sequence.length < asked.context) continue;
    Attend op{0, 0, 0.12f, asked.sinks ? sink_weight.get() : nullptr};
    op.softcap = asked.softcap;
    executor->attend(op);
    attended = executor->read_slot(Slot::kAttention);
  }
  return attended;
}

std::vector<Device> further() {
  std::vector<Device> devices;
  for (const std::string& name : further_devices()) devices.push_back({name, make_backend(name, {2})});
  return devices;
}

double relative_error(const std::vector<float>& got, const std::vector<float>& want) {
  double error = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += std::pow(static_cast<double>(got[i]) - want[i], 2);
    size += std::pow(static_cast<double>(want[i]), 2);
  }
  return std::sqrt(error / size);
}

TEST(SparseAttention, AgreesWithTheReferenceOnEveryTable) {
  const auto reference = make_reference_backend();
  for (const Asked& asked : {Asked{DType::kF32, 6, 331, 24}, Asked{DType::kF32, 12, 700, 64, 20.0f, true},
                             Asked{DType::kF16, 6, 331, 32}, Asked{DType::kBF16, 9, 500, 64},
                             Asked{DType::kF8E4M3, 6, 331, 32}, Asked{DType::kQ8_0, 6, 331, 64}}) {
    const std::vector<float> want = attend(*reference, asked);
    Asked full = asked;
    full.pages = 0;
    // Pages are left out: the answer is another.
    EXPECT_GT(relative_error(attend(*reference, full), want), 0.05);
    for (Device& device : cpu_devices(2)) {
      // Queries of an int8 cache are rounded to it; AMX multiplies bf16.
      const double bound = asked.kv_type == DType::kQ8_0 || device.label == "cpu/amx" ? 0.02 : 1e-5;
      EXPECT_LT(relative_error(attend(*device.backend, asked), want), bound)
          << device.label << " " << info(asked.kv_type).name << " pages " << asked.pages;
    }
  }
}

// GPUs multiply bf16 where heads are of 64, 128 or 256 dimensions.
TEST(SparseAttention, FurtherDevicesAgreeWithTheReference) {
  if (further_devices().empty()) GTEST_SKIP() << "MILLRACE_TEST_DEVICES names no further device";
  const auto reference = make_reference_backend();
  for (const Asked& asked :
       {Asked{DType::kF32, 6, 331, 24}, Asked{DType::kF32, 12, 700, 64, 20.0f, true},
        Asked{DType::kF16, 6, 331, 32}, Asked{DType::kBF16, 9, 500, 64}, Asked{DType::kBF16, 9, 500, 128},
        Asked{DType::kBF16, 40, 2500, 64, 0.0f, true}, Asked{DType::kBF16, 9, 500, 64, 20.0f},
        Asked{DType::kBF16, 9, 500, 256}, Asked{DType::kF8E4M3, 6, 331, 32},
        Asked{DType::kF8E4M3, 9, 500, 64}, Asked{DType::kF8E4M3, 9, 500, 128}}) {
    const std::vector<float> want = attend(*reference, asked);
    for (Device& device : further()) {
      EXPECT_LT(relative_error(attend(*device.backend, asked), want), asked.dim >= 64 ? 0.01 : 1e-5)
          << device.label << " " << info(asked.kv_type).name << " of " << asked.dim << " pages "
          << asked.pages;
    }
  }
}

TEST(SparseAttention, IsFullAttentionWithinItsBudget) {
  for (Device& device : all_devices(2)) {
    Asked asked{DType::kBF16, 0, 331, 64};
    const std::vector<float> full = attend(*device.backend, asked);
    asked.pages = blocks_for(asked.context);
    EXPECT_EQ(attend(*device.backend, asked), full) << device.label;
    asked.pages -= 1;  // one page of some rows is left out
    EXPECT_NE(attend(*device.backend, asked), full) << device.label;
  }
}

TEST(SparseAttention, BoundsAreOutsideOfTheKeys) {
  for (const float x : {1.0f, -1.0f, 1.00390625f, -1.00390625f, 1e-41f, -1e-41f, 3e38f, -3e38f, 0.0f}) {
    const float below = to_float(BFloat16{bf16_below(x)}), above = to_float(BFloat16{bf16_above(x)});
    EXPECT_LE(below, x);
    EXPECT_GE(above, x);
    EXPECT_EQ(below == above, to_float(to_bfloat16(x)) == x) << x;
  }
  EXPECT_TRUE(std::isnan(to_float(BFloat16{bf16_below(std::nanf(""))})));
  EXPECT_TRUE(std::isnan(to_float(BFloat16{bf16_above(std::nanf(""))})));
}

// ---------------------------------------------------------------- same bits, of a model

constexpr int32_t kHidden = 64, kHeads = 6, kKvHeads = 2, kVocab = 61, kFfn = 96, kWindow = 40,
                  kMaxContext = 700, kMaxTokens = 160;

ExecutorSpec model_spec(int32_t head_dim) {
  ExecutorSpec spec;
  spec.max_tokens = kMaxTokens;
  spec.max_logit_rows = kMaxTokens;
  spec.max_context = kMaxContext;
  spec.hidden = kHidden;
  spec.heads = kHeads;
  spec.kv_heads = kKvHeads;
  spec.head_dim = head_dim;
  spec.vocab = kVocab;
  spec.ffn = kFfn;
  spec.kv_type = DType::kBF16;
  spec.kv_groups = {{0, 2, 200}, {kWindow, 1, 200}};
  spec.layers = {{0, 0}, {1, 0}, {0, 1}};
  spec.page_summaries = true;
  return spec;
}

struct LayeredModel : RandomModel {
  const int32_t head_dim;
  explicit LayeredModel(int32_t dim = 24) : RandomModel(31, 0.15f, dim), head_dim(dim) {
    matrix("embedding", DType::kF32, kVocab, kHidden);
    for (int l = 0; l < 3; ++l) {
      const std::string p = std::to_string(l) + ".";
      vector(p + "norm1", kHidden, 1.0f);
      vector(p + "norm2", kHidden, 1.0f);
      matrix(p + "q", DType::kF32, kHeads * dim, kHidden);
      matrix(p + "k", DType::kF32, kKvHeads * dim, kHidden);
      matrix(p + "v", DType::kF32, kKvHeads * dim, kHidden);
      matrix(p + "o", DType::kF32, kHidden, kHeads * dim);
      matrix(p + "gate", DType::kF32, kFfn, kHidden);
      matrix(p + "up", DType::kF32, kFfn, kHidden);
      matrix(p + "down", DType::kF32, kHidden, kFfn);
    }
    vector("norm", kHidden, 1.0f);
    matrix("output", DType::kF32, kVocab, kHidden);
  }
};

class Runner final : public StepRunner {
 public:
  Runner(Backend& backend, const LayeredModel& model)
      : StepRunner(backend, model, model_spec(model.head_dim)) {}

 private:
  void forward(Executor& e) override {
    e.embed({w("embedding"), 2.0f});
    for (int l = 0; l < 3; ++l) {
      const std::string p = std::to_string(l) + ".";
      e.norm_qkv({{w(p + "norm1"), 1e-5f}, {w(p + "q")}, {w(p + "k")}, {w(p + "v")}, {}, {}});
      e.rope_append_kv({l, model_.inv_freq, 1.0f, false});
      e.attend({l, l == 1 ? kWindow : 0, 0.4f, nullptr});
      e.project_add({{w(p + "o")}});
      e.ffn_add({{w(p + "norm2"), 1e-5f}, {w(p + "gate")}, {w(p + "up")}, {w(p + "down")}});
    }
    e.norm_logits({{w("norm"), 1e-5f}, {w("output")}});
  }
};

constexpr int32_t kPages = 5;  // 80 tokens

std::vector<float> alone(Backend& backend, const LayeredModel& model, const std::vector<int32_t>& tokens,
                         size_t chunk, int32_t pages = kPages) {
  Runner runner(backend, model);
  runner.set_sparse_pages(0, pages);
  return run_alone(std::move(runner), tokens, chunk);
}

TEST(SparseAttention, HasTheSameBitsHoweverThePromptIsCut) {
  const LayeredModel model;
  const std::vector<int32_t> tokens = random_prompt(1, 300, kVocab);
  std::vector<float> of_tables;
  for (Device& device : cpu_devices(2)) {
    const std::vector<float> whole = alone(*device.backend, model, tokens, 160);
    for (size_t chunk : {1, 7, 33}) {
      expect_same_bits(alone(*device.backend, model, tokens, chunk), whole, kVocab,
                       fmt::format("{} chunks of {}", device.label, chunk));
      if (HasFatalFailure()) return;
    }
    // Heads of 24 dimensions: no tiles of AMX.
    if (of_tables.empty()) of_tables = whole;
    expect_same_bits(whole, of_tables, kVocab, device.label);
    ASSERT_NE(alone(*device.backend, model, tokens, 160, 0), whole);
    if (HasFatalFailure()) return;
  }
}

TEST(SparseAttention, HasTheSameBitsHoweverThePromptIsCutOnFurtherDevices) {
  if (further_devices().empty()) GTEST_SKIP() << "MILLRACE_TEST_DEVICES names no further device";
  for (const int32_t dim : {24, 64, 128, 256}) {
    const LayeredModel model(dim);
    const std::vector<int32_t> tokens = random_prompt(1, 620, kVocab);
    for (Device& device : further()) {
      const std::vector<float> whole = alone(*device.backend, model, tokens, 160);
      for (size_t chunk : {1, 7, 33}) {
        expect_same_bits(alone(*device.backend, model, tokens, chunk), whole, kVocab,
                         fmt::format("{} heads of {} chunks of {}", device.label, dim, chunk));
        if (HasFatalFailure()) return;
      }
      ASSERT_NE(alone(*device.backend, model, tokens, 160, 0), whole);
    }
  }
}

void expect_bits_of_alone(std::vector<Device> devices, const LayeredModel& model) {
  const int32_t pages[] = {kPages, 0, 12, kPages};
  std::vector<int32_t> tokens[4];
  for (int s = 0; s < 4; ++s) tokens[s] = random_prompt(s + 1, 250 - 20 * s, kVocab);
  for (Device& device : devices) {
    Runner runner(*device.backend, model);
    for (int s = 0; s < 4; ++s) runner.set_sparse_pages(s, pages[s]);
    // Whole pages, parts of them and single tokens of all four beside one another; some rows are not read.
    runner.step({{0, part(tokens[0], 0, 90)}, {1, part(tokens[1], 0, 70)}});
    runner.step(
        {{2, part(tokens[2], 0, 100), 60}, {0, part(tokens[0], 90, 33)}, {1, part(tokens[1], 70, 7)}});
    runner.step(
        {{3, part(tokens[3], 0, 70)}, {2, part(tokens[2], 100, 60), 60}, {0, part(tokens[0], 123, 1)}});
    runner.step(
        {{0, part(tokens[0], 124, 26), 20}, {3, part(tokens[3], 70, 120)}, {1, part(tokens[1], 77, 9)}});
    runner.step({{2, part(tokens[2], 160, 50), 48}, {1, part(tokens[1], 86, 100)}});
    runner.step({{0, part(tokens[0], 150, 100)}, {1, part(tokens[1], 186, 44)}});
    for (int s = 0; s < 4; ++s) {
      const std::vector<float> all = alone(*device.backend, model, tokens[s], 160, pages[s]);
      std::vector<float> want;
      for (size_t i = 0; i < all.size(); ++i) {
        const size_t at = i / kVocab;
        const bool unread =
            (s == 2 && (at < 60 || (at >= 100 && at < 208))) || (s == 0 && at >= 124 && at < 144);
        if (!unread) want.push_back(all[i]);
      }
      expect_same_bits(runner.logits(s), want, kVocab, fmt::format("{} sequence {}", device.label, s));
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(SparseAttention, HasTheSameBitsWhateverElseIsInTheBatch) {
  expect_bits_of_alone(cpu_devices(3), LayeredModel());
}

TEST(SparseAttention, HasTheSameBitsWhateverElseIsInTheBatchOfFurtherDevices) {
  if (further_devices().empty()) GTEST_SKIP() << "MILLRACE_TEST_DEVICES names no further device";
  for (const int32_t dim : {24, 64, 256}) expect_bits_of_alone(further(), LayeredModel(dim));
}

// One row and many threads share out the bounds; many rows are each a thread's own.
TEST(SparseAttention, HasTheSameBitsHoweverManyThreads) {
  const LayeredModel model;
  const std::vector<int32_t> tokens = random_prompt(4, 620, kVocab);
  const auto run = [&](int threads) {
    const auto backend = make_cpu_backend({threads});
    Runner runner(*backend, model);
    runner.set_sparse_pages(0, 35);  // past the 512 positions of a split
    size_t at = 0;
    for (; at < 600; at += 150) runner.step({{0, part(tokens, at, 150)}});
    for (; at < tokens.size(); ++at) runner.step({{0, part(tokens, at, 1)}});
    return runner.logits(0);
  };
  const std::vector<float> want = run(1);
  for (int threads : {2, 7}) {
    expect_same_bits(run(threads), want, kVocab, fmt::format("{} threads", threads));
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace millrace::sparse_pages_test
