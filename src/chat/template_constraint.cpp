#include "chat/template_constraint.h"

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "chat/tools.h"

namespace millrace::chat {
namespace {

// Any text that no reader takes for a call of llama3, which begins with a brace: until one is known not to be
// a call it is too late to hold it.
constexpr const char* kNoCall = R"(\s*([^\s{][\s\S]*)?)";

// How a family writes a call, around the arguments.
struct CallText {
  std::string marker;      // begins a call, or all of them; empty: none
  std::string head, tail;  // between marker and arguments, behind the arguments
  std::string again;       // between two calls; empty: one call only
};

// In a template's own spelling. Arguments that are held to a schema are JSON, which its reader takes in place
// of tags too.
CallText shaped_text(const CallShape& shape, const std::string& tool) {
  const bool object = shape.kind == CallShape::Kind::kObject;
  const std::string name = nlohmann::json(tool).dump();
  std::string before = shape.open + shape.begin;
  before += object ? "{\"name\": " + name + ", \"" + shape.arguments_key + "\": " : tool + shape.name_end;
  // An id, or a number.
  std::replace(before.begin(), before.end(), CallShape::kAny, '0');
  const size_t begin = before.find_first_not_of(" \n\r\t");
  const size_t marker = shape.openers()[0].mark.size();
  CallText out = {before.substr(begin, marker), before.substr(begin + marker), object ? "}" : "", ""};
  out.tail += shape.end + shape.close;
  const bool each_is_marked = shape.open.empty() && shape.close.empty();
  if (each_is_marked) out.again = shape.between;
  return out;
}

CallText call_text(const TemplateTraits& traits, const std::string& tool) {
  const std::string name = nlohmann::json(tool).dump();
  if (traits.shape.kind != CallShape::Kind::kNone) return shaped_text(traits.shape, tool);
  switch (traits.family) {
    case Family::kLlama3:
      return {"", "{\"name\": " + name + ", \"parameters\": ", "}", ""};
    case Family::kMistral:
      if (traits.named_arguments) return {"[TOOL_CALLS]", tool + "[ARGS]", "", ""};
      return {"[TOOL_CALLS]", "[{\"name\": " + name + ", \"arguments\": ", "}]", ""};
    case Family::kGemma:  // arguments that are held to a schema are JSON, which its reader takes as well
      return {"<|tool_call>", "call:" + tool, "<tool_call|>", ""};
    default:
      return {"<tool_call>", "\n{\"name\": " + name + ", \"arguments\": ", "}\n</tool_call>", "\n"};
  }
}

class TemplateBuilder {
 public:
  TemplateBuilder(const TemplateConstraintInput& in, const Conversation& conversation)
      : in_(in), conversation_(conversation) {}

  std::shared_ptr<const Plan> build(const std::shared_ptr<const grammar::Grammar>& content) {
    const int first = plan_.add({});  // replaced at the end
    done_ = plan_.add({});
    plan_.node(done_).done = true;
    Plan::Node end;
    end.ways = end_ways();
    end_ = plan_.add(std::move(end));

    int answer = 0;
    if (must_call(conversation_)) {
      answer = calls(true);
    } else if (content) {
      answer = grammar_node(content, end_);
      if (!callable_tools(conversation_).empty()) plan_.node(answer).instead = calls(true);
    } else {
      answer = free_answer();
    }
    plan_.node(first) = beginning(answer);
    return std::make_shared<Plan>(std::move(plan_));
  }

 private:
  std::vector<Plan::Way> end_ways() const {
    std::vector<Plan::Way> out;
    for (const int32_t token : in_.ends) out.push_back({.tokens = {token}, .next = done_});
    return out;
  }

  // What comes before the answer itself: thinking, or the choice to think.
  Plan::Node beginning(int answer) {
    if (in_.thinking == Thinking::kNone) return plan_.node(answer);
    const bool gemma = in_.traits.family == Family::kGemma;
    Plan::Node think;
    think.free_mask = in_.text;
    const std::vector<int32_t> close = in_.codec->encode(gemma ? "<channel|>" : "</think>", true);
    if (gemma) {  // a token, with the answer right behind it
      think.exits = {{close[0], answer}};
    } else {
      Plan::Node behind;  // </think> is followed by an empty line
      behind.ways = {{.tokens = in_.codec->encode("\n\n", false), .next = answer}};
      think.next = plan_.add(std::move(behind));
      think.exit_text = "</think>";
      if (close.size() == 1) think.exits = {{close[0], think.next}};
    }
    if (in_.thinking == Thinking::kOpened) return think;

    const std::vector<int32_t> open = in_.codec->encode(gemma ? "<|channel>thought\n" : "<think>", true);
    const int thinks = plan_.add(std::move(think));
    Plan::Node out = plan_.node(answer);
    if (out.grammar && out.instead < 0) {
      Plan::Node choice;
      choice.ways = {{.tokens = open, .next = thinks}};
      out.instead = plan_.add(std::move(choice));
    } else if (out.grammar) {
      Plan::Node choice = plan_.node(out.instead);
      choice.ways.push_back({.tokens = open, .next = thinks});
      out.instead = plan_.add(std::move(choice));
    } else if (!out.ways.empty()) {
      out.ways.push_back({.tokens = open, .next = thinks});
    }
    return out;  // free text may hold <think> as it is
  }

  // One of the calls that may be made, and those that may follow it.
  int calls(bool with_marker) {
    const int node = plan_.add({});
    std::vector<Plan::Way> ways;
    for (const Tool* tool : callable_tools(conversation_)) {
      const CallText text = call_text(in_.traits, tool->name);
      const int after = plan_.add({});
      Plan::Node tail;
      tail.ways = {{.tokens = in_.codec->encode(text.tail, true), .next = after}};
      const int behind = text.tail.empty() ? after : plan_.add(std::move(tail));
      plan_.node(after).ways = end_ways();
      if (!text.again.empty() && many_calls(conversation_)) {
        if (again_ < 0 && with_marker) again_ = node;
        if (again_ >= 0) {
          plan_.node(after).ways.push_back(
              {.tokens = in_.codec->encode(text.again, false), .next = again_, .again = true});
        }
      }
      std::shared_ptr<const grammar::Grammar> arguments =
          arguments_grammar(in_.grammars, *tool, conversation_);
      if (!arguments) arguments = in_.grammars.json_object();
      const std::string head = (with_marker ? text.marker : "") + text.head;
      ways.push_back({.tokens = in_.codec->encode(head, true), .next = grammar_node(arguments, behind)});
    }
    plan_.node(node).ways = std::move(ways);
    return node;
  }

  int grammar_node(const std::shared_ptr<const grammar::Grammar>& grammar, int next) {
    Plan::Node node;
    node.grammar = in_.grammars.constrain(grammar, {in_.ends[0]});
    node.grammar_end = in_.ends[0];
    node.next = next;
    return plan_.add(std::move(node));
  }

  // Text as the model likes; its calls are held behind their marker, or kept from beginning.
  int free_answer() {
    Plan::Node node;
    node.free_mask = in_.text;
    for (const int32_t token : in_.ends) node.exits.emplace_back(token, done_);
    for (const char* name : {"<think>", "</think>", "<|channel>", "<channel|>"}) {
      const int32_t token = in_.codec->find_special(name);
      if (token >= 0) set_bit(node.free_mask, token);
    }
    const std::string marker = call_text(in_.traits, "x").marker;
    const std::vector<int32_t> tokens = in_.codec->encode(marker, true);
    const bool may_call = !callable_tools(conversation_).empty();
    if (!may_call) {
      if (tokens.size() == 1) set_bit(node.free_mask, tokens[0], false);
    } else if (tokens.size() == 1) {
      node.exits.emplace_back(tokens[0], calls(false));
    } else {
      node.exit_text = marker;
      node.next = calls(false);
    }
    return plan_.add(std::move(node));
  }

  const TemplateConstraintInput& in_;
  const Conversation& conversation_;
  Plan plan_;
  int done_ = 0, end_ = 0, again_ = -1;
};

}  // namespace

std::shared_ptr<const TokenConstraint> template_constraint(const TemplateConstraintInput& in,
                                                           const Conversation& conversation,
                                                           std::shared_ptr<const grammar::Grammar> content) {
  if (in.ends.empty()) {
    throw_error(ErrorCode::kUnsupported,
                "constraint: the model has no end token, expected one to end the answer with");
  }
  if (!content && !holds_tools(conversation)) return nullptr;
  const bool unmarked = in.traits.family == Family::kLlama3;
  if (!content && holds_free_calls(conversation) && unmarked) content = in.grammars.regex(kNoCall);
  TemplateBuilder builder(in, conversation);
  return make_plan_constraint(builder.build(content), in.codec);
}

}  // namespace millrace::chat
