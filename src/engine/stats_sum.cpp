#include "engine/stats_sum.h"

#include <algorithm>

namespace millrace {
namespace {

void add_histogram(Histogram& sum, const Histogram& one) {
  for (size_t b = 0; b < sum.counts.size(); ++b) sum.counts[b] += one.counts[b];
  sum.sum_s += one.sum_s;
}

// Of means over so many steps.
double mean(double a, uint64_t a_steps, double b, uint64_t b_steps) {
  const uint64_t steps = a_steps + b_steps;
  return steps == 0 ? 0
                    : (a * static_cast<double>(a_steps) + b * static_cast<double>(b_steps)) /
                          static_cast<double>(steps);
}

}  // namespace

void add_stats(EngineStats& sum, const EngineStats& one) {
  sum.mean_batch = mean(sum.mean_batch, sum.steps, one.mean_batch, one.steps);
  sum.mean_rows = mean(sum.mean_rows, sum.steps, one.mean_rows, one.steps);
  sum.budget_use = mean(sum.budget_use, sum.steps, one.budget_use, one.steps);
  sum.energy_joules.insert(one.energy_joules.begin(), one.energy_joules.end());  // of one GPU: once
  sum.uptime_s = std::max(sum.uptime_s, one.uptime_s);
  constexpr uint64_t EngineStats::*kCounters[] = {
      &EngineStats::submitted,        &EngineStats::finished,         &EngineStats::cancelled,
      &EngineStats::expired,          &EngineStats::failed,           &EngineStats::prompt_tokens,
      &EngineStats::generated_tokens, &EngineStats::computed_tokens,  &EngineStats::steps,
      &EngineStats::decode_tokens,    &EngineStats::ram_bytes,        &EngineStats::disk_bytes,
      &EngineStats::cache_queries,    &EngineStats::cache_hits_pool,  &EngineStats::cache_hits_ram,
      &EngineStats::cache_hits_disk,  &EngineStats::preemptions_swap, &EngineStats::preemptions_recompute,
      &EngineStats::drafted,          &EngineStats::accepted,         &EngineStats::rows_picked_by_ranks,
      &EngineStats::rows_gathered};
  for (const auto field : kCounters) sum.*field += one.*field;
  constexpr int32_t EngineStats::*kSamples[] = {&EngineStats::running, &EngineStats::waiting,
                                                &EngineStats::swapped};
  for (const auto field : kSamples) sum.*field += one.*field;
  constexpr int64_t EngineStats::*kBlocks[] = {
      &EngineStats::blocks_total, &EngineStats::blocks_used,   &EngineStats::blocks_cached,
      &EngineStats::blocks_free,  &EngineStats::ram_blocks,    &EngineStats::disk_blocks,
      &EngineStats::states_used,  &EngineStats::states_cached, &EngineStats::states_free};
  for (const auto field : kBlocks) sum.*field += one.*field;
  constexpr double EngineStats::*kSeconds[] = {&EngineStats::generated_tok_s, &EngineStats::computed_tok_s,
                                               &EngineStats::busy_s,          &EngineStats::wait_s,
                                               &EngineStats::schedule_s,      &EngineStats::sample_s,
                                               &EngineStats::decode_s};
  for (const auto field : kSeconds) sum.*field += one.*field;
  constexpr Histogram EngineStats::*kHistograms[] = {&EngineStats::queue_time, &EngineStats::first_token,
                                                     &EngineStats::inter_token, &EngineStats::request_time,
                                                     &EngineStats::step_time};
  for (const auto field : kHistograms) add_histogram(sum.*field, one.*field);
  if (one.memory.reserved > 0) sum.memory = one.memory;
  sum.rank_groups.insert(sum.rank_groups.end(), one.rank_groups.begin(), one.rank_groups.end());
}

EngineStats counters_of(const EngineStats& stats) {
  EngineStats left = stats;
  left.running = left.waiting = left.swapped = 0;
  left.blocks_total = left.blocks_used = left.blocks_cached = left.blocks_free = 0;
  left.states_used = left.states_cached = left.states_free = 0;
  left.ram_blocks = left.disk_blocks = 0;
  left.ram_bytes = left.disk_bytes = 0;
  left.uptime_s = left.generated_tok_s = left.computed_tok_s = 0;
  left.memory = {};
  left.rank_groups.clear();
  return left;
}

}  // namespace millrace
