// The launches of layers with a state: what the step launcher does for NormMix and StateMix.
#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "backend/cuda/step_launcher.h"
#include "base/check.h"
#include "kernels/cuda/linear/replayed_scan.h"
#include "kernels/cuda/linear/short_conv.h"
#include "kernels/cuda/linear/state_rows.h"
#include "kernels/cuda/linear/state_scan.h"

namespace millrace::cuda {
namespace {

const float* state_vector(const Weight* weight) {
  return weight != nullptr ? own(*weight).vector() : nullptr;
}

PlacedHeads placed(const HeadColumns& from, int64_t to) {
  return {from.first, from.heads, from.dim, from.per_group, from.group_stride, to, from.scale};
}

// What StateScan and ReplayedScan have alike: q, k and v behind the convolution `conv`, a token a row.
template <class Scan>
Scan scan_behind(const ShortConv& conv, const StateShape& s, const Workspace& w) {
  Scan scan;
  scan.q = w.convolved.as<const float>() + s.query_at();
  scan.k = w.convolved.as<const float>() + s.key_at();
  scan.v = w.convolved.as<const float>() + s.value_at();
  scan.q_stride = scan.k_stride = scan.v_stride = s.channels();
  scan.out = w.attention.as<float>();
  scan.key_heads = s.key_heads;
  scan.heads = s.value_heads;
  scan.key_dim = s.key_dim;
  scan.value_dim = s.value_dim;
  scan.tiled = s.tiled;
  scan.sequences = conv.sequences;
  scan.pool = conv.pool;
  return scan;
}

}  // namespace

StatePool StepLauncher::state_pool_of(int layer) const {
  const auto [group, index] = spec_.state_place(layer);
  StatePool pool;
  pool.pool = w_.pools[static_cast<size_t>(group)].as<float>();
  pool.block_floats = static_cast<int64_t>(spec_.kv_block_bytes(group) / sizeof(float));
  pool.layer_offset = index * StateBlock(spec_.state).floats;
  pool.at = state_places_of(spec_.state);
  pool.table_starts = in_batch(batch_->table_starts(group));
  pool.tables = in_batch(0);
  return pool;
}

StateSequences StepLauncher::state_sequences() const {
  return {batch_->num_sequences(), plan_.single_tokens ? nullptr : in_batch(batch_->row_starts()),
          in_batch(batch_->positions())};
}

void StepLauncher::operator()(const NormMix& op) {
  if (plan_.rows == 0) return;
  const StateShape& s = spec_.state;
  PlaceRows place;
  std::vector<Target> targets;
  int64_t columns = 0, used = 0;
  static_assert(PlaceRows::kProducts == kStateProducts);
  const auto append = [&](const Linear& in) {
    MILLRACE_CHECK(targets.size() < kStateProducts);
    float* out = w_.projected.as<float>() + used;
    place.products[targets.size()] = {out, static_cast<int32_t>(in.weight->rows)};
    targets.push_back({in, out, in.weight->rows});
    columns += in.weight->rows;
    used += plan_.rows * in.weight->rows;
    used = (used + kProductAlignment - 1) / kProductAlignment * kProductAlignment;
  };
  for (const Linear& in : op.in) {
    if (in.weight != nullptr) append(in);
  }
  const size_t first_behind = targets.size();
  for (const NormMix::Behind& b : op.behind) {
    if (b.by.weight != nullptr) append(b.by);
  }
  MILLRACE_CHECK(first_behind > 0 && columns <= s.projected);
  // The products of a call are as many as attention has; others go by themselves.
  const Rows rows{w_.residual.as<float>(), plan_.rows, spec_.hidden, &op.norm, nullptr, &w_.normed};
  constexpr size_t kTogether = 3;
  const std::span<const Target> all(targets), of_rows = all.first(first_behind);
  linears(rows, of_rows.first(std::min(kTogether, of_rows.size())), false);
  if (of_rows.size() > kTogether) linears(rows, of_rows.subspan(kTogether), false);
  multiply_behind(op, place, all.subspan(first_behind));
  place.parts = {placed(op.query, s.query_at()), placed(op.key, s.key_at()),   placed(op.value, s.value_at()),
                 placed(op.gate, s.gate_at()),   placed(op.step, s.step_at()), placed(op.beta, s.beta_at())};
  place.value_by = placed(op.value_by, s.value_at());
  place.rows = plan_.rows;
  place.columns = s.mix_cols();
  place.out = w_.state_mix.as<float>();
  launch_place_rows(place, at_);
}

// Products of products: of one that lies by itself, all columns.
void StepLauncher::multiply_behind(const NormMix& op, const PlaceRows& place,
                                   std::span<const Target> targets) {
  size_t next = 0;
  for (const NormMix::Behind& b : op.behind) {
    if (b.by.weight == nullptr) continue;
    size_t from = 0;
    int32_t first = 0;
    while (from < place.products.size() && first < b.first) first += place.products[from++].columns;
    MILLRACE_CHECK(from < place.products.size() && first == b.first &&
                   place.products[from].columns == b.by.weight->cols);
    linears({place.products[from].data, plan_.rows, b.by.weight->cols, nullptr, nullptr, nullptr},
            targets.subspan(next++, 1), false);
  }
}

// The short convolution: of a layer that is nothing else the outputs, else what is scanned.
ShortConv StepLauncher::convolve(const StateMix& op) {
  const StateShape& s = spec_.state;
  const bool convolution = op.kind == StateMix::Kind::kConvolution;
  ShortConv conv;
  conv.x = w_.state_mix.as<const float>();
  conv.x_stride = s.mix_cols();
  conv.weight = state_vector(op.conv);
  conv.bias = state_vector(op.conv_bias);
  conv.channels = s.channels();
  conv.taps = s.taps;
  conv.silu = op.conv_silu;
  conv.out = (convolution ? w_.attention : w_.convolved).as<float>();
  conv.sequences = state_sequences();
  conv.pool = state_pool_of(op.layer);
  // Of a graph of single tokens nothing may depend on anything but the rows.
  conv.most_tokens = plan_.single_tokens ? 1 : batch_->most_tokens();
  if (convolution) {
    MILLRACE_CHECK(s.channels() == s.values());
    conv.gate = conv.x + s.gate_at();
    conv.gate_stride = s.mix_cols();
  }
  if (op.conv_keys != nullptr) {  // queries, keys and values, each with a matrix of its own
    MILLRACE_CHECK(!convolution && op.conv_bias == nullptr && !s.values_first);
    const auto part = [&](const Weight* weight, int64_t first, int64_t channels) {
      ShortConv of = conv;
      of.x += first;
      of.out += first;
      of.out_stride = s.channels();
      of.pool.at.inputs += first;
      of.weight = state_vector(weight);
      of.channels = channels;
      launch_short_conv(of, at_);
    };
    part(op.conv, s.query_at(), s.keys());
    part(op.conv_keys, s.key_at(), s.keys());
    part(op.conv_values, s.value_at(), s.values());
  } else {
    launch_short_conv(conv, at_);
  }
  return conv;
}

// Keys normed, decays and betas, between the convolution and the scan.
void StepLauncher::prepare_state(const StateMix& op, const StatePool& pool) {
  const StateShape& s = spec_.state;
  PrepareRows prepare;
  prepare.shape = s;
  prepare.delta = op.kind == StateMix::Kind::kGatedDelta;
  prepare.mix = w_.state_mix.as<const float>();
  prepare.convolved = w_.convolved.as<float>();
  prepare.a = state_vector(op.a);
  prepare.step_bias = state_vector(op.step_bias);
  prepare.step_min = op.step_min;
  prepare.step_max = op.step_max;
  prepare.logs = w_.decays.as<float>();
  prepare.betas = w_.betas.as<float>();
  prepare.sequence_of = in_batch(batch_->sequence_of());
  prepare.positions = in_batch(batch_->positions());
  prepare.pool = pool;
  prepare.rows = plan_.rows;
  MILLRACE_CHECK(prepare.delta || !s.channel_decay);
  launch_prepare_rows(prepare, at_);
}

void StepLauncher::operator()(const StateMix& op) {
  if (plan_.rows == 0) return;
  const StateShape& s = spec_.state;
  const ShortConv conv = convolve(op);
  if (op.kind == StateMix::Kind::kConvolution) return;
  prepare_state(op, conv.pool);
  if (s.channel_decay) {
    channel_scan(conv);
    return finish_state(op);
  }
  const bool delta = op.kind == StateMix::Kind::kGatedDelta;
  auto scan = scan_behind<StateScan>(conv, s, w_);
  scan.logs = w_.decays.as<const float>();
  (delta ? scan.betas : scan.steps) = w_.betas.as<const float>();
  scan.skip = state_vector(op.d);
  scan.scale = delta ? 1.0f / std::sqrt(static_cast<float>(s.key_dim)) : 1.0f;
  scan.most_tokens = conv.most_tokens;
  if (delta) {
    launch_gated_delta(scan, at_);
  } else {
    launch_selective_scan(scan, at_);
  }
  finish_state(op);
}

// The delta rule with a decay of each row of the state; conv: whose sequences and pool they are.
void StepLauncher::channel_scan(const ShortConv& conv) {
  const StateShape& s = spec_.state;
  auto scan = scan_behind<ReplayedScan>(conv, s, w_);
  scan.decays = w_.decays.as<const float>();
  scan.betas = w_.betas.as<const float>();
  scan.scale = 1.0f / std::sqrt(static_cast<float>(s.key_dim));
  launch_replayed_scan(scan, at_);
}

void StepLauncher::finish_state(const StateMix& op) {
  const StateShape& s = spec_.state;
  const bool delta = op.kind == StateMix::Kind::kGatedDelta;
  FinishRows finish;
  finish.y = w_.attention.as<float>();
  finish.gate = w_.state_mix.as<const float>() + s.gate_at();
  finish.gate_stride = s.mix_cols();
  finish.rows = plan_.rows;
  finish.columns = s.values();
  finish.norm = state_vector(op.norm.weight);
  finish.each_column = !delta;
  finish.norm_before_gate = delta || op.norm_before_gate;
  finish.gate_sigmoid = op.gate_sigmoid;
  finish.eps = op.norm.eps;
  finish.size = delta ? s.value_dim : op.norm_size > 0 ? op.norm_size : static_cast<int32_t>(s.values());
  MILLRACE_CHECK(finish.columns % finish.size == 0);
  launch_finish_rows(finish, at_);
}

}  // namespace millrace::cuda
