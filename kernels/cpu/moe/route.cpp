#include "kernels/cpu/moe/route.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace millrace::cpu {
namespace {

constexpr int64_t kRoutedPerTask = 16;  // tokens

// Sum of exp(score - top) over all experts, in their order.
float sum_of_exponentials(const KernelTable& kernels, const float* scores, int64_t experts, float top) {
  constexpr int64_t kAtOnce = 64;
  float sum = 0.0f;
  for (int64_t first = 0; first < experts; first += kAtOnce) {
    const int64_t count = std::min(kAtOnce, experts - first);
    float exponentials[kAtOnce];
    for (int64_t i = 0; i < count; ++i) exponentials[i] = scores[first + i] - top;
    kernels.exp(exponentials, count, exponentials);
    for (int64_t i = 0; i < count; ++i) sum += exponentials[i];
  }
  return sum;
}

}  // namespace

void route_top_k(const KernelTable& kernels, const TopK& op, int64_t token) {
  const int64_t experts = op.experts, k = op.k;
  const float* scores = op.scores + token * experts;
  int32_t* chosen = op.chosen + token * k;
  float* weights = op.weights + token * k;
  const auto key = [&](int64_t e) {
    return std::isnan(scores[e]) ? -std::numeric_limits<float>::infinity() : scores[e];
  };
  const int64_t size = experts / op.groups;
  const auto largest = [&](int64_t group) {
    float most = key(group * size);
    for (int64_t e = group * size + 1; e < (group + 1) * size; ++e) most = std::max(most, key(e));
    return most;
  };
  const auto is_eligible = [&](int64_t group) {  // fewer than groups_chosen come before it
    const float mine = largest(group);
    int before = 0;
    for (int64_t g = 0; g < op.groups; ++g) {
      const float other = largest(g);
      before += other > mine || (other == mine && g < group) ? 1 : 0;
    }
    return before < op.groups_chosen;
  };
  for (int64_t slot = 0; slot < k; ++slot) {
    int32_t best = -1;
    for (int32_t e = 0; e < experts; ++e) {
      if (op.groups_chosen < op.groups && e % size == 0 && !is_eligible(e / size)) {
        e += static_cast<int32_t>(size) - 1;
        continue;
      }
      const bool taken = std::find(chosen, chosen + slot, e) != chosen + slot;
      if (!taken && (best < 0 || key(e) > key(best))) best = e;
    }
    chosen[slot] = best;
  }
  const float top = scores[chosen[0]];
  for (int64_t slot = 0; slot < k; ++slot) weights[slot] = scores[chosen[slot]] - top;
  kernels.exp(weights, k, weights);
  float sum = 0.0f;
  if (op.softmax_over == TopK::SoftmaxOver::kAll) {
    sum = sum_of_exponentials(kernels, scores, experts, top);
  } else {
    for (int64_t slot = 0; slot < k; ++slot) sum += weights[slot];
  }
  for (int64_t slot = 0; slot < k; ++slot) weights[slot] /= sum;
}

namespace {

// NaN comes last.
float choice_key(const SigmoidTopK& op, const float* weights, int64_t expert) {
  const float key = weights[expert] + (op.bias == nullptr ? 0.0f : op.bias[expert]);
  return std::isnan(key) ? -std::numeric_limits<float>::infinity() : key;
}

// The two largest keys of a group, added.
float group_key(const SigmoidTopK& op, const float* weights, int64_t group) {
  const int64_t size = op.experts / op.groups;
  float first = -std::numeric_limits<float>::infinity(), second = first;
  for (int64_t e = group * size; e < (group + 1) * size; ++e) {
    const float key = choice_key(op, weights, e);
    if (key > first) {
      second = first;
      first = key;
    } else if (key > second) {
      second = key;
    }
  }
  return size > 1 ? first + second : first;
}

// Whether fewer than groups_chosen groups come before this one.
bool group_is_eligible(const SigmoidTopK& op, const float* weights, int64_t group) {
  if (op.groups_chosen >= op.groups) return true;
  const float key = group_key(op, weights, group);
  int before = 0;
  for (int64_t g = 0; g < op.groups; ++g) {
    const float other = group_key(op, weights, g);
    before += other > key || (other == key && g < group) ? 1 : 0;
  }
  return before < op.groups_chosen;
}

void route_sigmoid(const KernelTable& kernels, const SigmoidTopK& op, int64_t token) {
  float* of = op.scores + token * op.experts;
  int32_t* chosen = op.chosen + token * op.k;
  float* weights = op.weights + token * op.k;
  for (int64_t e = 0; e < op.experts; ++e) of[e] = -of[e];
  kernels.exp(of, op.experts, of);
  for (int64_t e = 0; e < op.experts; ++e) of[e] = 1.0f / (1.0f + of[e]);
  const int64_t size = op.experts / op.groups;
  std::fill_n(chosen, op.k, -1);
  for (int64_t g = 0; g < op.groups; ++g) {
    if (!group_is_eligible(op, of, g)) continue;
    for (auto e = static_cast<int32_t>(g * size); e < (g + 1) * size; ++e) {
      int32_t moved = e;  // insertion, ties to the lower index
      for (int64_t slot = 0; slot < op.k; ++slot) {
        const bool before = chosen[slot] < 0 || choice_key(op, of, moved) > choice_key(op, of, chosen[slot]);
        if (before) std::swap(moved, chosen[slot]);
        if (moved < 0) break;
      }
    }
  }
  float sum = 0.0f;
  for (int64_t slot = 0; slot < op.k; ++slot) sum += weights[slot] = of[chosen[slot]];
  if (!op.renormalize) return;
  for (int64_t slot = 0; slot < op.k; ++slot) weights[slot] /= sum + 1e-20f;
}

}  // namespace

void route_sigmoid_rows(const Context& ctx, const SigmoidTopK& op, int64_t rows) {
  ctx.pool.parallel_for(rows, kRoutedPerTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) route_sigmoid(ctx.kernels, op, t);
  });
}

void route_top_k_rows(const Context& ctx, const TopK& op, int64_t rows) {
  ctx.pool.parallel_for(rows, kRoutedPerTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) route_top_k(ctx.kernels, op, t);
  });
}

ActivationFormats route_tokens(const Context& ctx, const RouteTokens& op) {
  const int64_t rows = op.norm.rows, cols = op.norm.cols;
  const ActivationFormats formats = formats_for(ctx.kernels, {op.router}, rows);
  const ActivationRows x = op.normed.rows(op.norm.y, rows, cols, formats);
  const GemmProduct product{op.router, op.scores, op.top_k.experts};
  if (rows < kTileHeight * ctx.pool.size()) {
    norm_quantize_rows(ctx, op.norm, formats, op.normed);
    gemm(ctx, {&product, 1}, x, rows);
    route_top_k_rows(ctx, op.top_k, rows);
    return formats;
  }
  // With many tokens one loop does it all, a group of them at a time: threads wait for each other once.
  const int64_t height = formats.bf16_tiles ? bf16_tile_height(rows) : kTileHeight;
  ctx.pool.parallel_for(tasks_for(rows, height), 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task * height, count = std::min(height, rows - first);
      for (int64_t t = first; t < first + count; ++t) {
        norm_row(ctx.kernels, op.norm, t, formats, op.normed);
      }
      gemm_part(ctx, product, 0, op.top_k.experts, x, first, count, thread);
      for (int64_t t = first; t < first + count; ++t) route_top_k(ctx.kernels, op.top_k, t);
    }
  });
  return formats;
}

ExpertOrder take_expert_order(Arena& arena, int64_t experts, int64_t rows, int64_t k) {
  ExpertOrder order{};
  order.start = arena.take<int32_t>(experts + 1);
  order.active = arena.take<int32_t>(experts);
  order.token_of = arena.take<int32_t>(rows * k);
  order.sorted_row = arena.take<int32_t>(rows * k);
  return order;
}

// A counting sort.
void sort_by_expert(const int32_t* chosen, int64_t rows, int64_t k, int64_t experts, ExpertOrder& order) {
  int32_t* start = order.start;
  std::fill_n(start, experts + 1, 0);
  const int64_t count = rows * k;
  for (int64_t i = 0; i < count; ++i) {
    if (chosen[i] >= 0) ++start[chosen[i] + 1];
  }
  order.num_active = 0;
  for (int32_t e = 0; e < experts; ++e) {
    if (start[e + 1] > 0) order.active[order.num_active++] = e;
    start[e + 1] += start[e];
  }
  for (int64_t i = 0; i < count; ++i) {
    if (chosen[i] < 0) {
      order.sorted_row[i] = -1;
      continue;
    }
    const int32_t at = start[chosen[i]]++;
    order.token_of[at] = static_cast<int32_t>(i / k);
    order.sorted_row[i] = at;
  }
  // Every start has moved to its end: the next one's start.
  for (int64_t e = experts; e > 0; --e) start[e] = start[e - 1];
  start[0] = 0;
  // The experts with the most tokens first: what is handed out last is short, and nobody waits for it.
  std::sort(order.active, order.active + order.num_active, [&](int32_t a, int32_t b) {
    const int64_t of_a = order.rows_of(a), of_b = order.rows_of(b);
    return of_a != of_b ? of_a > of_b : a < b;
  });
}

}  // namespace millrace::cpu
