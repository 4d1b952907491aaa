// The small model of the tests on a GPU's decode path: heads of 64 with a bf16 cache, Q8_0 layers and MXFP4
// experts, and the same in other types.
#pragma once

#include "backend/step_runner.h"

namespace millrace::decode_shapes {

using namespace testing_support;

inline constexpr int32_t kHidden = 160, kHeads = 8, kKvHeads = 2, kHeadDim = 64, kVocab = 83, kExperts = 6,
                         kChosen = 4, kExpertFfn = 96, kWindow = 128, kMaxTokens = 96;

inline ExecutorSpec decode_spec(const Backend& backend, DType kv_type = DType::kBF16) {
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
  spec.kv_type = backend.supports_kv_type(kv_type) ? kv_type : DType::kF32;
  spec.kv_groups = {{kWindow, 1, 600}, {0, 1, 600}};
  spec.layers = {{0, 0}, {1, 0}};
  return spec;
}

struct Types {
  DType dense = DType::kQ8_0, v = DType::kQ4_0, o = DType::kQ8_0;  // v: of the second layer
  DType experts = DType::kMXFP4, down = DType::kQ8_0;              // down: of the second layer
};
// K-quants have blocks of 256: only the projection's columns are whole ones.
inline constexpr Types kOtherTypes[] = {
    {DType::kBF16, DType::kQ8_0, DType::kQ4_K, DType::kBF16, DType::kMXFP4},
    {DType::kF16, DType::kQ5_1, DType::kQ6_K, DType::kQ8_0, DType::kBF16},
};

struct DecodeModel : RandomModel {
  explicit DecodeModel(const Types& types = {}) : RandomModel(31, 0.08f, kHeadDim) {
    matrix("embedding", types.dense, kVocab, kHidden);
    matrix("output", types.dense, kVocab, kHidden);
    vector("norm", kHidden, 1.0f);
    for (int l = 0; l < 2; ++l) {
      const std::string p = std::to_string(l) + ".";
      vector(p + "norm1", kHidden, 1.0f);
      vector(p + "norm2", kHidden, 1.0f);
      vector(p + "sinks", kHeads, 0.5f);
      vector(p + "q_bias", kHeads * kHeadDim, 0.0f);
      vector(p + "o_bias", kHidden, 0.0f);
      matrix(p + "q", types.dense, kHeads * kHeadDim, kHidden);
      matrix(p + "k", types.dense, kKvHeads * kHeadDim, kHidden);
      matrix(p + "v", l == 0 ? types.dense : types.v, kKvHeads * kHeadDim, kHidden);
      matrix(p + "o", types.o, kHidden, kHeads * kHeadDim);
      matrix(p + "router", DType::kF32, kExperts, kHidden);
      vector(p + "router_bias", kExperts, 0.0f);
      matrix(p + "gate", types.experts, kExpertFfn, kHidden, kExperts);
      matrix(p + "up", types.experts, kExpertFfn, kHidden, kExperts);
      matrix(p + "down", l == 0 ? types.experts : types.down, kHidden, kExpertFfn, kExperts);
      vector(p + "gate_bias", kExperts * kExpertFfn, 0.0f);
      vector(p + "down_bias", kExperts * kHidden, 0.0f);
    }
  }
};

class DecodeRunner final : public StepRunner {
 public:
  DecodeRunner(Backend& backend, const DecodeModel& model, bool read_every_slot = false,
               DType kv_type = DType::kBF16)
      : StepRunner(backend, model, decode_spec(backend, kv_type)), read_every_slot_(read_every_slot) {}

 private:
  void pause(Executor& e, Slot slot) {
    if (read_every_slot_) e.read_slot(slot);
  }

  void forward(Executor& e) override {
    e.embed({w("embedding"), 2.0f});
    for (int l = 0; l < 2; ++l) {
      const std::string p = std::to_string(l) + ".";
      pause(e, Slot::kResidual);
      e.norm_qkv(
          {{w(p + "norm1"), 1e-5f}, {w(p + "q"), w(p + "q_bias")}, {w(p + "k")}, {w(p + "v")}, {}, {}});
      pause(e, Slot::kQuery);
      e.rope_append_kv({l, model_.inv_freq, 1.1f, l == 1});
      pause(e, Slot::kQuery);
      e.attend({l, l == 0 ? kWindow : 0, 0.125f, w(p + "sinks")});
      pause(e, Slot::kAttention);
      e.project_add({{w(p + "o"), w(p + "o_bias")}});
      pause(e, Slot::kResidual);
      e.route({{w(p + "norm2"), 1e-5f}, {w(p + "router"), w(p + "router_bias")}, kChosen});
      pause(e, Slot::kResidual);
      e.experts_add({{w(p + "gate"), w(p + "gate_bias")},
                     {w(p + "up")},
                     {w(p + "down"), w(p + "down_bias")},
                     Activation::kClampedSwiglu});
      pause(e, Slot::kResidual);
    }
    e.norm_logits({{w("norm"), 1e-5f}, {w("output")}});
  }

  bool read_every_slot_;  // after each operation: nothing is fused
};

inline std::vector<int32_t> prompt(int seed, int32_t length) { return random_prompt(seed, length, kVocab); }

inline std::vector<float> alone(Backend& backend, const DecodeModel& model,
                                const std::vector<int32_t>& tokens, size_t chunk,
                                bool read_every_slot = false, DType kv_type = DType::kBF16) {
  return run_alone(DecodeRunner(backend, model, read_every_slot, kv_type), tokens, chunk);
}

inline void expect_same_bits(const std::vector<float>& got, const std::vector<float>& want,
                             const std::string& what) {
  testing_support::expect_same_bits(got, want, kVocab, what);
}

}  // namespace millrace::decode_shapes
