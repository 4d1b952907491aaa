// Made-up loads for tests and benchmarks of the prefix cache: what many users of a chat service send. Lengths
// and arrivals are random from a seed; the same seed gives the same trace everywhere.
#pragma once

#include <cstdint>
#include <vector>

namespace millrace::kv {

struct TraceRequest {
  std::vector<int32_t> prompt, answer;
};

// Conversations that go on beside each other. Every turn's prompt is all that was said before and a new
// question.
struct ChatTrace {
  int32_t conversations = 20, turns = 8;
  int32_t at_once = 5;  // open conversations, of which a random one speaks next
  int32_t system_tokens = 150;
  int32_t question_tokens = 30, answer_tokens = 120;  // on average
  int32_t vocabulary = 30000;
  uint64_t seed = 1;
};
std::vector<TraceRequest> make_trace(const ChatTrace& options);

// Single questions behind one of a few long system prompts (tools, documents), some far more popular than
// others.
struct SharedPromptTrace {
  int32_t requests = 200, system_prompts = 8;
  int32_t system_tokens = 800;  // on average
  int32_t question_tokens = 60, answer_tokens = 80;
  int32_t vocabulary = 30000;
  uint64_t seed = 1;
};
std::vector<TraceRequest> make_trace(const SharedPromptTrace& options);

}  // namespace millrace::kv
