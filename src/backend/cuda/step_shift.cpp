// The launches of RWKV 7: the products of its two mixes, shifted by a token, and its recurrence.
#include "backend/cuda/step_launcher.h"
#include "backend/cuda/step_norms.h"
#include "base/check.h"
#include "kernels/cuda/linear/replayed_scan.h"
#include "kernels/cuda/linear/time_mix.h"

namespace millrace::cuda {

// Workspace::shifted = normed + (that of the token before - normed) by. `keep`: for the next step, once a
// mix.
void StepLauncher::shift_rows(int layer, int64_t place, const float* by, bool keep) {
  TokenShift shift;
  shift.x = w_.normed.as<const float>();
  shift.by = by;
  shift.rows = plan_.rows;
  shift.cols = spec_.hidden;
  shift.place = place * spec_.hidden;
  shift.keep = keep;
  shift.sequence_of = in_batch(batch_->sequence_of());
  shift.positions = in_batch(batch_->positions());
  shift.pool = state_pool_of(layer);
  shift.out = w_.shifted.as<float>();
  launch_token_shift(shift, at_);
}

void StepLauncher::operator()(const TimeMix& op) {
  if (plan_.rows == 0) return;
  const StateShape& s = spec_.state;
  const int64_t size = plan_.rows * spec_.hidden;
  MILLRACE_CHECK(s.wkv7 && s.keys() == spec_.hidden && s.values() == spec_.hidden &&
                 s.key_dim == s.value_dim);
  hidden(op.norm, plan_.rows);
  float* parts[kTimeMixParts];
  for (int64_t i = 0; i < kTimeMixParts; ++i) parts[i] = w_.time_mix.as<float>() + i * size;
  const TimeMixProducts products{.r = parts[0],
                                 .k = parts[1],
                                 .v = parts[2],
                                 .decay = parts[3],
                                 .rate = parts[4],
                                 .mixed = parts[5],
                                 .gate = parts[6]};
  multiply_shifted(op, products);
  scan_time_mix(op, products);
}

// Each of a shift of its own, one after another in the same memory.
void StepLauncher::multiply_shifted(const TimeMix& op, const TimeMixProducts& to) {
  enum Input { kR, kDecay, kK, kV, kRate, kGate };
  const auto shift = [&](Input input) {
    shift_rows(op.layer, 0, vector_of(op.shift) + input * int64_t{spec_.hidden}, input == kR);
  };
  const auto multiply = [&](const Linear& by, const float* x, float* y) {
    const Target target{by, y, by.weight->rows};
    linears({x, plan_.rows, by.weight->cols, nullptr, nullptr, nullptr}, {&target, 1}, false);
  };
  const float* shifted = w_.shifted.as<const float>();
  const auto down = [&](const TimeMix::LowRankProduct& by) {
    MILLRACE_CHECK(by.down.weight->rows <= spec_.state.projected);
    multiply(by.down, shifted, w_.projected.as<float>());
    return plan_.rows * by.down.weight->rows;
  };
  const auto up = [&](const TimeMix::LowRankProduct& by, float* y) {
    multiply(by.up, w_.projected.as<const float>(), y);
  };
  shift(kR);
  multiply(op.r, shifted, to.r);
  shift(kDecay);
  launch_squash(Squash::kTanh, down(op.decay), w_.projected.as<float>(), at_);
  up(op.decay, to.decay);
  shift(kK);
  multiply(op.k, shifted, to.k);
  shift(kV);
  multiply(op.v, shifted, to.v);
  if (!op.first) {
    down(op.value);
    up(op.value, to.mixed);
  }
  shift(kRate);
  down(op.rate);
  up(op.rate, to.rate);
  shift(kGate);
  launch_squash(Squash::kSigmoid, down(op.gate), w_.projected.as<float>(), at_);
  up(op.gate, to.gate);
}

// The recurrence over them, between what is done to rows before and behind it.
void StepLauncher::scan_time_mix(const TimeMix& op, const TimeMixProducts& of) {
  const StateShape& s = spec_.state;
  PrepareTimeMix prepare;
  prepare.k = of.k;
  prepare.v = of.v;
  prepare.decay = of.decay;
  prepare.rate = of.rate;
  prepare.mixed = of.mixed;
  prepare.first_values = w_.first_values.as<float>();
  prepare.first = op.first;
  prepare.k_k = vector_of(op.k_k);
  prepare.k_a = vector_of(op.k_a);
  prepare.rows = plan_.rows;
  prepare.heads = s.key_heads;
  prepare.dim = s.key_dim;
  prepare.sequence_of = in_batch(batch_->sequence_of());
  prepare.positions = in_batch(batch_->positions());
  prepare.pool = state_pool_of(op.layer);
  launch_prepare_time_mix(prepare, at_);

  ReplayedScan scan;
  scan.wkv7 = true;
  scan.q = of.r;
  scan.k = of.k;
  scan.v = of.v;
  scan.q_stride = scan.k_stride = scan.v_stride = spec_.hidden;
  scan.decays = of.decay;
  scan.a = of.mixed;
  scan.b = of.rate;
  scan.out = w_.attention.as<float>();
  scan.key_heads = scan.heads = s.key_heads;
  scan.key_dim = scan.value_dim = s.key_dim;
  scan.sequences = state_sequences();
  scan.pool = prepare.pool;
  launch_replayed_scan(scan, at_);

  FinishTimeMix finish;
  finish.y = w_.attention.as<float>();
  finish.r = of.r;
  finish.k = of.k;
  finish.v = of.v;
  finish.gate = of.gate;
  finish.r_k = vector_of(op.r_k);
  finish.norm = vector_of(op.head_norm.weight);
  finish.norm_bias = vector_of(op.head_norm.bias);
  finish.eps = op.head_norm.eps;
  finish.rows = plan_.rows;
  finish.heads = s.key_heads;
  finish.dim = s.key_dim;
  launch_finish_time_mix(finish, at_);
}

void StepLauncher::operator()(const ChannelMix& op) {
  if (plan_.rows == 0) return;
  hidden(op.norm, plan_.rows);
  shift_rows(op.layer, 1, vector_of(op.shift), true);
  gate_up({w_.shifted.as<float>(), plan_.rows, spec_.hidden, nullptr, nullptr, nullptr}, {}, op.key,
          millrace::Activation::kReluSquared);
  linear_add(op.value, {w_.gate.as<float>(), plan_.rows, op.key.weight->rows, nullptr, nullptr, nullptr}, {},
             1.0f);
}

}  // namespace millrace::cuda
