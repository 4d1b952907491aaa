// Steps with prompts that FP8 products compute: each run of such rows, and of others, by itself. Matrices
// without codes multiply all rows alike.
#include <algorithm>

#include "backend/cuda/step_launcher.h"
#include "backend/cuda/step_norms.h"
#include "base/check.h"

namespace millrace::cuda {
namespace {

bool has_fp8(const Linear& op) { return own(*op.weight).fp8_codes.bytes() > 0; }

}  // namespace

// Codes and scales take less than the bf16 that the buffer has room for.
Fp8Rows StepLauncher::fp8_rows(int64_t cols, int64_t rows) const {
  auto* const codes = w_.bf16_rows.as<uint8_t>();
  return {codes, reinterpret_cast<float*>(codes + rows * cols)};
}

void StepLauncher::round_fp8(const Rows& rows) const {
  RoundFp8 round;
  round.x = rows.x;
  round.norm_weight = rows.norm != nullptr ? vector_of(rows.norm->weight) : nullptr;
  round.eps = rows.norm != nullptr ? rows.norm->eps : 0.0f;
  round.rows = rows.count;
  round.cols = rows.cols;
  round.to = fp8_rows(rows.cols, rows.count);
  launch_round_fp8(round, at_);
}

// out (+)= W x + b of the rows that were rounded last.
void StepLauncher::fp8_product(const Linear& op, int64_t rows, void* out, DenseOut type, bool add) {
  const CudaWeight& w = own(*op.weight);
  const Fp8Rows x = fp8_rows(w.cols, rows);
  DenseGemm gemm;
  gemm.type = DenseType::kE4m3;
  gemm.a = x.codes;
  gemm.b = w.fp8_codes.as<const uint8_t>();
  gemm.c = out;
  gemm.m = rows;
  gemm.n = gemm.ldc = w.rows;
  gemm.k = gemm.lda = gemm.ldb = w.cols;
  gemm.a_scales = x.scales;
  gemm.b_scales = w.fp8_scales.as<const float>();
  gemm.a_scale_stride = gemm.b_scale_stride = fp8_row_scales(w.cols);
  gemm.epilogue.bias = vector_of(op.bias);
  gemm.epilogue.out = type;
  if (add) {
    gemm.epilogue.residual = out;
    gemm.epilogue.residual_stride = w.rows;
  }
  launch_dense(gemm, at_);
}

void StepLauncher::products_in_runs(const Rows& rows, std::span<const Target> targets, bool add) {
  MILLRACE_CHECK(rows.source == nullptr && rows.count == plan_.rows);
  std::vector<Target> in_fp8, others;
  for (const Target& target : targets) (has_fp8(target.linear) ? in_fp8 : others).push_back(target);
  if (!others.empty()) full_products(rows, others, add);
  if (in_fp8.empty()) return;
  for (const StepPlan::Run& run : plan_.runs) {
    Rows part = rows;
    part.x += run.first * rows.cols;
    part.count = run.count;
    std::vector<Target> to;
    for (const Target& t : in_fp8)
      to.push_back({t.linear, t.out + run.first * t.expected_rows, t.expected_rows});
    if (!run.fp8) {
      full_products(part, to, add);
      continue;
    }
    round_fp8(part);
    for (const Target& t : to) {
      MILLRACE_CHECK(t.linear.weight->rows == t.expected_rows && t.linear.weight->cols == rows.cols);
      fp8_product(t.linear, run.count, t.out, DenseOut::kF32, add);
    }
  }
}

// A gated layer whose three matrices have codes; else its products go one by one.
bool StepLauncher::fp8_ffn(const Ffn& op) {
  if (plan_.runs.empty() || op.gate.weight == nullptr ||
      op.activation == millrace::Activation::kClampedSwiglu || !has_fp8(op.gate) || !has_fp8(op.up) ||
      !has_fp8(op.down))
    return false;
  const int64_t inner = op.up.weight->rows, hidden = spec_.hidden;
  MILLRACE_CHECK(op.gate.weight->rows == inner && inner <= spec_.ffn && op.gate.weight->cols == hidden &&
                 op.up.weight->cols == hidden && op.down.weight->rows == hidden &&
                 op.down.weight->cols == inner);
  Rows rows{w_.residual.as<float>(), plan_.rows, hidden, &op.norm, nullptr, &w_.normed};
  if (!is_plain(op.norm)) {
    launch_row_norm(row_norm_of(op.norm, rows.x, rows.count, hidden, w_.normed.as<float>()), at_);
    rows = {w_.normed.as<float>(), plan_.rows, hidden, nullptr, nullptr, nullptr};
  }
  const bool as_it_is = !op.norm_after.present() && op.scale == 1.0f;
  float* const to = (as_it_is ? w_.residual : w_.normed).as<float>();
  for (const StepPlan::Run& run : plan_.runs) {
    Rows part = rows;
    part.x += run.first * hidden;
    part.count = run.count;
    float* const out = to + run.first * hidden;
    if (run.fp8) {
      fp8_gate_up(part, op);
      fp8_product(op.down, run.count, out, DenseOut::kF32, as_it_is);
      continue;
    }
    const Target first[] = {{op.gate, w_.gate.as<float>(), inner}, {op.up, w_.up.as<float>(), inner}};
    full_products(part, first, false);
    activate(op.activation, run.count * inner, w_.gate.as<float>(), w_.up.as<float>());
    const Target down{op.down, out, hidden};
    full_products({w_.gate.as<const float>(), run.count, inner, nullptr, nullptr, nullptr}, {&down, 1},
                  as_it_is);
  }
  if (!as_it_is) add_normed(op.norm_after, op.scale);
  return true;
}

// The rows that down multiplies, as codes. What is between is bf16.
void StepLauncher::fp8_gate_up(const Rows& rows, const Ffn& op) {
  round_fp8(rows);
  fp8_product(op.gate, rows.count, w_.gate.as<void>(), DenseOut::kBf16, false);
  fp8_product(op.up, rows.count, w_.up.as<void>(), DenseOut::kBf16, false);
  ActivateFp8 act;
  act.kind = kind_of(op.activation);
  act.gate = w_.gate.as<const uint16_t>();
  act.up = w_.up.as<const uint16_t>();
  act.rows = rows.count;
  act.cols = op.up.weight->rows;
  act.to = fp8_rows(act.cols, act.rows);
  launch_activate_fp8(act, at_);
}

}  // namespace millrace::cuda
