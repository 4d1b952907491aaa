#include "chat/gemma_answer_parser.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <span>

#include "base/utf8.h"

namespace millrace::chat {
namespace {

constexpr std::string_view kChannel = "<|channel>", kChannelEnd = "<channel|>", kCall = "<|tool_call>",
                           kCallEnd = "<tool_call|>", kQuote = "<|\"|>";

// How much of the end of `text` could be the start of one of these.
size_t held_back(std::string_view text, std::span<const std::string_view> markers) {
  size_t most = 0;
  for (const std::string_view marker : markers) {
    for (size_t n = std::min(text.size(), marker.size() - 1); n > most; --n) {
      if (marker.starts_with(text.substr(text.size() - n))) most = n;
    }
  }
  return most;
}

// A value in Gemma's spelling or in JSON's, written as JSON.
class ArgumentReader {
 public:
  explicit ArgumentReader(std::string_view text) : text_(text) {}

  std::optional<std::string> object() {
    space();
    if (at_ == text_.size() || text_[at_] != '{' || !value(0)) return std::nullopt;
    space();
    if (at_ != text_.size()) return std::nullopt;
    return std::move(out_);
  }

 private:
  static constexpr int kMaxDepth = 64;

  void space() {
    while (at_ < text_.size() && is_space(text_[at_])) ++at_;
  }
  bool take(std::string_view part) {
    if (!text_.substr(at_).starts_with(part)) return false;
    at_ += part.size();
    return true;
  }
  void put_string(std::string_view text) { out_ += nlohmann::json(valid_utf8(std::string(text))).dump(); }

  bool quoted() {
    const size_t end = text_.find(kQuote, at_);
    if (end == std::string_view::npos) return false;
    put_string(text_.substr(at_, end - at_));
    at_ = end + kQuote.size();
    return true;
  }

  bool json_string() {
    JsonScanner scanner;
    const size_t begin = at_;
    while (at_ < text_.size()) {
      const JsonScanner::State state = scanner.push(text_[at_++]);
      if (state == JsonScanner::State::kBad) return false;
      if (state != JsonScanner::State::kDone) continue;
      out_ += text_.substr(begin, at_ - begin);
      return true;
    }
    return false;
  }

  bool key() {
    space();
    if (take(kQuote)) return quoted();
    if (at_ < text_.size() && text_[at_] == '"') return json_string();
    const size_t end = text_.find_first_of(":{}[],", at_);
    if (end == std::string_view::npos || text_[end] != ':') return false;
    const std::string_view name = trimmed(text_.substr(at_, end - at_));
    if (name.empty()) return false;
    put_string(name);
    at_ = end;
    return true;
  }

  // Members or elements up to `close`, behind the bracket that opened them.
  bool list(char close, int depth) {
    out_ += close == '}' ? '{' : '[';
    space();
    if (at_ < text_.size() && text_[at_] == close) {
      ++at_;
      out_ += close;
      return true;
    }
    while (true) {
      if (close == '}') {
        if (!key()) return false;
        space();
        if (!take(":")) return false;
        out_ += ':';
      }
      if (!value(depth + 1)) return false;
      space();
      if (at_ == text_.size()) return false;
      const char c = text_[at_++];
      if (c != close && c != ',') return false;
      out_ += c;
      if (c == close) return true;
    }
  }

  bool value(int depth) {
    if (depth > kMaxDepth) return false;
    space();
    if (at_ == text_.size()) return false;
    if (take(kQuote)) return quoted();
    if (take("{")) return list('}', depth);
    if (take("[")) return list(']', depth);
    if (text_[at_] == '"') return json_string();
    const size_t end = text_.find_first_of(",{}[]", at_);
    if (end == std::string_view::npos) return false;
    const std::string_view word = trimmed(text_.substr(at_, end - at_));
    if (word.empty()) return false;
    at_ = end;
    const nlohmann::json plain = nlohmann::json::parse(word, nullptr, false);
    if (plain.is_number() || plain.is_boolean() || plain.is_null()) {
      out_ += word;
    } else if (word == "None" || word == "True" || word == "False") {  // its template writes Python's words
      out_ += word == "None" ? "null" : word == "True" ? "true" : "false";
    } else {
      put_string(word);  // a string without its quotes
    }
    return true;
  }

  std::string_view text_;
  size_t at_ = 0;
  std::string out_;
};

// Where a call's text ends: the first end marker outside of its strings.
size_t call_end(std::string_view text) {
  size_t at = 0;
  while (true) {
    const size_t end = text.find(kCallEnd, at), quote = text.find(kQuote, at);
    if (end == std::string_view::npos || quote > end) return end;
    const size_t behind = text.find(kQuote, quote + kQuote.size());
    if (behind == std::string_view::npos) return std::string_view::npos;
    at = behind + kQuote.size();
  }
}

}  // namespace

std::optional<std::string> gemma_arguments(std::string_view text) { return ArgumentReader(text).object(); }

void GemmaAnswerParser::token(int32_t token, std::string_view text, std::vector<Delta>& out) {
  first_ = out.size();
  input_ += text;
  const auto name = answer_.names.find(token);
  if (name != answer_.names.end() && text != name->second) input_ += name->second;
  read(false, out);
}

void GemmaAnswerParser::finish(std::string_view text, std::vector<Delta>& out) {
  first_ = out.size();
  input_ += text;
  read(true, out);
}

void GemmaAnswerParser::read(bool last, std::vector<Delta>& out) {
  while (!input_.empty() && step(last, out)) {
  }
}

// False: more text is needed.
bool GemmaAnswerParser::step(bool last, std::vector<Delta>& out) {
  if (state_ == State::kCall) return in_call(last, out);
  if (state_ != State::kChannel) return in_text(last, out);
  // The channel's name is on a line of its own.
  const size_t line = input_.find('\n'), end = input_.find(kChannelEnd);
  if (std::min(line, end) == std::string::npos) {
    if (last) input_.clear();
    return last;
  }
  input_.erase(0, line < end ? line + 1 : end);
  state_ = State::kReasoning;
  return true;
}

bool GemmaAnswerParser::in_text(bool last, std::vector<Delta>& out) {
  static constexpr std::array<std::string_view, 3> kMarkers = {kChannelEnd, kChannel, kCall};
  const bool reasons = state_ == State::kReasoning;
  // Thinking ends with its channel, and has no calls.
  const size_t known = reasons ? 1 : answer_.tools.empty() ? 2 : 3;
  const std::span markers = std::span(kMarkers).first(known);
  size_t at = std::string::npos;
  std::string_view found;
  for (const std::string_view marker : markers) {
    const size_t here = input_.find(marker);
    if (here < at) {
      at = here;
      found = marker;
    }
  }
  const size_t sure = at != std::string::npos ? at : input_.size() - (last ? 0 : held_back(input_, markers));
  put(reasons ? Delta::Kind::kReasoning : Delta::Kind::kContent, std::string_view(input_).substr(0, sure),
      out);
  input_.erase(0, sure + found.size());
  if (found.empty()) return false;
  space_.clear();
  // An end without a beginning is dropped.
  state_ = found == kChannel ? State::kChannel : found == kCall ? State::kCall : State::kContent;
  return true;
}

bool GemmaAnswerParser::in_call(bool last, std::vector<Delta>& out) {
  size_t end = call_end(input_);
  if (end == std::string::npos && !last) return false;
  const bool closed = end != std::string::npos;
  if (!closed) end = input_.size();
  std::string_view text = trimmed(std::string_view(input_).substr(0, end));
  constexpr std::string_view kBegin = "call:";
  const size_t brace = text.find('{');
  std::optional<std::string> arguments;
  std::string name;
  if (text.starts_with(kBegin) && brace != std::string_view::npos) {
    name = trimmed(text.substr(kBegin.size(), brace - kBegin.size()));
    if (std::find(answer_.tools.begin(), answer_.tools.end(), name) != answer_.tools.end())
      arguments = gemma_arguments(text.substr(brace));
  }
  state_ = State::kContent;
  if (arguments) {
    out.push_back({.kind = Delta::Kind::kToolCall, .call = calls_, .name = name});
    out.push_back({.kind = Delta::Kind::kToolArguments, .call = calls_, .text = std::move(*arguments)});
    ++calls_;
  } else {
    put(Delta::Kind::kContent, kCall, out);
    put(Delta::Kind::kContent, std::string_view(input_).substr(0, end), out);
    if (closed) put(Delta::Kind::kContent, kCallEnd, out);
  }
  input_.erase(0, end + (closed ? kCallEnd.size() : 0));
  return true;
}

// White space at the end of thinking is the template's.
void GemmaAnswerParser::put(Delta::Kind kind, std::string_view text, std::vector<Delta>& out) {
  std::string whole(text);
  if (kind == Delta::Kind::kReasoning) {
    whole = space_ + whole;
    size_t end = whole.size();
    while (end > 0 && is_space(whole[end - 1])) --end;
    space_ = whole.substr(end);
    whole.resize(end);
  }
  if (whole.empty()) return;
  if (out.size() > first_ && out.back().kind == kind) {
    out.back().text += whole;
  } else {
    out.push_back({.kind = kind, .text = std::move(whole)});
  }
}

}  // namespace millrace::chat
