// Latent attention (DeepSeek V2) of a step: queries and keys out of what was compressed, the attention over
// one key a token, and the values behind it.
#include "backend/cuda/step_launcher.h"
#include "base/check.h"
#include "kernels/cuda/attention/latent.h"
#include "kernels/cuda/attention/split_plan.h"
#include "kernels/cuda/gemm/head_gemm.h"

namespace millrace::cuda {
namespace {

// One matrix per head, [heads, out, in].
HeadGemm head_gemm_of(const Linear& op, int32_t heads, int64_t out, int64_t in, int64_t rows) {
  const CudaWeight& weight = own(*op.weight);
  MILLRACE_CHECK(weight.experts == heads && weight.rows == out && weight.cols == in && op.bias == nullptr);
  HeadGemm gemm;
  gemm.packed = weight.packed;
  gemm.matrix = weight.matrix;
  gemm.heads = heads;
  gemm.rows = rows;
  return gemm;
}

}  // namespace

// The heads' queries wait in w_.attention, which nobody needs yet; what kv_a made is where other models have
// values.
void StepLauncher::operator()(const NormLatentQkv& op) {
  const LatentShape& s = spec_.latent;
  const int64_t heads = spec_.heads, q_dim = s.nope + s.rope, dim = spec_.head_dim;
  float* q = w_.attention.as<float>();
  const bool compresses = op.q_a.weight != nullptr;
  const Target targets[] = {{op.kv_a, w_.value.as<float>(), s.rank + s.rope},
                            {compresses ? op.q_a : op.q, compresses ? w_.compressed.as<float>() : q,
                             compresses ? int64_t{s.q_rank} : heads * q_dim}};
  linears({w_.residual.as<float>(), plan_.rows, spec_.hidden, &op.norm, nullptr, &w_.normed}, targets, false);
  if (compresses) {
    const Target target{op.q, q, heads * q_dim};
    linears({w_.compressed.as<float>(), plan_.rows, s.q_rank, &op.q_a_norm, nullptr, &w_.compressed},
            {&target, 1}, false);
  }
  LatentKeys keys;
  keys.compressed = w_.value.as<const float>();
  keys.norm_weight = op.kv_a_norm.weight != nullptr ? own(*op.kv_a_norm.weight).vector() : nullptr;
  keys.eps = op.kv_a_norm.eps;
  keys.rows = plan_.rows;
  keys.rope = s.rope;
  keys.rank = s.rank;
  keys.key = w_.key.as<float>();
  MILLRACE_CHECK(op.kv_a_norm.kind == Norm::Kind::kRms);
  launch_latent_keys(keys, at_);
  launch_latent_rope_queries(q, plan_.rows, spec_.heads, s.nope, s.rope, s.rank, w_.query.as<float>(), at_);
  HeadGemm absorb = head_gemm_of(op.k_b, spec_.heads, s.rank, s.nope, plan_.rows);
  absorb.x = q;
  absorb.x_row = heads * q_dim;
  absorb.x_head = q_dim;
  absorb.y = w_.query.as<float>() + s.rope;
  absorb.y_row = heads * dim;
  absorb.y_head = dim;
  launch_head_gemm(absorb, at_);
}

void StepLauncher::latent_attention(const Attend& op) {
  MILLRACE_CHECK(op.window == 0 && op.chunk == 0 && op.softcap == 0.0f && op.sinks == nullptr &&
                 !op.bidirectional && !op.gated);
  LatentAttention attention;
  attention.cache = cache_of(op.layer);
  attention.scale = op.scale;
  attention.rope = spec_.latent.rope;
  attention.rank = spec_.latent.rank;
  attention.rows = static_cast<int32_t>(plan_.rows);
  attention.max_splits = max_splits_for(plan_.last_position, 0);
  attention.query = w_.query.as<const float>();
  attention.out = w_.attention.as<float>();
  if (!latent_wgmma_) return launch_latent_generic(attention, at_);
  if (!plan_.single_tokens) {
    attention.chunks = in_batch(batch_->chunks());
    attention.num_chunks = batch_->num_chunks();
  }
  // Splits on CTAs of their own where rows alone leave SMs idle, though one takes half as long again so: its
  // queries are loaded and its sums stored for it alone. The bits are the same.
  const int64_t pieces = int64_t{plan_.single_tokens ? attention.rows : attention.num_chunks} *
                         ((spec_.heads + kLatentRows - 1) / kLatentRows);
  const int64_t sms = at_.device.sm_count(), splits = attention.max_splits;
  const int64_t in_turn = (pieces + sms - 1) / sms * splits, apart = (pieces * splits + sms - 1) / sms;
  if (splits > 1 && 3 * apart < 2 * in_turn &&
      latent_partial_bytes(plan_.rows, spec_.heads, attention.max_splits, spec_.latent.rank) <=
          w_.partial.bytes()) {
    attention.partial = w_.partial.as<float>();
  }
  launch_latent_wgmma(attention, at_);
}

void StepLauncher::head_values(const Linear& op) {
  const LatentShape& s = spec_.latent;
  const int64_t heads = spec_.heads, dim = spec_.head_dim;
  HeadGemm values = head_gemm_of(op, spec_.heads, s.value, s.rank, plan_.rows);
  values.x = w_.attention.as<const float>() + s.rope;
  values.x_row = heads * dim;
  values.x_head = dim;
  values.y = w_.query.as<float>();
  values.y_row = heads * s.value;
  values.y_head = s.value;
  launch_head_gemm(values, at_);
}

}  // namespace millrace::cuda
