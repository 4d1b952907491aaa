#include "kernels/reference/naive_flash_attention.h"

#include <cmath>
#include <limits>

#include "base/float_bits.h"

namespace millrace::reference {
namespace {

constexpr int32_t kPositionsPerScale = 128;
constexpr double kNever = -std::numeric_limits<double>::infinity();

double element(const mr_flash_tensor& t, mr_dtype type, int64_t at) {
  switch (type) {
    case MR_F32:
      return static_cast<const float*>(t.data)[at];
    case MR_F16:
      return to_float(Half{static_cast<const uint16_t*>(t.data)[at]});
    case MR_BF16:
      return to_float(BFloat16{static_cast<const uint16_t*>(t.data)[at]});
    default:
      return to_float(Fp8E4M3{static_cast<const uint8_t*>(t.data)[at]});
  }
}

std::vector<double> row_at(const mr_flash_tensor& t, mr_dtype type, int64_t at, int32_t dim, double scale) {
  std::vector<double> row(static_cast<size_t>(dim));
  for (int32_t d = 0; d < dim; ++d) row[d] = element(t, type, at + d) * scale;
  return row;
}

std::vector<double> query_row(const FlashInputs& in, int32_t b, int32_t h, int32_t i) {
  const mr_flash_problem& p = in.problem;
  const int64_t row = flash_query_row(p, b) + i;
  const int64_t at = p.cu_q != nullptr ? row * in.q.seq_stride : b * in.q.batch_stride + i * in.q.seq_stride;
  const double scale = p.type == MR_F8_E4M3 ? p.q_scales[row * p.heads + h] : 1.0;
  return row_at(in.q, p.type, at + h * in.q.head_stride, p.head_dim, scale);
}

std::vector<double> key_row(const FlashInputs& in, const mr_flash_tensor& t, const float* scales, int32_t dim,
                            int32_t b, int32_t kv_head, int32_t j) {
  const mr_flash_problem& p = in.problem;
  int64_t at = kv_head * t.head_stride;
  if (p.pages != nullptr) {
    at += p.pages[b * p.pages_stride + j / p.page_tokens] * t.batch_stride + j % p.page_tokens * t.seq_stride;
  } else if (p.cu_k != nullptr) {
    at += (int64_t{p.cu_k[b]} + j) * t.seq_stride;
  } else {
    at += b * t.batch_stride + j * t.seq_stride;
  }
  double scale = 1.0;
  if (p.type == MR_F8_E4M3) {
    const int64_t groups = (int64_t{p.max_k} + kPositionsPerScale - 1) / kPositionsPerScale;
    scale = scales[(int64_t{b} * p.kv_heads + kv_head) * groups + j / kPositionsPerScale];
  }
  return row_at(t, p.type, at, dim, scale);
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// One query row: its scores, after the soft cap, and what they add up to.
struct ScoredRow {
  std::vector<double> score;  // [k_len]; -infinity where the key is not seen
  double lse;
};
ScoredRow score_row(const FlashInputs& in, int32_t b, int32_t h, int32_t i) {
  const mr_flash_problem& p = in.problem;
  const int32_t k_len = flash_key_length(p, b), kv_head = h / (p.heads / p.kv_heads);
  const double scale = p.scale != 0.0f ? p.scale : 1.0 / std::sqrt(static_cast<double>(p.head_dim));
  const std::vector<double> q = query_row(in, b, h, i);
  ScoredRow row{std::vector<double>(static_cast<size_t>(k_len), kNever), kNever};
  double largest = p.sinks != nullptr ? p.sinks[h] : kNever;
  for (int32_t j = 0; j < k_len; ++j) {
    if (!flash_sees(p, b, h, i, j)) continue;
    double s = scale * dot(q, key_row(in, in.k, p.k_scales, p.head_dim, b, kv_head, j));
    if (p.softcap > 0.0f) s = p.softcap * std::tanh(s / p.softcap);
    row.score[j] = s;
    largest = std::max(largest, s);
  }
  if (largest == kNever) return row;
  double sum = p.sinks != nullptr ? std::exp(p.sinks[h] - largest) : 0.0;
  for (const double s : row.score) sum += std::exp(s - largest);
  row.lse = largest + std::log(sum);
  return row;
}

// Calls f(b, h, i, row of all) for every query row and head.
template <class F>
void for_each_query(const mr_flash_problem& p, const F& f) {
  for (int32_t b = 0; b < p.batch; ++b) {
    for (int32_t i = 0; i < flash_query_length(p, b); ++i) {
      for (int32_t h = 0; h < p.heads; ++h) f(b, h, i, flash_query_row(p, b) + i);
    }
  }
}

void add_scaled(std::vector<double>& to, int64_t at, double by, const std::vector<double>& x) {
  for (size_t d = 0; d < x.size(); ++d) to[static_cast<size_t>(at) + d] += by * x[d];
}

}  // namespace

int64_t flash_query_row(const mr_flash_problem& p, int32_t b) {
  return p.cu_q != nullptr ? p.cu_q[b] : int64_t{b} * p.max_q;
}
int32_t flash_query_length(const mr_flash_problem& p, int32_t b) {
  return p.cu_q != nullptr ? p.cu_q[b + 1] - p.cu_q[b] : p.max_q;
}
int64_t flash_key_row(const mr_flash_problem& p, int32_t b) {
  return p.pages == nullptr && p.cu_k != nullptr ? p.cu_k[b] : int64_t{b} * p.max_k;
}
int32_t flash_key_length(const mr_flash_problem& p, int32_t b) {
  if (p.pages != nullptr) return p.k_lengths[b];
  return p.cu_k != nullptr ? p.cu_k[b + 1] - p.cu_k[b] : p.max_k;
}

bool flash_sees(const mr_flash_problem& p, int32_t b, int32_t h, int32_t i, int32_t j) {
  const int64_t position = int64_t{i} + flash_key_length(p, b) - flash_query_length(p, b);
  if (p.window_left >= 0 && j < position - p.window_left) return false;
  if (p.window_right >= 0 && j > position + p.window_right) return false;
  if (p.blocks == nullptr) return true;
  const mr_flash_blocks& blocks = *p.blocks;
  const int64_t n = (int64_t{b} * p.heads + h) * blocks.q_blocks + i / blocks.block_q;
  for (int32_t at = blocks.row_starts[n]; at < blocks.row_starts[n + 1]; ++at) {
    if (blocks.columns[at] == j / blocks.block_k) return true;
  }
  return false;
}

FlashOutputs flash_forward(const FlashInputs& in) {
  const mr_flash_problem& p = in.problem;
  const auto rows = static_cast<size_t>(flash_query_row(p, p.batch) * p.heads);
  FlashOutputs result{std::vector<double>(rows * static_cast<size_t>(p.value_dim), 0.0),
                      std::vector<double>(rows)};
  for_each_query(p, [&](int32_t b, int32_t h, int32_t i, int64_t n) {
    const ScoredRow row = score_row(in, b, h, i);
    result.lse[n * p.heads + h] = row.lse;
    for (size_t j = 0; j < row.score.size(); ++j) {
      if (row.score[j] == kNever) continue;
      const std::vector<double> v =
          key_row(in, in.v, p.v_scales, p.value_dim, b, h / (p.heads / p.kv_heads), static_cast<int32_t>(j));
      add_scaled(result.out, (n * p.heads + h) * p.value_dim, std::exp(row.score[j] - row.lse), v);
    }
  });
  return result;
}

FlashGradients flash_backward(const FlashInputs& in, const std::vector<double>& d_out) {
  const mr_flash_problem& p = in.problem;
  const double scale = p.scale != 0.0f ? p.scale : 1.0 / std::sqrt(static_cast<double>(p.head_dim));
  const auto queries = static_cast<size_t>(flash_query_row(p, p.batch) * p.heads);
  const auto keys = static_cast<size_t>(flash_key_row(p, p.batch) * p.kv_heads);
  FlashGradients g{std::vector<double>(queries * static_cast<size_t>(p.head_dim)),
                   std::vector<double>(keys * static_cast<size_t>(p.head_dim)),
                   std::vector<double>(keys * static_cast<size_t>(p.value_dim)),
                   std::vector<double>(p.sinks != nullptr ? static_cast<size_t>(p.heads) : 0)};
  for_each_query(p, [&](int32_t b, int32_t h, int32_t i, int64_t n) {
    const ScoredRow row = score_row(in, b, h, i);
    const int32_t kv_head = h / (p.heads / p.kv_heads);
    const auto first = d_out.begin() + (n * p.heads + h) * p.value_dim;
    const std::vector<double> grad(first, first + p.value_dim), q = query_row(in, b, h, i);
    // d of a weight: grad . v; delta: the weighted mean of those, the sink's being 0.
    std::vector<double> weight(row.score.size()), d_weight(row.score.size());
    double delta = 0;
    for (size_t j = 0; j < row.score.size(); ++j) {
      if (row.score[j] == kNever) continue;
      weight[j] = std::exp(row.score[j] - row.lse);
      d_weight[j] = dot(grad, key_row(in, in.v, nullptr, p.value_dim, b, kv_head, static_cast<int32_t>(j)));
      delta += weight[j] * d_weight[j];
    }
    if (p.sinks != nullptr) g.d_sinks[h] -= std::exp(p.sinks[h] - row.lse) * delta;
    for (size_t j = 0; j < row.score.size(); ++j) {
      if (row.score[j] == kNever) continue;
      double d_score = weight[j] * (d_weight[j] - delta) * scale;
      if (p.softcap > 0.0f) d_score *= 1.0 - std::pow(row.score[j] / p.softcap, 2);
      const int64_t key = (flash_key_row(p, b) + static_cast<int64_t>(j)) * p.kv_heads + kv_head;
      add_scaled(g.d_v, key * p.value_dim, weight[j], grad);
      add_scaled(g.d_k, key * p.head_dim, d_score, q);
      add_scaled(g.d_q, (n * p.heads + h) * p.head_dim, d_score,
                 key_row(in, in.k, nullptr, p.head_dim, b, kv_head, static_cast<int32_t>(j)));
    }
  });
  return g;
}

void flash_merge(std::vector<double>& out, double& lse, const std::vector<double>& other, double other_lse) {
  if (other_lse == kNever) return;
  const double both = lse == kNever
                          ? other_lse
                          : std::max(lse, other_lse) + std::log1p(std::exp(-std::fabs(lse - other_lse)));
  for (size_t d = 0; d < out.size(); ++d)
    out[d] = std::exp(lse - both) * out[d] + std::exp(other_lse - both) * other[d];
  lse = both;
}

}  // namespace millrace::reference
