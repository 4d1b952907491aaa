// A loop driven by hand, round by round, on a tiny model; and requests run on it.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine_options.h"
#include "engine/loop.h"
#include "engine/naive_sampling.h"

namespace millrace::test {

inline const std::string kWindowModel = "tests/golden/models/gpt-oss-w32/model.gguf";
inline const std::string kStateModel = "tests/golden/models/qwen3next/model.gguf";
inline const std::string kLlamaModel = "tests/golden/models/llama3/model.gguf";

// What one sample answered.
struct Answer {
  std::vector<int32_t> tokens;
  std::string text;
  std::vector<float> embedding;
  std::vector<double> logprobs;  // the chosen's, and those of the likeliest, one after another
  FinishReason finish = FinishReason::kError;
  std::string error;
  Usage usage;
  bool ended = false;
};

struct Harness {
  // kv_blocks: per group, empty for a pool as the options say. change: what no engine option says.
  explicit Harness(const EngineOptions& engine_options, std::vector<int32_t> kv_blocks = {},
                   std::unique_ptr<ModelDrafter> drafter = nullptr,
                   const std::function<void(RuntimeSetup&)>& change = {})
      : options(engine_options), inbox(std::make_shared<Inbox>()) {
    RuntimeSetup setup{.sequences = RuntimeSetup::kShared, .kv_blocks = std::move(kv_blocks)};
    setup.adjust_cache = [](kv::CacheOptions& cache) { cache.log = [](const std::string&) {}; };
    if (change) change(setup);
    runtime = Runtime::open(options, setup);
    new_loop(std::move(drafter));
  }
  ~Harness() {
    streams.clear();
    loop.reset();
  }

  // Another engine's life over the same cache.
  void new_loop(std::unique_ptr<ModelDrafter> drafter = nullptr) {
    streams.clear();
    loop.reset();
    inbox = std::make_shared<Inbox>();
    recorder = std::make_unique<Recorder>();
    loop = std::make_unique<Loop>(*runtime, std::move(drafter), options, inbox, *recorder);
  }

  size_t submit(const Request& request) {
    std::shared_ptr<Job> job = make_job(*runtime, runtime->cache(), nullptr, request, options.max_running,
                                        next_id++, [&](const kv::Prompt&) { return inbox; });
    streams.emplace_back(job->events);
    answers.emplace_back(static_cast<size_t>(request.samples));
    inbox->jobs.push_back(std::move(job));
    return streams.size() - 1;
  }

  void read(size_t request) {
    EventStream& stream = streams[request];
    while (auto event = stream.next_for(std::chrono::milliseconds(0))) {
      Answer& answer = answers[request][static_cast<size_t>(event->sample)];
      if (answer.ended) throw std::runtime_error("an event after the last one");
      answer.text += event->text;
      if (event->kind == Event::Kind::kToken) {
        answer.tokens.push_back(event->token);
        if (event->logprob != 0.0) answer.logprobs.push_back(event->logprob);
        for (const auto& [token, logprob] : event->top) {
          answer.logprobs.push_back(token);
          answer.logprobs.push_back(logprob);
        }
        continue;
      }
      answer.ended = true;
      answer.finish = event->finish;
      answer.embedding = std::move(event->embedding);
      answer.error = event->error;
      answer.usage = event->usage;
    }
  }
  void read_all() {
    for (size_t i = 0; i < streams.size(); ++i) read(i);
  }

  // Rounds until nothing is left to do; `each` runs after every one.
  void run(const std::function<void()>& each = {}) {
    int idle = 0;
    while (idle < 3) {
      const bool moved = loop->turn();
      read_all();
      if (each) each();
      if (moved) {
        idle = 0;
      } else {
        runtime->cache().wait(std::chrono::milliseconds(5));
        idle = recorder->running.load() + recorder->waiting.load() > 0 ? 0 : idle + 1;
      }
    }
  }

  EngineOptions options;
  std::shared_ptr<Inbox> inbox;
  std::unique_ptr<Runtime> runtime;
  std::unique_ptr<Recorder> recorder;
  std::unique_ptr<Loop> loop;
  std::vector<EventStream> streams;
  std::vector<std::vector<Answer>> answers;  // by request and sample; survives new_loop
  uint64_t next_id = 1;
};

// A change of Harness: its device samples, and *to is the one that does.
inline std::function<void(RuntimeSetup&)> sampling_device(SamplingExecutor** to) {
  return [to](RuntimeSetup& setup) {
    setup.wrap_executor = [to](std::unique_ptr<Executor> inner) {
      auto wrapped = std::make_unique<SamplingExecutor>(std::move(inner));
      *to = wrapped.get();
      return wrapped;
    };
  };
}

// An engine for eight small requests at once, on one thread.
inline EngineOptions small_options(const std::string& model = kLlamaModel, int64_t kv_tokens = 1280) {
  EngineOptions options;
  options.model = model;
  options.threads = 1;
  options.context = 128;
  options.max_running = 8;
  options.step_tokens = 64;
  options.kv_tokens = kv_tokens;
  return options;
}

inline Request greedy_request(std::vector<int32_t> tokens, int32_t max_tokens) {
  Request r;
  r.tokens = std::move(tokens);
  r.max_tokens = max_tokens;
  r.ignore_end = true;
  r.sampling.temperature = 0.0f;
  return r;
}

// Answers of one request that has the engine to itself: nothing remembered, nothing shared, no drafts.
inline std::vector<Answer> run_alone(const std::string& model, const Request& request, int threads = 1,
                                     const std::string& device = "cpu", const std::string& kv_type = "",
                                     const std::string& compute = "full") {
  EngineOptions options = small_options(model, 2048);
  options.device = device;
  options.compute = compute;
  options.kv_type = kv_type;
  options.threads = threads;
  options.step_tokens = 256;
  options.prefix_cache = false;
  Harness alone(options);
  alone.submit(request);
  alone.run();
  return alone.answers[0];
}

}  // namespace millrace::test
