// The launches of expert layers: the router, the choice, the experts, the one that every token goes to.
#include <tuple>

#include "backend/cuda/step_launcher.h"
#include "backend/cuda/step_norms.h"
#include "base/check.h"
#include "kernels/cuda/gemm/gemm.h"
#include "kernels/cuda/gemm/generic.h"
#include "kernels/cuda/gemv/gemv.h"
#include "kernels/cuda/moe/gelu.h"
#include "kernels/cuda/moe/moe.h"
#include "kernels/cuda/moe/sigmoid_routing.h"
#include "kernels/cuda/norm/norm.h"
#include "kernels/cuda/norm/row_norm.h"

namespace millrace::cuda {

Router StepLauncher::router_of(const Route& op) const {
  Router route;
  route.weight = own(*op.router.weight).float_rows();
  route.bias = vector_of(op.router.bias);
  route.x = w_.residual.as<const float>();
  route.norm_weight = vector_of(op.norm.weight);
  route.eps = op.norm.eps;
  route.tokens = static_cast<int32_t>(plan_.rows);
  route.experts = spec_.experts;
  route.cols = spec_.hidden;
  route.scores = w_.scores.as<float>();
  route.normed = w_.normed.as<float>();
  if (plan_.rows <= kMaxGemvRows) route.x_bf16 = w_.x_bf16.as<uint16_t>();
  return route;
}

// The router's rows lie as its kernel wants them.
bool StepLauncher::has_router_kernel(const Route& op) const {
  const CudaWeight& router = own(*op.router.weight);
  MILLRACE_CHECK(router.rows == spec_.experts && router.cols == spec_.hidden);
  return router.float_rows() != nullptr && is_plain(op.norm) && supports_router(spec_.hidden, at_.device);
}

// Router and experts of one row in one kernel. False: they are not, and nothing was launched.
bool StepLauncher::launch_persistent(const std::vector<StepOp>& ops, size_t at) {
  const auto* route = std::get_if<Route>(&ops[at]);
  const auto* experts = at + 1 < ops.size() ? std::get_if<Experts>(&ops[at + 1]) : nullptr;
  if (route == nullptr || experts == nullptr || plan_.rows > kMaxGemvRows || !whole_grid_.held() ||
      part_ != nullptr)
    return false;
  if (!has_router_kernel(*route) || plan_.chosen || experts->shared.up.weight != nullptr ||
      experts->weigh_input || !gated_epilogue(*experts) || experts->norm.present() || any_update(*experts)) {
    return false;
  }
  check_experts(*experts);
  const GemvExperts gemv = gemv_experts(*experts);
  if (!supports_persistent_moe(router_of(*route), gemv, at_.device)) return false;
  launch_persistent_moe(router_of(*route), gemv, w_.moe_sync.as<PersistentMoeSync>(), at_);
  return true;
}

void StepLauncher::operator()(const Route& op) {
  if (has_router_kernel(op)) {
    launch_router(router_of(op), at_);
    return choose(op);
  }
  if (is_plain(op.norm)) {
    launch_rmsnorm(w_.residual.as<float>(), nullptr, vector_of(op.norm.weight), op.norm.eps, plan_.rows,
                   spec_.hidden, w_.normed.as<float>(), at_);
  } else {
    launch_row_norm(
        row_norm_of(op.norm, w_.residual.as<float>(), plan_.rows, spec_.hidden, w_.normed.as<float>()), at_);
  }
  const CudaWeight& router = own(*op.router.weight);
  if (router.float_rows() != nullptr) {  // exact, on any GPU: the choice of experts depends on it
    DeviceMatrix rows = router.matrix;
    rows.data = reinterpret_cast<const uint8_t*>(router.float_rows());
    rows.type = DType::kF32;
    rows.row_bytes = int64_t{spec_.hidden} * static_cast<int64_t>(sizeof(float));
    launch_linear(rows, vector_of(op.router.bias), w_.normed.as<float>(), plan_.rows, false,
                  w_.scores.as<float>(), at_);
  } else {
    const Target target{op.router, w_.scores.as<float>(), spec_.experts};
    linears({w_.normed.as<float>(), plan_.rows, spec_.hidden, nullptr, nullptr, nullptr}, {&target, 1},
            false);
  }
  if (spec_.hidden % 32 == 0 && plan_.rows <= kMaxGemvRows) {
    launch_rows_to_bf16(w_.normed.as<float>(), plan_.rows, spec_.hidden, w_.x_bf16.as<uint16_t>(), at_);
  }
  choose(op);
}

void StepLauncher::choose(const Route& op) {
  if (!plan_.chosen) return;
  using enum Route::Weighting;
  const bool softmax = op.weighting != kSigmoid && op.weighting != kSigmoidRenormalized;
  if (op.score_scale != 1.0f) {
    launch_scale_softcap(op.score_scale, 0.0f, plan_.rows * spec_.experts, w_.scores.as<float>(), at_);
  }
  const auto scale_chosen = [&] {
    if (op.expert_scales == nullptr) return;
    launch_scale_chosen(vector_of(op.expert_scales), pairs(), w_.chosen.as<const int32_t>(),
                        w_.chosen_weight.as<float>(), at_);
  };
  if (softmax && op.groups_chosen >= op.groups) {
    route_top_k();
    launch_scale_softcap(op.scale, 0.0f, pairs(), w_.chosen_weight.as<float>(), at_);
    return scale_chosen();
  }
  SigmoidRouting routing;
  routing.scores = w_.scores.as<const float>();
  routing.choice_bias = vector_of(op.choice_bias);
  routing.tokens = plan_.rows;
  routing.experts = spec_.experts;
  routing.k = spec_.experts_per_token;
  routing.groups = op.groups;
  routing.groups_chosen = op.groups_chosen;
  routing.softmax = softmax;
  routing.renormalize = op.weighting == kSigmoidRenormalized || (softmax && op.weighting != kSoftmaxAll);
  routing.scale = op.scale;
  routing.chosen = w_.chosen.as<int32_t>();
  routing.weights = w_.chosen_weight.as<float>();
  launch_sigmoid_routing(routing, at_);
  scale_chosen();
}

void StepLauncher::route_top_k() {
  // Softmax over all, renormalized over the chosen, is softmax over the chosen.
  launch_route_top_k(w_.scores.as<float>(), plan_.rows, spec_.experts, spec_.experts_per_token,
                     plan_.softmax_over_all, w_.chosen.as<int32_t>(), w_.chosen_weight.as<float>(), at_);
}

GemvExperts StepLauncher::gemv_experts(const Experts& op) const {
  GemvExperts experts;
  experts.gate = own(*op.gate.weight).packed;
  experts.up = own(*op.up.weight).packed;
  experts.down = own(*op.down.weight).packed;
  experts.gate_bias = vector_of(op.gate.bias);
  experts.up_bias = vector_of(op.up.bias);
  experts.down_bias = vector_of(op.down.bias);
  experts.scores = w_.scores.as<const float>();
  experts.tokens = static_cast<int32_t>(plan_.rows);
  experts.experts = spec_.experts;
  experts.k = spec_.experts_per_token;
  experts.softmax_over_all = plan_.softmax_over_all;
  experts.activation = {op.activation == millrace::Activation::kClampedSwiglu, op.alpha, op.limit};
  experts.x_bf16 = w_.x_bf16.as<const uint16_t>();
  experts.act = w_.gate.as<float>();
  experts.residual = w_.residual.as<float>();
  return experts;
}

// Rows of x, each of `copies` pairs, into the groups' order.
void StepLauncher::round_pairs(const DeviceBuffer& x, int32_t copies, const PackedMatrix& w) {
  const ExpertGroups groups = expert_groups(w_.groups.as<int32_t>(), pairs(), spec_.experts, at_.device);
  RoundRows round;
  round.x = x.as<const float>();
  round.sorted_rows = groups.sorted_rows;
  round.copies = copies;
  round.rows = pairs() / copies;
  round.cols = w.cols;
  round.weights = w.format;
  round.to = {w_.bf16_rows.as<uint8_t>()};
  launch_round_rows(round, at_);
}

void StepLauncher::grouped_gate_up(const Experts& op, const DeviceBuffer& x, int32_t divide) {
  round_pairs(x, divide, own(*op.gate.weight).packed);
  GroupedGemm gemm;
  gemm.experts = spec_.experts;
  gemm.gate = own(*op.gate.weight).packed;
  gemm.up = own(*op.up.weight).packed;
  gemm.gate_bias = vector_of(op.gate.bias);
  gemm.up_bias = vector_of(op.up.bias);
  gemm.activation = {op.activation == millrace::Activation::kClampedSwiglu, op.alpha, op.limit};
  gemm.groups = expert_groups(w_.groups.as<int32_t>(), pairs(), spec_.experts, at_.device);
  gemm.x = {w_.bf16_rows.as<uint8_t>()};
  gemm.out = w_.gate.as<float>();
  if (rounds_act(op)) {
    gemm.act = {w_.act_rows.as<uint8_t>()};
    gemm.act_weights = own(*op.down.weight).packed.format;
  }
  launch_grouped_gemm(gemm, at_);
}

// What the kernels of gate and up together do: an activation of theirs, and a gate.
bool StepLauncher::gated_epilogue(const Experts& op) const {
  return op.gate.weight != nullptr && in_epilogues(op.activation);
}

bool StepLauncher::fuses_gate_up(const Experts& op) const {
  if (!gated_epilogue(op)) return false;
  const PackedFormat gate = own(*op.gate.weight).packed.format;
  return gate != PackedFormat::kNone && gate == own(*op.up.weight).packed.format;
}

// Whether gate and up leave their activations as down's operand.
bool StepLauncher::rounds_act(const Experts& op) const {
  return at_.device.has_wgmma() && fuses_gate_up(op) && (part_ == nullptr || whole_experts()) &&
         own(*op.down.weight).packed.format != PackedFormat::kNone;
}

// out[pair] = the pair's expert . row of x, x in the groups' order.
void StepLauncher::grouped_linear(const Linear& op, const Bf16Rows& x, const DeviceBuffer& out) {
  const CudaWeight& weight = own(*op.weight);
  GroupedGemm gemm;
  gemm.experts = spec_.experts;
  gemm.gate = weight.packed;
  gemm.gate_bias = vector_of(op.bias);
  gemm.groups = expert_groups(w_.groups.as<int32_t>(), pairs(), spec_.experts, at_.device);
  gemm.x = x;
  gemm.out = out.as<float>();
  launch_grouped_gemm(gemm, at_);
}

void StepLauncher::expert_linear(const Linear& op, const DeviceBuffer& x, int32_t divide,
                                 const DeviceBuffer& out) {
  const CudaWeight& weight = own(*op.weight);
  if (weight.packed.format == PackedFormat::kNone) {
    return launch_expert_linear(weight.matrix, vector_of(op.bias), x.as<float>(), divide,
                                w_.chosen.as<int32_t>(), pairs(), out.as<float>(), at_);
  }
  round_pairs(x, divide, weight.packed);
  grouped_linear(op, {w_.bf16_rows.as<uint8_t>()}, out);
}

void StepLauncher::check_experts(const Experts& op) const {
  const int64_t ffn = spec_.expert_ffn, hidden = spec_.hidden;
  const bool by_rows = part_ != nullptr && !whole_experts();
  const int64_t own_ffn = by_rows ? part_->own(ffn) : ffn, own_down = by_rows ? own_hidden() : hidden;
  for (const auto& [linear, rows, cols] :
       {std::tuple{&op.gate, own_ffn, hidden}, {&op.up, own_ffn, hidden}, {&op.down, own_down, ffn}}) {
    if (linear->weight == nullptr && linear == &op.gate) continue;  // there is none
    MILLRACE_CHECK(linear->weight->rows == rows && linear->weight->cols == cols);
    if (whole_experts()) {
      MILLRACE_CHECK(linear->weight->experts == part_->own_experts());
      continue;
    }
    MILLRACE_CHECK(linear->weight->experts == spec_.experts ||
                   (plan_.chosen && linear->weight->experts < spec_.experts));  // KeepExpertsOp
  }
}

// to += scale * sigmoid(mix n) * down(act(gate n) * (up n)): of n what route() left in `normed`. to: [rows,
// own_hidden()].
void StepLauncher::shared_expert_add(const Experts& op, float* to) {
  const Experts::Shared& shared = op.shared;
  const Rows rows{w_.normed.as<float>(), plan_.rows, spec_.hidden, nullptr, nullptr, nullptr};
  gate_up(rows, shared.gate, shared.up, op.activation);
  const Rows inner{whole_inner(shared.down, plan_.rows).as<float>(),
                   plan_.rows,
                   shared.down.weight->cols,
                   nullptr,
                   nullptr,
                   nullptr};
  const int64_t hidden = own_hidden();
  if (hidden == 0) return;
  const bool mixed = shared.mix.weight != nullptr;
  const bool as_it_is = !mixed && shared.scale == 1.0f;
  const Target down{shared.down, as_it_is ? to : w_.down.as<float>(), hidden};
  linears(inner, {&down, 1}, as_it_is);
  if (as_it_is) return;
  if (!mixed) {
    RowNorm add = row_norm_of({}, w_.down.as<float>(), plan_.rows, hidden, to);
    add.add = true;
    add.scale = shared.scale;
    return launch_row_norm(add, at_);
  }
  const Target mix{shared.mix, w_.mix.as<float>(), 1};
  linears(rows, {&mix, 1}, false);
  launch_add_mixed(w_.mix.as<const float>(), shared.scale, w_.down.as<const float>(), plan_.rows, hidden, to,
                   at_);
}

void StepLauncher::operator()(const ChooseOp&) {
  if (!plan_.chosen) route_top_k();
}

void StepLauncher::operator()(const KeepExpertsOp& op) {
  launch_keep_experts(op.local, op.count, pairs(), w_.chosen.as<int32_t>(), w_.chosen_weight.as<float>(),
                      at_);
}

void StepLauncher::operator()(const Experts& op) {
  if (op.norm.present()) return normed_experts_add(op);
  if (part_ != nullptr) {
    float* const columns = part_->take_columns(w_.residual.as<float>(), plan_.rows, at_);
    if (op.shared.up.weight != nullptr) shared_expert_add(op, columns);
    check_experts(op);
    run_experts(op, columns);
    return part_->gather_rows(columns, spec_.hidden, w_.residual.as<float>(), plan_.rows, at_);
  }
  if (op.shared.up.weight != nullptr) shared_expert_add(op, w_.residual.as<float>());
  if (op.up.weight == nullptr) return;  // another device has them
  check_experts(op);
  if (plan_.rows <= kMaxGemvRows && !plan_.chosen && !op.weigh_input && gated_epilogue(op) &&
      !any_update(op)) {
    const GemvExperts gemv = gemv_experts(op);
    if (supports_gemv_experts(gemv, at_.device)) return launch_gemv_experts(gemv, at_);
  }
  run_experts(op, w_.residual.as<float>());
}

// residual += norm_after(shared_norm_after(shared(shared_norm(x))) + experts_norm_after(experts(norm(x)))).
void StepLauncher::normed_experts_add(const Experts& op) {
  const Experts::Shared& shared = op.shared;
  MILLRACE_CHECK(shared.up.weight != nullptr && shared.mix.weight == nullptr && shared.scale == 1.0f);
  check_experts(op);
  const int64_t hidden = spec_.hidden;
  gate_up({w_.residual.as<float>(), plan_.rows, hidden, &op.shared_norm, nullptr, &w_.normed}, shared.gate,
          shared.up, op.activation);
  const Target down{shared.down, w_.shared_sum.as<float>(), hidden};
  linears({w_.gate.as<float>(), plan_.rows, shared.up.weight->rows, nullptr, nullptr, nullptr}, {&down, 1},
          false);
  norm_rows(op.shared_norm_after, plan_.rows, hidden, w_.shared_sum);

  this->hidden(op.norm, plan_.rows);
  const auto bytes = static_cast<size_t>(plan_.rows * hidden) * sizeof(float);
  if (bytes > 0) MILLRACE_CUDA_TRY(cudaMemsetAsync(w_.expert_sum.as<void>(), 0, bytes, at_.stream));
  run_experts(op, w_.expert_sum.as<float>());

  const auto add = [&](const Norm& norm, const DeviceBuffer& from, const DeviceBuffer& to) {
    RowNorm rows = row_norm_of(norm, from.as<float>(), plan_.rows, hidden, to.as<float>());
    rows.add = true;
    launch_row_norm(rows, at_);
  };
  add(op.experts_norm_after, w_.expert_sum, w_.shared_sum);
  add(op.norm_after, w_.shared_sum, w_.residual);
}

// to += what the experts make of `normed`; to: [rows, own_hidden()].
void StepLauncher::run_experts(const Experts& op, float* to) {
  if (!plan_.chosen) route_top_k();
  const int64_t all = pairs();
  if (op.weigh_input) {  // into `down`, which nobody needs before the inputs are used up
    launch_weigh_inputs(w_.normed.as<const float>(), all, spec_.experts_per_token, spec_.hidden,
                        w_.chosen_weight.as<float>(), w_.down.as<float>(), at_);
  }
  const DeviceBuffer& x = op.weigh_input ? w_.down : w_.normed;
  const int32_t divide = op.weigh_input ? 1 : spec_.experts_per_token;
  if (whole_experts()) {  // this rank's pairs alone, whose rows are put side by side
    pairs_ = part_->sort_pairs(w_.chosen.as<int32_t>(), all, divide, at_);
    if (pairs_ > 0) {
      RowNorm take = row_norm_of({}, x.as<float>(), pairs_, spec_.hidden, part_->scratch().as<float>());
      take.source_rows = part_->own_rows();
      launch_row_norm(take, at_);
      expert_products(op, part_->scratch(), 1);
    }
    pairs_ = all;
    part_->exchange_outputs(w_.down.as<float>(), all, at_);
  } else {
    expert_products(op, x, divide);
  }
  if (own_hidden() == 0) return;
  launch_combine_experts(w_.down.as<float>(), w_.chosen_weight.as<float>(), plan_.rows,
                         spec_.experts_per_token, own_hidden(), to, at_);
}

void StepLauncher::expert_products(const Experts& op, const DeviceBuffer& x, int32_t divide) {
  launch_group_experts(w_.chosen.as<int32_t>(), pairs(), spec_.experts,
                       expert_groups(w_.groups.as<int32_t>(), pairs(), spec_.experts, at_.device), at_);
  const int64_t inner = op.up.weight->rows;  // of a rank maybe none
  const bool updated = any_update(op);       // what adapters add comes before the activation
  if (inner > 0 && fuses_gate_up(op) && !updated) {
    grouped_gate_up(op, x, divide);
  } else if (inner > 0) {
    const bool gated = op.gate.weight != nullptr;
    const Linear& first = gated ? op.gate : op.up;
    expert_linear(first, x, divide, w_.gate);
    if (gated) expert_linear(op.up, x, divide, w_.up);
    add_expert_updates(first, x, divide, w_.gate);
    if (gated) add_expert_updates(op.up, x, divide, w_.up);
    const int64_t size = pairs() * inner;
    if (!gated_epilogue(op)) {
      MILLRACE_CHECK(op.activation != millrace::Activation::kClampedSwiglu);  // it has a gate
      activate(op.activation, size, w_.gate.as<float>(), gated ? w_.up.as<float>() : nullptr);
    } else {
      const Activation activation{op.activation == millrace::Activation::kClampedSwiglu, op.alpha, op.limit};
      launch_activate(activation, size, w_.gate.as<float>(), w_.up.as<float>(), at_);
    }
  }
  const DeviceBuffer& activated = whole_experts() ? w_.gate : whole_inner(op.down, pairs());
  if (op.down.weight->rows == 0) return;
  if (rounds_act(op) && !updated) {
    grouped_linear(op.down, {w_.act_rows.as<uint8_t>()}, w_.down);
  } else {
    expert_linear(op.down, activated, 1, w_.down);
  }
  add_expert_updates(op.down, activated, 1, w_.down);
}

}  // namespace millrace::cuda
