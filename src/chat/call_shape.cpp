#include "chat/call_shape.h"

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/error.h"
#include "chat/json_scanner.h"

namespace millrace::chat {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kFirstName = "probe_function", kSecondName = "second_function";
constexpr std::string_view kFirstKey = "first_key", kFirstValue = "first value", kSecondKey = "other_key",
                           kSecondValue = "4161";
constexpr std::string_view kThirdKey = "third_key", kThirdValue = "third value";
const std::vector<std::string> kIds = {"callaaaa0", "callaaaa1"};

Json first_arguments() {
  return {{kFirstKey, kFirstValue}, {kSecondKey, std::stoi(std::string(kSecondValue))}};
}

Json second_arguments() { return {{kThirdKey, kThirdValue}}; }

Json tool(std::string_view name, const Json& properties) {
  const Json schema = {{"type", "object"}, {"properties", properties}};
  return {{"type", "function"},
          {"function", {{"name", name}, {"description", "probe"}, {"parameters", schema}}}};
}

Json call(const std::string& id, std::string_view name, const Json& arguments) {
  return {{"id", id}, {"type", "function"}, {"function", {{"name", name}, {"arguments", arguments}}}};
}

std::string render(const Codec& codec, Json answer) {
  const Json text = {{"type", "string"}}, number = {{"type", "integer"}};
  answer["role"] = "assistant";
  const Json variables = {
      {"messages", {{{"role", "user"}, {"content", "probe question"}}, std::move(answer)}},
      {"tools",
       {tool(kFirstName, {{kFirstKey, text}, {kSecondKey, number}}), tool(kSecondName, {{kThirdKey, text}})}},
      {"add_generation_prompt", false}};
  try {
    return codec.render(variables.dump());
  } catch (const Error&) {
    return "";
  }
}

size_t common_prefix(std::string_view a, std::string_view b) {
  return static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}
size_t common_suffix(std::string_view a, std::string_view b) {
  return static_cast<size_t>(std::mismatch(a.rbegin(), a.rend(), b.rbegin(), b.rend()).first - a.rbegin());
}

void replace_all(std::string& text, std::string_view what, char by) {
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at)) {
    text.replace(at, what.size(), 1, by);
  }
}

// What the template writes for two calls: an answer with them, without what an answer of text has too.
std::string written_calls(const Codec& codec) {
  Json calls = {call(kIds[0], kFirstName, first_arguments()), call(kIds[1], kSecondName, second_arguments())};
  const std::string with = render(codec, {{"content", ""}, {"tool_calls", std::move(calls)}});
  const std::string text = render(codec, {{"content", "probe answer"}});
  if (with.empty() || text.empty()) return "";
  size_t begin = common_prefix(with, text);
  size_t end =
      with.size() - common_suffix(std::string_view(with).substr(begin), std::string_view(text).substr(begin));
  // Whole marks: two may begin or end alike.
  const auto last = [&](char c, size_t at) { return at == 0 ? std::string::npos : with.rfind(c, at - 1); };
  const size_t open = last('<', begin), close = last('>', begin);
  if (open != std::string::npos && (close == std::string::npos || close < open)) begin = open;
  const size_t last_open = last('<', end), last_close = last('>', end);
  if (last_open != std::string::npos && (last_close == std::string::npos || last_close < last_open)) {
    end = std::min(with.find('>', end), with.size() - 1) + 1;
  }
  std::string out = with.substr(begin, end - begin);
  for (const std::string& id : kIds) replace_all(out, id, CallShape::kAny);
  // Thinking that the template writes for an answer with calls is no part of them.
  if (const size_t think = out.find("think>"); think < out.find(kFirstName)) {
    out.erase(0, out.rfind("think>", out.find(kFirstName)) + std::string_view("think>").size());
  }
  return out;
}

// The object at `begin`, and where it ends; nothing: there is none.
std::optional<Json> object_at(std::string_view text, size_t begin, size_t& end) {
  JsonScanner scanner;
  for (end = begin; end < text.size();) {
    const JsonScanner::State state = scanner.push(text[end++]);
    if (state == JsonScanner::State::kBad) return std::nullopt;
    if (state == JsonScanner::State::kDone)
      return Json::parse(text.substr(begin, end - begin), nullptr, false);
  }
  return std::nullopt;
}

// Of what stands before several things alike, the part that belongs to one of them: it begins with a mark.
std::string from_mark(std::string_view text) {
  size_t at = 0;
  while (at < text.size() && std::string_view("<[{").find(text[at]) == std::string_view::npos &&
         !(at > 0 && is_space(text[at - 1]))) {
    ++at;
  }
  return std::string(text.substr(at));
}

// Equal but for a few letters or digits, which become kAny.
std::optional<std::string> merged(std::string_view a, std::string_view b) {
  if (a == b) return std::string(a);
  const auto letter = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; };
  size_t prefix = common_prefix(a, b);
  size_t suffix = common_suffix(a.substr(prefix), b.substr(prefix));
  while (prefix > 0 && letter(a[prefix - 1])) --prefix;  // whole words
  while (suffix > 0 && letter(a[a.size() - suffix])) --suffix;
  const auto plain = [&](std::string_view text) {
    text = text.substr(prefix, text.size() - prefix - suffix);
    return std::all_of(text.begin(), text.end(), letter);
  };
  if (!plain(a) || !plain(b)) return std::nullopt;
  return std::string(a.substr(0, prefix)) + CallShape::kAny + std::string(a.substr(a.size() - suffix));
}

bool blank(std::string_view text) { return std::all_of(text.begin(), text.end(), is_space); }

// Where the parts of two calls stand in what was written for both.
class Learner {
 public:
  explicit Learner(std::string two) : two_(std::move(two)) {}

  CallShape run() {
    const size_t name = two_.find(kFirstName), second = two_.find(kSecondName);
    if (name == std::string::npos || second == std::string::npos || second < name) return {};
    const size_t after = name + kFirstName.size(), after_second = second + kSecondName.size();
    // Up to where the arguments of either end.
    size_t end = 0, end_second = 0;
    const bool read =
        objects(name, second) || (two_[after] == '(' ? python(after, after_second, end, end_second)
                                                     : json(after, after_second, end, end_second) ||
                                                           tagged(after, after_second, end, end_second));
    if (!read) return {};
    if (out_.kind != CallShape::Kind::kObject) split(name, end, second, end_second);
    // Calls in a list of objects with keys of their own are not read.
    const bool in_object = (out_.open + out_.between).find('{') != std::string::npos;
    return in_object || out_.openers().empty() ? CallShape() : out_;
  }

 private:
  std::string_view between(size_t begin, size_t end) const {
    return std::string_view(two_).substr(begin, end - begin);
  }

  // {"name": .., "arguments": ..} in whose arguments the call's stand.
  bool objects(size_t name, size_t second) {
    size_t end = 0, begin = two_.rfind('{', name);
    if (begin == std::string::npos) return false;
    const std::optional<Json> object = object_at(two_, begin, end);
    if (!object || !object->is_object() || object->value("name", Json()) != Json(kFirstName)) return false;
    for (const char* key : {"arguments", "parameters"}) {
      if (object->value(key, Json()) == first_arguments()) out_.arguments_key = key;
    }
    size_t end_second = 0;
    const size_t begin_second = two_.rfind('{', second);
    if (out_.arguments_key.empty() || begin_second < end || !object_at(two_, begin_second, end_second))
      return false;
    out_.kind = CallShape::Kind::kObject;
    out_.open = two_.substr(0, begin);
    out_.between = between(end, begin_second);
    out_.close = two_.substr(end_second);
    // Each call has the marks.
    const std::string again = out_.close + out_.open;
    if (const size_t at = out_.between.find(out_.open);
        !out_.open.empty() && at != std::string::npos && match_mark(out_.between, again) == Match::kWhole) {
      out_.begin = std::exchange(out_.open, "");
      out_.end = std::exchange(out_.close, "");
      out_.between = out_.between.substr(out_.end.size(), at - std::min(at, out_.end.size()));
    }
    return true;
  }

  bool json(size_t after, size_t after_second, size_t& end, size_t& end_second) {
    const size_t begin = two_.find('{', after), begin_second = two_.find('{', after_second);
    if (begin == std::string::npos || begin_second == std::string::npos) return false;
    const std::optional<Json> first = object_at(two_, begin, end);
    const std::optional<Json> second = object_at(two_, begin_second, end_second);
    if (!first || *first != first_arguments() || !second || *second != second_arguments()) return false;
    const std::optional<std::string> name_end =
        merged(between(after, begin), between(after_second, begin_second));
    if (!name_end) return false;
    out_.kind = CallShape::Kind::kNamed;
    out_.name_end = *name_end;
    return true;
  }

  bool tagged(size_t after, size_t after_second, size_t& end, size_t& end_second) {
    const size_t key = two_.find(kFirstKey, after), value = two_.find(kFirstValue, after);
    const size_t other = two_.find(kSecondKey, after), number = two_.find(kSecondValue, after);
    const size_t third = two_.find(kThirdKey, after_second), last = two_.find(kThirdValue, after_second);
    if (!(key < value && value < other && other < number && number < third && third < last) ||
        last == std::string::npos) {
      return false;
    }
    const std::string_view before_key = between(after, key);
    const std::string_view before_other = between(value + kFirstValue.size(), other);
    out_.kind = CallShape::Kind::kTagged;
    out_.key_begin =
        from_mark(before_key.substr(before_key.size() - common_suffix(before_key, before_other)));
    out_.name_end = before_key.substr(0, before_key.size() - out_.key_begin.size());
    out_.value_end = before_other.substr(0, before_other.size() - out_.key_begin.size());
    const std::string_view of_string = between(key + kFirstKey.size(), value);
    const std::optional<std::string> key_end = merged(of_string, between(other + kSecondKey.size(), number));
    end = number + kSecondValue.size();
    end_second = last + kThirdValue.size();
    if (!key_end || blank(out_.key_begin) || blank(*key_end) || blank(out_.value_end)) return false;
    out_.key_end = *key_end;
    match_mark(of_string, *key_end, &out_.any_of_string);
    // The last value has its end too.
    for (size_t* at : {&end, &end_second}) {
      const std::string_view tail = std::string_view(two_).substr(*at);
      const std::string_view mark = std::string_view(out_.value_end);
      const size_t length = mark.find_last_not_of(" \n\r\t") + 1;
      if (!tail.starts_with(mark.substr(0, length))) return false;
      *at += length;
    }
    return true;
  }

  bool python(size_t after, size_t after_second, size_t& end, size_t& end_second) {
    end = two_.find(')', two_.find(kSecondValue, after));
    end_second = two_.find(')', two_.find(kThirdValue, after_second));
    if (end == std::string::npos || end_second == std::string::npos || end > after_second) return false;
    if (two_.find(kFirstKey, after) != after + 1 || two_[after + 1 + kFirstKey.size()] != '=') return false;
    out_.kind = CallShape::Kind::kPython;
    out_.name_end = "(";
    return true;
  }

  // What stands around calls and between them, of what stands before the first name, between the first call's
  // arguments and the second name, and behind all.
  void split(size_t name, size_t end, size_t second, size_t end_second) {
    const std::string_view before = between(0, name), middle = between(end, second);
    const std::string_view behind = std::string_view(two_).substr(end_second);
    out_.begin = from_mark(before.substr(before.size() - common_suffix(before, middle)));
    out_.open = before.substr(0, before.size() - out_.begin.size());
    const std::string_view ends = middle.substr(0, middle.size() - out_.begin.size());
    out_.end = ends.substr(0, common_prefix(ends, behind));
    out_.between = ends.substr(out_.end.size());
    out_.close = behind.substr(out_.end.size());
  }

  std::string two_;
  CallShape out_;
};

// How many bytes of `text` are its first mark: <..> or [..], or up to white space.
size_t mark_length(std::string_view text) {
  if (text.empty() || (text[0] != '<' && text[0] != '[')) return 0;
  const size_t close = text.find(text[0] == '<' ? '>' : ']'), space = text.find_first_of(" \n\r\t");
  const size_t any = text.find(CallShape::kAny);
  return std::min({close == std::string_view::npos ? text.size() : close + 1, space, any, text.size()});
}

}  // namespace

std::vector<CallShape::Opener> CallShape::openers() const {
  constexpr size_t kShortest = 3;  // less is too common in text
  std::vector<Opener> out;
  const auto add = [&](std::string_view text) -> size_t {
    text = trimmed(text);
    const size_t length = mark_length(text);
    const std::string mark(text.substr(0, length));
    const bool known = std::any_of(out.begin(), out.end(), [&](const Opener& o) { return o.mark == mark; });
    if (length >= kShortest && !known) out.push_back({mark, std::string(trimmed(text.substr(length)))});
    return length;
  };
  if (!trimmed(open).empty()) add(open + begin);
  const std::string_view first = trimmed(begin);
  if (first.empty()) return out;
  const size_t length = add(first);
  if (kind != Kind::kObject && length > 0) add(first.substr(length));
  return out;
}

std::vector<std::string> CallShape::marks() const {
  std::vector<std::string> out;
  for (const std::string* part :
       {&open, &begin, &name_end, &key_begin, &key_end, &value_end, &end, &between, &close}) {
    for (size_t at = part->find('<'); at != std::string::npos; at = part->find('<', at + 1)) {
      const size_t end_of_mark = part->find('>', at);
      if (end_of_mark == std::string::npos) break;
      std::string mark = part->substr(at, end_of_mark + 1 - at);
      if (std::find(out.begin(), out.end(), mark) == out.end()) out.push_back(std::move(mark));
    }
  }
  return out;
}

CallShape learn_call_shape(const Codec& codec, std::string& written) {
  written = written_calls(codec);
  if (written.empty()) return {};
  CallShape out = Learner(written).run();
  for (const int32_t token : codec.end_tokens()) {  // the turn's, not the calls'
    const std::string name = codec.token_text(token);
    if (!name.empty()) out.close = out.close.substr(0, out.close.find(name));
  }
  std::replace(written.begin(), written.end(), CallShape::kAny, '0');
  return out;
}

std::vector<ProbeCall> probe_calls() {
  return {{std::string(kFirstName), first_arguments().dump()},
          {std::string(kSecondName), second_arguments().dump()}};
}

Match match_mark(std::string_view text, std::string_view mark, std::string* any) {
  size_t at = 0, i = 0;
  while (true) {
    while (i < mark.size() && is_space(mark[i])) ++i;
    while (at < text.size() && is_space(text[at])) ++at;
    if (i == mark.size()) return Match::kWhole;
    if (mark[i] == CallShape::kAny) {
      const size_t begin = at;
      while (at < text.size() &&
             (std::isalnum(static_cast<unsigned char>(text[at])) != 0 || text[at] == '_' || text[at] == '-'))
        ++at;
      if (any != nullptr) *any = text.substr(begin, at - begin);
      ++i;
      continue;
    }
    if (at == text.size()) return Match::kPartly;
    if (text[at++] != mark[i++]) return Match::kNo;
  }
}

}  // namespace millrace::chat
