#include "chat/template_answer_parser.h"

#include <algorithm>

namespace millrace::chat {
namespace {

constexpr std::string_view kThink = "<think>", kThinkEnd = "</think>", kPythonTag = "<|python_tag|>";
constexpr std::string_view kArgs = "[ARGS]", kCallId = "[CALL_ID]";
// More text than this before a call's name is known is no call.
constexpr size_t kMaxHeld = 16384;

// Can still become `whole`.
bool is_start(std::string_view part, std::string_view whole) { return whole.starts_with(part); }
std::string_view without_leading_space(std::string_view text) {
  while (!text.empty() && is_space(text[0])) text.remove_prefix(1);
  return text;
}
size_t without_space(std::string_view text) { return text.size() - without_leading_space(text).size(); }
// The end of a list of calls, without the list's own bracket.
std::string without_brackets(std::string_view text) {
  text = trimmed(text);
  return std::string(text.starts_with(']') ? trimmed(text.substr(1)) : text);
}

}  // namespace

TemplateAnswerParser::TemplateAnswerParser(TemplateAnswer answer) : answer_(std::move(answer)) {
  if (answer_.tools.empty()) answer_.family = Family::kPlain;
  const CallShape& shape = answer_.shape;
  if (shape.kind != CallShape::Kind::kNone && answer_.family != Family::kPlain) {
    openers_ = shape.openers();
    if (shape.kind == CallShape::Kind::kObject) close_marker_ = without_brackets(shape.end + shape.close);
  } else if (answer_.family == Family::kHermes) {
    openers_ = {{"<tool_call>", ""}};
    close_marker_ = "</tool_call>";
  } else if (answer_.family == Family::kMistral) {
    openers_ = {{"[TOOL_CALLS]", ""}};
  }
  if (answer_.thinking) enter_text(State::kReasoning);
}

void TemplateAnswerParser::token(int32_t token, std::string_view text, std::vector<Delta>& out) {
  first_ = out.size();
  add(text, out);
  const auto name = answer_.names.find(token);
  if (name != answer_.names.end() && text != name->second) add(name->second, out);
}

void TemplateAnswerParser::finish(std::string_view text, std::vector<Delta>& out) {
  first_ = out.size();
  add(text, out);
  if (state_ == State::kBegin) {  // what could have become <think> is text
    const std::string pending = held_;
    enter_text(State::kContent);
    held_ = pending;
    skip_space_ = false;
  }
  const bool unread = (state_ == State::kCalls || state_ == State::kCall) && !is_open_;
  if (unread) state_ = otherwise_;
  if (state_ != State::kReasoning && state_ != State::kContent) return;
  put_text(unread ? marker_ + held_ : held_, out);
  if (state_ == State::kContent) put(Delta::Kind::kContent, space_, out);
}

void TemplateAnswerParser::add(std::string_view text, std::vector<Delta>& out) {
  input_ += text;
  while (at_ < input_.size()) step(input_[at_++], out);
  input_.clear();
  at_ = 0;
}

void TemplateAnswerParser::read_again(const std::string& text) {
  input_.replace(0, at_, text);
  at_ = 0;
}

void TemplateAnswerParser::step(char c, std::vector<Delta>& out) {
  switch (state_) {
    case State::kBegin:
      held_ += c;
      return begin(out);
    case State::kReasoning:
    case State::kContent:
      held_ += c;
      return text(out);
    case State::kCalls:
      held_ += c;
      return calls(c, out);
    case State::kCall:
      if (!is_open_) held_ += c;
      return call(c, out);
    case State::kArguments:
      return arguments(c, out);
    case State::kAfterCall:
      return after_call(c);
  }
}

// ---------------------------------------------------------------- text

void TemplateAnswerParser::begin(std::vector<Delta>& /*out*/) {
  const std::string_view text = without_leading_space(held_);
  const bool llama = answer_.family == Family::kLlama3;
  if (text.empty()) return;
  if (text == kThink) {
    enter_text(State::kReasoning);
  } else if (llama && text == kPythonTag) {
    begin_calls(State::kContent, std::string(kPythonTag));
  } else if (llama && text == "{") {
    begin_calls(State::kContent, "");
    read_again("{");
  } else if (!is_start(text, kThink) && !(llama && is_start(text, kPythonTag))) {
    const std::string again = held_;
    enter_text(State::kContent);
    skip_space_ = false;
    read_again(again);
  }
}

void TemplateAnswerParser::enter_text(State state) {
  state_ = state;
  held_.clear();
  space_.clear();
  skip_space_ = true;
}

void TemplateAnswerParser::text(std::vector<Delta>& out) {
  const std::string_view think_end = state_ == State::kReasoning ? kThinkEnd : std::string_view();
  const auto waits = [&](std::string_view text) {
    return is_start(text, think_end) || std::any_of(openers_.begin(), openers_.end(),
                                                    [&](const auto& o) { return is_start(text, o.mark); });
  };
  size_t done = 0;
  while (done < held_.size() && !waits(std::string_view(held_).substr(done))) ++done;
  put_text(std::string_view(held_).substr(0, done), out);
  held_.erase(0, done);
  if (held_.empty()) return;
  if (held_ == think_end) return enter_text(State::kContent);
  for (const CallShape::Opener& opener : openers_) {
    if (held_ == opener.mark) return begin_calls(state_, opener.mark);
  }
}

// White space waits for the text behind it: it is dropped where a part ends or begins.
void TemplateAnswerParser::put_text(std::string_view text, std::vector<Delta>& out) {
  const Delta::Kind kind = state_ == State::kReasoning ? Delta::Kind::kReasoning : Delta::Kind::kContent;
  if (skip_space_) text = without_leading_space(text);
  if (text.empty()) return;
  skip_space_ = false;
  size_t end = text.size();
  while (end > 0 && is_space(text[end - 1])) --end;
  if (end > 0) {
    put(kind, space_, out);
    put(kind, text.substr(0, end), out);
    space_.clear();
  }
  space_ += text.substr(end);
}

void TemplateAnswerParser::put(Delta::Kind kind, std::string_view text, std::vector<Delta>& out) {
  if (text.empty()) return;
  const int32_t call = kind == Delta::Kind::kToolArguments ? calls_ - 1 : 0;
  if (out.size() > first_ && out.back().kind == kind && out.back().call == call) {
    out.back().text += text;
    return;
  }
  Delta delta;
  delta.kind = kind;
  delta.call = call;
  delta.text = text;
  out.push_back(std::move(delta));
}

// ---------------------------------------------------------------- calls

void TemplateAnswerParser::begin_calls(State otherwise, const std::string& marker) {
  otherwise_ = otherwise;
  marker_ = marker;
  held_.clear();
  state_ = State::kCalls;
  in_list_ = is_open_ = false;
  if (answer_.family != Family::kShaped) return;
  state_ = State::kCall;
  std::string rest;
  for (const CallShape::Opener& opener : openers_) {
    if (opener.mark == marker) rest = opener.rest;
  }
  scanner_ = std::make_unique<ShapeScanner>(answer_.shape, answer_.strings, rest);
}

// The marker is text, and what came behind it is read again as such.
void TemplateAnswerParser::not_a_call(std::vector<Delta>& out) {
  const std::string again = held_;
  state_ = otherwise_;
  held_.clear();
  const bool is_control = std::any_of(answer_.names.begin(), answer_.names.end(),
                                      [&](const auto& name) { return name.second == marker_; });
  if (!is_control) put_text(marker_, out);
  read_again(again);
}

void TemplateAnswerParser::open_call(const std::string& name, std::vector<Delta>& out) {
  is_open_ = true;
  has_arguments_ = false;
  Delta delta;
  delta.kind = Delta::Kind::kToolCall;
  delta.call = calls_++;
  delta.name = name;
  out.push_back(std::move(delta));
  space_.clear();
  held_.clear();
}

void TemplateAnswerParser::calls(char c, std::vector<Delta>& out) {
  if (c == '{' && (in_list_ || without_leading_space(held_) == "{")) {
    scanner_ = std::make_unique<CallScanner>();
    is_open_ = false;
    state_ = State::kCall;
    return call(c, out);
  }
  if (is_space(c)) return;
  if (in_list_) return not_a_call(out);
  if (c == '[' && without_leading_space(held_) == "[" && answer_.family != Family::kLlama3) {
    in_list_ = true;
    return;
  }
  if (answer_.family != Family::kMistral) return not_a_call(out);
  named_call(c, out);
}

// [TOOL_CALLS]NAME[ARGS]{..}, with [CALL_ID]ID before [ARGS] in some versions, and without [ARGS] in others.
void TemplateAnswerParser::named_call(char c, std::vector<Delta>& out) {
  const std::string_view all = without_leading_space(held_);
  size_t length = 0;
  while (length < all.size() && is_name_char(all[length])) ++length;
  const std::string name(all.substr(0, length));
  std::string_view rest = all.substr(length);
  if (!name.empty() && c == '{' && rest == "{") {
    open_call(name, out);
    json_ = JsonScanner();
    state_ = State::kArguments;
    return arguments(c, out);
  }
  if (rest.starts_with(kCallId)) {
    rest.remove_prefix(kCallId.size());
    while (!rest.empty() && is_name_char(rest[0])) rest.remove_prefix(1);
  } else if (is_start(rest, kCallId)) {
    return;
  }
  if (name.empty() || !is_start(rest, kArgs) || held_.size() > kMaxHeld) return not_a_call(out);
  if (rest == kArgs) {
    open_call(name, out);
    json_ = JsonScanner();
    state_ = State::kArguments;
  }
}

void TemplateAnswerParser::call(char c, std::vector<Delta>& out) {
  using JsonState = JsonScanner::State;
  const JsonState state = scanner_->push(c);
  if (!is_open_) {
    const bool known =
        std::find(answer_.tools.begin(), answer_.tools.end(), scanner_->name()) != answer_.tools.end();
    // Without a marker around it only the name tells a call from an answer in JSON.
    const bool refused =
        scanner_->has_name() && answer_.family == Family::kLlama3 && marker_.empty() && !known;
    if (state == JsonState::kBad || refused || held_.size() > kMaxHeld) return not_a_call(out);
    if (scanner_->has_name()) open_call(scanner_->name(), out);
  }
  const std::string arguments = scanner_->take_arguments();
  has_arguments_ |= !arguments.empty();
  put(Delta::Kind::kToolArguments, arguments, out);
  if (state == JsonState::kMore) return;
  if (state == JsonState::kDone && !has_arguments_) put(Delta::Kind::kToolArguments, "{}", out);
  state_ = State::kAfterCall;
  held_.clear();
  if (state == JsonState::kBad) {  // too late to take it back: the rest is text
    in_list_ = false;
    end_calls();
    read_again(scanner_->unread());
  }
}

void TemplateAnswerParser::arguments(char c, std::vector<Delta>& out) {
  const JsonScanner::State state = json_.push(c);
  if (state == JsonScanner::State::kBad ||
      (json_.depth() == 0 && state == JsonScanner::State::kMore && !is_space(c))) {
    end_calls();
    return read_again(std::string(1, c));
  }
  put(Delta::Kind::kToolArguments, std::string(1, c), out);
  if (state == JsonScanner::State::kDone) {
    state_ = State::kAfterCall;
    held_.clear();
  }
}

void TemplateAnswerParser::after_call(char c) {
  held_ += c;
  const std::string_view text = without_leading_space(held_);
  if (text.empty()) return;
  is_open_ = false;
  if (answer_.family == Family::kShaped && after_shaped_call(text)) return;
  if (in_list_ && (text == "," || text == "]")) {
    if (c == ']') in_list_ = false;
    if (c == ',') state_ = State::kCalls;
    // A list's later members are calls whatever they are: no marker goes back into the text.
    if (c == ',') marker_.clear();
    held_.clear();
    return;
  }
  if (answer_.family == Family::kLlama3 && (text == ";" || text == ",")) {
    held_.clear();
    return;
  }
  if ((answer_.family == Family::kLlama3 || answer_.family == Family::kHermes) && text == "{") {
    begin_calls(State::kContent, "");
    return read_again("{");
  }
  if (!close_marker_.empty() && text == close_marker_) return end_calls();
  if (!close_marker_.empty() && is_start(text, close_marker_)) return;
  const std::string again(text);
  end_calls();
  read_again(again);
}

// What may stand behind a call in a template's own spelling: what ends it, what stands between two, what ends
// them all, and the next. False: none of these.
bool TemplateAnswerParser::after_shaped_call(std::string_view text) {
  const CallShape& shape = answer_.shape;
  const auto next_call = [&](const std::string& rest) {
    held_.clear();
    state_ = State::kCall;
    marker_.clear();
    scanner_ = std::make_unique<ShapeScanner>(shape, answer_.strings, rest);
  };
  bool waits = false;
  for (const CallShape::Opener& opener : openers_) {
    if (text == opener.mark) return begin_calls(State::kContent, opener.mark), true;
    waits |= is_start(text, opener.mark);
  }
  // Of a call's end only the first mark is the scanner's.
  const size_t cut = std::min(shape.end.find_first_of(" \n\r\t", without_space(shape.end)), shape.end.size());
  for (const std::string& mark : {shape.end.substr(cut), shape.between, shape.close, shape.begin}) {
    if (without_leading_space(mark).empty()) continue;
    const Match match = match_mark(text, mark);
    waits |= match == Match::kPartly;
    if (match != Match::kWhole) continue;
    const bool is_next = mark == shape.begin || (mark == shape.between && shape.begin.empty());
    if (is_next) next_call("");
    held_.clear();
    return true;
  }
  return waits;
}

void TemplateAnswerParser::end_calls() { enter_text(State::kContent); }

}  // namespace millrace::chat
