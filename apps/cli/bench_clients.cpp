// millrace bench --clients N: N clients that each send a request, wait for its end and send the next, against
// one engine. Lengths are spread evenly between a quarter of -p (-n) and all of it. One client alone is
// measured first, in the same run: what batching gains is the ratio.
#include "bench_clients.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <ctime>
#include <deque>
#include <mutex>

#include "base/error.h"
#include "bench_energy.h"
#include "interrupt.h"
#include "millrace/engine.h"
#include "model_options.h"
#include "open_model.h"
#include "output.h"
#include "prompt.h"

namespace millrace::cli {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

struct Load {
  int32_t clients, requests, prompt, generate, shared_prefix;
  std::vector<int32_t> priorities;
  bool exact = false;
  float temperature = 0.0f, top_p = 1.0f;
  int32_t top_k = 0;
  std::string adapter = {};
};

struct Result {
  double seconds = 0, cpu_s = 0;  // cpu_s: of the whole process
  int64_t prompt_tokens = 0, generated_tokens = 0, cached_tokens = 0, failed = 0;
  double decode_s = 0;  // of steps without prompts
  uint64_t decode_tokens = 0;
  EnergyUse energy;
  std::map<int32_t, std::vector<double>> queue_s, first_token_s;  // by priority
  double tok_s() const { return seconds > 0 ? static_cast<double>(generated_tokens) / seconds : 0; }
};

double process_cpu_s() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double quantile(std::vector<double> values, double fraction) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const auto at = static_cast<size_t>(fraction * static_cast<double>(values.size() - 1) + 0.5);
  return values[std::min(at, values.size() - 1)];
}

// Streams that have something to read, in order of their news.
class ReadyList {
 public:
  void add(size_t stream) {
    {
      const std::lock_guard lock(mutex_);
      ready_.push_back(stream);
    }
    news_.notify_one();
  }
  std::optional<size_t> next(std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    if (!news_.wait_for(lock, timeout, [&] { return !ready_.empty(); })) return std::nullopt;
    const size_t stream = ready_.front();
    ready_.pop_front();
    return stream;
  }

 private:
  std::mutex mutex_;
  std::condition_variable news_;
  std::deque<size_t> ready_;
};

class Clients {
 public:
  Clients(Engine& engine, const Load& load, uint64_t seed) : engine_(engine), load_(load), state_(seed) {
    for (int32_t i = 0; i < load.shared_prefix; ++i) prefix_.push_back(token());
  }

  Result run(const std::function<void(double seconds)>& live) {
    const Clock::time_point start = Clock::now();
    const double cpu_before = process_cpu_s();
    const EngineStats before = engine_.stats();
    const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
    ReadyList ready;  // outlives the streams that tell it
    std::vector<std::optional<EventStream>> streams(static_cast<size_t>(load_.clients));
    std::vector<int32_t> sent(streams.size(), 0), priority(streams.size(), 0);
    std::vector<bool> ended(streams.size(), false);  // news may come after the last event was read
    const auto send = [&](size_t c) {
      priority[c] = load_.priorities[c % load_.priorities.size()];
      streams[c].emplace(engine_.submit(request(priority[c])));
      streams[c]->on_ready([&ready, c] { ready.add(c); });
      ++sent[c];
    };
    for (size_t c = 0; c < streams.size(); ++c) send(c);
    Result result;
    size_t open = streams.size();
    while (open > 0) {
      throw_if_interrupted();
      live(elapsed());
      const std::optional<size_t> c = ready.next(std::chrono::milliseconds(200));
      if (!c) continue;
      while (const std::optional<Event> event = streams[*c]->next_for(std::chrono::milliseconds(0))) {
        count(*event, priority[*c], result);
      }
      if (!streams[*c]->done() || ended[*c]) continue;
      if (sent[*c] < load_.requests) {
        send(*c);
      } else {
        ended[*c] = true;
        --open;
      }
    }
    result.seconds = elapsed();
    result.cpu_s = process_cpu_s() - cpu_before;
    const EngineStats after = engine_.stats();
    result.decode_s = after.decode_s - before.decode_s;
    result.decode_tokens = after.decode_tokens - before.decode_tokens;
    result.energy.add(before.energy_joules, after.energy_joules, result.generated_tokens, result.seconds);
    return result;
  }

 private:
  static void count(const Event& event, int32_t priority, Result& result) {
    if (event.kind == Event::Kind::kToken) {
      ++result.generated_tokens;
      return;
    }
    if (event.kind == Event::Kind::kFailed) {
      ++result.failed;
      write_stderr(fmt::format("[a request failed: {}]\n", event.error));
      return;
    }
    result.prompt_tokens += event.usage.prompt_tokens;
    result.cached_tokens += event.usage.cached_tokens;
    result.queue_s[priority].push_back(event.usage.queue_s);
    result.first_token_s[priority].push_back(event.usage.first_token_s);
  }

  uint32_t random() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 33);
  }
  int32_t between(int32_t low, int32_t high) {
    return low + static_cast<int32_t>(random() % static_cast<uint32_t>(high - low + 1));
  }
  int32_t token() { return between(0, engine_.model().vocab - 1); }

  Request request(int32_t priority) {
    Request r;
    r.tokens = prefix_;
    const int32_t own = load_.exact ? load_.prompt : between(std::max(1, load_.prompt / 4), load_.prompt);
    for (int32_t i = 0; i < own; ++i) r.tokens.push_back(token());
    r.max_tokens = load_.exact ? load_.generate : between(std::max(1, load_.generate / 4), load_.generate);
    r.ignore_end = true;
    r.sampling.temperature = load_.temperature;
    r.sampling.top_p = load_.top_p;
    r.sampling.top_k = load_.top_k;
    // Drawn only where it is used: bench/server_load.py --as-bench repeats the greedy load's draws.
    if (load_.temperature > 0.0f) r.sampling.seed = random();
    r.priority = priority;
    r.adapter = load_.adapter;
    return r;
  }

  Engine& engine_;
  const Load load_;
  uint64_t state_;
  std::vector<int32_t> prefix_;
};

// A line that is written over while it runs, on a terminal only.
class LiveLine {
 public:
  explicit LiveLine(const Engine& engine) : engine_(engine), on_(::isatty(STDERR_FILENO) == 1) {}
  ~LiveLine() {
    if (on_ && shown_) write_stderr("\r\033[K");
  }
  void update(double seconds) {
    if (!on_ || seconds < next_) return;
    next_ = seconds + 0.5;
    shown_ = true;
    const EngineStats s = engine_.stats();
    write_stderr(fmt::format(
        "\r\033[K{:6.1f} s  {:7.1f} tok/s  running {}  waiting {}  blocks {}/{}  batch {:.1f}  preempted {}",
        seconds, s.generated_tok_s, s.running, s.waiting, s.blocks_used, s.blocks_total, s.mean_batch,
        s.preemptions_swap + s.preemptions_recompute));
  }

 private:
  const Engine& engine_;
  bool on_, shown_ = false;
  double next_ = 0.5;
};

Json histogram_json(const Histogram& h) {
  return {{"count", h.total()},
          {"mean_s", h.mean_s()},
          {"p50_s", h.quantile_s(0.5)},
          {"p90_s", h.quantile_s(0.9)},
          {"p99_s", h.quantile_s(0.99)}};
}

Json to_json(const Engine& engine, const ClientOptions& options, bool energy, const Result& one,
             const Result& many) {
  const EngineStats s = engine.stats();
  Json priorities = Json::object();
  for (const auto& [priority, waits] : many.queue_s) {
    const std::vector<double>& first = many.first_token_s.at(priority);
    priorities[std::to_string(priority)] = {{"requests", waits.size()},
                                            {"queue_p50_s", quantile(waits, 0.5)},
                                            {"queue_p99_s", quantile(waits, 0.99)},
                                            {"first_token_p50_s", quantile(first, 0.5)},
                                            {"first_token_p99_s", quantile(first, 0.99)}};
  }
  Json json = {
      {"clients", options.clients},
      {"requests", options.clients * options.requests},
      {"failed", many.failed},
      {"seconds", many.seconds},
      {"cpu_s", many.cpu_s},
      {"generated_tok_s", many.tok_s()},
      {"total_tok_s", static_cast<double>(many.prompt_tokens + many.generated_tokens) / many.seconds},
      {"one_client_tok_s", one.tok_s()},
      {"gain_over_one_client", one.tok_s() > 0 ? many.tok_s() / one.tok_s() : 0.0},
      {"prompt_tokens", many.prompt_tokens},
      {"generated_tokens", many.generated_tokens},
      {"cached_tokens", many.cached_tokens},
      {"steps", s.steps},
      {"mean_batch", s.mean_batch},
      {"mean_rows", s.mean_rows},
      {"decode_tok_s", many.decode_s > 0 ? static_cast<double>(many.decode_tokens) / many.decode_s : 0.0},
      {"decode_tokens", many.decode_tokens},
      {"decode_s", many.decode_s},
      {"model_s", s.busy_s},
      {"wait_s", s.wait_s},
      {"host_s", s.busy_s - s.wait_s + s.schedule_s + s.sample_s},
      {"schedule_s", s.schedule_s},
      {"sample_s", s.sample_s},
      {"blocks_total", s.blocks_total},
      {"cache_hits",
       {{"asked", s.cache_queries},
        {"pool", s.cache_hits_pool},
        {"ram", s.cache_hits_ram},
        {"disk", s.cache_hits_disk}}},
      {"preemptions", {{"swap", s.preemptions_swap}, {"recompute", s.preemptions_recompute}}},
      {"drafted", s.drafted},
      {"accepted", s.accepted},
      {"first_token", histogram_json(s.first_token)},
      {"inter_token", histogram_json(s.inter_token)},
      {"queue", histogram_json(s.queue_time)},
      {"by_priority", priorities},
      {"buffers", {{"in_use", s.memory.in_use}, {"peak", s.memory.peak}, {"reserved", s.memory.reserved}}},
      {"device", engine.model().device}};
  if (energy) json["energy"] = {{"joules_per_generated_token", many.energy.json()}};
  return json;
}

std::string to_text(const Engine& engine, const ClientOptions& options, bool energy, const Result& one,
                    const Result& many) {
  const EngineStats s = engine.stats();
  std::string out = fmt::format("{} on {}\n", valid_utf8(engine.model().name), engine.model().device);
  const auto line = [&](const std::string& label, const std::string& value) {
    out += fmt::format("  {:<34} {}\n", label, value);
  };
  line(fmt::format("{} clients, {} requests", options.clients, options.clients * options.requests),
       fmt::format("{:.2f} s, {} failed", many.seconds, many.failed));
  line("generated",
       fmt::format("{} tokens, {:.1f} tok/s; one client alone {:.1f}, gain {:.2f}x", many.generated_tokens,
                   many.tok_s(), one.tok_s(), one.tok_s() > 0 ? many.tok_s() / one.tok_s() : 0.0));
  line("prompts",
       fmt::format("{} tokens, {} of them found in the cache", many.prompt_tokens, many.cached_tokens));
  if (energy) line("energy, of generated tokens", many.energy.text());
  line("steps without prompts",
       fmt::format("{} tokens, {:.1f} tok/s", many.decode_tokens,
                   many.decode_s > 0 ? static_cast<double>(many.decode_tokens) / many.decode_s : 0.0));
  line("steps",
       fmt::format("{}, on average {:.1f} sequences and {:.1f} rows", s.steps, s.mean_batch, s.mean_rows));
  line("time in model, scheduler, sampler",
       fmt::format("{:.2f} s, {:.3f} s, {:.3f} s", s.busy_s, s.schedule_s, s.sample_s));
  line("preempted by swap, by recompute", fmt::format("{}, {}", s.preemptions_swap, s.preemptions_recompute));
  if (s.drafted > 0) line("drafts", fmt::format("{} of {} right", s.accepted, s.drafted));
  const auto times = [&](const char* label, const Histogram& h) {
    line(label, fmt::format("p50 {:.3f} s, p90 {:.3f} s, p99 {:.3f} s", h.quantile_s(0.5), h.quantile_s(0.9),
                            h.quantile_s(0.99)));
  };
  times("first token", s.first_token);
  times("between tokens", s.inter_token);
  for (const auto& [priority, waits] : many.queue_s) {
    line(fmt::format("queue, priority {}", priority),
         fmt::format("p50 {:.3f} s, p99 {:.3f} s", quantile(waits, 0.5), quantile(waits, 0.99)));
  }
  return out;
}

}  // namespace

std::shared_ptr<ClientOptions> add_client_options(Command& command, EngineOptions& engine) {
  auto o = std::make_shared<ClientOptions>();
  const std::string group = "Many clients (--clients)";
  const auto add = [&](const char* name, int32_t& value, int32_t least, const char* help) {
    command.option(name, value, help).range(least, 1 << 24).show_default().group(group);
  };
  add("--clients", o->clients, 0, "that send requests of up to -p and -n tokens at the same time; 0: none");
  add("--requests", o->requests, 1, "of each client, one after another");
  add("--shared-prefix", o->shared_prefix, 0, "tokens that all prompts begin with");
  command.option("--priorities", o->priorities, "of the clients in turn, e.g. 0,0,5")
      .separated_by(',')
      .group(group);
  command.flag("--exact", o->exact, "every request has all of -p and -n tokens, not up to that many")
      .group(group);
  command.option("--temp", o->temperature, "of sampling; 0: greedy")
      .range(0.0, 100.0)
      .show_default()
      .group(group);
  command.option("--top-p", o->top_p, "of sampling").range(0.0, 1.0).show_default().group(group);
  add("--top-k", o->top_k, 0, "of sampling; 0: all");
  add_engine_options(command, engine, group);
  return o;
}

int bench_clients(const EngineOptions& given, const ClientOptions& options, int32_t prompt, int32_t generate,
                  bool energy, bool json) {
  const int32_t longest = options.shared_prefix + prompt + generate + 1;
  EngineOptions engine_options = given;
  if (engine_options.context == 0) engine_options.context = longest;
  const std::string adapter = only_adapter(engine_options);
  const std::unique_ptr<Engine> engine = open_engine(engine_options);
  if (engine->model().context < longest) {
    throw_error(ErrorCode::kBadInput, "--ctx is {}, expected at least {} for --shared-prefix, -p and -n",
                engine->model().context, longest);
  }
  if (energy && engine->stats().energy_joules.empty()) refuse_without_counters();
  LiveLine live(*engine);
  const auto show = [&](double seconds) { live.update(seconds); };
  // Few requests are enough for one client: nothing varies but their lengths.
  const Load alone{1,
                   3,
                   prompt,
                   generate,
                   options.shared_prefix,
                   {0},
                   options.exact,
                   options.temperature,
                   options.top_p,
                   options.top_k,
                   adapter};
  const Result one = Clients(*engine, alone, 7).run(show);
  const Load all{options.clients,       options.requests,   prompt,        generate,
                 options.shared_prefix, options.priorities, options.exact, options.temperature,
                 options.top_p,         options.top_k,      adapter};
  const Result many = Clients(*engine, all, 42).run(show);
  if (json) {
    write_json(to_json(*engine, options, energy, one, many));
  } else {
    write_stdout(to_text(*engine, options, energy, one, many));
  }
  engine->shutdown(true);
  return many.failed > 0 ? 1 : 0;
}

}  // namespace millrace::cli
