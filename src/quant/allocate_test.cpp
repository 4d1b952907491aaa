// The allocation against trying every choice, on small cases; requests and their fallbacks.
#include "quant/allocate.h"

#include <gtest/gtest.h>

#include <random>

#include "base/error.h"
#include "quant/type_request.h"

namespace millrace::quant {
namespace {

using Tensors = std::vector<std::vector<TypeOption>>;

double cost_of(const Tensors& tensors, const std::vector<size_t>& chosen, size_t* bytes) {
  double cost = 0.0;
  *bytes = 0;
  for (size_t t = 0; t < tensors.size(); ++t) {
    cost += tensors[t][chosen[t]].cost;
    *bytes += tensors[t][chosen[t]].bytes;
  }
  return cost;
}

double best_cost(const Tensors& tensors, size_t budget) {
  std::vector<size_t> chosen(tensors.size(), 0);
  double best = 1e30;
  while (true) {
    size_t bytes = 0;
    const double cost = cost_of(tensors, chosen, &bytes);
    if (bytes <= budget) best = std::min(best, cost);
    size_t t = 0;
    while (t < tensors.size() && ++chosen[t] == tensors[t].size()) chosen[t++] = 0;
    if (t == tensors.size()) return best;
  }
}

TEST(Allocate, StaysWithinTheBudgetAndNearTheBestChoice) {
  std::mt19937 random(1);
  for (int round = 0; round < 50; ++round) {
    Tensors tensors(6);
    for (auto& options : tensors) {
      const double scale = 1.0 + static_cast<double>(random() % 100);
      for (size_t bits = 4; bits <= 8; ++bits) {
        options.push_back({DType::kQ8_0, bits * 100, scale / static_cast<double>(1u << (2 * bits))});
      }
    }
    const size_t least = least_bytes(tensors), budget = least + random() % 2400;
    size_t bytes = 0;
    const double cost = cost_of(tensors, allocate(tensors, budget), &bytes);
    EXPECT_LE(bytes, budget);
    // Whole steps leave at most one step's bytes unused: the best of one step less bounds the loss.
    EXPECT_LE(cost, best_cost(tensors, std::max(least, budget - 100)) * 1.0001);
  }
}

TEST(Allocate, TakesEverythingWhenItMayAndTheLeastWhenItMust) {
  const Tensors tensors = {{{DType::kQ4_0, 10, 5.0}, {DType::kQ8_0, 20, 1.0}, {DType::kQ5_0, 15, 6.0}},
                           {{DType::kF16, 7, 0.0}}};
  EXPECT_EQ(least_bytes(tensors), 17u);
  EXPECT_EQ(allocate(tensors, 1000), (std::vector<size_t>{1, 0}));
  EXPECT_EQ(allocate(tensors, 17), (std::vector<size_t>{0, 0}));
  EXPECT_EQ(allocate(tensors, 26), (std::vector<size_t>{0, 0}));  // q5_0 is larger and worse
}

TensorView matrix(DType type, int64_t rows, int64_t cols) {
  TensorView view;
  view.type = type;
  view.rank = 2;
  view.shape = {rows, cols, 1, 1};
  return view;
}

TEST(TypeRequest, NamesKnownTypesWhenItFindsAnother) {
  for (const char* bad : {"", "q3_l", "iq2_s", "f8_e4m3", "i32", "auto8"}) {
    try {
      parse_request("--type", bad);
      FAIL() << bad;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("q8_0 q6_k"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("--type"), std::string::npos);
    }
  }
}

TEST(TypeRequest, GivesEachPartItsType) {
  const TypeRequest int4 = parse_request("--type", "int4"), q4_0 = parse_request("--type", "q4_0"),
                    int8 = parse_request("--type", "int8");
  const TensorView wide = matrix(DType::kBF16, 8, 512), odd = matrix(DType::kBF16, 8, 576),
                   strange = matrix(DType::kBF16, 8, 100), fp4 = matrix(DType::kMXFP4Split, 8, 2880);
  TensorView norm = matrix(DType::kF32, 512, 1);
  norm.rank = 1;
  EXPECT_EQ(target_type(int4, "blk.0.ffn_up.weight", wide, false), DType::kQ4_K);
  EXPECT_EQ(target_type(int4, "blk.0.ffn_up.weight", odd, false), DType::kQ4_1);
  EXPECT_EQ(target_type(int4, "blk.0.ffn_up.weight", strange, false), DType::kBF16);  // no larger: kept
  EXPECT_EQ(target_type(q4_0, "blk.0.ffn_up.weight", strange, false), DType::kF16);
  EXPECT_EQ(target_type(int4, "blk.0.ffn_up_exps.weight", fp4, false), DType::kMXFP4);
  EXPECT_EQ(target_type(int8, "blk.0.ffn_up_exps.weight", fp4, false), DType::kMXFP4);
  EXPECT_EQ(target_type(int4, "output.weight", wide, false), DType::kQ6_K);
  EXPECT_EQ(target_type(int4, "output.weight", odd, false), DType::kQ8_0);
  EXPECT_EQ(target_type(int4, "token_embd.weight", wide, true), DType::kQ6_K);
  EXPECT_EQ(target_type(q4_0, "token_embd.weight", odd, false), DType::kQ4_0);
  EXPECT_EQ(target_type(q4_0, "blk.0.ffn_up_exps.weight", fp4, false), DType::kQ4_0);
  EXPECT_EQ(target_type(q4_0, "blk.0.attn_norm.weight", norm, false), DType::kF32);
  EXPECT_EQ(target_type(q4_0, "blk.0.ffn_gate_inp.weight", wide, false), DType::kF32);
  EXPECT_EQ(target_type(q4_0, "blk.0.attn_q.bias", norm, false), DType::kF32);
}

}  // namespace
}  // namespace millrace::quant
