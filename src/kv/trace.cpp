#include "kv/trace.h"

#include <algorithm>
#include <utility>

namespace millrace::kv {
namespace {

// splitmix64: the standard library's distributions differ between implementations.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  int32_t below(int32_t limit) { return static_cast<int32_t>(next() % static_cast<uint64_t>(limit)); }
  // 1/4 to 7/4 of the average, most often in the middle.
  int32_t length(int32_t average) {
    return std::max(1, average / 4 + below(3 * average / 4 + 1) + below(3 * average / 4 + 1));
  }
  std::vector<int32_t> tokens(int32_t count, int32_t vocabulary) {
    std::vector<int32_t> tokens(static_cast<size_t>(count));
    for (int32_t& token : tokens) token = below(vocabulary);
    return tokens;
  }

 private:
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  uint64_t state_;
};

void append(std::vector<int32_t>& to, const std::vector<int32_t>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

}  // namespace

std::vector<TraceRequest> make_trace(const ChatTrace& o) {
  Random random(o.seed);
  const std::vector<int32_t> system = random.tokens(o.system_tokens, o.vocabulary);
  struct Conversation {
    std::vector<int32_t> said;
    int32_t turns_left;
  };
  std::vector<Conversation> open;
  std::vector<TraceRequest> trace;
  for (int32_t started = 0; started < o.conversations || !open.empty();) {
    while (static_cast<int32_t>(open.size()) < o.at_once && started < o.conversations) {
      open.push_back({system, o.turns});
      ++started;
    }
    const int32_t i = random.below(static_cast<int32_t>(open.size()));
    append(open[i].said, random.tokens(random.length(o.question_tokens), o.vocabulary));
    TraceRequest request{open[i].said, random.tokens(random.length(o.answer_tokens), o.vocabulary)};
    append(open[i].said, request.answer);
    trace.push_back(std::move(request));
    if (--open[i].turns_left == 0) open.erase(open.begin() + i);
  }
  return trace;
}

std::vector<TraceRequest> make_trace(const SharedPromptTrace& o) {
  Random random(o.seed);
  std::vector<std::vector<int32_t>> systems;
  for (int32_t i = 0; i < o.system_prompts; ++i) {
    systems.push_back(random.tokens(random.length(o.system_tokens), o.vocabulary));
  }
  std::vector<TraceRequest> trace;
  for (int32_t i = 0; i < o.requests; ++i) {
    // The smaller of two draws: the first system prompt is asked for most.
    const int32_t which = std::min(random.below(o.system_prompts), random.below(o.system_prompts));
    TraceRequest request{systems[which], random.tokens(random.length(o.answer_tokens), o.vocabulary)};
    append(request.prompt, random.tokens(random.length(o.question_tokens), o.vocabulary));
    trace.push_back(std::move(request));
  }
  return trace;
}

}  // namespace millrace::kv
