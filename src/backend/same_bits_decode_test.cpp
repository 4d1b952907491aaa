// "Same bits" on the shapes that a GPU's decode path has kernels of its own for: heads of 64 with a bf16
// cache, Q8_0 layers and MXFP4 experts, and the same in other types. One model's logits, token by token, in
// chunks of every size, alone and in batches, and with every operation's result read in between (nothing
// fused, nothing replayed), compared bit by bit.
#include <gtest/gtest.h>

#include "backend/decode_model.h"
#include "backend/reference/reference_backend.h"

namespace millrace::decode_shapes {
namespace {

// Past two spans of 256 positions; chunks of 1 to 4 stream, larger ones do not.
TEST(SameBitsDecode, HoweverThePromptIsCut) {
  const DecodeModel model;
  const std::vector<int32_t> tokens = prompt(1, 600);
  for (Device& device : all_devices(2)) {
    const std::vector<float> one_by_one = alone(*device.backend, model, tokens, 1);
    for (size_t chunk : {2, 3, 4, 5, 33, 96}) {
      expect_same_bits(alone(*device.backend, model, tokens, chunk), one_by_one,
                       device.label + " chunks of " + std::to_string(chunk));
      if (HasFatalFailure()) return;
    }
  }
}

TEST(SameBitsDecode, WhateverTheTypes) {
  for (const Types& types : kOtherTypes) {
    const DecodeModel model(types);
    const std::vector<int32_t> tokens = prompt(4, 140);
    for (Device& device : all_devices(2)) {
      const std::vector<float> one_by_one = alone(*device.backend, model, tokens, 1);
      for (size_t chunk : {3, 4, 5, 70}) {
        expect_same_bits(
            alone(*device.backend, model, tokens, chunk), one_by_one,
            device.label + " " + std::string(info(types.dense).name) + " chunks of " + std::to_string(chunk));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Scales are of one token and head: chunks, neighbours and fusing leave the same codes and the same bits.
TEST(SameBitsDecode, InACacheOfFp8) {
  const DecodeModel model;
  for (Device& device : all_devices(2)) {
    const bool fast = device.label.starts_with("cuda");
    std::vector<std::vector<int32_t>> prompts;  // past a span of 512 where that is cheap
    for (int s = 0; s < (fast ? 6 : 4); ++s)
      prompts.push_back(prompt(60 + s, fast && s == 0 ? 560 : 100 - 17 * s));
    const auto run = [&](const std::vector<int32_t>& tokens, size_t chunk, bool read_every_slot = false) {
      return alone(*device.backend, model, tokens, chunk, read_every_slot, DType::kF8E4M3);
    };
    std::vector<std::vector<float>> one_by_one;
    for (const std::vector<int32_t>& tokens : prompts) one_by_one.push_back(run(tokens, 1));
    for (const size_t chunk : fast ? std::vector<size_t>{2, 4, 5, 33, 96} : std::vector<size_t>{5, 33}) {
      expect_same_bits(run(prompts[0], chunk), one_by_one[0],
                       device.label + " fp8, chunks of " + std::to_string(chunk));
      if (HasFatalFailure()) return;
    }
    expect_same_bits(run(prompts[3], 1, true), one_by_one[3], device.label + " fp8, nothing fused");
    DecodeRunner together(*device.backend, model, false, DType::kF8E4M3);
    std::vector<size_t> done(prompts.size(), 0);
    for (size_t step = 0, left = prompts.size(); left > 0; ++step) {
      std::vector<DecodeRunner::Piece> pieces;
      for (size_t s = 0; s < prompts.size(); ++s) {
        const size_t wanted = step % 3 == 2 ? 1 : 1 + (step + 5 * s) % 15;
        const size_t count = std::min(wanted, prompts[s].size() - done[s]);
        if (count == 0) continue;
        pieces.push_back({static_cast<int>(s), part(prompts[s], done[s], count)});
        done[s] += count;
        if (done[s] == prompts[s].size()) --left;
      }
      together.step(pieces);
      if (HasFatalFailure()) return;
    }
    for (size_t s = 0; s < prompts.size(); ++s) {
      expect_same_bits(together.logits(static_cast<int>(s)), one_by_one[s],
                       device.label + " fp8, sequence " + std::to_string(s));
      if (HasFatalFailure()) return;
    }
  }
}

TEST(SameBitsDecode, WhetherOrNotOperationsAreFused) {
  const DecodeModel model;
  const std::vector<int32_t> tokens = prompt(2, 290);
  for (Device& device : all_devices(2)) {
    expect_same_bits(alone(*device.backend, model, tokens, 1, true), alone(*device.backend, model, tokens, 1),
                     device.label);
    if (HasFatalFailure()) return;
  }
}

// Batches of one to twelve single tokens at different positions, and prompts among them.
TEST(SameBitsDecode, WhateverElseIsInTheBatch) {
  const DecodeModel model;
  std::vector<std::vector<int32_t>> prompts;
  for (int s = 0; s < 12; ++s) prompts.push_back(prompt(10 + s, 40 + 25 * s));
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
        pieces.push_back({static_cast<int>(s), part(prompts[s], done[s], count)});
        done[s] += count;
        rows += count;
      }
      if (!pieces.empty()) runner.step(pieces);
      if (HasFatalFailure()) return;
    }
    for (size_t s = 0; s < prompts.size(); s += 3) {
      expect_same_bits(runner.logits(static_cast<int>(s)), alone(*device.backend, model, prompts[s], 50),
                       device.label + " sequence " + std::to_string(s));
      if (HasFatalFailure()) return;
    }
  }
}

// Matrices so tall that a GPU's CTAs have many tiles each and their rings of stages go round: one row alone,
// as decoding has it, against the same row among others, and both against the reference.
void compare_tall(Backend& device, int32_t hidden, int32_t expert_ffn, int32_t vocab, DType expert_type,
                  DType output_type, const std::string& label) {
  std::mt19937 random(41);
  ExecutorSpec spec = decode_spec(device);
  spec.hidden = hidden;
  spec.expert_ffn = expert_ffn;
  spec.vocab = vocab;
  spec.max_tokens = spec.max_logit_rows = 7;
  const auto reference = make_reference_backend();
  const OwnedTensor norm = random_vector(random, hidden, 1.0f, 0.1f),
                    router = random_tensor(random, DType::kF32, kExperts, hidden, 0, 0.1f),
                    gate = random_tensor(random, expert_type, expert_ffn, hidden, kExperts, 0.1f),
                    up = random_tensor(random, expert_type, expert_ffn, hidden, kExperts, 0.1f),
                    down = random_tensor(random, expert_type, hidden, expert_ffn, kExperts, 0.1f),
                    bias = random_vector(random, kExperts * hidden, 0.0f, 0.3f),
                    output = random_tensor(random, output_type, vocab, hidden, 0, 0.1f);
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
    executor->experts_add({{g.get()}, {u.get()}, {d.get(), b.get()}, Activation::kClampedSwiglu});
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
  expect_same_bits(one, among, label);
  double error = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += std::pow(static_cast<double>(one[i]) - want[i], 2);
    size += std::pow(static_cast<double>(want[i]), 2);
  }
  EXPECT_LT(std::sqrt(error / size), 0.05)
      << label;  // three products with int8 activations; equal nonsense fails
}
// So many sequences that their attention is cut otherwise, a few of them long.
TEST(SameBitsDecode, AmongManyOthers) {
  const DecodeModel model;
  std::vector<std::vector<int32_t>> prompts;
  for (int s = 0; s < 90; ++s) prompts.push_back(prompt(100 + s, s % 30 == 0 ? 420 + s : 12 + s % 5));
  for (Device& device : all_devices(2)) {
    DecodeRunner runner(*device.backend, model);
    // All but the last three tokens: the long ones in chunks, the short ones four at a time.
    std::vector<DecodeRunner::Piece> some;
    for (size_t s = 0; s < prompts.size(); ++s) {
      const size_t known = prompts[s].size() - 3;
      for (size_t at = 0; at < known; at += kMaxTokens) {
        DecodeRunner::Piece piece{static_cast<int>(s),
                                  part(prompts[s], at, std::min<size_t>(kMaxTokens, known - at))};
        const bool alone_in_step = known > 24;
        if (!alone_in_step) some.push_back(piece);
        if (alone_in_step) runner.step({piece});
      }
      if (some.size() == 4 || s + 1 == prompts.size()) {
        if (!some.empty()) runner.step(some);
        some.clear();
      }
    }
    for (size_t last = 3; last > 0; --last) {
      std::vector<DecodeRunner::Piece> pieces;
      for (size_t s = 0; s < prompts.size(); ++s) {
        pieces.push_back({static_cast<int>(s), part(prompts[s], prompts[s].size() - last, 1)});
      }
      runner.step(pieces);
    }
    if (HasFatalFailure()) return;
    for (const int s : {30, 37}) {
      const std::vector<int32_t>& tokens = prompts[static_cast<size_t>(s)];
      expect_same_bits(runner.logits(s), alone(*device.backend, model, tokens, 64),
                       device.label + " sequence " + std::to_string(s));
      if (HasFatalFailure()) return;
    }
  }
}

// Random ragged batches: prompts of 1 to 150 tokens, each with its own chunks, single tokens among them, in
// the blocks that earlier rounds have left full of other numbers. Every row of every batch is compared.
TEST(SameBitsDecode, InEveryRaggedBatch) {
  const DecodeModel model;
  for (Device& device : all_devices(2)) {
    const bool fast = device.label.starts_with("cuda");
    const int wanted = fast ? 10000 : 20;
    const size_t count_of_prompts = fast ? 24 : 8;
    std::mt19937 random(5);
    std::vector<std::vector<int32_t>> prompts;
    for (size_t s = 0; s < count_of_prompts; ++s)
      prompts.push_back(prompt(200 + static_cast<int>(s), static_cast<int32_t>(1 + random() % 150)));
    std::vector<std::vector<float>> want;
    for (const std::vector<int32_t>& tokens : prompts)
      want.push_back(alone(*device.backend, model, tokens, 1));
    DecodeRunner runner(*device.backend, model);
    int batches = 0;
    size_t rows = 0;
    while (batches < wanted) {
      runner.restart();
      std::vector<size_t> done(count_of_prompts, 0);
      size_t unfinished = count_of_prompts;
      while (unfinished > 0) {
        std::vector<DecodeRunner::Piece> pieces;
        const uint32_t longest = std::array<uint32_t, 4>{1, 1, 5, 90}[random() % 4];
        size_t room = 1 + random() % kMaxTokens;
        for (size_t i = 0, s = random() % count_of_prompts; i < count_of_prompts && room > 0;
             ++i, s = (s + 1) % count_of_prompts) {
          const size_t count = std::min({size_t{1 + random() % longest}, room, prompts[s].size() - done[s]});
          if (count == 0 || random() % 3 == 0) continue;
          pieces.push_back({static_cast<int>(s), part(prompts[s], done[s], count)});
          done[s] += count, room -= count, rows += count;
          if (done[s] == prompts[s].size()) --unfinished;
        }
        if (pieces.empty()) continue;
        runner.step(pieces);
        ++batches;
        if (HasFatalFailure()) return;
      }
      for (size_t s = 0; s < count_of_prompts; ++s) {
        expect_same_bits(
            runner.logits(static_cast<int>(s)), want[s],
            device.label + " after " + std::to_string(batches) + " batches, prompt " + std::to_string(s));
        if (HasFatalFailure()) return;
      }
    }
    std::printf("[  figure  ] %s ragged batches: %d, %zu rows, all as alone\n", device.label.c_str(), batches,
                rows);
  }
}

TEST(SameBitsDecode, HoweverTallTheMatrices) {
  for (Device& device : all_devices(2)) {
    const std::string tall = device.label + " tall experts and logits ", wide = device.label + " tall down ";
    compare_tall(*device.backend, 64, 4800, 20000, DType::kMXFP4, DType::kQ8_0, tall + "mxfp4");
    if (HasFatalFailure()) return;
    compare_tall(*device.backend, 4800, 64, 64, DType::kMXFP4, DType::kQ8_0, wide + "mxfp4");
    if (HasFatalFailure()) return;
    compare_tall(*device.backend, 64, 4800, 20000, DType::kQ8_0, DType::kBF16, tall + "q8_0");
    if (HasFatalFailure()) return;
    compare_tall(*device.backend, 4800, 64, 64, DType::kBF16, DType::kF16, wide + "bf16");
    if (HasFatalFailure()) return;
  }
}

// Equal nonsense does not pass: close to the reference, by the norm of each position's logits.
void compare_with_reference(const Types& types) {
  const DecodeModel model(types);
  const std::vector<int32_t> tokens = prompt(7, 300);
  const auto reference = make_reference_backend();
  const std::vector<float> want = alone(*reference, model, tokens, 90);
  for (Device& device : all_devices(2)) {
    const std::vector<float> got = alone(*device.backend, model, tokens, 1);
    ASSERT_EQ(got.size(), want.size());
    const std::vector<double> errors = sorted_row_errors(got, want, kVocab);
    // Some ten products, each about half a percent off by int8 activations; a few tokens swap an expert.
    EXPECT_LT(errors[errors.size() / 2], 0.03) << device.label;
    EXPECT_LT(errors[errors.size() * 9 / 10], 0.08) << device.label;
  }
}
TEST(SameBitsDecode, AndTheyAreTheRightOnes) {
  compare_with_reference({});
  for (const Types& types : kOtherTypes) compare_with_reference(types);
}

}  // namespace
}  // namespace millrace::decode_shapes
