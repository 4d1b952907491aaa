// Decoding with and without lookup drafts on text that repeats: processor time of the whole process (wall
// time with "wall"), the two alternating.
//   speculation_bench MODEL [repetitions [weights [threads [wall|edits]]]]      weights: q8_0, ...; "": as
//   they are
//
// Two kinds of text. Edits are written whatever the model would say (a constraint allows one token at each
// place): a file of code with a name changed and lines added, a JSON document with values changed. A small
// model cannot do such an edit; where drafts are right is a matter of the text alone, and every row is
// computed as if the model had chosen. Free text is the model's own.
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "millrace/engine.h"

namespace {

using namespace millrace;

bool wall = false;

double seconds_now() {
  if (wall) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  timespec t{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
  return text;
}

const char* const kCode =
    R"(class Wheel:
    """An overshot wheel: water falls on it from above."""

    def __init__(self, radius, width, buckets):
        self.radius = radius
        self.width = width
        self.buckets = buckets
        self.turns = 0

    def volume(self):
        inner = self.radius - 0.3
        ring = 3.14159 * (self.radius ** 2 - inner ** 2)
        return ring * self.width / self.buckets

    def power(self, flow, efficiency=0.8):
        fall = 2 * self.radius
        return 9.81 * 1000 * flow * fall * efficiency

    def speed(self, flow):
        filled = flow / self.volume()
        return 60 * filled / self.buckets

    def turn(self, flow, minutes):
        self.turns += self.speed(flow) * minutes
        return self.turns


class Stones:
    def __init__(self, diameter, gap):
        self.diameter = diameter
        self.gap = gap
        self.flour = 0.0

    def grind(self, power, minutes):
        rate = power / (1000 * self.gap)
        self.flour += rate * minutes
        return self.flour

    def worn(self, turns):
        return turns > 100000 * self.gap


def run_day(wheel, stones, flows):
    for hour, flow in enumerate(flows):
        wheel.turn(flow, 60)
        stones.grind(wheel.power(flow), 60)
        if stones.worn(wheel.turns):
            print("dress the stones after hour", hour)
            break
    return stones.flour
)";

std::string edited_code() {
  std::string text = replaced(kCode, "buckets", "paddles");
  text = replaced(text, "        fall = 2 * self.radius\n",
                  "        if flow < 0:\n            raise ValueError(\"flow is negative\")\n"
                  "        fall = 2 * self.radius\n");
  return replaced(text, "efficiency=0.8", "efficiency=0.75");
}

const char* const kJson =
    R"({"order": 4711, "customer": {"name": "Ada Miller", "city": "Bristol", "since": 2019}, "items": [
  {"part": "wheel", "count": 2, "price": 180, "stock": "yard 3"},
  {"part": "shaft", "count": 1, "price": 75, "stock": "yard 1"},
  {"part": "sluice gate", "count": 4, "price": 310, "stock": "yard 3"},
  {"part": "bearing", "count": 8, "price": 12, "stock": "shed"},
  {"part": "mill stone", "count": 2, "price": 940, "stock": "yard 2"},
  {"part": "hopper", "count": 1, "price": 64, "stock": "shed"},
  {"part": "flour sack", "count": 200, "price": 1, "stock": "loft"},
  {"part": "belt", "count": 3, "price": 41, "stock": "shed"}
 ], "paid": false, "carrier": "river boat", "notes": ["leave at the quay", "call before noon"]}
)";

std::string edited_json() {
  return replaced(
      replaced(replaced(kJson, "\"paid\": false", "\"paid\": true"), "\"count\": 4", "\"count\": 5"),
      "\"price\": 41", "\"price\": 43");
}

struct Text {
  const char* name;
  std::string prompt;
  std::string answer;  // empty: whatever the model says
};

std::vector<Text> texts() {
  return {
      {"edit of code",
       std::string("Call the buckets paddles, and check the flow.\n\n") + kCode + "\nEdited:\n\n",
       edited_code()},
      {"edit of JSON",
       std::string("The order is paid; five gates; belts cost 43.\n\n") + kJson + "\nEdited:\n\n",
       edited_json()},
      {"free: the code again",
       std::string(kCode) + "\n\n# The same file once more:\n\n" + std::string(kCode).substr(0, 200), ""},
      {"free: the JSON again",
       std::string(kJson) + "\n\nThe same document again:\n" + std::string(kJson).substr(0, 60), ""},
      {"free: a list that goes on",
       "[{\"id\": 1, \"name\": \"alpha\", \"state\": \"open\"}, {\"id\": 2, \"name\": \"beta\", \"state\": "
       "\"open\"}, {\"id\": 3, \"name\": \"gamma\", \"state\": \"open\"}, {\"id\": 4, \"name\": \"delta\", "
       "\"state\": \"open\"}, ",
       ""},
  };
}

// Allows one token at each place.
class Written final : public TokenConstraint {
 public:
  explicit Written(std::shared_ptr<const std::vector<int32_t>> tokens) : tokens_(std::move(tokens)) {}
  std::unique_ptr<TokenConstraint> clone() const override { return std::make_unique<Written>(*this); }
  bool allowed(std::span<uint64_t> mask) override {
    const auto token = static_cast<size_t>((*tokens_)[std::min(at_, tokens_->size() - 1)]);
    mask[token / 64] |= uint64_t{1} << token % 64;
    return true;
  }
  void accept(int32_t) override { ++at_; }

 private:
  std::shared_ptr<const std::vector<int32_t>> tokens_;
  size_t at_ = 0;
};

struct Run {
  double seconds = 0;
  Usage usage;
  uint64_t steps = 0;
  std::vector<int32_t> tokens;
};

Run decode(Engine& engine, const Text& text) {
  Request request{
      .text = text.prompt, .sampling = {.temperature = 0.0f}, .max_tokens = 160, .ignore_end = true};
  if (!text.answer.empty()) {
    auto tokens = std::make_shared<std::vector<int32_t>>(engine.tokenize(text.answer, false, false));
    request.max_tokens = static_cast<int32_t>(tokens->size());
    request.constraint = std::make_shared<Written>(std::move(tokens));
  }
  EventStream stream = engine.submit(request);
  Run run;
  double start = 0;
  uint64_t steps = 0;
  while (const auto event = stream.next()) {
    run.usage = event->usage;
    if (event->kind != Event::Kind::kToken) break;
    if (run.tokens.empty()) {  // the prompt is not counted
      start = seconds_now();
      steps = engine.stats().steps;
    }
    run.tokens.push_back(event->token);
  }
  run.seconds = seconds_now() - start;
  run.steps = engine.stats().steps - steps;
  return run;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: speculation_bench MODEL [repetitions [weights [threads [wall|edits]]]]\n");
    return 2;
  }
  const int repetitions = argc > 2 ? std::atoi(argv[2]) : 3;
  EngineOptions options{.model = argv[1], .threads = 1, .context = 2048, .max_running = 1, .kv_tokens = 4096};
  if (argc > 3) options.quantize = argv[3];
  if (argc > 4) options.threads = std::atoi(argv[4]);
  const bool edits = argc > 5 && std::strcmp(argv[5], "edits") == 0;
  wall = edits || (argc > 5 && std::strcmp(argv[5], "wall") == 0);
  const auto plain = Engine::create(options);
  options.speculation = Speculation::kLookup;
  options.max_draft = 16;
  const auto drafting = Engine::create(options);
  for (const Text& text : texts()) {
    if (edits && text.answer.empty()) continue;
    for (int i = 0; i < repetitions; ++i) {
      const Run a = decode(*plain, text), b = decode(*drafting, text);
      std::printf(
          "%-26s without %.3f s, with drafts %.3f s: %.2fx; tokens %s; %d of %d drafts right, %zu "
          "tokens in %lu steps\n",
          text.name, a.seconds, b.seconds, a.seconds / b.seconds, a.tokens == b.tokens ? "equal" : "DIFFER",
          b.usage.accepted_tokens, b.usage.drafted_tokens, b.tokens.size(),
          static_cast<unsigned long>(b.steps));
      std::fflush(stdout);
    }
  }
  return 0;
}
