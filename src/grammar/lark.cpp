#include "grammar/lark.h"

#include <algorithm>
#include <map>
#include <vector>

#include "base/error.h"
#include "base/utf8.h"
#include "base/work_budget.h"
#include "grammar/codepoint_set.h"
#include "grammar/regex.h"

namespace millrace::grammar {
namespace {

constexpr int kMaxLarkDepth = 60;           // of groups in groups, and of rules in rules
constexpr size_t kMaxLarkBytes = 64 << 10;  // of the expression: rules in rules multiply
constexpr uint32_t kMaxLarkRepeats = 10'000;

// What `%import common.NAME` means.
constexpr std::pair<std::string_view, std::string_view> kCommon[] = {
    {"DIGIT", "[0-9]"},
    {"HEXDIGIT", "[0-9a-fA-F]"},
    {"INT", "[0-9]+"},
    {"SIGNED_INT", "[+-]?[0-9]+"},
    {"DECIMAL", "(?:[0-9]+\\.[0-9]*|\\.[0-9]+)"},
    {"NUMBER", "(?:[0-9]+(?:\\.[0-9]*)?|\\.[0-9]+)(?:[eE][+-]?[0-9]+)?"},
    {"SIGNED_NUMBER", "[+-]?(?:[0-9]+(?:\\.[0-9]*)?|\\.[0-9]+)(?:[eE][+-]?[0-9]+)?"},
    {"LCASE_LETTER", "[a-z]"},
    {"UCASE_LETTER", "[A-Z]"},
    {"LETTER", "[a-zA-Z]"},
    {"WORD", "[a-zA-Z]+"},
    {"CNAME", "[_a-zA-Z][_a-zA-Z0-9]*"},
    {"ESCAPED_STRING", "\"(?:[^\"\\\\\\n]|\\\\[^\\n])*\""},
    {"WS_INLINE", "[ \\t]+"},
    {"WS", "[ \\t\\f\\r\\n]+"},
    {"NEWLINE", "(?:\\r?\\n)+"},
};

std::string escaped(uint32_t character) {
  constexpr std::string_view kSpecial = "\\^$.|?*+()[]{}/-";
  if (character < 0x20 || character == 0x7f) return fmt::format("\\x{:02x}", character);
  std::string out;
  if (character < 0x80 && kSpecial.find(static_cast<char>(character)) != std::string_view::npos) out = "\\";
  append_utf8(out, character);
  return out;
}

class LarkReader {
 public:
  explicit LarkReader(std::string_view text) : text_(text) {}

  std::string regex() {
    find_rules();
    if (!rules_.contains("start")) fail_at(0, "found no rule 'start', expected one to begin with");
    return rule("start", 0, 0);
  }

 private:
  struct Rule {
    size_t begin = 0;        // of its body
    std::string regex = {};  // once it is known
    enum class State { kNew, kOpen, kDone } state = State::kNew;
  };

  [[noreturn]] void fail_at(size_t pos, const std::string& what,
                            ErrorCode code = ErrorCode::kBadInput) const {
    const auto line = 1 + std::count(text_.begin(), text_.begin() + static_cast<ptrdiff_t>(pos), '\n');
    throw_error(code, "lark: line {}: {}", line, what);
  }
  [[noreturn]] void fail(const std::string& what) const { fail_at(pos_, what); }
  [[noreturn]] void lacks(size_t pos, const std::string& what) const {
    fail_at(pos, what, ErrorCode::kUnsupported);
  }

  char peek(size_t ahead = 0) const { return pos_ + ahead < text_.size() ? text_[pos_ + ahead] : '\0'; }
  std::string here() const {
    const auto c = static_cast<unsigned char>(peek());
    if (pos_ >= text_.size() || c == '\n') return "the line's end";
    return c > 0x20 && c < 0x7f ? fmt::format("'{}'", peek()) : fmt::format("byte {:#04x}", c);
  }
  bool take(char c) {
    if (pos_ >= text_.size() || text_[pos_] != c) return false;
    ++pos_;
    return true;
  }
  static bool is_name(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  }
  std::string name() {
    const size_t begin = pos_;
    while (is_name(peek())) ++pos_;
    if (pos_ == begin) fail("expected a name");
    return std::string(text_.substr(begin, pos_ - begin));
  }
  void skip_line() {
    while (pos_ < text_.size() && peek() != '\n') ++pos_;
  }
  void skip_blanks() {
    while (peek() == ' ' || peek() == '\t' || peek() == '\r') ++pos_;
    if (peek() == '/' && peek(1) == '/') skip_line();
  }
  void skip_lines() {
    for (skip_blanks(); peek() == '\n'; skip_blanks()) ++pos_;
  }
  // Also over lines, where a rule goes on: in a group, and before a bar.
  void skip_space(bool in_group) {
    skip_blanks();
    const size_t here = pos_;
    skip_lines();
    if (!in_group && peek() != '|') pos_ = here;
  }

  void find_rules() {
    for (skip_lines(); pos_ < text_.size(); skip_lines()) {
      if (peek() == '%') {
        directive();
        continue;
      }
      const size_t begin = pos_;
      while (peek() == '?' || peek() == '!') ++pos_;
      std::string called = name();
      if (take('.')) {  // a priority: one regular expression has no use for it
        take('-');
        name();
      }
      skip_blanks();
      if (peek() == '{') lacks(begin, fmt::format("'{}' is a template, which is not supported", called));
      if (!take(':')) fail(fmt::format("expected ':' behind the name '{}'", called));
      add(std::move(called), {.begin = pos_}, begin);
      skip_body();
    }
  }
  void add(std::string called, Rule rule, size_t where) {
    if (!rules_.try_emplace(called, std::move(rule)).second) {
      fail_at(where, fmt::format("'{}' is defined twice", called));
    }
  }
  // To the end of the rule: it is read when it is known what the names in it mean.
  void skip_body() {
    int groups = 0;
    while (pos_ < text_.size()) {
      spend_work(1);
      const char c = peek();
      if (c == '"' || (c == '/' && peek(1) != '/')) {
        quoted(c);
        continue;
      }
      if (c == '/') skip_line();
      if (peek() == '\n' && groups <= 0) {
        skip_lines();
        if (peek() != '|') return;
      }
      groups += c == '(' || c == '[' ? 1 : c == ')' || c == ']' ? -1 : 0;
      if (pos_ < text_.size()) ++pos_;
    }
  }

  void directive() {
    const size_t begin = pos_++;
    const std::string what = name();
    if (what != "import") lacks(begin, fmt::format("%{} is not supported", what));
    skip_blanks();
    if (name() != "common" || !take('.')) lacks(begin, "only %import common.NAME is supported");
    const std::string given = name();
    std::string called = given;
    skip_blanks();
    if (peek() == '-' && peek(1) == '>') {
      pos_ += 2;
      skip_blanks();
      called = name();
    }
    const auto* found =
        std::find_if(std::begin(kCommon), std::end(kCommon), [&](const auto& c) { return c.first == given; });
    if (found == std::end(kCommon)) lacks(begin, fmt::format("common.{} is not known here", given));
    add(std::move(called), {.regex = std::string(found->second), .state = Rule::State::kDone}, begin);
  }

  std::string rule(const std::string& called, size_t used, int depth) {
    const auto found = rules_.find(called);
    if (found == rules_.end()) fail_at(used, fmt::format("'{}' is not defined", called));
    Rule& rule = found->second;
    if (rule.state == Rule::State::kOpen) {
      lacks(used, fmt::format("'{}' calls itself: only grammars without recursion are supported", called));
    }
    if (rule.state == Rule::State::kNew) {
      rule.state = Rule::State::kOpen;
      const size_t back = std::exchange(pos_, rule.begin);
      rule.regex = choice(false, depth + 1);
      skip_blanks();
      if (pos_ < text_.size() && peek() != '\n')
        fail(fmt::format("found {}, expected the rule's end", here()));
      pos_ = back;
      rule.state = Rule::State::kDone;
    }
    return rule.regex;
  }

  std::string choice(bool in_group, int depth) {
    if (depth > kMaxLarkDepth)
      lacks(pos_, fmt::format("more than {} groups or rules in one another", kMaxLarkDepth));
    std::string out = sequence(in_group, depth);
    for (skip_space(in_group); take('|'); skip_space(in_group)) out += "|" + sequence(in_group, depth);
    return out;
  }
  std::string sequence(bool in_group, int depth) {
    std::string out;
    for (skip_space(in_group); pos_ < text_.size(); skip_space(in_group)) {
      const char c = peek();
      if (c == '|' || c == ')' || c == ']' || c == '\n') break;
      if (c == '-' && peek(1) == '>') {  // the name of an alternative: nothing to match
        pos_ += 2;
        skip_blanks();
        name();
        continue;
      }
      out += repeated(item(depth));
      spend_work(1 + out.size() / 64);
      if (out.size() > kMaxLarkBytes)
        lacks(pos_, fmt::format("more than {} bytes without rules", kMaxLarkBytes));
    }
    return out;
  }

  std::string item(int depth) {
    const size_t begin = pos_;
    if (take('(')) return group(')', depth);
    if (take('[')) return group(']', depth) + "?";
    if (peek() == '"') return literal();
    if (peek() == '/') return pattern();
    if (!is_name(peek()))
      fail(fmt::format("found {}, expected a text, a pattern, a group or a name", here()));
    const std::string called = name();
    if (peek() == '{') lacks(begin, fmt::format("'{}' is a template, which is not supported", called));
    return "(?:" + rule(called, begin, depth) + ")";
  }
  std::string group(char end, int depth) {
    std::string inner = choice(true, depth + 1);
    skip_space(true);
    if (!take(end)) fail(fmt::format("expected '{}'", end));
    return "(?:" + inner + ")";
  }
  std::string repeated(std::string item) {
    skip_blanks();
    if (peek() == '?' || peek() == '*' || peek() == '+') return "(?:" + item + ")" + text_[pos_++];
    if (!take('~')) return item;
    skip_blanks();
    const uint32_t least = count();
    uint32_t most = least;
    if (peek() == '.' && peek(1) == '.') {
      pos_ += 2;
      most = count();
    }
    if (most < least) fail(fmt::format("found ~{}..{}, expected a maximum that is not below", least, most));
    return fmt::format("(?:{}){{{},{}}}", item, least, most);
  }
  uint32_t count() {
    if (peek() < '0' || peek() > '9') fail("expected a number behind '~'");
    uint32_t value = 0;
    while (peek() >= '0' && peek() <= '9') {
      value = value * 10 + static_cast<uint32_t>(text_[pos_++] - '0');
      if (value > kMaxLarkRepeats) lacks(pos_, fmt::format("repeats more than {} times", kMaxLarkRepeats));
    }
    return value;
  }

  // The text between two of these, as it is written.
  std::string_view quoted(char quote) {
    const size_t begin = ++pos_;
    while (pos_ < text_.size() && peek() != quote && peek() != '\n') pos_ += peek() == '\\' ? 2 : 1;
    if (pos_ >= text_.size() || peek() != quote)
      fail_at(begin - 1, fmt::format("expected a closing {}", quote));
    return text_.substr(begin, pos_++ - begin);
  }
  std::vector<uint32_t> characters() {
    const size_t begin = pos_;
    const std::string_view text = quoted('"');
    std::vector<uint32_t> out;
    for (size_t i = 0; i < text.size();) {
      if (text[i] != '\\') {
        out.push_back(next_codepoint(text, i, "lark"));
        continue;
      }
      constexpr std::string_view kNames = "nrtfv\"\\/", kMeant = "\n\r\t\f\v\"\\/";
      const size_t at = i + 1 < text.size() ? kNames.find(text[i + 1]) : std::string_view::npos;
      if (at == std::string_view::npos)
        lacks(begin, "found an escape that is none of \\n \\r \\t \\f \\v \\\" \\\\ \\/");
      out.push_back(static_cast<uint32_t>(kMeant[at]));
      i += 2;
    }
    return out;
  }
  std::string literal() {
    const size_t begin = pos_;
    const std::vector<uint32_t> text = characters();
    if (peek() == '.' && peek(1) == '.') {
      pos_ += 2;
      if (peek() != '"') fail("expected the range's last character");
      const std::vector<uint32_t> last = characters();
      if (text.size() != 1 || last.size() != 1 || last[0] < text[0])
        fail_at(begin, "expected a range of characters");
      return "[" + escaped(text[0]) + "-" + escaped(last[0]) + "]";
    }
    const bool any_case = take('i');
    std::string out;
    for (const uint32_t c : text) {
      const bool letter = (c | 0x20) >= 'a' && (c | 0x20) <= 'z';
      out += any_case && letter ? fmt::format("[{}{}]", char(c & ~0x20u), char(c | 0x20u)) : escaped(c);
    }
    return "(?:" + out + ")";
  }
  std::string pattern() {
    const size_t begin = pos_;
    const std::string inner(quoted('/'));
    if (is_name(peek())) lacks(begin, "flags of a pattern are not supported");
    try {
      parse_regex(inner, false, "pattern");
    } catch (const Error& error) {
      fail_at(begin, error.what(), error.code());
    }
    return "(?:" + inner + ")";
  }

  const std::string_view text_;
  size_t pos_ = 0;
  std::map<std::string, Rule> rules_;
};

}  // namespace

std::string lark_to_regex(std::string_view text) { return LarkReader(text).regex(); }

}  // namespace millrace::grammar
