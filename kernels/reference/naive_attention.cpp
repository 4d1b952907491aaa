#include "kernels/reference/naive_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "base/check.h"
#include "base/float_bits.h"
#include "base/paging.h"
#include "base/sparse_pages.h"
#include "kernels/quant/kv_types.h"

namespace millrace::reference {
namespace {

// The bound of a page's scores for one query.
double bound_of(const Attention& op, int kv_head, int32_t page, const float* q) {
  double bound = 0;
  for (int64_t d = 0; d < op.kv.head_dim; ++d) {
    float least = cached(op.kv, op.table, 0, kv_head, page * kBlockTokens)[d], largest = least;
    for (int32_t t = 1; t < kBlockTokens; ++t) {
      const float key = cached(op.kv, op.table, 0, kv_head, page * kBlockTokens + t)[d];
      least = std::min(least, key);
      largest = std::max(largest, key);
    }
    const double low = to_float(BFloat16{bf16_below(least)}), high = to_float(BFloat16{bf16_above(largest)});
    bound += std::max(q[d] * low, q[d] * high);
  }
  return bound * op.scale;
}

// Which pages a token reads for one KV head, up to its own. query: [heads][head_dim]
std::vector<bool> chosen_pages(const Attention& op, int32_t position, int kv_head, const float* query) {
  const int32_t before = position / kBlockTokens;
  std::vector<bool> read(static_cast<size_t>(before) + 1, true);
  if (op.sparse_pages == 0 || before + 1 <= op.sparse_pages) return read;
  std::vector<double> weight(static_cast<size_t>(before), 0.0), share(weight.size());
  const int group = op.heads / op.kv.kv_heads;
  for (int h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    for (int32_t page = 0; page < before; ++page)
      share[page] = bound_of(op, kv_head, page, query + static_cast<int64_t>(h) * op.kv.head_dim);
    const double largest = *std::max_element(share.begin(), share.end());
    double sum = 0;
    for (double& s : share) sum += s = std::exp(s - largest);
    for (int32_t page = 0; page < before; ++page) weight[page] += share[page] / sum;
  }
  const PageChoice choice = page_choice(op.sparse_pages, before + 1);
  std::vector<int32_t> order;
  for (int32_t page = choice.first; page < choice.last; ++page) order.push_back(page);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return weight[a] > weight[b]; });
  for (size_t i = static_cast<size_t>(choice.wanted); i < order.size(); ++i) read[order[i]] = false;
  return read;
}

void attend_head(const Attention& op, const std::vector<bool>& pages, int32_t position, int head,
                 const float* q, float* out) {
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
  const auto reads = [&](int32_t p) {
    return (pages.empty() || pages[p / kBlockTokens]) && (op.chosen == nullptr || (*op.chosen)[p]);
  };
  for (int32_t p = first; p <= last; ++p) {
    if (!reads(p)) {
      weight[p - first] = -std::numeric_limits<double>::infinity();
      continue;
    }
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
    if (!reads(p)) continue;
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

std::vector<bool> indexed_tokens(const Indexer& op, int32_t position, const float* query,
                                 const float* weights) {
  const auto visible = static_cast<size_t>(position) + 1;
  std::vector<bool> chosen(visible, true);
  if (visible <= static_cast<size_t>(op.top)) return chosen;
  std::vector<double> score(visible, 0.0);
  for (size_t t = 0; t < visible; ++t) {
    const float* key = cached(op.keys, op.table, 0, 0, static_cast<int32_t>(t));
    for (int64_t h = 0; h < op.heads; ++h) {
      double dot = 0;
      for (int64_t d = 0; d < op.keys.head_dim; ++d)
        dot += static_cast<double>(query[h * op.keys.head_dim + d]) * key[d];
      score[t] += weights[h] * std::max(0.0, dot);
    }
  }
  std::vector<size_t> order(visible);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return score[a] > score[b]; });
  for (size_t i = static_cast<size_t>(op.top); i < visible; ++i) chosen[order[i]] = false;
  return chosen;
}

void attend(const Attention& op, int32_t position, const float* query, float* out) {
  const bool sparse = op.sparse_pages > 0 && op.window == 0 && op.chunk == 0 && op.bidirectional_length == 0;
  std::vector<bool> pages;  // empty: all
  for (int h = 0; h < op.heads; ++h) {
    const int64_t at = static_cast<int64_t>(h) * op.kv.head_dim;
    const int group = op.heads / op.kv.kv_heads;
    if (sparse && h % group == 0) pages = chosen_pages(op, position, h / group, query);
    attend_head(op, pages, position, h, query + at, out + at);
  }
}

}  // namespace millrace::reference
