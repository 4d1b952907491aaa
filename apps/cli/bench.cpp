// millrace bench: speed, and how much of the machine it uses: decoding reads every weight once per token, so
// its limit is the read bandwidth, measured here in the same run with the same threads.
#include "bench.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "base/paging.h"
#include "base/stolen_time.h"
#include "bench_clients.h"
#include "bench_energy.h"
#include "bench_machine.h"
#include "bench_roofline.h"
#include "interrupt.h"
#include "model_options.h"
#include "open_model.h"
#include "output.h"
#include "progress.h"
#include "prompt.h"
#include "sample/token_softmax.h"

namespace millrace::cli {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct BenchOptions {
  EngineOptions engine = default_options();
  int32_t prompt = 512, generate = 128, depth = 0, repeat = 3;
  bool warm_up = false, roofline = false, energy = false, json = false;
};

constexpr const char* kBenchFooter =
    "Examples:\n"
    "  millrace bench model.gguf\n"
    "  millrace bench model.gguf -p 2048 -n 64 --depth 8192 --json\n"
    "  millrace bench model.gguf -p 512 -n 32 --roofline        # where the time goes\n"
    "  millrace bench model.gguf --clients 32 -p 256 -n 64\n"
    "  millrace bench model.gguf -n 1024 -p 8192 --energy       # joules a token; counters want half a "
    "second\n"
    "  MILLRACE_ISA=scalar millrace bench model.gguf -p 64 -n 16 --repeat 1\n"
    "Each repeat reads -p tokens, and decodes -n tokens one by one, both after --depth tokens that are not "
    "timed\n"
    "(the first 512 are computed, the rest repeats their keys and values);\n"
    "figures are medians. bytes_per_token is what one decoded token reads of the weights, read_gb_s the best "
    "speed\n"
    "at which the same threads read plain memory, decode_bandwidth_fraction their use by decoding, "
    "stolen_fraction\n"
    "what a virtual machine's host took away of the processors' time. "
    "first_token_s is\n"
    "the first prompt's time to its first token, with the model just loaded unless --warm-up; load_s comes "
    "before it.";

struct Samples {
  std::vector<double> values;
  double median() const {
    std::vector<double> sorted = values;
    std::sort(sorted.begin(), sorted.end());
    const size_t n = sorted.size();
    return n == 0 ? 0.0 : n % 2 == 1 ? sorted[n / 2] : 0.5 * (sorted[n / 2 - 1] + sorted[n / 2]);
  }
  double low() const { return values.empty() ? 0.0 : *std::min_element(values.begin(), values.end()); }
  double high() const { return values.empty() ? 0.0 : *std::max_element(values.begin(), values.end()); }
};

struct BenchResult {
  Samples prefill, decode;  // tok/s
  EnergyUse prefill_energy, decode_energy;
  double load_s = 0.0, first_token_s = 0.0, read_gb_s = 0.0;
  size_t bytes_per_token = 0, peak_rss_bytes = 0, anonymous_bytes = 0;
  std::optional<double> stolen;  // of the processors' time, by a hypervisor
  double fraction() const {
    return read_gb_s > 0 ? decode.median() * static_cast<double>(bytes_per_token) / (read_gb_s * 1e9) : 0.0;
  }
};

// A line of /proc/self/status in bytes; 0 where the system has none.
size_t status_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  std::string word;
  size_t kib = 0;
  while (status >> word) {
    if (word == key + ":" && status >> kib) return kib * 1024;
  }
  return 0;
}

// energy: the counters to read, or null.
void run_once(Runtime& runtime, const BenchOptions& options, EnergyCounters* energy, BenchResult& result) {
  Progress progress("bench", false);
  const auto deeper = [&](int32_t done) {
    progress.update(static_cast<size_t>(done), static_cast<size_t>(options.depth));
  };
  const int32_t vocab = runtime.config().vocab;
  const std::vector<int32_t> prompt = some_tokens(options.prompt, vocab);
  {
    kv::Sequence sequence = sequence_at(runtime, options.depth, deeper);
    if (energy != nullptr) energy->start();
    const Clock::time_point start = Clock::now();
    const int32_t token = argmax(runtime.prefill(sequence, prompt));
    const double seconds = seconds_since(start);
    if (energy != nullptr) energy->stop(options.prompt, seconds, result.prefill_energy);
    if (token < 0) throw_error(ErrorCode::kBadInput, "logits: none is a number above -infinity");
    if (result.prefill.values.empty()) result.first_token_s = seconds;
    result.prefill.values.push_back(static_cast<double>(prompt.size()) / seconds);
  }
  throw_if_interrupted();
  kv::Sequence sequence = sequence_at(runtime, options.depth, deeper);
  int32_t token = prompt[0];
  std::vector<int32_t> answer(static_cast<size_t>(options.generate));
  if (energy != nullptr) energy->start();
  const Clock::time_point start = Clock::now();
  constexpr size_t kAtOnce = 256;  // between looks at the progress
  for (size_t done = 0; done < answer.size(); done += kAtOnce) {
    const auto some = std::span(answer).subspan(done, std::min(kAtOnce, answer.size() - done));
    runtime.generate_greedy(sequence, token, some);
    token = some.back();
    progress.update(done, answer.size());
    throw_if_interrupted();
  }
  const double seconds = seconds_since(start);
  result.decode.values.push_back(options.generate / seconds);
  if (energy != nullptr) energy->stop(options.generate, seconds, result.decode_energy);
}

nlohmann::ordered_json to_json(const BenchOptions& options, Runtime& runtime, const BenchResult& result) {
  nlohmann::ordered_json json = {
      {"decode_tok_s", result.decode.median()},
      {"prefill_tok_s", result.prefill.median()},
      {"bytes_per_token", result.bytes_per_token},
      {"read_gb_s", result.read_gb_s > 0 ? nlohmann::ordered_json(result.read_gb_s) : nullptr},
      {"decode_bandwidth_fraction",
       result.read_gb_s > 0 ? nlohmann::ordered_json(result.fraction()) : nullptr},
      {"stolen_fraction", result.stolen ? nlohmann::ordered_json(*result.stolen) : nullptr},
      {"load_s", result.load_s},
      {"first_token_s", result.first_token_s},
      {"peak_rss_bytes", result.peak_rss_bytes},
      {"anonymous_bytes", result.anonymous_bytes},
      {"isa", runtime.backend().isa()},
      {"threads", runtime.backend().threads()},
      {"device", runtime.backend().name()},
      {"model", valid_utf8(runtime.checkpoint().path())},
      {"architecture", runtime.config().architecture},
      {"prompt_tokens", options.prompt},
      {"decode_tokens", options.generate},
      {"depth", options.depth},
      {"repeat", options.repeat},
      {"decode_tok_s_range", {result.decode.low(), result.decode.high()}},
      {"prefill_tok_s_range", {result.prefill.low(), result.prefill.high()}}};
  if (options.energy) {
    json["energy"] = {{"prefill_joules_per_token", result.prefill_energy.json()},
                      {"decode_joules_per_token", result.decode_energy.json()}};
  }
  return json;
}

std::string to_text(const BenchOptions& options, Runtime& runtime, const BenchResult& result) {
  std::string out = fmt::format("{}\n{} on {}\n", runtime.checkpoint().path(), runtime.config().architecture,
                                runtime.backend().description());
  const auto line = [&](const std::string& label, const std::string& value) {
    out += fmt::format("  {:<36} {}\n", label, value);
  };
  const auto speed = [](const Samples& s) {
    return fmt::format("{:.2f} tok/s  (median; {:.2f} to {:.2f})", s.median(), s.low(), s.high());
  };
  const std::string at = options.depth > 0 ? fmt::format(" at depth {}", options.depth) : "";
  line(fmt::format("prefill of {}{}", options.prompt, at), speed(result.prefill));
  line(fmt::format("decode of {}{}", options.generate, at), speed(result.decode));
  if (options.energy) {
    line("energy of the prompt", result.prefill_energy.text());
    line("energy of decoding", result.decode_energy.text());
  }
  line("weights read per token", human_bytes(result.bytes_per_token));
  if (result.read_gb_s > 0) {
    line("read bandwidth, same threads", fmt::format("{:.1f} GB/s", result.read_gb_s));
    line("of which decoding uses", fmt::format("{:.1f}%", 100.0 * result.fraction()));
  }
  if (result.stolen.value_or(0.0) >= 0.01) {
    line("taken away by the machine's host",
         fmt::format("{:.1f}% of the processors' time", 100.0 * *result.stolen));
  }
  line("load", fmt::format("{:.3f} s", result.load_s));
  line("first token", fmt::format("{:.3f} s", result.first_token_s));
  line("peak memory", fmt::format("{}, {} of it not file pages", human_bytes(result.peak_rss_bytes),
                                  human_bytes(result.anonymous_bytes)));
  return out;
}

int bench(const BenchOptions& options) {
  BenchResult result;
  const Clock::time_point start = Clock::now();
  const int32_t needed = options.depth + std::max(options.prompt, options.generate);
  const auto meter = std::make_shared<OpMeter>();
  EngineOptions engine = options.engine;
  if (engine.context == 0) engine.context = needed;
  RuntimeSetup setup;
  if (options.roofline) meter->attach(setup);
  const std::unique_ptr<Runtime> runtime = open_runtime(engine, setup);
  result.load_s = seconds_since(start);
  if (runtime->context() < needed) {
    throw_error(ErrorCode::kBadInput,
                "--ctx is {}, expected at least {} for --depth {} and the longer of -p {} and -n {}",
                runtime->context(), needed, options.depth, options.prompt, options.generate);
  }
  if (options.roofline) {
    const RooflineRun run = {options.prompt, options.generate, options.depth, options.repeat};
    return roofline(*runtime, *meter, run, options.json);
  }
  EnergyCounters energy(runtime->backend());
  if (options.energy) energy.check();
  if (options.warm_up) {
    BenchOptions few = options;
    few.depth = 0;
    few.prompt = std::min(options.prompt, 32);
    few.generate = std::min(options.generate, 4);
    BenchResult untimed;
    run_once(*runtime, few, nullptr, untimed);
  }
  StolenTime time;
  (void)time.share();  // from here on
  for (int32_t i = 0; i < options.repeat; ++i) {
    run_once(*runtime, options, options.energy ? &energy : nullptr, result);
  }
  result.stolen = time.share();
  result.bytes_per_token = runtime->model().bytes_per_token();
  // Before the bandwidth buffer comes into it.
  result.peak_rss_bytes = status_bytes("VmHWM");
  result.anonymous_bytes = status_bytes("RssAnon");
  // A GPU reads its own memory, which the host's threads cannot measure: no figure rather than a wrong one.
  if (runtime->backend().name() != "cuda") result.read_gb_s = measure_read_gb_s(runtime->backend());
  if (options.json) {
    write_json(to_json(options, *runtime, result));
  } else {
    write_stdout(to_text(options, *runtime, result));
  }
  return 0;
}

}  // namespace

void add_bench(CommandLine& line) {
  Command command = line.add("bench", "speed, bandwidth and memory");
  auto options = std::make_shared<BenchOptions>();
  add_model_path(command, options->engine);
  const auto add = [&](const char* name, int32_t& value, int32_t least, const char* help) {
    command.option(name, value, help).range(least, 1 << 24).show_default();
  };
  add("-p,--prompt-tokens", options->prompt, 1, "tokens of the prompt");
  add("-n,--decode-tokens", options->generate, 1, "tokens to decode");
  add("--depth", options->depth, 0, "tokens of context already there");
  add("--repeat", options->repeat, 1, "runs; medians are reported");
  command.flag("--warm-up", options->warm_up, "a short prompt and a few tokens before the clock starts");
  command.flag("--roofline", options->roofline,
               "per operation: time, bytes, operations, and their share of the machine's limits");
  command.flag("--energy", options->energy,
               "joules a token, of the GPU (NVML) and the processors (RAPL, which root may read)");
  command.flag("--json", options->json, "one JSON object");
  const std::shared_ptr<ClientOptions> clients = add_client_options(command, options->engine);
  add_loading_options(command, options->engine);
  command.footer(kBenchFooter);
  // What the other way of measuring would not look at is refused, not ignored.
  const auto many = [clients] { return clients->clients > 0; };
  for (const char* name : {"--depth", "--repeat", "--warm-up", "--roofline"}) {
    command.refuse_unless(
        name, [many] { return !many(); }, "with --clients");
  }
  for (const char* name :
       {"--requests", "--shared-prefix", "--max-running", "--step-tokens", "--kv-tokens", "--max-draft",
        "--priorities", "--ram-tier", "--kv-dir", "--kv-dir-size", "--speculate", "--draft-model",
        "--no-prefix-cache", "--exact", "--temp", "--top-p", "--top-k"}) {
    command.refuse_unless(name, many, "without --clients");
  }
  for (const char* name : {"--top-p", "--top-k"}) {
    command.refuse_unless(
        name, [clients] { return clients->temperature > 0; }, "without --temp: greedy looks at one token");
  }
  command.refuse_unless(
      "--energy", [options] { return !options->roofline; },
      "with --roofline, which times operations one by one");
  command.refuse_unless(
      "--warm-up", [options] { return !options->roofline; }, "with --roofline, which keeps the fastest run");
  command.runs([options, clients] {
    if (clients->clients == 0) return bench(*options);
    return bench_clients(options->engine, *clients, options->prompt, options->generate, options->energy,
                         options->json);
  });
}

}  // namespace millrace::cli
