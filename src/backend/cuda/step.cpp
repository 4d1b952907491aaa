#include "backend/cuda/step.h"

#include <bit>

#include "backend/cuda/cuda_weight.h"
#include "kernels/cuda/attention/split_plan.h"

namespace millrace::cuda {
namespace {

class Signature {
 public:
  std::vector<uint64_t> words;

  void add(uint64_t word) { words.push_back(word); }
  void add(float value) { words.push_back(std::bit_cast<uint32_t>(value)); }
  // What the launches see of a weight: it may have been freed and another be at its address.
  void add(const Weight* weight) {
    if (weight == nullptr) return add(uint64_t{0});
    const CudaWeight& w = own(*weight);
    add(reinterpret_cast<uint64_t>(w.values.as<void>()));
    add(reinterpret_cast<uint64_t>(w.scale_grid.as<void>()));
    add(static_cast<uint64_t>(w.matrix.type) << 32 | static_cast<uint64_t>(w.experts));
    add(static_cast<uint64_t>(w.rows) << 32 | static_cast<uint64_t>(w.cols));
  }
  void add(const Norm& norm) {
    add(norm.weight);
    add(norm.eps);
    add(norm.bias);
    add(static_cast<uint64_t>(norm.kind));
  }
  void add(const Linear& linear) {
    add(linear.weight);
    add(linear.bias);
  }

  void operator()(const Embed& op) {
    add(op.table);
    add(op.scale);
    add(op.positions);
    add(op.types);
    add(op.norm);
  }
  void operator()(const NormQkv& op) {
    add(op.norm);
    add(op.q);
    add(op.k);
    add(op.v);
    add(op.q_norm);
    add(op.k_norm);
    add(op.v_norm);
    add(static_cast<uint64_t>(op.head_dim));
    add(uint64_t{op.norm_whole} << 1 | uint64_t{op.gated});
  }
  void operator()(const NormLatentQkv& op) {
    for (const Norm* norm : {&op.norm, &op.q_a_norm, &op.kv_a_norm}) add(*norm);
    for (const Linear* linear :
         {&op.q_a, &op.q, &op.kv_a, &op.k_b, &op.index_q, &op.index_k, &op.index_weights})
      add(*linear);
    add(op.index_k_norm);
  }
  void operator()(const RopeOp& op) {
    add(static_cast<uint64_t>(op.layer) << 32 | static_cast<uint64_t>(op.table));
    add(op.params.magnitude);
    add(uint64_t{op.appends} << 1 | uint64_t{op.params.interleaved});
    add(op.growth.scale);
    add(op.growth.every);
    add(static_cast<uint64_t>(op.growth.offset));
  }
  void operator()(const Attend& op) {
    add(static_cast<uint64_t>(op.layer) << 32 | static_cast<uint32_t>(op.window));
    add(op.scale);
    add(op.sinks);
    add(op.softcap);
    add(static_cast<uint64_t>(op.chunk) << 2 | uint64_t{op.bidirectional} << 1 | uint64_t{op.gated});
  }
  void operator()(const Projection& op) {
    add(op.linear);
    add(op.head_values);
    add(op.norm_after);
    add(op.scale);
  }
  void operator()(const Ffn& op) {
    add(op.norm);
    add(op.gate);
    add(op.up);
    add(op.down);
    add(static_cast<uint64_t>(op.activation));
    add(op.norm_after);
    add(op.scale);
  }
  void operator()(const Route& op) {
    add(op.norm);
    add(op.router);
    add(static_cast<uint64_t>(op.experts_per_token) << 32 | static_cast<uint64_t>(op.weighting));
    add(op.scale);
    add(op.score_scale);
    add(op.expert_scales);
    add(op.choice_bias);
    add(static_cast<uint64_t>(op.groups) << 32 | static_cast<uint64_t>(op.groups_chosen));
  }
  void operator()(const Experts& op) {
    add(op.gate);
    add(op.up);
    add(op.down);
    add(static_cast<uint64_t>(op.activation));
    add(op.alpha);
    add(op.limit);
    add(uint64_t{op.weigh_input});
    add(op.shared.gate);
    add(op.shared.up);
    add(op.shared.down);
    add(op.shared.mix);
    add(op.shared.scale);
    for (const Norm* norm :
         {&op.norm, &op.experts_norm_after, &op.shared_norm, &op.shared_norm_after, &op.norm_after})
      add(*norm);
  }
  void operator()(const NormResidualOp& op) { add(op.norm); }
  void operator()(const Logits& op) {
    add(op.norm);
    add(op.output);
    add(op.scale);
    add(op.softcap);
  }
  void operator()(const NormMix& op) {
    add(op.norm);
    for (const Linear& in : op.in) add(in);
    for (const NormMix::Behind& b : op.behind) {
      add(b.by);
      add(static_cast<uint64_t>(b.first));
    }
    for (const HeadColumns* part :
         {&op.query, &op.key, &op.value, &op.gate, &op.step, &op.beta, &op.value_by}) {
      add(static_cast<uint64_t>(part->first) << 32 | static_cast<uint64_t>(part->heads));
      add(static_cast<uint64_t>(part->dim) << 32 | static_cast<uint64_t>(part->per_group));
      add(static_cast<uint64_t>(part->group_stride));
      add(part->scale);
    }
  }
  void operator()(const StateMix& op) {
    add(static_cast<uint64_t>(op.layer) << 32 | static_cast<uint64_t>(op.kind));
    for (const Weight* weight :
         {op.conv, op.conv_bias, op.conv_keys, op.conv_values, op.a, op.step_bias, op.d})
      add(weight);
    add(op.step_min);
    add(op.step_max);
    add(op.norm);
    add(static_cast<uint64_t>(op.norm_size) << 3 | uint64_t{op.gate_sigmoid} << 2 |
        uint64_t{op.norm_before_gate} << 1 | uint64_t{op.conv_silu});
  }
  void operator()(const LayerInputs& op) {
    add(op.table);
    add(op.table_scale);
    add(op.projection);
    add(op.projection_scale);
    add(op.norm);
    add(op.scale);
  }
  void operator()(const EndLayer& op) {
    add(static_cast<uint64_t>(op.layer) << 32 | static_cast<uint64_t>(op.activation));
    add(op.gate);
    add(op.projection);
    add(op.norm_after);
    add(op.scale);
  }
  void operator()(const TimeMix& op) {
    add(static_cast<uint64_t>(op.layer) << 1 | uint64_t{op.first});
    add(op.norm);
    for (const Weight* weight : {op.shift, op.k_k, op.k_a, op.r_k}) add(weight);
    for (const Linear* linear : {&op.r, &op.k, &op.v}) add(*linear);
    for (const TimeMix::LowRankProduct* product : {&op.decay, &op.rate, &op.value, &op.gate}) {
      add(product->down);
      add(product->up);
    }
    add(op.head_norm);
  }
  void operator()(const ChannelMix& op) {
    add(static_cast<uint64_t>(op.layer));
    add(op.norm);
    add(op.shift);
    add(op.key);
    add(op.value);
  }
  void operator()(const GivenOp& op) { add(static_cast<uint64_t>(op.layer + 1)); }
  void operator()(const ArgmaxOp&) {}
  void operator()(const SampleOp&) {}
  void operator()(const ChooseOp&) {}
  void operator()(const KeepExpertsOp& op) {
    add(reinterpret_cast<uint64_t>(op.local));
    add(static_cast<uint64_t>(op.count));
  }
  void operator()(const AddRowsOp&) {}
};

}  // namespace

std::vector<uint64_t> signature_of(const std::vector<StepOp>& ops, const StepPlan& plan) {
  Signature signature;
  signature.words.reserve(32 * ops.size() + 4);
  signature.add(static_cast<uint64_t>(plan.rows) << 32 | static_cast<uint64_t>(plan.logit_rows));
  // Splits: a power of two, so that one graph serves many positions.
  signature.add(static_cast<uint64_t>(max_splits_for(plan.last_position, 0)));
  signature.add(uint64_t{plan.sparse} << 32 | static_cast<uint64_t>(max_splits_for(plan.last_read, 0)));
  signature.add(uint64_t{plan.chosen} << 3 | uint64_t{plan.takes_sampled} << 2 |
                uint64_t{plan.single_tokens} << 1 | uint64_t{plan.softmax_over_all});
  // A model's table does not change once it runs.
  signature.add(reinterpret_cast<uint64_t>(plan.adapters));
  signature.add(reinterpret_cast<uint64_t>(plan.rope_positions));
  for (const StepPlan::Run& run : plan.runs)
    signature.add(static_cast<uint64_t>(run.count) << 1 | uint64_t{run.fp8});
  for (const StepOp& op : ops) {
    signature.add(uint64_t{op.index()});
    std::visit(signature, op);
  }
  return std::move(signature.words);
}

}  // namespace millrace::cuda
