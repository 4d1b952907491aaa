// "Same bits" on the shapes that a GPU's decode path has kernels of its own for: heads of 64 with a bf16
// cache, Q8_0 layers and MXFP4 experts. One model's logits, token by token, in chunks of every size, alone
// and in batches, and with every operation's result read in between (nothing fused, nothing replayed),
// compared bit by bit.
#include <gtest/gtest.h>

#include <map>

#include "backend/reference/reference_backend.h"
#include "backend/test_support.h"

namespace millrace::decode_shapes {
namespace {

using namespace testing_support;

constexpr int32_t kHidden = 160, kHeads = 8, kKvHeads = 2, kHeadDim = 64, kVocab = 83, kExperts = 6,
                  kChosen = 4, kExpertFfn = 96, kWindow = 128, kMaxTokens = 96;

ExecutorSpec decode_spec() {
  ExecutorSpec spec;
  spec.max_tokens = spec.max_logit_rows = kMaxTokens;
  spec.max_context = 1100;
  spec.hidden = kHidden;
  spec.heads = kHeads;
  spec.kv_heads = kKvHeads;
  spec.head_dim = kHeadDim;
  spec.vocab = kVocab;
  spec.experts = kExperts;
  spec.experts_per_token = kChosen;
  spec.expert_ffn = kExpertFfn;
  spec.kv_type = DType::kBF16;
  spec.kv_groups = {{kWindow, 1, 400}, {0, 1, 400}};
  spec.layers = {{0, 0}, {1, 0}};
  return spec;
}

struct DecodeModel {
  std::map<std::string, OwnedTensor> tensors;
  std::vector<float> inv_freq;

  DecodeModel() {
    std::mt19937 random(31);
    const auto matrix = [&](const std::string& name, DType type, int64_t rows, int64_t cols,
                            int64_t experts = 0) {
      tensors[name] = random_tensor(random, type, rows, cols, experts, 0.08f);
    };
    const auto vector = [&](const std::string& name, int64_t size, float middle) {
      tensors[name] = random_vector(random, size, middle, 0.1f);
    };
    matrix("embedding", DType::kQ8_0, kVocab, kHidden);
    matrix("output", DType::kQ8_0, kVocab, kHidden);
    vector("norm", kHidden, 1.0f);
    for (int l = 0; l < 2; ++l) {
      const std::string p = std::to_string(l) + ".";
      vector(p + "norm1", kHidden, 1.0f);
      vector(p + "norm2", kHidden, 1.0f);
      vector(p + "sinks", kHeads, 0.5f);
      vector(p + "q_bias", kHeads * kHeadDim, 0.0f);
      vector(p + "o_bias", kHidden, 0.0f);
      matrix(p + "q", DType::kQ8_0, kHeads * kHeadDim, kHidden);
      matrix(p + "k", DType::kQ8_0, kKvHeads * kHeadDim, kHidden);
      matrix(p + "v", l == 0 ? DType::kQ8_0 : DType::kQ4_0, kKvHeads * kHeadDim, kHidden);
      matrix(p + "o", DType::kQ8_0, kHidden, kHeads * kHeadDim);
      matrix(p + "router", DType::kF32, kExperts, kHidden);
      vector(p + "router_bias", kExperts, 0.0f);
      matrix(p + "gate", DType::kMXFP4, kExpertFfn, kHidden, kExperts);
      matrix(p + "up", DType::kMXFP4, kExpertFfn, kHidden, kExperts);
      matrix(p + "down", l == 0 ? DType::kMXFP4 : DType::kQ8_0, kHidden, kExpertFfn, kExperts);
      vector(p + "gate_bias", kExperts * kExpertFfn, 0.0f);
      vector(p + "down_bias", kExperts * kHidden, 0.0f);
    }
    for (int i = 0; i < kHeadDim / 2; ++i)
      inv_freq.push_back(static_cast<float>(std::pow(1e4, -2.0 * i / kHeadDim)));
  }
};

class DecodeRunner {
 public:
  DecodeRunner(Backend& backend, const DecodeModel& model) : model_(model), spec_(decode_spec()) {
    if (!backend.supports_kv_type(spec_.kv_type)) spec_.kv_type = DType::kF32;
    for (const auto& [name, tensor] : model.tensors) {
      const bool is_vector = tensor.view.shape[0] == 1 && tensor.view.rank == 2;
      weights_[name] = backend.load_weight(tensor.view, is_vector             ? WeightUse::kVector
                                                        : name == "embedding" ? WeightUse::kEmbedding
                                                                              : WeightUse::kMatrix);
    }
    executor_ = backend.make_executor(spec_);
  }

  bool read_every_slot = false;  // after each operation: nothing is fused

  struct Piece {
    int sequence;
    std::vector<int32_t> tokens;
  };
  void step(const std::vector<Piece>& pieces) {
    std::vector<int32_t> tokens, rows;
    std::vector<SequenceSlice> slices;
    for (const Piece& piece : pieces) {
      sequences_[piece.sequence].reserve(spec_, static_cast<int32_t>(piece.tokens.size()), next_);
    }
    for (const Piece& piece : pieces) {
      const auto count = static_cast<int32_t>(piece.tokens.size());
      slices.push_back(sequences_[piece.sequence].slice(static_cast<int32_t>(tokens.size()), count));
      for (int32_t t : piece.tokens) {
        rows.push_back(static_cast<int32_t>(tokens.size()));
        tokens.push_back(t);
      }
    }
    executor_->begin({tokens, slices, rows});
    forward();
    const std::span<const int32_t> greedy = executor_->greedy_tokens();
    const std::span<const float> all = executor_->logits();
    size_t at = 0;
    for (const Piece& piece : pieces) {
      const auto from = all.begin() + static_cast<int64_t>(at * kVocab);
      std::vector<float>& to = logits_[piece.sequence];
      to.insert(to.end(), from, from + static_cast<int64_t>(piece.tokens.size() * kVocab));
      at += piece.tokens.size();
      sequences_[piece.sequence].length += static_cast<int32_t>(piece.tokens.size());
    }
    for (size_t r = 0; r < greedy.size(); ++r) {
      const auto row = all.subspan(r * kVocab, kVocab);
      ASSERT_EQ(greedy[r], std::max_element(row.begin(), row.end()) - row.begin());
    }
  }
  const std::vector<float>& logits(int sequence) { return logits_[sequence]; }

 private:
  const Weight* w(const std::string& name) { return weights_.at(name).get(); }
  void pause(Slot slot) {
    if (read_every_slot) executor_->read_slot(slot);
  }

  void forward() {
    Executor& e = *executor_;
    e.embed(*w("embedding"), 2.0f);
    for (int l = 0; l < 2; ++l) {
      const std::string p = std::to_string(l) + ".";
      pause(Slot::kResidual);
      e.norm_qkv(
          {{w(p + "norm1"), 1e-5f}, {w(p + "q"), w(p + "q_bias")}, {w(p + "k")}, {w(p + "v")}, {}, {}});
      pause(Slot::kQuery);
      e.rope_append_kv({l, model_.inv_freq, 1.1f, l == 1});
      pause(Slot::kQuery);
      e.attend({l, l == 0 ? kWindow : 0, 0.125f, w(p + "sinks")});
      pause(Slot::kAttention);
      e.project_add({w(p + "o"), w(p + "o_bias")});
      pause(Slot::kResidual);
      e.route({{w(p + "norm2"), 1e-5f}, {w(p + "router"), w(p + "router_bias")}, kChosen});
      pause(Slot::kResidual);
      e.experts_add({{w(p + "gate"), w(p + "gate_bias")},
                     {w(p + "up")},
                     {w(p + "down"), w(p + "down_bias")},
                     Experts::Activation::kClampedSwiglu});
      pause(Slot::kResidual);
    }
    e.norm_logits({{w("norm"), 1e-5f}, {w("output")}});
  }

  const DecodeModel& model_;
  ExecutorSpec spec_;
  std::map<std::string, WeightPtr> weights_;
  std::unique_ptr<Executor> executor_;
  std::map<int, TestSequence> sequences_;
  std::map<int, std::vector<float>> logits_;
  std::array<int32_t, kMaxKvGroups> next_{};
};

std::vector<int32_t> some_prompt(int seed, int32_t length) {
  std::mt19937 random(static_cast<uint32_t>(seed));
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < length; ++i) tokens.push_back(static_cast<int32_t>(random() % kVocab));
  return tokens;
}
std::vector<int32_t> cut(const std::vector<int32_t>& tokens, size_t from, size_t count) {
  from = std::min(from, tokens.size());
  return {tokens.begin() + static_cast<int64_t>(from),
          tokens.begin() + static_cast<int64_t>(std::min(tokens.size(), from + count))};
}

void expect_bits(const std::vector<float>& got, const std::vector<float>& want, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_TRUE(std::isfinite(want[i])) << what << " position " << i / kVocab;
    ASSERT_EQ(std::memcmp(&got[i], &want[i], sizeof(float)), 0)
        << what << " position " << i / kVocab << " logit " << i % kVocab << ": " << got[i] << " and "
        << want[i];
  }
}

std::vector<float> run_alone(Backend& backend, const DecodeModel& model, const std::vector<int32_t>& tokens,
                             size_t chunk, bool read_every_slot = false) {
  DecodeRunner runner(backend, model);
  runner.read_every_slot = read_every_slot;
  for (size_t at = 0; at < tokens.size(); at += chunk) {
    runner.step({{0, cut(tokens, at, chunk)}});
    if (::testing::Test::HasFatalFailure()) break;
  }
  return runner.logits(0);
}

// Past two spans of 256 positions; chunks of 1 to 4 stream, larger ones do not.
TEST(SameBitsDecode, HoweverThePromptIsCut) {
  const DecodeModel model;
  const std::vector<int32_t> tokens = some_prompt(1, 600);
  for (Device& device : all_devices(2)) {
    const std::vector<float> one_by_one = run_alone(*device.backend, model, tokens, 1);
    for (size_t chunk : {2, 3, 4, 5, 33, 96}) {
      expect_bits(run_alone(*device.backend, model, tokens, chunk), one_by_one,
                  device.label + " chunks of " + std::to_string(chunk));
      if (HasFatalFailure()) return;
    }
  }
}

TEST(SameBitsDecode, WhetherOrNotOperationsAreFused) {
  const DecodeModel model;
  const std::vector<int32_t> tokens = some_prompt(2, 290);
  for (Device& device : all_devices(2)) {
    expect_bits(run_alone(*device.backend, model, tokens, 1, true),
                run_alone(*device.backend, model, tokens, 1), device.label);
    if (HasFatalFailure()) return;
  }
}

// Batches of one to twelve single tokens at different positions, and prompts among them.
TEST(SameBitsDecode, WhateverElseIsInTheBatch) {
  const DecodeModel model;
  std::vector<std::vector<int32_t>> prompts;
  for (int s = 0; s < 12; ++s) prompts.push_back(some_prompt(10 + s, 40 + 25 * s));
  for (Device& device : all_devices(2)) {
    DecodeRunner runner(*device.backend, model);
    std::vector<size_t> done(prompts.size(), 0);
    std::mt19937 random(3);
    for (bool more = true; more;) {
      std::vector<DecodeRunner::Piece> pieces;
      const size_t most = 1 + random() % prompts.size();
      const bool decode = random() % 3 != 0;
      size_t rows = 0;
      more = false;
      for (size_t s = 0; s < prompts.size(); ++s) {
        if (done[s] == prompts[s].size()) continue;
        more = true;
        if (pieces.size() >= most || random() % 4 == 0) continue;
        const size_t count = std::min(
            {decode ? size_t{1} : 1 + random() % 30, kMaxTokens - rows, prompts[s].size() - done[s]});
        if (count == 0) continue;
        pieces.push_back({static_cast<int>(s), cut(prompts[s], done[s], count)});
        done[s] += count;
        rows += count;
      }
      if (!pieces.empty()) runner.step(pieces);
      if (HasFatalFailure()) return;
    }
    for (size_t s = 0; s < prompts.size(); s += 3) {
      expect_bits(runner.logits(static_cast<int>(s)), run_alone(*device.backend, model, prompts[s], 50),
                  device.label + " sequence " + std::to_string(s));
      if (HasFatalFailure()) return;
    }
  }
}

// Matrices so tall that a GPU's CTAs have many tiles each and their rings of stages go round: one row alone,
// as decoding has it, against the same row among others, and both against the reference.
void compare_tall(Backend& device, int32_t hidden, int32_t expert_ffn, int32_t vocab,
                  const std::string& label) {
  std::mt19937 random(41);
  ExecutorSpec spec = decode_spec();
  spec.hidden = hidden;
  spec.expert_ffn = expert_ffn;
  spec.vocab = vocab;
  spec.max_tokens = spec.max_logit_rows = 7;
  const auto reference = make_reference_backend();
  const OwnedTensor norm = random_vector(random, hidden, 1.0f, 0.1f),
                    router = random_tensor(random, DType::kF32, kExperts, hidden, 0, 0.1f),
                    gate = random_tensor(random, DType::kMXFP4, expert_ffn, hidden, kExperts, 0.1f),
                    up = random_tensor(random, DType::kMXFP4, expert_ffn, hidden, kExperts, 0.1f),
                    down = random_tensor(random, DType::kMXFP4, hidden, expert_ffn, kExperts, 0.1f),
                    bias = random_vector(random, kExperts * hidden, 0.0f, 0.3f),
                    output = random_tensor(random, DType::kQ8_0, vocab, hidden, 0, 0.1f);
  const std::vector<float> x = random_floats(random, static_cast<size_t>(7 * hidden));
  const auto run = [&](Backend& backend, int32_t first, int32_t rows) {
    if (!backend.supports_kv_type(spec.kv_type)) spec.kv_type = DType::kF32;
    const auto load = [&](const OwnedTensor& t, WeightUse use) { return backend.load_weight(t.view, use); };
    const WeightPtr n = load(norm, WeightUse::kVector), r = load(router, WeightUse::kMatrix),
                    g = load(gate, WeightUse::kMatrix), u = load(up, WeightUse::kMatrix),
                    d = load(down, WeightUse::kMatrix), b = load(bias, WeightUse::kVector),
                    o = load(output, WeightUse::kMatrix);
    const auto executor = backend.make_executor(spec);
    const std::vector<int32_t> tokens(static_cast<size_t>(rows), 0);
    std::vector<int32_t> logit_rows;
    for (int32_t i = 0; i < rows; ++i) logit_rows.push_back(i);
    TestSequence sequence;
    std::array<int32_t, kMaxKvGroups> next{};
    sequence.reserve(spec, rows, next);
    const SequenceSlice slice = sequence.slice(0, rows);
    executor->begin({tokens, {&slice, 1}, logit_rows});
    executor->write_slot(Slot::kResidual, {x.data() + static_cast<int64_t>(first) * hidden,
                                           static_cast<size_t>(rows) * static_cast<size_t>(hidden)});
    executor->route({{n.get(), 1e-5f}, {r.get()}, kChosen});
    executor->experts_add({{g.get()}, {u.get()}, {d.get(), b.get()}, Experts::Activation::kClampedSwiglu});
    executor->norm_logits({{n.get(), 1e-5f}, {o.get()}});
    std::vector<float> result = executor->read_slot(Slot::kLogits);
    const std::vector<float> residual = executor->read_slot(Slot::kResidual);
    result.insert(result.end(), residual.begin(), residual.end());
    return result;
  };
  const std::vector<float> one = run(device, 3, 1), all = run(device, 0, 7), want = run(*reference, 3, 1);
  std::vector<float> among(all.begin() + 3 * int64_t{vocab}, all.begin() + 4 * int64_t{vocab});
  const auto residual = all.begin() + 7 * int64_t{vocab} + 3 * int64_t{hidden};
  among.insert(among.end(), residual, residual + hidden);
  expect_bits(one, among, label);
  double error = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += std::pow(static_cast<double>(one[i]) - want[i], 2);
    size += std::pow(static_cast<double>(want[i]), 2);
  }
  EXPECT_LT(std::sqrt(error / size), 0.05)
      << label;  // three products with int8 activations; equal nonsense fails
}
TEST(SameBitsDecode, HoweverTallTheMatrices) {
  for (Device& device : all_devices(2)) {
    compare_tall(*device.backend, 64, 4800, 20000, device.label + " tall experts and logits");
    if (HasFatalFailure()) return;
    compare_tall(*device.backend, 4800, 64, 64, device.label + " tall down");
    if (HasFatalFailure()) return;
  }
}

// Equal nonsense does not pass: close to the reference, by the norm of each position's logits.
TEST(SameBitsDecode, AndTheyAreTheRightOnes) {
  const DecodeModel model;
  const std::vector<int32_t> tokens = some_prompt(7, 300);
  const auto reference = make_reference_backend();
  const std::vector<float> want = run_alone(*reference, model, tokens, 90);
  for (Device& device : all_devices(2)) {
    const std::vector<float> got = run_alone(*device.backend, model, tokens, 1);
    ASSERT_EQ(got.size(), want.size());
    std::vector<double> errors;
    for (size_t at = 0; at < want.size(); at += kVocab) {
      double error = 0, size = 0;
      for (size_t i = at; i < at + kVocab; ++i) {
        error += std::pow(static_cast<double>(got[i]) - want[i], 2);
        size += std::pow(static_cast<double>(want[i]), 2);
      }
      errors.push_back(std::sqrt(error / size));
    }
    std::sort(errors.begin(), errors.end());
    // Some ten products, each about half a percent off by int8 activations; a few tokens swap an expert.
    EXPECT_LT(errors[errors.size() / 2], 0.03) << device.label;
    EXPECT_LT(errors[errors.size() * 9 / 10], 0.08) << device.label;
  }
}

}  // namespace
}  // namespace millrace::decode_shapes
