#include "kernels/cpu/sample/draw.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/sampling_math.h"

namespace millrace::cpu {
namespace {

// Likeliest first, ties to the lower id.
bool before(const DrawEntry& a, const DrawEntry& b) {
  return a.weight > b.weight || (a.weight == b.weight && a.token < b.token);
}

// Entries of the weights that are left.
int64_t fill_entries(const float* weights, int64_t vocab, DrawEntry* entries) {
  int64_t count = 0;
  for (int64_t i = 0; i < vocab; ++i) {
    if (weights[i] > 0.0f) entries[count++] = {weights[i], static_cast<int32_t>(i)};
  }
  return count;
}

// Everything behind `last` is dropped.
void cut_behind(float* weights, int64_t vocab, const DrawEntry& last) {
  for (int64_t i = 0; i < vocab; ++i) {
    if (before(last, {weights[i], static_cast<int32_t>(i)})) weights[i] = 0.0f;
  }
}

void cut_to_top_k(float* weights, int64_t vocab, int32_t k, DrawEntry* entries) {
  const int64_t count = fill_entries(weights, vocab, entries);
  if (k >= count) return;
  std::nth_element(entries, entries + k - 1, entries + count, before);
  cut_behind(weights, vocab, entries[k - 1]);
}

uint64_t total_units(const float* weights, int64_t vocab) {
  uint64_t total = 0;
  for (int64_t i = 0; i < vocab; ++i) total += sampling::units_of(weights[i]);
  return total;
}

// The fewest likeliest whose units reach the mass: the range that holds the last of them is halved until one
// entry is left.
void cut_to_top_p(float* weights, int64_t vocab, float top_p, DrawEntry* entries) {
  uint64_t left = sampling::units_of_mass(top_p, total_units(weights, vocab));
  DrawEntry *first = entries, *last = entries + fill_entries(weights, vocab, entries);
  while (last - first > 1) {
    DrawEntry* middle = first + (last - first) / 2;
    std::nth_element(first, middle, last, before);
    uint64_t upper = 0;
    for (const DrawEntry* e = first; e != middle; ++e) upper += sampling::units_of(e->weight);
    if (upper >= left) {
      last = middle;
    } else {
      left -= upper;
      first = middle;
    }
  }
  cut_behind(weights, vocab, *first);
}

}  // namespace

DrawScratch* take_draw_scratch(Arena& arena, int threads, int64_t vocab) {
  auto* scratch = arena.take<DrawScratch>(threads);
  for (int t = 0; t < threads; ++t) {
    const DrawScratch own{arena.take<float>(vocab), arena.take<DrawEntry>(vocab)};
    if (scratch != nullptr) scratch[t] = own;
  }
  return scratch;
}

int32_t draw_token(const float* logits, int64_t vocab, const DrawParams& params, const DrawScratch& scratch) {
  int32_t top = kTokenNone;
  float largest = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < vocab; ++i) {
    if (std::isnan(logits[i])) return kTokenNan;
    if (logits[i] > largest) {
      largest = logits[i];
      top = static_cast<int32_t>(i);
    }
  }
  if (top == kTokenNone || !params.draw) return top;
  float* weights = scratch.weights;
  for (int64_t i = 0; i < vocab; ++i) weights[i] = sampling::weight_of(logits[i], largest, params.scale);
  if (params.top_k > 0 && params.top_k < vocab) cut_to_top_k(weights, vocab, params.top_k, scratch.entries);
  if (params.top_p < 1.0f) cut_to_top_p(weights, vocab, params.top_p, scratch.entries);
  if (params.min_p > 0.0f) {
    for (int64_t i = 0; i < vocab; ++i) {
      if (weights[i] < params.min_p) weights[i] = 0.0f;
    }
  }
  uint64_t left = sampling::drawn_unit(params.uniform, total_units(weights, vocab));
  int64_t picked = 0;
  for (; left >= sampling::units_of(weights[picked]); ++picked) left -= sampling::units_of(weights[picked]);
  return static_cast<int32_t>(picked);
}

}  // namespace millrace::cpu
