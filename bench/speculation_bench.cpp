// Decoding with and without lookup drafts on text that repeats: processor time, the two alternating.
//   speculation_bench MODEL [repetitions [weights]]      weights: q8_0, ... quantized while loading
#include <time.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "millrace/engine.h"

namespace {

using namespace millrace;

double processor_seconds() {
  timespec t{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// A code edit, a JSON document that goes on, and one that is to be written out again: what is asked for is
// nearly what was given.
const char* const kPrompts[] = {
    "def area(shape):\n    if shape.kind == 'circle':\n        return 3.14159 * shape.radius * shape.radius\n"
    "    if shape.kind == 'square':\n        return shape.side * shape.side\n    return 0\n\n"
    "def area(shape):\n    if shape.kind == 'circle':\n        return 3.14159 * shape.radius * shape.radius\n"
    "    if shape.kind == 'square':\n",
    "[{\"id\": 1, \"name\": \"alpha\", \"state\": \"open\"}, {\"id\": 2, \"name\": \"beta\", \"state\": "
    "\"open\"}, "
    "{\"id\": 3, \"name\": \"gamma\", \"state\": \"open\"}, {\"id\": 4, \"name\": \"delta\", \"state\": "
    "\"open\"}, ",
    "{\"order\": 4711, \"customer\": {\"name\": \"Ada Miller\", \"city\": \"Bristol\"}, \"items\": ["
    "{\"part\": \"wheel\", \"count\": 2, \"price\": 180}, {\"part\": \"shaft\", \"count\": 1, \"price\": "
    "75}, "
    "{\"part\": \"sluice gate\", \"count\": 4, \"price\": 310}, {\"part\": \"bearing\", \"count\": 8, "
    "\"price\": 12}], \"paid\": true, \"carrier\": \"river boat\"}\n\nThe same document again:\n"
    "{\"order\": 4711, \"customer\": {\"name\": ",
};

struct Run {
  double seconds = 0;
  Usage usage;
  std::vector<int32_t> tokens;
};

Run decode(Engine& engine, const char* prompt) {
  Stream stream = engine.submit(
      {.text = prompt, .sampling = {.temperature = 0.0f}, .max_tokens = 160, .ignore_end = true});
  Run run;
  double start = 0;
  while (const auto event = stream.next()) {
    run.usage = event->usage;
    if (event->kind != Event::Kind::kToken) break;
    if (run.tokens.empty()) start = processor_seconds();  // the prompt is not counted
    run.tokens.push_back(event->token);
  }
  run.seconds = processor_seconds() - start;
  return run;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: speculation_bench MODEL [repetitions [weights]]\n");
    return 2;
  }
  const int repetitions = argc > 2 ? std::atoi(argv[2]) : 3;
  EngineOptions options{.model = argv[1], .threads = 1, .context = 1024, .max_running = 1, .kv_tokens = 2048};
  if (argc > 3) options.quantize = argv[3];
  const auto plain = Engine::create(options);
  options.speculation = Speculation::kLookup;
  options.max_draft = 16;
  const auto drafting = Engine::create(options);
  for (const char* prompt : kPrompts) {
    for (int i = 0; i < repetitions; ++i) {
      const Run a = decode(*plain, prompt), b = decode(*drafting, prompt);
      std::printf("without %.3f s, with drafts %.3f s: %.2fx; tokens %s; %d of %d drafts right\n", a.seconds,
                  b.seconds, a.seconds / b.seconds, a.tokens == b.tokens ? "equal" : "DIFFER",
                  b.usage.accepted_tokens, b.usage.drafted_tokens);
    }
  }
  return 0;
}
