#include "timeline.h"

#include <algorithm>
#include <cmath>

namespace millrace::server {

double unix_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::shared_ptr<Timeline::Entry> Timeline::add(Entry entry) {
  auto shared = std::make_shared<Entry>(std::move(entry));
  if (!on_) return shared;
  const std::lock_guard lock(mutex_);
  // chatcmpl-7, resp_8: as many as were added before, and nothing of the id but what kind it is.
  const size_t kind = shared->id.find_first_of("-_");
  shared->shown_id =
      shared->id.substr(0, kind == std::string::npos ? 0 : kind + 1) + std::to_string(++added_);
  entries_.push_front(shared);
  if (entries_.size() > kRequests) entries_.pop_back();
  return shared;
}

void Timeline::keep(const Sample& sample) {
  samples_.push_back(sample);
  if (samples_.size() > kSamples) samples_.pop_front();
}

void Timeline::sample(const EngineStats& stats, int64_t streams, double now) {
  const std::lock_guard lock(mutex_);
  // Of this second alone: the engine's own rates are smoothed over several.
  const double elapsed = last_time_ > 0 ? now - last_time_ : 0;
  const auto rate = [&](uint64_t count, uint64_t before) {
    return elapsed > 0 ? static_cast<double>(count - before) / elapsed : 0.0;
  };
  Sample s{.time = now,
           .generated_tok_s = rate(stats.generated_tokens, last_generated_),
           .computed_tok_s = rate(stats.computed_tokens, last_computed_),
           .running = stats.running,
           .waiting = stats.waiting,
           .blocks_used = stats.blocks_used,
           .blocks_cached = stats.blocks_cached,
           .streams = streams};
  Histogram fresh = stats.first_token;
  for (size_t b = 0; b < fresh.counts.size(); ++b) fresh.counts[b] -= last_first_token_.counts[b];
  if (fresh.total() > 0) s.first_token_p50_s = fresh.quantile_s(0.5);
  const auto seconds = static_cast<size_t>(std::clamp(std::round(elapsed), 1.0, double{kSamples}));
  for (size_t i = 1; i < seconds; ++i) keep({.time = last_time_ + static_cast<double>(i), .missed = true});
  last_first_token_ = stats.first_token;
  last_time_ = now;
  last_generated_ = stats.generated_tokens;
  last_computed_ = stats.computed_tokens;
  keep(s);
}

namespace {

Json or_null(const std::optional<double>& value) { return value ? Json(*value) : Json(nullptr); }

}  // namespace

Json Timeline::requests_json() const {
  const std::lock_guard lock(mutex_);
  Json list = Json::array();
  for (const auto& e : entries_) {
    list.push_back({{"id", e->shown_id},
                    {"request_id", e->request_id},
                    {"endpoint", e->endpoint},
                    {"model", e->model},
                    {"stream", e->stream},
                    {"start", e->start},
                    {"state", e->state},
                    {"queue_s", or_null(e->queue_s)},
                    {"first_token_s", or_null(e->first_token_s)},
                    {"total_s", or_null(e->total_s)},
                    {"finish", e->finish.empty() ? Json(nullptr) : Json(e->finish)},
                    {"prompt_tokens", e->prompt_tokens},
                    {"cached_tokens", e->cached_tokens},
                    {"generated_tokens", e->generated_tokens},
                    {"samples", e->samples},
                    {"preemptions", e->preemptions}});
  }
  return list;
}

Json Timeline::history_json() const {
  const std::lock_guard lock(mutex_);
  const auto column = [&](const auto& field) {
    Json list = Json::array();
    for (const Sample& s : samples_) list.push_back(s.missed ? Json(nullptr) : Json(field(s)));
    return list;
  };
  return {{"interval_s", 1},
          {"end", samples_.empty() ? 0.0 : std::floor(samples_.back().time)},
          {"generated_tok_s", column([](const Sample& s) { return s.generated_tok_s; })},
          {"computed_tok_s", column([](const Sample& s) { return s.computed_tok_s; })},
          {"running", column([](const Sample& s) { return s.running; })},
          {"waiting", column([](const Sample& s) { return s.waiting; })},
          {"blocks_used", column([](const Sample& s) { return s.blocks_used; })},
          {"blocks_cached", column([](const Sample& s) { return s.blocks_cached; })},
          {"streams", column([](const Sample& s) { return s.streams; })},
          {"first_token_p50_s", column([](const Sample& s) { return or_null(s.first_token_p50_s); })}};
}

}  // namespace millrace::server
