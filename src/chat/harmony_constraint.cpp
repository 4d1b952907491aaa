#include "chat/harmony_constraint.h"

#include "chat/harmony_render.h"
#include "chat/tools.h"

namespace millrace::chat {
namespace {

class HarmonyBuilder {
 public:
  HarmonyBuilder(const Codec& codec, const Grammars& grammars, const HarmonyTokens& tokens,
                 const std::vector<uint64_t>& text, const Conversation& conversation)
      : codec_(codec), grammars_(grammars), tokens_(tokens), text_(text), conversation_(conversation) {}

  std::shared_ptr<const Plan> build(const std::shared_ptr<const grammar::Grammar>& content) {
    // Behind "assistant": the first message of the answer, and any later one.
    const int first = plan_.add({});
    const int later = plan_.add({});
    done_ = plan_.add({});
    plan_.node(done_).done = true;
    const int next_message = plan_.add({});
    plan_.node(next_message).ways = {{.tokens = pieces({tokens_.start}, "assistant"), .next = later}};

    std::vector<Plan::Way> headers = tool_headers();
    const bool call = must_call(conversation_);
    if (!call) headers.push_back({.tokens = header("final"), .next = final_text(content)});
    // A preamble leads up to a call and is shown: not beside a grammar, which the whole text is to match.
    if (!call && !content && !callable_tools(conversation_).empty()) {
      headers.push_back({.tokens = header("commentary"), .next = free_text(tokens_.end, next_message)});
    }
    const Plan::Way analysis = {.tokens = header("analysis"), .next = free_text(tokens_.end, next_message)};
    plan_.node(later).ways = headers;
    if (!call) plan_.node(later).ways.push_back(analysis);
    headers.push_back(analysis);
    plan_.node(first).ways = std::move(headers);
    return std::make_shared<Plan>(std::move(plan_));
  }

 private:
  std::vector<int32_t> pieces(std::vector<int32_t> front, std::string_view text,
                              std::vector<int32_t> back = {}) const {
    const std::vector<int32_t> ids = codec_.encode(text, false);
    front.insert(front.end(), ids.begin(), ids.end());
    front.insert(front.end(), back.begin(), back.end());
    return front;
  }
  std::vector<int32_t> header(const std::string& channel) const {
    return pieces({tokens_.channel}, channel, {tokens_.message});
  }

  // The ways a model writes the header of a call: the recipient behind the channel or before it, the type
  // marked or not said.
  std::vector<Plan::Way> tool_headers() {
    std::vector<Plan::Way> out;
    for (const Tool* tool : callable_tools(conversation_)) {
      const int arguments = tool_arguments(*tool);
      const std::string to = " to=" + harmony_recipient(tool->name, conversation_);
      out.push_back(
          {.tokens = pieces({tokens_.channel}, "commentary" + to, {tokens_.message}), .next = arguments});
      if (tokens_.constrain < 0) continue;
      const std::vector<int32_t> type = pieces({tokens_.constrain}, "json", {tokens_.message});
      out.push_back({.tokens = pieces({tokens_.channel}, "commentary" + to + " ", type), .next = arguments});
      std::vector<int32_t> before = pieces({}, to);
      before = joined(before, pieces({tokens_.channel}, "commentary"));
      out.push_back({.tokens = joined(joined(before, codec_.encode(" ", false)), type), .next = arguments});
    }
    return out;
  }
  static std::vector<int32_t> joined(std::vector<int32_t> a, const std::vector<int32_t>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  }

  int tool_arguments(const Tool& tool) {
    return held_text(arguments_grammar(grammars_, tool, conversation_),
                     tokens_.call >= 0 ? tokens_.call : tokens_.end);
  }
  int final_text(const std::shared_ptr<const grammar::Grammar>& content) {
    return held_text(content, tokens_.ret >= 0 ? tokens_.ret : tokens_.end);
  }
  int held_text(const std::shared_ptr<const grammar::Grammar>& grammar, int32_t end) {
    if (!grammar) return free_text(end, done_);
    Plan::Node last;
    last.ways = {{.tokens = {end}, .next = done_}};
    Plan::Node node;
    node.grammar = grammars_.constrain(grammar, {end});
    node.grammar_end = end;
    node.next = plan_.add(std::move(last));
    return plan_.add(std::move(node));
  }
  int free_text(int32_t end, int next) {
    Plan::Node node;
    node.free_mask = text_;
    node.exits = {{end, next}};
    return plan_.add(std::move(node));
  }

  const Codec& codec_;
  const Grammars& grammars_;
  const HarmonyTokens& tokens_;
  const std::vector<uint64_t>& text_;
  const Conversation& conversation_;
  Plan plan_;
  int done_ = 0;
};

}  // namespace

std::shared_ptr<const TokenConstraint> harmony_constraint(std::shared_ptr<const Codec> codec,
                                                          const Grammars& grammars,
                                                          const HarmonyTokens& tokens,
                                                          const std::vector<uint64_t>& text,
                                                          const Conversation& conversation,
                                                          std::shared_ptr<const grammar::Grammar> content) {
  if (!content && !holds_tools(conversation)) return nullptr;
  HarmonyBuilder builder(*codec, grammars, tokens, text, conversation);
  std::shared_ptr<const Plan> plan = builder.build(content);
  return make_plan_constraint(std::move(plan), std::move(codec));
}

}  // namespace millrace::chat
