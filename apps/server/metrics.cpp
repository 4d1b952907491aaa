// GET /metrics and GET /stats: the engine's counters for Prometheus, and for the dashboard (docs/server.md).
#include <fmt/core.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <map>

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

// Numbers of every model, each under its name; those of the server as a whole have the name of the only one.
class Exposition {
 public:
  struct Model {
    std::string label;
    ModelSet::Status status;
    EngineStats stats;
  };
  explicit Exposition(ModelSet& models) {
    for (ModelSet::Status& status : models.list()) {
      std::string label = fmt::format("model_name={}", json_string(status.name));
      const EngineStats stats = models.stats(status.name);
      models_.push_back({std::move(label), std::move(status), stats});
    }
    if (models_.size() == 1) server_label_ = models_.front().label;
  }

  void head(std::string_view type, std::string_view name, std::string_view help) {
    out_ += fmt::format("# HELP millrace:{} {}\n# TYPE millrace:{} {}\n", name, help, name, type);
  }
  void of_server(std::string_view type, std::string_view name, std::string_view help, double value) {
    head(type, name, help);
    out_ += fmt::format("millrace:{}{{{}}} {}\n", name, server_label_, value);
  }
  void of_server_labelled(std::string_view name, std::string_view key, std::string_view label, double value) {
    const std::string_view comma = server_label_.empty() ? "" : ",";
    out_ += fmt::format("millrace:{}{{{}{}{}=\"{}\"}} {}\n", name, server_label_, comma, key, label, value);
  }
  template <typename Value>  // of a Model
  void value(std::string_view type, std::string_view name, std::string_view help, const Value& value) {
    head(type, name, help);
    for (const Model& m : models_) {
      out_ += fmt::format("millrace:{}{{{}}} {}\n", name, m.label, static_cast<double>(value(m)));
    }
  }
  template <typename Value>  // of an EngineStats
  void labelled(std::string_view name, std::string_view key, std::string_view label, const Value& value) {
    for (const Model& m : models_) {
      out_ += fmt::format("millrace:{}{{{},{}=\"{}\"}} {}\n", name, m.label, key, label,
                          static_cast<double>(std::invoke(value, m.stats)));
    }
  }
  // value(group) of every group of ranks, and value(rank) of their ranks; replicas are numbered.
  template <typename Value>
  void of_groups(std::string_view type, std::string_view name, std::string_view help, const Value& value) {
    head(type, name, help);
    for_groups([&](const std::string& label, const RankGroupStats& group) {
      out_ += fmt::format("millrace:{}{{{}}} {}\n", name, label, static_cast<double>(value(group)));
    });
  }
  template <typename Value>
  void of_ranks(std::string_view type, std::string_view name, std::string_view help, const Value& value) {
    head(type, name, help);
    for_groups([&](const std::string& label, const RankGroupStats& group) {
      for (const RankStats& rank : group.ranks) {
        out_ += fmt::format("millrace:{}{{{},rank=\"{}\"}} {}\n", name, label, rank.rank,
                            static_cast<double>(value(rank)));
      }
    });
  }
  template <typename T>
  void of_links(std::string_view type, std::string_view name, std::string_view help,
                std::vector<T> RankStats::*values) {
    head(type, name, help);
    for_groups([&](const std::string& label, const RankGroupStats& group) {
      for (const RankStats& rank : group.ranks) {
        for (size_t to = 0; to < (rank.*values).size(); ++to) {
          if (static_cast<int32_t>(to) == rank.rank) continue;
          out_ += fmt::format("millrace:{}{{{},from=\"{}\",to=\"{}\"}} {}\n", name, label, rank.rank, to,
                              (rank.*values)[to]);
        }
      }
    });
  }
  // Of ranks that mpirun started no group is known here.
  bool picks_by_ranks() const {
    return has_ranks() || std::any_of(models_.begin(), models_.end(), [](const Model& m) {
             return m.stats.rows_picked_by_ranks + m.stats.rows_gathered > 0;
           });
  }
  bool has_ranks() const {
    return std::any_of(models_.begin(), models_.end(),
                       [](const Model& m) { return !m.stats.rank_groups.empty(); });
  }
  // One bucket an octave: the engine keeps four.
  void histogram(std::string_view name, std::string_view help, Histogram EngineStats::*field) {
    head("histogram", name, help);
    for (const Model& m : models_) {
      const Histogram& h = m.stats.*field;
      uint64_t sum = 0;
      for (int b = 0; b < Histogram::kBuckets; ++b) {
        sum += h.counts[static_cast<size_t>(b)];
        if (b % 4 != 0) continue;
        out_ += fmt::format("millrace:{}_bucket{{{},le=\"{}\"}} {}\n", name, m.label,
                            Histogram::upper_bound_s(b), sum);
      }
      out_ += fmt::format("millrace:{}_bucket{{{},le=\"+Inf\"}} {}\n", name, m.label, sum);
      out_ += fmt::format("millrace:{}_sum{{{}}} {}\nmillrace:{}_count{{{}}} {}\n", name, m.label, h.sum_s,
                          name, m.label, sum);
    }
  }
  // Of the machine: what each counter says, once, whichever models' devices it is of.
  void energy() {
    std::map<std::string, double> joules;
    for (const Model& m : models_) joules.insert(m.stats.energy_joules.begin(), m.stats.energy_joules.end());
    if (joules.empty()) return;
    head("counter", "energy_joules_total", "Energy that the machine has used, by counter.");
    for (const auto& [counter, value] : joules)
      of_server_labelled("energy_joules_total", "counter", counter, value);
  }
  std::string take() { return std::move(out_); }

 private:
  template <typename Body>
  void for_groups(const Body& body) {
    for (const Model& m : models_) {
      for (size_t i = 0; i < m.stats.rank_groups.size(); ++i) {
        body(fmt::format("{},replica=\"{}\"", m.label, i), m.stats.rank_groups[i]);
      }
    }
  }

  std::vector<Model> models_;
  std::string server_label_, out_;
};

// A gauge or counter of every model, `value` of its EngineStats.
template <typename Value>
void gauge(Exposition& e, std::string_view name, std::string_view help, const Value& value) {
  e.value("gauge", name, help, [&](const Exposition::Model& m) { return std::invoke(value, m.stats); });
}
template <typename Value>
void counter(Exposition& e, std::string_view name, std::string_view help, const Value& value) {
  e.value("counter", name, help, [&](const Exposition::Model& m) { return std::invoke(value, m.stats); });
}

void add_requests(Exposition& e) {
  using Stats = EngineStats;
  gauge(e, "num_requests_running", "Samples being computed.", &Stats::running);
  gauge(e, "num_requests_waiting", "Samples waiting to start.", &Stats::waiting);
  gauge(e, "num_requests_swapped", "Samples swapped out.", &Stats::swapped);
}

void add_cache(Exposition& e) {
  using Stats = EngineStats;
  gauge(e, "kv_cache_usage_perc", "Blocks of the KV cache in use; 1 is all of them.", [](const Stats& s) {
    return ratio(static_cast<double>(s.blocks_used), static_cast<double>(s.blocks_total));
  });
  counter(e, "prefix_cache_queries_total", "Prompt tokens looked for in the prefix cache.",
          &Stats::cache_queries);
  counter(e, "prefix_cache_hits_total", "Prompt tokens found in it.",
          [](const Stats& s) { return s.cache_hits_pool + s.cache_hits_ram + s.cache_hits_disk; });
  e.head("counter", "prefix_cache_tier_hits_total", "Prompt tokens found, by tier.");
  e.labelled("prefix_cache_tier_hits_total", "tier", "pool", &Stats::cache_hits_pool);
  e.labelled("prefix_cache_tier_hits_total", "tier", "ram", &Stats::cache_hits_ram);
  e.labelled("prefix_cache_tier_hits_total", "tier", "disk", &Stats::cache_hits_disk);
  e.head("gauge", "kv_blocks", "Blocks of the KV cache, by where and what they are.");
  e.labelled("kv_blocks", "state", "used", &Stats::blocks_used);
  e.labelled("kv_blocks", "state", "cached", &Stats::blocks_cached);
  e.labelled("kv_blocks", "state", "free", &Stats::blocks_free);
  e.labelled("kv_blocks", "state", "ram", &Stats::ram_blocks);
  e.labelled("kv_blocks", "state", "disk", &Stats::disk_blocks);
  e.head("gauge", "kv_states", "Of these, states: of layers that have one in place of keys and values.");
  e.labelled("kv_states", "state", "used", &Stats::states_used);
  e.labelled("kv_states", "state", "cached", &Stats::states_cached);
  e.labelled("kv_states", "state", "free", &Stats::states_free);
}

void add_work(Exposition& e) {
  using Stats = EngineStats;
  counter(e, "prompt_tokens_total", "Prompt tokens, computed or found.", &Stats::prompt_tokens);
  counter(e, "generation_tokens_total", "Tokens given to clients.", &Stats::generated_tokens);
  counter(e, "computed_tokens_total", "Rows that went through the model.", &Stats::computed_tokens);
  counter(e, "engine_steps_total", "Steps of the engine.", &Stats::steps);
  counter(e, "num_preemptions_total", "Samples that had to give way.",
          [](const Stats& s) { return s.preemptions_swap + s.preemptions_recompute; });
  counter(e, "spec_decode_num_draft_tokens_total", "Tokens drafted.", &Stats::drafted);
  counter(e, "spec_decode_num_accepted_tokens_total", "Drafts that were right.", &Stats::accepted);
  e.head("counter", "request_success_total", "Requests of the engine, by how they ended.");
  e.labelled("request_success_total", "finished_reason", "done", &Stats::finished);
  e.labelled("request_success_total", "finished_reason", "abort", &Stats::cancelled);
  e.labelled("request_success_total", "finished_reason", "deadline", &Stats::expired);
  e.labelled("request_success_total", "finished_reason", "error", &Stats::failed);
  e.histogram("time_to_first_token_seconds", "From arrival to the first token.", &Stats::first_token);
  e.histogram("inter_token_latency_seconds", "Between two tokens of a sample.", &Stats::inter_token);
  e.histogram("e2e_request_latency_seconds", "From arrival to the end.", &Stats::request_time);
  e.histogram("request_queue_time_seconds", "From arrival to the first step.", &Stats::queue_time);
  e.histogram("step_time_seconds", "One step of the engine.", &Stats::step_time);
}

void add_models(Exposition& e) {
  using Model = Exposition::Model;
  e.value("gauge", "model_loaded", "Whether the model is loaded.",
          [](const Model& m) { return m.status.info.has_value() ? 1 : 0; });
  e.value("counter", "model_loads_total", "How often it was loaded.",
          [](const Model& m) { return m.status.loads; });
  e.value("counter", "model_load_failures_total", "How often it could not be loaded.",
          [](const Model& m) { return m.status.failed_loads; });
}

void add_ranks(Exposition& e) {
  if (e.has_ranks()) {
    e.of_groups("gauge", "ranks_wanted", "Ranks that share the model.",
                [](const RankGroupStats& g) { return g.wanted; });
    e.of_groups("gauge", "ranks_up", "Those that are there.",
                [](const RankGroupStats& g) { return g.ranks.size(); });
    e.of_groups("counter", "rank_restarts_total", "How often the group was formed anew.",
                [](const RankGroupStats& g) { return g.restarts; });
    e.of_ranks("gauge", "rank_heard_seconds", "Since it was last heard of.",
               [](const RankStats& r) { return r.heard_s; });
    e.of_ranks("counter", "rank_exchanges_total", "Calls of its communicator.",
               [](const RankStats& r) { return r.exchanges; });
    e.of_links("counter", "rank_link_bytes_total", "Bytes that a rank sent to another.", &RankStats::sent);
    e.of_links("gauge", "rank_link_latency_seconds", "Of a message of 8 bytes, when the group began.",
               &RankStats::latency_s);
    e.of_links("gauge", "rank_link_bytes_per_second", "Of long messages, when the group began.",
               &RankStats::bytes_per_s);
  }
  if (e.picks_by_ranks()) {
    counter(e, "rank_picked_rows_total", "Rows whose token ranks picked without bringing logits together.",
            &EngineStats::rows_picked_by_ranks);
    counter(e, "rank_gathered_rows_total", "Rows whose logits had to be brought together.",
            &EngineStats::rows_gathered);
  }
}

void add_server(Exposition& e, const Counters& c) {
  e.of_server("gauge", "http_connections", "Open connections.", static_cast<double>(c.connections.load()));
  e.of_server("gauge", "http_streams", "Answers under way.", static_cast<double>(c.streams.load()));
  e.of_server("gauge", "http_body_bytes", "Received of requests that are not whole yet.",
              static_cast<double>(c.body_bytes.load()));
  e.of_server("gauge", "http_queued_work", "Large requests that wait to be read.",
              static_cast<double>(c.queued_work.load()));
  e.of_server("gauge", "http_queued_work_limit", "How many may; more are answered with 503.",
              static_cast<double>(c.queued_work_limit.load()));
  e.head("counter", "http_responses_total", "HTTP responses, by class of status.");
  e.of_server_labelled("http_responses_total", "code", "2xx", static_cast<double>(c.status_2xx.load()));
  e.of_server_labelled("http_responses_total", "code", "4xx", static_cast<double>(c.status_4xx.load()));
  e.of_server_labelled("http_responses_total", "code", "5xx", static_cast<double>(c.status_5xx.load()));
  e.of_server("counter", "http_refused_connections_total", "Connections beyond the limit.",
              static_cast<double>(c.refused_connections.load()));
}

}  // namespace

HttpResponse metrics(Api& api) {
  Exposition e(api.models());
  add_requests(e);
  add_cache(e);
  add_work(e);
  add_models(e);
  add_ranks(e);
  add_server(e, api.counters());
  e.energy();
  e.of_server("gauge", "resident_memory_bytes", "Of this process.", static_cast<double>(resident_bytes()));
  return {.content_type = "text/plain; version=0.0.4; charset=utf-8", .body = e.take()};
}

namespace {

// One object for each group: a replica's.
Json ranks_part(const EngineStats& s) {
  Json groups = Json::array();
  for (const RankGroupStats& group : s.rank_groups) {
    Json ranks = Json::array();
    for (const RankStats& rank : group.ranks) {
      ranks.push_back({{"rank", rank.rank},
                       {"host", rank.host},
                       {"pid", rank.pid},
                       {"heard_s", rank.heard_s},
                       {"waiting_s", rank.waiting_s},
                       {"exchanges", rank.exchanges},
                       {"sent_bytes", rank.sent},
                       {"received_bytes", rank.received},
                       {"latency_s", rank.latency_s},
                       {"bytes_per_s", rank.bytes_per_s}});
    }
    groups.push_back({{"up", group.up},
                      {"wanted", group.wanted},
                      {"restarts", group.restarts},
                      {"last_loss", group.last_loss},
                      {"ranks", ranks}});
  }
  return groups;
}

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

// `models`: those that are meant; what is not loaded takes nothing.
Json memory_part(const std::vector<ModelSet::Status>& models, const EngineStats& s) {
  ModelInfo::Memory m;
  for (const ModelSet::Status& model : models) {
    if (!model.info) continue;
    const ModelInfo::Memory& one = model.info->memory;
    m.weights_mapped += one.weights_mapped;
    m.weights_copied += one.weights_copied;
    m.workspace += one.workspace;
    m.kv_pool += one.kv_pool;
    m.available = one.available;  // as it was when the last of them was loaded
  }
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

Json model_part(const ModelSet::Status& model) {
  const ModelInfo info = model.info.value_or(ModelInfo());
  return {{"id", model.name},
          {"loaded", model.info.has_value()},
          {"busy", model.leases},
          {"loads", model.loads},
          {"failed_loads", model.failed_loads},
          {"architecture", info.architecture},
          {"device", info.device},
          {"vocab", info.vocab},
          {"context", info.context},
          {"trained_context", info.trained_context},
          {"format", model.format}};
}

}  // namespace

HttpResponse stats_json(Api& api, const HttpRequest& request) {
  const std::string name = request.query_value("model");
  const EngineStats s = name.empty() ? api.models().stats() : api.models().stats(name);
  const std::vector<ModelSet::Status> all = api.models().list();
  const std::vector<ModelSet::Status> meant = name.empty() ? all : std::vector{api.models().status(name)};
  const auto loaded = [](const ModelSet::Status& model) { return model.info.has_value(); };
  const auto first = std::find_if(meant.begin(), meant.end(), loaded);
  Json models = Json::array();
  for (const ModelSet::Status& model : all) models.push_back(model_part(model));
  const double hits = static_cast<double>(s.cache_hits_pool + s.cache_hits_ram + s.cache_hits_disk);
  const Json stats = {
      {"now", unix_time()},
      {"server", server_part(api)},
      {"model", model_part(first != meant.end() ? *first : meant.front())},
      {"models", models},
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
        {"states", {{"used", s.states_used}, {"cached", s.states_cached}, {"free", s.states_free}}},
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
      {"memory", memory_part(meant, s)},
      {"rank_groups", ranks_part(s)},
      {"rank_sampling", {{"picked_rows", s.rows_picked_by_ranks}, {"gathered_rows", s.rows_gathered}}},
      {"history", api.timeline().history_json()},
      {"timeline", api.timeline().requests_json()}};
  return {.body = stats.dump(-1, ' ', false, Json::error_handler_t::replace),
          .headers = {{"cache-control", "no-store"}}};
}

}  // namespace millrace::server
