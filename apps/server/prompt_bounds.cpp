#include "prompt_bounds.h"

#include <fmt/core.h>

#include <algorithm>
#include <string>
#include <utility>

#include "api_error.h"
#include "base/work_budget.h"

namespace millrace::server {
namespace {

constexpr std::string_view kEndOfThought = "</think>";
constexpr size_t kMinTokensOfMessage = 1;  // an empty one, in any format

void check(const Engine& engine, size_t min_tokens, std::string_view path) {
  const auto context = static_cast<size_t>(engine.model().context);
  if (min_tokens <= context) return;
  throw context_exceeded(min_tokens, static_cast<int64_t>(context), std::string(path), true);
}

// One check for every message: a conversation is refused at the first with which it is too long.
template <class Check>
void check_sums(const Engine& engine, const chat::Conversation& conversation, std::string_view path,
                const Check& check_one) {
  size_t sum = 0;
  for (const chat::Message& message : conversation.messages) {
    sum += least_tokens(engine, message);
    check_one(engine, sum, path);
  }
}

}  // namespace

void check_text_may_fit(const Engine& engine, std::string_view text, std::string_view path) {
  if (!engine.model().has_tokenizer) return;
  spend_work(text.size() / 16);
  check(engine, engine.min_tokens(text), path);
}

void check_messages_may_fit(const Engine& engine, const Json* messages, std::string_view path) {
  if (messages != nullptr && messages->is_array())
    check(engine, messages->size() * kMinTokensOfMessage, path);
}

size_t least_tokens(const Engine& engine, const chat::Message& message) {
  if (!engine.model().has_tokenizer) return 0;
  spend_work(2 + message.content.size() / 16);
  // Templates may leave out what a model thought, also where its content holds it.
  const std::string_view content = message.content;
  const size_t thought = content.rfind(kEndOfThought);
  return kMinTokensOfMessage + message.tool_calls.size() +
         engine.min_tokens(thought == std::string_view::npos ? content : content.substr(thought));
}

void check_conversation_may_fit(const Engine& engine, const chat::Conversation& conversation,
                                std::string_view path) {
  check_sums(engine, conversation, path, check);
}

std::vector<int32_t> prompt_tokens(Prompt& prompt, const Engine& engine) {
  const int32_t context = engine.model().context;
  std::vector<int32_t> tokens = std::move(prompt.tokens);
  if (!prompt.text.empty()) {
    check_text_may_fit(engine, prompt.text, prompt.path);
    tokens = engine.tokenize(prompt.text, true, true, most_counted(context));
  }
  if (tokens.empty()) bad_field(prompt.path, "found no tokens, expected at least one");
  if (std::ssize(tokens) > context) throw context_exceeded(tokens.size(), context, prompt.path);
  return tokens;
}

size_t most_listed(const Engine& engine) {
  return std::max(4 * static_cast<size_t>(engine.model().context), size_t{1} << 19);
}

void check_countable(const Engine& engine, size_t tokens, std::string_view path) {
  if (tokens <= most_listed(engine)) return;
  bad_field(std::string(path), fmt::format("is more than {} tokens: send it in parts", most_listed(engine)));
}

void check_conversation_countable(const Engine& engine, const chat::Conversation& conversation,
                                  std::string_view path) {
  check_sums(engine, conversation, path, check_countable);
}

}  // namespace millrace::server
