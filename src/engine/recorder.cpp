#include "engine/recorder.h"

#include <algorithm>
#include <cmath>

namespace millrace {
namespace {

constexpr double kFirstBound = 10e-6;  // seconds
constexpr double kPerOctave = 4;
constexpr double kRateSeconds = 5;  // the past counts e times less after so long

int bucket_of(double seconds) {
  if (!(seconds > kFirstBound)) return 0;
  const double at = std::ceil(kPerOctave * std::log2(seconds / kFirstBound) - 1e-9);
  return static_cast<int>(std::min(at, static_cast<double>(Histogram::kBuckets - 1)));
}

}  // namespace

double Histogram::upper_bound_s(int bucket) { return kFirstBound * std::exp2(bucket / kPerOctave); }

uint64_t Histogram::total() const {
  uint64_t sum = 0;
  for (const uint64_t n : counts) sum += n;
  return sum;
}

double Histogram::mean_s() const {
  const uint64_t n = total();
  return n == 0 ? 0.0 : sum_s / static_cast<double>(n);
}

double Histogram::quantile_s(double fraction) const {
  const uint64_t n = total();
  if (n == 0) return 0.0;
  const double wanted = fraction * static_cast<double>(n);
  double sum = 0;
  for (int b = 0; b < kBuckets; ++b) {
    sum += static_cast<double>(counts[static_cast<size_t>(b)]);
    if (sum >= wanted && sum > 0) return upper_bound_s(b);
  }
  return upper_bound_s(kBuckets - 1);
}

void AtomicHistogram::add(double seconds) {
  Recorder::add(counts_[static_cast<size_t>(bucket_of(seconds))], 1);
  Recorder::add(sum_, seconds);
}

Histogram AtomicHistogram::snapshot() const {
  Histogram h;
  for (size_t b = 0; b < h.counts.size(); ++b) h.counts[b] = counts_[b].load(std::memory_order_relaxed);
  h.sum_s = sum_.load(std::memory_order_relaxed);
  return h;
}

void Rate::add(double now, double events) {
  const double before = at(now);
  weight_.store(before + events / kRateSeconds, std::memory_order_relaxed);
  time_.store(now, std::memory_order_relaxed);
}

double Rate::at(double now) const {
  const double age = std::max(0.0, now - time_.load(std::memory_order_relaxed));
  return weight_.load(std::memory_order_relaxed) * std::exp(-age / kRateSeconds);
}

EngineStats Recorder::snapshot() const {
  const auto get = [](const auto& atomic) { return atomic.load(std::memory_order_relaxed); };
  const double t = now();
  EngineStats s;
  s.uptime_s = t;
  s.submitted = get(submitted);
  s.finished = get(finished);
  s.cancelled = get(cancelled);
  s.expired = get(expired);
  s.failed = get(failed);
  s.running = static_cast<int32_t>(get(running));
  s.waiting = static_cast<int32_t>(get(waiting));
  s.swapped = static_cast<int32_t>(get(swapped));
  s.prompt_tokens = get(prompt_tokens);
  s.generated_tokens = get(generated_tokens);
  s.computed_tokens = get(computed_tokens);
  s.generated_tok_s = generated_rate.at(t);
  s.computed_tok_s = computed_rate.at(t);
  s.steps = get(steps);
  const double n = std::max<double>(1.0, static_cast<double>(s.steps));
  s.mean_batch = static_cast<double>(get(batch_sum)) / n;
  s.mean_rows = static_cast<double>(get(rows_sum)) / n;
  s.budget_use =
      static_cast<double>(get(rows_sum)) / std::max<double>(1.0, static_cast<double>(get(budget_sum)));
  s.busy_s = get(busy_s);
  s.wait_s = get(wait_s);
  s.decode_s = get(decode_s);
  s.decode_tokens = get(decode_tokens);
  s.schedule_s = get(schedule_s);
  s.sample_s = get(sample_s);
  s.blocks_total = get(blocks_total);
  s.blocks_used = get(blocks_held);
  s.blocks_cached = get(blocks_cached);
  s.blocks_free = get(blocks_free);
  s.states_used = get(states_held);
  s.states_cached = get(states_cached);
  s.states_free = get(states_free);
  s.ram_blocks = get(ram_blocks);
  s.ram_bytes = static_cast<uint64_t>(get(ram_bytes));
  s.disk_blocks = get(disk_blocks);
  s.disk_bytes = static_cast<uint64_t>(get(disk_bytes));
  s.cache_queries = get(cache_queries);
  s.cache_hits_pool = get(hits_pool);
  s.cache_hits_ram = get(hits_ram);
  s.cache_hits_disk = get(hits_disk);
  s.preemptions_swap = get(preemptions_swap);
  s.preemptions_recompute = get(preemptions_recompute);
  s.drafted = get(drafted);
  s.rows_picked_by_ranks = get(rows_picked_by_ranks);
  s.rows_gathered = get(rows_gathered);
  s.accepted = get(accepted);
  s.queue_time = queue_time.snapshot();
  s.first_token = first_token.snapshot();
  s.inter_token = inter_token.snapshot();
  s.request_time = request_time.snapshot();
  s.step_time = step_time.snapshot();
  return s;
}

}  // namespace millrace
