// Grammars in the manner of GBNF (docs/constrained_output.md has the syntax):
//   root   ::= "yes" | "no" reason{0,2}   # a comment
//   reason ::= " because " [^.\n]+ "."
// A rule ends where the next `name ::=` begins; new lines are space.
#include <map>
#include <string>

#include "base/error.h"
#include "base/utf8.h"
#include "grammar/compiled_grammar.h"
#include "grammar/expression.h"

namespace millrace::grammar {
namespace {

constexpr int kMaxGbnfDepth = 100;             // of groups in groups
constexpr std::string_view kWhat = "grammar";  // names the input in messages

class GbnfParser {
 public:
  explicit GbnfParser(std::string_view text) : text_(text) {}

  RuleId parse(GrammarBuilder& builder) {
    builder_ = &builder;
    skip_space();
    while (pos_ < text_.size()) parse_rule();
    for (const auto& [name, rule] : rules_) {
      if (!builder.rules()[rule].defined)
        throw_error(ErrorCode::kBadInput, "{}: line {}: rule '{}' is called but not defined", kWhat,
                    line(first_use_[name]), name);
    }
    const auto root = rules_.find("root");
    if (root == rules_.end())
      throw_error(ErrorCode::kBadInput, "{}: has no rule 'root' to begin with", kWhat);
    return root->second;
  }

 private:
  [[noreturn]] void fail(const std::string& found, std::string_view expected) const {
    throw_error(ErrorCode::kBadInput, "{}: line {}: found {}, expected {}", kWhat, line(pos_), found,
                expected);
  }
  size_t line(size_t pos) const {
    size_t count = 1;
    for (size_t i = 0; i < pos && i < text_.size(); ++i) count += text_[i] == '\n';
    return count;
  }
  std::string here() const {
    if (pos_ >= text_.size()) return "the end";
    const auto c = static_cast<unsigned char>(text_[pos_]);
    return c > 0x20 && c < 0x7f ? fmt::format("'{}'", text_[pos_]) : fmt::format("byte {:#04x}", c);
  }
  char peek() const { return pos_ < text_.size() ? text_[pos_] : '\0'; }
  bool take(char c) {
    if (peek() != c || pos_ >= text_.size()) return false;
    ++pos_;
    return true;
  }

  void skip_space() {
    while (pos_ < text_.size()) {
      const char c = text_[pos_];
      if (c == '#') {
        while (pos_ < text_.size() && text_[pos_] != '\n') ++pos_;
      } else if (c == ' ' || c == '\t' || c == '\r' || c == '\n') {
        ++pos_;
      } else {
        break;
      }
    }
  }

  static bool is_name(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
  }

  std::string parse_name() {
    const size_t begin = pos_;
    while (pos_ < text_.size() && is_name(text_[pos_])) ++pos_;
    if (pos_ == begin) fail(here(), "a rule's name");
    return std::string(text_.substr(begin, pos_ - begin));
  }

  // Whether `name ::=` stands here: then the rule before it has ended.
  bool at_rule() {
    const size_t begin = pos_;
    while (pos_ < text_.size() && is_name(text_[pos_])) ++pos_;
    const bool named = pos_ > begin;
    skip_space();
    const bool result = named && text_.substr(pos_, 3) == "::=";
    pos_ = begin;
    return result;
  }

  RuleId rule_of(const std::string& name) {
    const auto [it, is_new] = rules_.try_emplace(name, 0);
    if (is_new) {
      it->second = builder_->add_rule(name);
      first_use_[name] = pos_;
    }
    return it->second;
  }

  void parse_rule() {
    const std::string name = parse_name();
    const RuleId rule = rule_of(name);
    if (builder_->rules()[rule].defined)
      throw_error(ErrorCode::kBadInput, "{}: line {}: rule '{}' is defined twice", kWhat, line(pos_), name);
    skip_space();
    if (text_.substr(pos_, 3) != "::=") fail(here(), "'::='");
    pos_ += 3;
    skip_space();
    builder_->define(rule, parse_choice(0));
    if (pos_ < text_.size() && !at_rule()) fail(here(), "a rule");
  }

  ExprId parse_choice(int depth) {
    if (depth > kMaxGbnfDepth)
      throw_error(ErrorCode::kUnsupported, "{}: line {}: more than {} groups in one another", kWhat,
                  line(pos_), kMaxGbnfDepth);
    std::vector<ExprId> parts = {parse_sequence(depth)};
    while (take('|')) {
      skip_space();
      parts.push_back(parse_sequence(depth));
    }
    return builder_->choice(std::move(parts));
  }

  ExprId parse_sequence(int depth) {
    std::vector<ExprId> parts;
    while (pos_ < text_.size() && peek() != '|' && peek() != ')' && !at_rule()) {
      ExprId part = parse_atom(depth);
      skip_space();
      while (pos_ < text_.size() && (peek() == '*' || peek() == '+' || peek() == '?' || peek() == '{'))
        part = parse_quantifier(part);
      parts.push_back(part);
    }
    return builder_->sequence(std::move(parts));
  }

  ExprId parse_atom(int depth) {
    if (peek() == '"') return parse_literal();
    if (peek() == '[') return parse_class();
    if (take('.')) return builder_->set(CodepointSet::all());
    if (take('(')) {
      skip_space();
      const ExprId inner = parse_choice(depth + 1);
      if (!take(')')) fail(here(), "')'");
      return inner;
    }
    if (!is_name(peek())) fail(here(), "a literal, a class, a group or a rule's name");
    return builder_->rule(rule_of(parse_name()));
  }

  ExprId parse_quantifier(ExprId body) {
    ExprId result = body;
    if (take('*')) {
      result = builder_->repeat(body, 0, kUnbounded);
    } else if (take('+')) {
      result = builder_->repeat(body, 1, kUnbounded);
    } else if (take('?')) {
      result = builder_->optional(body);
    } else {
      take('{');
      skip_space();
      const bool has_min = peek() != ',';
      const uint32_t min = has_min ? parse_count() : 0;
      uint32_t max = min;
      skip_space();
      if (take(',')) {
        skip_space();
        max = peek() == '}' ? kUnbounded : parse_count();
        skip_space();
      }
      if (!take('}')) fail(here(), "'}'");
      if (max < min) fail(fmt::format("{{{},{}}}", min, max), "a maximum that is not below the minimum");
      result = builder_->repeat(body, min, max);
    }
    skip_space();
    return result;
  }

  uint32_t parse_count() {
    if (peek() < '0' || peek() > '9') fail(here(), "a number");
    uint32_t value = 0;
    while (peek() >= '0' && peek() <= '9') {
      value = value * 10 + static_cast<uint32_t>(text_[pos_++] - '0');
      if (value > kMaxRepeat)
        throw_error(ErrorCode::kUnsupported, "{}: line {}: repeats more than {} times", kWhat, line(pos_),
                    kMaxRepeat);
    }
    return value;
  }

  uint32_t parse_hex(int digits) {
    uint32_t value = 0;
    for (int i = 0; i < digits; ++i) {
      const char c = peek();
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) fail(here(), fmt::format("{} hexadecimal digits", digits));
      value = value << 4 | static_cast<uint32_t>(digit);
      ++pos_;
    }
    if (value > kLastCodepoint || (value >= 0xd800 && value <= 0xdfff))
      fail(fmt::format("U+{:04X}", value), "a Unicode character");
    return value;
  }

  uint32_t parse_character() {
    if (pos_ >= text_.size()) fail(here(), "a character");
    if (!take('\\')) return next_codepoint(text_, pos_, kWhat);
    const char c = peek();
    ++pos_;
    switch (c) {
      case 'n':
        return '\n';
      case 'r':
        return '\r';
      case 't':
        return '\t';
      case 'x':
        return parse_hex(2);
      case 'u':
        return parse_hex(4);
      case 'U':
        return parse_hex(8);
      case '"':
      case '\\':
      case '[':
      case ']':
      case '-':
      case '^':
      case '/':
        return static_cast<uint32_t>(c);
      default:
        --pos_;
        fail("'\\' before " + here(), "one of n r t x u U \" \\ [ ] - ^ /");
    }
  }

  ExprId parse_literal() {
    take('"');
    std::string text;
    while (!take('"')) {
      if (pos_ >= text_.size() || peek() == '\n') fail(here(), "the literal's closing '\"'");
      append_utf8(text, parse_character());
    }
    return builder_->bytes(text);
  }

  ExprId parse_class() {
    take('[');
    const bool negated = take('^');
    CodepointSet set;
    while (!take(']')) {
      if (pos_ >= text_.size()) fail(here(), "the class's closing ']'");
      const uint32_t first = parse_character();
      uint32_t last = first;
      if (peek() == '-' && text_.substr(pos_ + 1, 1) != "]") {
        ++pos_;
        last = parse_character();
      }
      if (last < first) fail("a range that ends before it begins", "a range");
      set.add(first, last);
    }
    return builder_->set(negated ? set.complement() : set);
  }

  std::string_view text_;
  size_t pos_ = 0;
  GrammarBuilder* builder_ = nullptr;
  std::map<std::string, RuleId> rules_;
  std::map<std::string, size_t> first_use_;
};

}  // namespace

std::shared_ptr<const Grammar> compile_gbnf(std::string_view rules) {
  GrammarBuilder builder;
  const RuleId root = GbnfParser(rules).parse(builder);
  return std::make_shared<const Grammar>(compile_automaton(builder, root, std::string(kWhat)));
}

}  // namespace millrace::grammar
