// What architectures differ in, operation by operation, against `reference`: norms of every kind at every
// place, embeddings with positions and types, rows of images, activations with and without a gate, scales and
// soft caps, what a token sees. float32 weights, whose products differ by the rounding of sums alone, and
// bf16 ones, whose activations a GPU rounds: 2^-9 of each.
#include <gtest/gtest.h>

#include "backend/reference/reference_backend.h"
#include "backend/test_support.h"

namespace millrace::operations {
namespace {

using namespace testing_support;

constexpr int32_t kHeads = 6, kKvHeads = 2, kHeadDim = 16, kInner = 160, kVocab = 45, kPositions = 40;

// Tensors by role, the same for every backend, and their weights on one.
struct Model {
  DType type;
  int32_t hidden;
  std::mt19937 random{11};
  std::map<std::string, OwnedTensor> tensors;

  Model(DType t, int32_t h) : type(t), hidden(h) {
    const int64_t query = kHeads * kHeadDim, key = kKvHeads * kHeadDim;
    for (const auto& [name, rows, cols] :
         std::vector<std::tuple<const char*, int64_t, int64_t>>{{"q", query, hidden},
                                                                {"k", key, hidden},
                                                                {"v", key, hidden},
                                                                {"o", hidden, query},
                                                                {"gate", kInner, hidden},
                                                                {"up", kInner, hidden},
                                                                {"down", hidden, kInner},
                                                                {"out", kVocab, hidden},
                                                                {"table", kVocab, hidden},
                                                                {"at", kPositions, hidden},
                                                                {"types", 2, hidden}}) {
      tensors[name] = random_tensor(random, type, rows, cols, 0, 0.3f);
    }
    for (const auto& [name, size] : std::vector<std::pair<const char*, int64_t>>{{"norm", hidden},
                                                                                 {"norm.bias", hidden},
                                                                                 {"head", kHeadDim},
                                                                                 {"whole.q", query},
                                                                                 {"whole.k", key},
                                                                                 {"head.bias", kHeadDim},
                                                                                 {"o.bias", hidden},
                                                                                 {"up.bias", kInner},
                                                                                 {"out.bias", kVocab}}) {
      tensors[name] = random_vector(random, size, 0.7f, 0.3f);
    }
  }
};

class Weights {
 public:
  Weights(Backend& backend, const Model& model) : backend_(backend), model_(model) {}
  const Weight* operator()(const std::string& name) {
    WeightPtr& weight = weights_[name];
    if (weight != nullptr) return weight.get();
    const OwnedTensor& tensor = model_.tensors.at(name);
    const bool vector = tensor.view.shape[0] == 1;
    const bool lookup = name == "table" || name == "at" || name == "types";
    weight = backend_.load_weight(tensor.view, vector   ? WeightUse::kVector
                                               : lookup ? WeightUse::kLookup
                                                        : WeightUse::kMatrix);
    return weight.get();
  }
  // Of a kind from 0 to 4: none, RMS, RMS without weights, LayerNorm without and with a bias.
  Norm norm(int kind, const std::string& name, bool has_bias = true) {
    if (kind == 0) return {};
    Norm norm{.weight = kind == 2 ? nullptr : (*this)(name), .eps = 1e-4f};
    if (kind == 2) norm.kind = Norm::Kind::kRmsUnweighted;
    if (kind >= 3) norm.kind = Norm::Kind::kLayer;
    if (kind == 4 && has_bias) norm.bias = (*this)(name + ".bias");
    return norm;
  }

 private:
  Backend& backend_;
  const Model& model_;
  std::map<std::string, WeightPtr> weights_;
};

ExecutorSpec spec_of(const Model& model, int32_t rows) {
  ExecutorSpec spec;
  spec.max_tokens = spec.max_logit_rows = rows;
  spec.max_context = 64;
  spec.hidden = model.hidden;
  spec.heads = kHeads, spec.kv_heads = kKvHeads, spec.head_dim = kHeadDim;
  spec.vocab = kVocab;
  spec.ffn = kInner;
  return spec;
}

// Rows of one fresh sequence without a cache; logits of every other one.
struct Step {
  std::vector<int32_t> tokens, logit_rows;
  SequenceSlice slice;
  explicit Step(int32_t rows, int32_t context = 0) : slice{0, rows, context, {}} {
    for (int32_t i = 0; i < rows; ++i) {
      tokens.push_back(i * 7 % kVocab);
      if (i % 2 == 0) logit_rows.push_back(i);
    }
  }
  Batch batch() const { return {tokens, {&slice, 1}, logit_rows}; }
};

// The largest error of a row of `cols`, relative to that row's norm.
double worst_row(const std::vector<float>& got, const std::vector<float>& want, size_t cols) {
  EXPECT_EQ(got.size(), want.size());
  double worst = 0;
  for (size_t row = 0; row < want.size() / cols; ++row) {
    double error = 0, size = 1e-30;
    for (size_t i = row * cols; i < (row + 1) * cols; ++i) {
      error += std::pow(static_cast<double>(got[i]) - want[i], 2);
      size += std::pow(static_cast<double>(want[i]), 2);
    }
    worst = std::max(worst, std::sqrt(error / size));
    if (std::isnan(error)) worst = 1e30;
  }
  return worst;
}

// Runs `body(executor, weights)` on the reference and every device and compares what it returns.
template <class Body>
void compare(const std::string& what, DType type, int32_t hidden, int32_t rows, size_t cols,
             const Body& body) {
  const Model model(type, hidden);
  const auto run = [&](Backend& backend) {
    Weights weights(backend, model);
    const auto executor = backend.make_executor(spec_of(model, rows));
    const Step step(rows, 3);
    executor->begin(step.batch());
    std::mt19937 random(12);
    executor->write_slot(Slot::kResidual, random_floats(random, static_cast<size_t>(rows * hidden), 2.0f));
    executor->write_slot(Slot::kAttention,
                         random_floats(random, static_cast<size_t>(rows * kHeads * kHeadDim)));
    return body(*executor, weights);
  };
  const std::vector<float> want = run(*make_reference_backend());
  for (Device& device : all_devices()) {
    const double allowed = type != DType::kF32 && device.label == "cuda" ? 0.01 : 2e-6;
    EXPECT_LT(worst_row(run(*device.backend), want, cols), allowed)
        << device.label << " " << what << " " << info(type).name << " hidden " << hidden << " rows " << rows;
  }
}
struct Shape {
  DType type;
  int32_t hidden, rows;
};
const Shape kShapes[] = {
    {DType::kF32, 7, 1}, {DType::kF32, 300, 5}, {DType::kBF16, 96, 3}, {DType::kBF16, 288, 9}};

TEST(Operations, Norms) {
  for (const Shape& shape : kShapes) {
    const DType type = shape.type;
    const int32_t hidden = shape.hidden, rows = shape.rows;
    for (int kind = 0; kind < 5; ++kind) {
      const std::string label = "norm " + std::to_string(kind);
      const auto cols = static_cast<size_t>(hidden);
      const auto residual = [&](const std::string& what, auto body) {
        compare(what + label, type, hidden, rows, cols, [&](Executor& e, Weights& w) {
          body(e, w);
          return e.read_slot(Slot::kResidual);
        });
      };
      residual("residual ", [&](Executor& e, Weights& w) { e.norm_residual(w.norm(kind, "norm")); });
      residual("projection ", [&](Executor& e, Weights& w) {
        e.project_add({.linear = {w("o"), w("o.bias")}, .norm_after = w.norm(kind, "norm"), .scale = 0.6f});
      });
      residual("ffn ", [&](Executor& e, Weights& w) {
        e.ffn_add({w.norm(kind, "norm"),
                   {w("gate")},
                   {w("up")},
                   {w("down")},
                   Activation::kSilu,
                   w.norm(4 - kind, "norm"),
                   1.5f});
      });
      compare("logits " + label, type, hidden, rows, kVocab, [&](Executor& e, Weights& w) {
        e.norm_logits({w.norm(kind, "norm"), {w("out")}});
        return e.read_slot(Slot::kLogits);
      });
      compare("hidden " + label, type, hidden, rows, cols, [&](Executor& e, Weights& w) {
        std::vector<float> all;
        for (int32_t row = 0; row < rows; ++row) {
          std::vector<float> one(cols);
          e.read_hidden(w.norm(kind, "norm"), row, one);
          all.insert(all.end(), one.begin(), one.end());
        }
        return all;
      });
    }
  }
}

TEST(Operations, NormsOfQueriesAndKeys) {
  for (const auto& [type, hidden, rows] : kShapes) {
    for (int kind = 0; kind < 5; ++kind) {
      for (const bool whole : {false, true}) {
        for (const Slot slot : {Slot::kQuery, Slot::kKey, Slot::kValue}) {
          const size_t cols = static_cast<size_t>(kHeadDim) * (slot == Slot::kQuery ? kHeads : kKvHeads);
          compare("qkv " + std::to_string(kind), type, hidden, rows, cols, [&](Executor& e, Weights& w) {
            e.norm_qkv({.norm = w.norm(kind, "norm"),
                        .q = {w("q")},
                        .k = {w("k")},
                        .v = {w("v")},
                        .q_norm = w.norm(kind, whole ? "whole.q" : "head", !whole),
                        .k_norm = w.norm(kind, whole ? "whole.k" : "head", !whole),
                        .norm_whole = whole});
            return e.read_slot(slot);
          });
        }
      }
    }
  }
}

TEST(Operations, Embeddings) {
  for (const auto& [type, hidden, rows] : kShapes) {
    for (int parts = 0; parts < 4; ++parts) {
      compare("embedding " + std::to_string(parts), type, hidden, rows, static_cast<size_t>(hidden),
              [&](Executor& e, Weights& w) {
                e.embed({w("table"), 1.7f, parts % 2 == 1 ? w("at") : nullptr,
                         parts >= 2 ? w("types") : nullptr, w.norm(parts + 1, "norm")});
                return e.read_slot(Slot::kResidual);
              });
    }
  }
}

TEST(Operations, Activations) {
  for (const auto& [type, hidden, rows] : kShapes) {
    for (const Activation activation :
         {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kReluSquared}) {
      for (const bool gated : {false, true}) {
        compare("activation " + std::to_string(static_cast<int>(activation)), type, hidden, rows,
                static_cast<size_t>(hidden), [&](Executor& e, Weights& w) {
                  e.ffn_add({w.norm(1, "norm"),
                             gated ? Linear{w("gate")} : Linear{},
                             {w("up"), w("up.bias")},
                             {w("down"), w("o.bias")},
                             activation});
                  return e.read_slot(Slot::kResidual);
                });
      }
    }
  }
}

TEST(Operations, LogitsScaledAndCapped) {
  for (const auto& [type, hidden, rows] : kShapes) {
    for (const float softcap : {0.0f, 3.0f}) {
      compare("logits", type, hidden, rows, kVocab, [&](Executor& e, Weights& w) {
        e.norm_logits({w.norm(1, "norm"), {w("out"), w("out.bias")}, 0.3f, softcap});
        return e.read_slot(Slot::kLogits);
      });
    }
  }
}

// ---------------------------------------------------------------- what a token sees

struct Seen {
  int32_t heads, kv_heads, head_dim;
  DType kv_type;
  int32_t window, chunk;
  float softcap;
  bool bidirectional;
};

// A prompt in two steps (in one where tokens see those behind them) beside another sequence, then a token
// each.
std::vector<float> attention_of(Backend& backend, const Seen& c, bool rounds_kv) {
  ExecutorSpec spec;
  spec.max_tokens = spec.max_logit_rows = 96;
  spec.max_context = 160;
  spec.hidden = 32, spec.vocab = 16;
  spec.heads = c.heads, spec.kv_heads = c.kv_heads, spec.head_dim = c.head_dim;
  spec.kv_type = rounds_kv ? c.kv_type : DType::kF32;
  spec.kv_groups = {{std::max(c.window, c.chunk), 1, 40}};
  if (c.bidirectional) spec.kv_groups[0].window = 0;
  spec.layers = {{0, 0}};
  const auto executor = backend.make_executor(spec);
  TestSequence sequences[2];
  std::array<int32_t, kMaxKvGroups> next{};
  std::mt19937 random(13);
  std::vector<float> all;
  std::vector<float> inv_freq;
  for (int i = 0; i < c.head_dim / 2; ++i)
    inv_freq.push_back(static_cast<float>(std::pow(1e4, -2.0 * i / c.head_dim)));
  for (const auto& [first, second] :
       c.bidirectional ? std::vector<std::pair<int32_t, int32_t>>{{71, 20}}
                       : std::vector<std::pair<int32_t, int32_t>>{{50, 20}, {40, 3}, {1, 1}}) {
    std::vector<SequenceSlice> slices;
    sequences[0].reserve(spec, first, next);
    slices.push_back(sequences[0].slice(0, first));
    sequences[1].reserve(spec, second, next);
    slices.push_back(sequences[1].slice(first, second));
    const std::vector<int32_t> tokens(static_cast<size_t>(first + second), 0);
    executor->begin({tokens, slices, {}});
    const size_t query = tokens.size() * static_cast<size_t>(c.heads * c.head_dim),
                 key = tokens.size() * static_cast<size_t>(c.kv_heads * c.head_dim);
    executor->write_slot(Slot::kQuery, random_floats(random, query, 1.5f));
    executor->write_slot(Slot::kKey, random_floats(random, key, 1.5f));
    executor->write_slot(Slot::kValue, random_floats(random, key));
    Rope rope{0, inv_freq};
    if (c.chunk > 0) rope.growth = {0.2f, 16.0f, 1};
    executor->rope_append_kv(rope);
    executor->attend({0, c.window, 1.0f / std::sqrt(static_cast<float>(c.head_dim)), nullptr, c.softcap,
                      c.chunk, c.bidirectional});
    const std::vector<float> step = executor->read_slot(Slot::kAttention);
    all.insert(all.end(), step.begin(), step.end());
    sequences[0].length += first;
    sequences[1].length += second;
  }
  return all;
}

// Sizes of heads and types of the cache, for the attention kernels of every kind.
constexpr std::pair<int32_t, DType> kHeadTypes[] = {
    {16, DType::kF32}, {64, DType::kBF16}, {128, DType::kBF16}, {64, DType::kF8E4M3}, {256, DType::kBF16}};

TEST(Operations, WhatATokenSees) {
  std::vector<Seen> cases;
  for (const auto& [dim, type] : kHeadTypes) {
    cases.push_back({4, 2, dim, type, 0, 0, 5.0f, false});
    cases.push_back({4, 2, dim, type, 24, 0, 5.0f, false});
    cases.push_back({4, 1, dim, type, 0, 24, 0.0f, false});
    cases.push_back({4, 2, dim, type, 0, 0, 0.0f, true});
    cases.push_back({4, 2, dim, type, 9, 0, 0.0f, true});
  }
  for (Device& device : all_devices()) {
    for (const Seen& c : cases) {
      if (!device.backend->supports_kv_type(c.kv_type)) continue;
      const bool one_byte = c.kv_type == DType::kF8E4M3;
      const std::vector<float> want = attention_of(*make_reference_backend(), c, one_byte);
      // A cache of bf16 rounds keys and values to 2^-9 of each; a kernel of the tensor cores the weights too.
      EXPECT_LT(
          worst_row(attention_of(*device.backend, c, true), want, static_cast<size_t>(c.heads * c.head_dim)),
          c.kv_type == DType::kF32 ? 1e-5 : 0.03)
          << device.label << " dim " << c.head_dim << " " << info(c.kv_type).name << " window " << c.window
          << " chunk " << c.chunk << " softcap " << c.softcap << " bidirectional " << c.bidirectional;
    }
  }
}

// ---------------------------------------------------------------- images, pairs of texts

// Rows that are given in place of the embedding's, what is added behind the first layer, and a second text.
TEST(Operations, GivenRowsAndSecondTexts) {
  constexpr int32_t kRows = 9;
  for (const int32_t hidden : {7, 300}) {
    const Model model(DType::kF32, hidden);
    std::mt19937 random(14);
    const std::vector<float> values = random_floats(random, static_cast<size_t>(3 * 2 * hidden));
    const auto run = [&](Backend& backend, bool given) {
      Weights weights(backend, model);
      const auto executor = backend.make_executor(spec_of(model, kRows));
      Step step(kRows);
      step.slice.second_text = 5;
      std::vector<GivenRow> rows;
      for (const int32_t row : {1, 2, 6}) {
        rows.push_back({row, values.data() + static_cast<int64_t>(rows.size()) * 2 * hidden, 1});
      }
      Batch batch = step.batch();
      if (given) batch.given = rows;
      executor->begin(batch);
      executor->embed({weights("table"), 1.7f, nullptr, weights("types"), weights.norm(1, "norm")});
      executor->add_given(0);
      executor->add_given(1);  // they have no such row
      return executor->read_slot(Slot::kResidual);
    };
    const std::vector<float> want = run(*make_reference_backend(), true);
    for (Device& device : all_devices()) {
      const std::vector<float> got = run(*device.backend, true), plain = run(*device.backend, false);
      EXPECT_LT(worst_row(got, want, static_cast<size_t>(hidden)), 2e-6) << device.label << " " << hidden;
      EXPECT_TRUE(std::equal(got.begin(), got.begin() + hidden, plain.begin())) << device.label;
    }
  }
}

// A text, an image whose tokens see one another, and the text behind it, beside another sequence, which has
// the bits that it has alone; rows are turned by three positions each. The second sequence comes last.
std::vector<float> attention_with_image(Backend& backend, const Seen& c, bool rounds_kv, bool with_image) {
  constexpr int32_t kPieces[] = {10, 21, 5}, kOther = 23;
  ExecutorSpec spec;
  spec.max_tokens = spec.max_logit_rows = 64;
  spec.max_context = 64;
  spec.hidden = 32, spec.vocab = 16;
  spec.heads = c.heads, spec.kv_heads = c.kv_heads, spec.head_dim = c.head_dim;
  spec.kv_type = rounds_kv ? c.kv_type : DType::kF32;
  spec.kv_groups = {{c.window, 1, 40}};
  spec.layers = {{0, 0}};
  const auto executor = backend.make_executor(spec);
  TestSequence seeing, other;
  std::array<int32_t, kMaxKvGroups> next{};
  std::vector<SequenceSlice> slices;
  int32_t rows = 0;
  if (with_image) {
    seeing.reserve(spec, 36, next);
    for (const int32_t piece : kPieces) {
      slices.push_back(seeing.slice(rows, piece));
      slices.back().both_ways = slices.size() == 2;
      rows += piece;
      seeing.length += piece;
    }
  }
  other.reserve(spec, kOther, next);
  slices.push_back(other.slice(rows, kOther));
  rows += kOther;

  std::vector<int32_t> turned;
  for (const SequenceSlice& s : slices) {
    for (int32_t i = 0; i < s.num_tokens; ++i) {
      const int32_t at = s.context_len + (s.both_ways ? 0 : i);
      for (const int32_t more : {0, s.both_ways ? i / 7 : 0, s.both_ways ? i % 7 : 0})
        turned.push_back(at + more);
    }
  }
  std::vector<float> inv_freq;
  std::vector<uint8_t> axes;
  for (int i = 0; i < c.head_dim / 2; ++i) {
    inv_freq.push_back(static_cast<float>(std::pow(1e4, -2.0 * i / c.head_dim)));
    axes.push_back(static_cast<uint8_t>(i % 3));
  }
  const std::vector<int32_t> tokens(static_cast<size_t>(rows), 0);
  const float row_of_image[32] = {};
  std::vector<GivenRow> given;
  for (int32_t i = 0; with_image && i < kPieces[1]; ++i) given.push_back({kPieces[0] + i, row_of_image, 0});
  executor->begin(
      {.tokens = tokens, .sequences = slices, .logit_rows = {}, .given = given, .rope_positions = turned});
  const auto write = [&](Slot slot, int32_t heads,
                         float scale) {  // the other sequence's are the same in both
    std::mt19937 random(15 + static_cast<int>(slot)), others(25 + static_cast<int>(slot));
    const auto cols = static_cast<size_t>(heads * c.head_dim);
    std::vector<float> all = random_floats(random, static_cast<size_t>(rows - kOther) * cols, scale);
    const std::vector<float> last = random_floats(others, kOther * cols, scale);
    all.insert(all.end(), last.begin(), last.end());
    executor->write_slot(slot, all);
  };
  write(Slot::kQuery, c.heads, 1.5f);
  write(Slot::kKey, c.kv_heads, 1.5f);
  write(Slot::kValue, c.kv_heads, 1.0f);
  executor->rope_append_kv({.layer = 0, .inv_freq = inv_freq, .axes = axes});
  executor->attend(
      {.layer = 0, .window = c.window, .scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim))});
  return executor->read_slot(Slot::kAttention);
}

TEST(Operations, RowsOfImagesSeeOneAnother) {
  std::vector<Seen> cases;
  for (const auto& [dim, type] : kHeadTypes) {
    for (const int32_t window : {0, 9}) cases.push_back({4, 2, dim, type, window, 0, 0.0f, false});
  }
  for (Device& device : all_devices()) {
    for (const Seen& c : cases) {
      if (!device.backend->supports_kv_type(c.kv_type)) continue;
      SCOPED_TRACE(device.label + " dim " + std::to_string(c.head_dim) + " " +
                   std::string(info(c.kv_type).name) + " window " + std::to_string(c.window));
      const bool one_byte = c.kv_type == DType::kF8E4M3;
      const std::vector<float> want = attention_with_image(*make_reference_backend(), c, one_byte, true);
      const std::vector<float> got = attention_with_image(*device.backend, c, true, true);
      EXPECT_LT(worst_row(got, want, static_cast<size_t>(c.heads * c.head_dim)),
                c.kv_type == DType::kF32 ? 1e-5 : 0.03);
      const std::vector<float> alone = attention_with_image(*device.backend, c, true, false);
      EXPECT_TRUE(std::equal(alone.begin(), alone.end(), got.end() - std::ssize(alone)));
    }
  }
}

}  // namespace
}  // namespace millrace::operations
