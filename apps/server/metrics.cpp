// GET /metrics and GET /stats: the engine's counters for Prometheus, and for the dashboard (docs/server.md).
#include <fmt/format.h>

#include <fstream>

#include "base/json_writer.h"
#include "endpoints.h"
#include "json_fields.h"

namespace millrace::server {
namespace {

size_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  size_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * 4096;
}

double ratio(double part, double whole) { return whole > 0 ? part / whole : 0.0; }

class Exposition {
 public:
  explicit Exposition(const std::string& model) : label_(fmt::format("model_name={}", json_string(model))) {}

  void value(std::string_view type, std::string_view name, std::string_view help, double value) {
    head(type, name, help);
    out_ += fmt::format("millrace:{}{{{}}} {}\n", name, label_, value);
  }
  void head(std::string_view type, std::string_view name, std::string_view help) {
    out_ += fmt::format("# HELP millrace:{} {}\n# TYPE millrace:{} {}\n", name, help, name, type);
  }
  void labelled(std::string_view name, std::string_view key, std::string_view label, double value) {
    out_ += fmt::format("millrace:{}{{{},{}=\"{}\"}} {}\n", name, label_, key, label, value);
  }
  // One bucket an octave: the engine keeps four.
  void histogram(std::string_view name, std::string_view help, const Histogram& h) {
    head("histogram", name, help);
    uint64_t sum = 0;
    for (int b = 0; b < Histogram::kBuckets; ++b) {
      sum += h.counts[static_cast<size_t>(b)];
      if (b % 4 != 0) continue;
      out_ += fmt::format("millrace:{}_bucket{{{},le=\"{}\"}} {}\n", name, label_,
                          Histogram::upper_bound_s(b), sum);
    }
    out_ += fmt::format("millrace:{}_bucket{{{},le=\"+Inf\"}} {}\n", name, label_, sum);
    out_ += fmt::format("millrace:{}_sum{{{}}} {}\nmillrace:{}_count{{{}}} {}\n", name, label_, h.sum_s, name,
                        label_, sum);
  }
  std::string take() { return std::move(out_); }

 private:
  std::string label_, out_;
};

}  // namespace

HttpResponse metrics(Api& api) {
  const EngineStats s = api.engine().stats();
  const Counters& c = api.counters();
  Exposition e(api.model_id());
  const auto gauge = [&](std::string_view name, std::string_view help, auto value) {
    e.value("gauge", name, help, static_cast<double>(value));
  };
  const auto counter = [&](std::string_view name, std::string_view help, auto value) {
    e.value("counter", name, help, static_cast<double>(value));
  };
  gauge("num_requests_running", "Samples being computed.", s.running);
  gauge("num_requests_waiting", "Samples waiting to start.", s.waiting);
  gauge("num_requests_swapped", "Samples swapped out.", s.swapped);
  gauge("kv_cache_usage_perc", "Blocks of the KV cache in use; 1 is all of them.",
        ratio(static_cast<double>(s.blocks_used), static_cast<double>(s.blocks_total)));
  counter("prefix_cache_queries_total", "Prompt tokens looked for in the prefix cache.", s.cache_queries);
  counter("prefix_cache_hits_total", "Prompt tokens found in it.",
          s.cache_hits_pool + s.cache_hits_ram + s.cache_hits_disk);
  e.head("counter", "prefix_cache_tier_hits_total", "Prompt tokens found, by tier.");
  e.labelled("prefix_cache_tier_hits_total", "tier", "pool", static_cast<double>(s.cache_hits_pool));
  e.labelled("prefix_cache_tier_hits_total", "tier", "ram", static_cast<double>(s.cache_hits_ram));
  e.labelled("prefix_cache_tier_hits_total", "tier", "disk", static_cast<double>(s.cache_hits_disk));
  e.head("gauge", "kv_blocks", "Blocks of the KV cache, by where and what they are.");
  e.labelled("kv_blocks", "state", "used", static_cast<double>(s.blocks_used));
  e.labelled("kv_blocks", "state", "cached", static_cast<double>(s.blocks_cached));
  e.labelled("kv_blocks", "state", "free", static_cast<double>(s.blocks_free));
  e.labelled("kv_blocks", "state", "ram", static_cast<double>(s.ram_blocks));
  e.labelled("kv_blocks", "state", "disk", static_cast<double>(s.disk_blocks));
  counter("prompt_tokens_total", "Prompt tokens, computed or found.", s.prompt_tokens);
  counter("generation_tokens_total", "Tokens given to clients.", s.generated_tokens);
  counter("computed_tokens_total", "Rows that went through the model.", s.computed_tokens);
  counter("engine_steps_total", "Steps of the engine.", s.steps);
  counter("num_preemptions_total", "Samples that had to give way.",
          s.preemptions_swap + s.preemptions_recompute);
  counter("spec_decode_num_draft_tokens_total", "Tokens drafted.", s.drafted);
  counter("spec_decode_num_accepted_tokens_total", "Drafts that were right.", s.accepted);
  e.head("counter", "request_success_total", "Requests of the engine, by how they ended.");
  e.labelled("request_success_total", "finished_reason", "done", static_cast<double>(s.finished));
  e.labelled("request_success_total", "finished_reason", "abort", static_cast<double>(s.cancelled));
  e.labelled("request_success_total", "finished_reason", "deadline", static_cast<double>(s.expired));
  e.labelled("request_success_total", "finished_reason", "error", static_cast<double>(s.failed));
  e.histogram("time_to_first_token_seconds", "From arrival to the first token.", s.first_token);
  e.histogram("inter_token_latency_seconds", "Between two tokens of a sample.", s.inter_token);
  e.histogram("e2e_request_latency_seconds", "From arrival to the end.", s.request_time);
  e.histogram("request_queue_time_seconds", "From arrival to the first step.", s.queue_time);
  e.histogram("step_time_seconds", "One step of the engine.", s.step_time);
  gauge("http_connections", "Open connections.", c.connections.load());
  gauge("http_streams", "Answers under way.", c.streams.load());
  gauge("http_queued_work", "Large requests that wait to be read.", c.queued_work.load());
  gauge("http_queued_work_limit", "How many may; more are answered with 503.", c.queued_work_limit.load());
  e.head("counter", "http_responses_total", "HTTP responses, by class of status.");
  e.labelled("http_responses_total", "code", "2xx", static_cast<double>(c.status_2xx.load()));
  e.labelled("http_responses_total", "code", "4xx", static_cast<double>(c.status_4xx.load()));
  e.labelled("http_responses_total", "code", "5xx", static_cast<double>(c.status_5xx.load()));
  counter("http_refused_connections_total", "Connections beyond the limit.", c.refused_connections.load());
  gauge("resident_memory_bytes", "Of this process.", resident_bytes());
  return {.content_type = "text/plain; version=0.0.4; charset=utf-8", .body = e.take()};
}

namespace {

Json latency(const Histogram& h) {
  return {{"count", h.total()},
          {"mean_s", h.mean_s()},
          {"p50_s", h.quantile_s(0.5)},
          {"p90_s", h.quantile_s(0.9)},
          {"p99_s", h.quantile_s(0.99)}};
}

Json server_part(Api& api) {
  const Counters& c = api.counters();
  return {{"version", MILLRACE_VERSION},
          {"uptime_s", api.uptime_s()},
          {"connections", c.connections.load()},
          {"max_connections", api.options().max_connections},
          {"streams", c.streams.load()},
          {"requests", c.requests.load()},
          {"responses",
           {{"2xx", c.status_2xx.load()}, {"4xx", c.status_4xx.load()}, {"5xx", c.status_5xx.load()}}},
          {"draining", api.draining()}};
}

Json memory_part(const Api& api, const EngineStats& s) {
  const ModelInfo::Memory& m = api.engine_info().memory;
  return {{"plan",
           {{"weights_mapped", m.weights_mapped},
            {"weights_repacked", m.weights_copied},
            {"workspace", m.workspace},
            {"kv_pool", m.kv_pool},
            {"total", m.weights_mapped + m.weights_copied + m.workspace + m.kv_pool},
            {"available", m.available}}},
          {"buffers",
           {{"in_use", s.memory.in_use},
            {"peak", s.memory.peak},
            {"reserved", s.memory.reserved},
            {"fragmentation", s.memory.fragmentation}}},
          {"resident", resident_bytes()}};
}

}  // namespace

HttpResponse stats_json(Api& api) {
  const EngineStats s = api.engine().stats();
  const ModelInfo& info = api.engine_info();
  const double hits = static_cast<double>(s.cache_hits_pool + s.cache_hits_ram + s.cache_hits_disk);
  const Json stats = {
      {"now", unix_time()},
      {"server", server_part(api)},
      {"model",
       {{"id", api.model_id()},
        {"architecture", info.architecture},
        {"device", info.device},
        {"vocab", info.vocab},
        {"context", info.context},
        {"trained_context", info.trained_context},
        {"format", std::string(api.format().name())}}},
      {"requests",
       {{"submitted", s.submitted},
        {"finished", s.finished},
        {"cancelled", s.cancelled},
        {"expired", s.expired},
        {"failed", s.failed},
        {"running", s.running},
        {"waiting", s.waiting},
        {"swapped", s.swapped}}},
      {"throughput",
       {{"generated_tok_s", s.generated_tok_s},
        {"computed_tok_s", s.computed_tok_s},
        {"prompt_tokens", s.prompt_tokens},
        {"generated_tokens", s.generated_tokens},
        {"computed_tokens", s.computed_tokens}}},
      {"steps",
       {{"count", s.steps},
        {"mean_batch", s.mean_batch},
        {"mean_rows", s.mean_rows},
        {"budget_use", s.budget_use},
        {"model_s", s.busy_s},
        {"schedule_s", s.schedule_s},
        {"sample_s", s.sample_s}}},
      {"blocks",
       {{"total", s.blocks_total},
        {"used", s.blocks_used},
        {"cached", s.blocks_cached},
        {"free", s.blocks_free},
        {"usage", ratio(static_cast<double>(s.blocks_used), static_cast<double>(s.blocks_total))},
        {"ram", {{"blocks", s.ram_blocks}, {"bytes", s.ram_bytes}}},
        {"disk", {{"blocks", s.disk_blocks}, {"bytes", s.disk_bytes}}}}},
      {"cache",
       {{"queries", s.cache_queries},
        {"hits_pool", s.cache_hits_pool},
        {"hits_ram", s.cache_hits_ram},
        {"hits_disk", s.cache_hits_disk},
        {"hit_rate", ratio(hits, static_cast<double>(s.cache_queries))}}},
      {"preemptions", {{"swap", s.preemptions_swap}, {"recompute", s.preemptions_recompute}}},
      {"speculation",
       {{"drafted", s.drafted},
        {"accepted", s.accepted},
        {"acceptance", ratio(static_cast<double>(s.accepted), static_cast<double>(s.drafted))}}},
      {"latency",
       {{"queue", latency(s.queue_time)},
        {"first_token", latency(s.first_token)},
        {"inter_token", latency(s.inter_token)},
        {"request", latency(s.request_time)},
        {"step", latency(s.step_time)}}},
      {"memory", memory_part(api, s)},
      {"history", api.timeline().history_json()},
      {"timeline", api.timeline().requests_json()}};
  return {.body = stats.dump(-1, ' ', false, Json::error_handler_t::replace),
          .headers = {{"cache-control", "no-store"}}};
}

}  // namespace millrace::server
