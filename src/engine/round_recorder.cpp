#include "engine/round_recorder.h"

namespace millrace {
namespace {

void set_gauge(Recorder::Gauge& gauge, int64_t value) { gauge.store(value, std::memory_order_relaxed); }
void set_counter(Recorder::Counter& counter, uint64_t value) {
  counter.store(value, std::memory_order_relaxed);
}

}  // namespace

void RoundRecorder::round(double begin, bool decoded) {
  gauges(false);
  const uint64_t generated = recorder_.generated_tokens.load(std::memory_order_relaxed);
  if (decoded) {
    Recorder::add(recorder_.decode_s, recorder_.now() - begin);
    Recorder::add(recorder_.decode_tokens, generated - generated_);
  }
  generated_ = generated;
}

void RoundRecorder::gauges(bool all) {
  set_gauge(recorder_.running, scheduler_.running());
  set_gauge(recorder_.waiting, scheduler_.waiting());
  set_gauge(recorder_.swapped, scheduler_.swapped());
  constexpr uint64_t kEvery = 32;  // rounds: the cache's own counts are not free
  if (all || ++rounds_ % kEvery == 0) cache_gauges();
}

void RoundRecorder::cache_gauges() {
  const kv::CacheStats stats = cache_.stats();
  int64_t total = 0, free = 0, cached = 0, held = 0;
  int64_t states_held = 0, states_cached = 0, states_free = 0;
  for (const auto& group : stats.groups) {
    total += group.total;
    free += group.free;
    cached += group.cached;
    held += group.held + group.loading;
    if (!group.sparse) continue;
    states_free += group.free;
    states_cached += group.cached;
    states_held += group.held + group.loading;
  }
  set_gauge(recorder_.blocks_total, total);
  set_gauge(recorder_.blocks_free, free);
  set_gauge(recorder_.blocks_cached, cached);
  set_gauge(recorder_.blocks_held, held);
  set_gauge(recorder_.states_free, states_free);
  set_gauge(recorder_.states_cached, states_cached);
  set_gauge(recorder_.states_held, states_held);
  set_gauge(recorder_.ram_blocks, stats.ram.blocks);
  set_gauge(recorder_.ram_bytes, static_cast<int64_t>(stats.ram.bytes));
  set_gauge(recorder_.disk_blocks, stats.disk.blocks);
  set_gauge(recorder_.disk_bytes, static_cast<int64_t>(stats.disk.bytes));
  set_counter(recorder_.cache_queries, stats.prompt_tokens);
  set_counter(recorder_.hits_pool, stats.main.hit_tokens);
  set_counter(recorder_.hits_ram, stats.ram.hit_tokens);
  set_counter(recorder_.hits_disk, stats.disk.hit_tokens);
}

}  // namespace millrace
