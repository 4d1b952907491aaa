#include "kernels/reference/naive_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/check.h"
#include "base/paging.h"
#include "kernels/quant/kv_types.h"

namespace millrace::reference {
namespace {

void attend_head(const Attention& op, int32_t position, int head, const float* q, float* out) {
  const int64_t dim = op.kv.head_dim;
  const int kv_head = head / (op.heads / op.kv.kv_heads);
  const int32_t first = op.window > 0  ? std::max(0, position - op.window + 1)
                        : op.chunk > 0 ? position / op.chunk * op.chunk
                                       : 0;
  int32_t last = position;
  if (op.bidirectional_length > 0) {
    last = op.bidirectional_length - 1;
    if (op.window > 0 && !op.both_ways) last = std::min(last, position + op.window - 1);
  }

  std::vector<double> weight(static_cast<size_t>(last - first + 1));
  double row_max = -std::numeric_limits<double>::infinity();
  if (op.sinks != nullptr) row_max = op.sinks[head];
  for (int32_t p = first; p <= last; ++p) {
    const float* k = cached(op.kv, op.table, 0, kv_head, p);
    double dot = 0;
    for (int64_t d = 0; d < dim; ++d) dot += static_cast<double>(q[d]) * k[d];
    weight[p - first] = dot * op.scale;
    if (op.softcap > 0) weight[p - first] = op.softcap * std::tanh(weight[p - first] / op.softcap);
    row_max = std::max(row_max, weight[p - first]);
  }
  double row_sum = op.sinks != nullptr ? std::exp(op.sinks[head] - row_max) : 0.0;
  for (double& w : weight) row_sum += w = std::exp(w - row_max);

  std::vector<double> sum(static_cast<size_t>(dim), 0.0);
  for (int32_t p = first; p <= last; ++p) {
    const float* v = cached(op.kv, op.table, 1, kv_head, p);
    for (int64_t d = 0; d < dim; ++d) sum[d] += weight[p - first] / row_sum * v[d];
  }
  for (int64_t d = 0; d < dim; ++d) out[d] = static_cast<float>(sum[d]);
}

}  // namespace

float* cached(const PagedKv& kv, const int32_t* table, int part, int head, int32_t position) {
  const int32_t block = table[position / kBlockTokens];
  MILLRACE_CHECK(block != kNoBlock);
  const int64_t token =
      (static_cast<int64_t>(std::min(part, kv.parts - 1)) * kv.kv_heads + head) * kBlockTokens +
      position % kBlockTokens;
  return kv.pool + block * kv.block_floats + kv.layer_offset + token * kv.head_dim;
}

void append_kv(const PagedKv& kv, const int32_t* table, int32_t position, const float* key,
               const float* value) {
  for (int h = 0; h < kv.kv_heads; ++h) {
    float* to_key = cached(kv, table, 0, h, position);
    std::copy_n(key + h * kv.head_dim, kv.head_dim, to_key);
    round_to_kv_type(kv.type, to_key, kv.head_dim);
    if (kv.parts == 1) continue;
    float* to_value = cached(kv, table, 1, h, position);
    std::copy_n(value + h * kv.head_dim, kv.head_dim, to_value);
    round_to_kv_type(kv.type, to_value, kv.head_dim);
  }
}

void attend(const Attention& op, int32_t position, const float* query, float* out) {
  for (int h = 0; h < op.heads; ++h) {
    const int64_t at = static_cast<int64_t>(h) * op.kv.head_dim;
    attend_head(op, position, h, query + at, out + at);
  }
}

}  // namespace millrace::reference
