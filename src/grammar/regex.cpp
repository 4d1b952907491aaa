#include "grammar/regex.h"

#include <algorithm>
#include <optional>

#include "base/error.h"
#include "grammar/compiled_grammar.h"
#include "grammar/expression.h"

namespace millrace::grammar {
namespace {

constexpr int kMaxRegexDepth = 100;  // of groups in groups
constexpr size_t kMaxNfaStates = 100'000;

const CodepointSet& digits() {
  static const CodepointSet set('0', '9');
  return set;
}

const CodepointSet& word_characters() {
  static const CodepointSet set = [] {
    CodepointSet s('0', '9');
    s.add('A', 'Z');
    s.add('a', 'z');
    s.add('_', '_');
    return s;
  }();
  return set;
}

const CodepointSet& spaces() {
  static const CodepointSet set = [] {
    CodepointSet s = CodepointSet::of(U"\t\n\v\f\r \u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff");
    s.add(0x2000, 0x200a);
    return s;
  }();
  return set;
}

// Builds the automaton while it reads. A piece is read again for each of its repetitions: `pos_` goes back.
class RegexParser {
 public:
  RegexParser(std::string_view pattern, const std::string& what) : text_(pattern), what_(what) {}

  CharNfa parse(bool search) {
    nfa_.start = add_state();
    nfa_.accept = add_state();
    const uint32_t from = search ? any_text(nfa_.start) : nfa_.start;
    const uint32_t to = add_state();
    parse_choice(from, to, 0);
    if (pos_ < text_.size()) fail("an unmatched ')'", "the end");
    const uint32_t end = search ? any_text(to) : to;
    empty_edge(end, nfa_.accept);
    return std::move(nfa_);
  }

 private:
  using EdgeKind = CharNfa::Edge::Kind;

  [[noreturn]] void fail(std::string_view found, std::string_view expected) const {
    throw_error(ErrorCode::kBadInput, "{}: offset {}: found {}, expected {}", what_, pos_, found, expected);
  }
  [[noreturn]] void refuse(size_t pos, std::string_view found) const {
    throw_error(ErrorCode::kUnsupported, "{}: offset {}: {} not supported", what_, pos, found);
  }

  uint32_t add_state() {
    if (nfa_.states.size() >= kMaxNfaStates)
      throw_error(ErrorCode::kUnsupported, "{}: takes more than {} states; repeat counts are too large",
                  what_, kMaxNfaStates);
    return nfa_.add_state();
  }
  void empty_edge(uint32_t from, uint32_t to) { nfa_.states[from].push_back({EdgeKind::kEmpty, 0, to}); }
  void set_edge(uint32_t from, const CodepointSet& set, uint32_t to) {
    size_t index = 0;
    while (index < nfa_.sets.size() && !(nfa_.sets[index] == set)) ++index;
    if (index == nfa_.sets.size()) nfa_.sets.push_back(set);
    nfa_.states[from].push_back({EdgeKind::kSet, static_cast<uint32_t>(index), to});
  }
  uint32_t any_text(uint32_t from) {
    const uint32_t loop = add_state();
    empty_edge(from, loop);
    set_edge(loop, CodepointSet::all(), loop);
    const uint32_t to = add_state();
    empty_edge(loop, to);
    return to;
  }

  char peek(size_t ahead = 0) const { return pos_ + ahead < text_.size() ? text_[pos_ + ahead] : '\0'; }
  bool take(char c) {
    if (pos_ >= text_.size() || text_[pos_] != c) return false;
    ++pos_;
    return true;
  }
  bool take(std::string_view s) {
    if (text_.substr(pos_, s.size()) != s) return false;
    pos_ += s.size();
    return true;
  }

  void parse_choice(uint32_t from, uint32_t to, int depth) {
    if (depth > kMaxRegexDepth)
      refuse(pos_, fmt::format("more than {} groups in one another", kMaxRegexDepth));
    do {
      const uint32_t begin = add_state();
      empty_edge(from, begin);
      parse_sequence(begin, to, depth);
    } while (take('|'));
  }

  void parse_sequence(uint32_t from, uint32_t to, int depth) {
    while (pos_ < text_.size() && peek() != '|' && peek() != ')') {
      const uint32_t next = add_state();
      parse_piece(from, next, depth);
      from = next;
    }
    empty_edge(from, to);
  }

  struct Quantifier {
    uint32_t min = 1, max = 1;
  };

  // An atom with its quantifier. The quantifier comes after the atom, so its end is looked for first; the
  // atom is then read once for every repetition.
  void parse_piece(uint32_t from, uint32_t to, int depth) {
    const size_t begin = pos_;
    skip_atom();
    const size_t atom_end = pos_;
    const std::optional<Quantifier> quantifier = parse_quantifier();
    const size_t end = pos_;
    pos_ = begin;
    if (!quantifier) {
      parse_atom(from, to, depth);
      return;
    }
    if (text_[begin] == '^' || text_[begin] == '$') refuse(atom_end, "repeating an anchor is");
    if (quantifier->max == 0) parse_atom(add_state(), add_state(), depth);  // for its errors
    const auto once = [&](uint32_t a, uint32_t b) {
      pos_ = begin;
      parse_atom(a, b, depth);
    };
    for (uint32_t i = 0; i < quantifier->min; ++i) {
      const uint32_t next = add_state();
      once(from, next);
      from = next;
    }
    if (quantifier->max == kUnbounded) {
      const uint32_t loop = add_state(), back = add_state();
      empty_edge(from, loop);
      once(loop, back);
      empty_edge(back, loop);
      empty_edge(loop, to);
    } else {
      for (uint32_t i = quantifier->min; i < quantifier->max; ++i) {
        const uint32_t next = add_state();
        empty_edge(from, to);
        once(from, next);
        from = next;
      }
      empty_edge(from, to);
    }
    pos_ = end;
  }

  void skip_atom() {
    int groups = 0;
    bool in_class = false;
    do {
      const char c = peek();
      if (pos_ >= text_.size()) return;  // whoever reads the atom says what is missing
      pos_ += c == '\\' ? 2 : 1;
      if (c == '[') in_class = true;
      if (c == ']') in_class = false;
      if (c == '(' && !in_class) ++groups;
      if (c == ')' && !in_class) --groups;
    } while (groups > 0 || in_class);
    pos_ = std::min(pos_, text_.size());
    while (pos_ < text_.size() && (static_cast<unsigned char>(text_[pos_]) & 0xc0) == 0x80) ++pos_;
  }

  std::optional<Quantifier> parse_quantifier() {
    Quantifier q;
    if (take('*')) {
      q = {0, kUnbounded};
    } else if (take('+')) {
      q = {1, kUnbounded};
    } else if (take('?')) {
      q = {0, 1};
    } else if (peek() == '{' && parse_counts(q)) {
      if (q.max < q.min) fail("a repeat whose maximum is below its minimum", "{minimum,maximum}");
    } else {
      return std::nullopt;
    }
    if (!take('?') && peek() == '+') refuse(pos_, "a possessive quantifier is");
    if (peek() == '*' || peek() == '+' || peek() == '?') fail("a quantifier after a quantifier", "an atom");
    return q;
  }

  // {m}, {m,} or {m,n}; anything else in braces is literal text, as in ECMA 262.
  bool parse_counts(Quantifier& q) {
    const size_t begin = pos_;
    ++pos_;
    const std::optional<uint32_t> min = parse_count();
    std::optional<uint32_t> max = min;
    if (min && take(',')) max = peek() == '}' ? kUnbounded : parse_count();
    if (!min || !max || !take('}')) {
      pos_ = begin;
      return false;
    }
    q = {*min, *max};
    return true;
  }

  std::optional<uint32_t> parse_count() {
    if (peek() < '0' || peek() > '9') return std::nullopt;
    uint32_t value = 0;
    while (peek() >= '0' && peek() <= '9') {
      value = value * 10 + static_cast<uint32_t>(text_[pos_] - '0');
      if (value > kMaxRepeat) refuse(pos_, fmt::format("repeating more than {} times is", kMaxRepeat));
      ++pos_;
    }
    return value;
  }

  void parse_atom(uint32_t from, uint32_t to, int depth) {
    switch (peek()) {
      case '^':
        ++pos_;
        nfa_.states[from].push_back({EdgeKind::kAtBegin, 0, to});
        return;
      case '$':
        ++pos_;
        nfa_.states[from].push_back({EdgeKind::kAtEnd, 0, to});
        return;
      case '(':
        parse_group(from, to, depth);
        return;
      case '[':
        set_edge(from, parse_class(), to);
        return;
      case '.':
        ++pos_;
        set_edge(from, CodepointSet::of(U"\n\r\u2028\u2029").complement(), to);
        return;
      case '*':
      case '+':
      case '?':
        fail("a quantifier with nothing before it", "an atom");
      case '\\': {
        CodepointSet set;
        if (const std::optional<uint32_t> c = parse_escape(false, set)) set.add(*c, *c);
        set_edge(from, set, to);
        return;
      }
      default: {
        const uint32_t c = next_codepoint(text_, pos_, what_);
        set_edge(from, CodepointSet(c, c), to);
        return;
      }
    }
  }

  void parse_group(uint32_t from, uint32_t to, int depth) {
    const size_t begin = pos_;
    ++pos_;
    if (take("?=") || take("?!")) refuse(begin, "lookahead is");
    if (take("?<=") || take("?<!")) refuse(begin, "lookbehind is");
    if (take("?>")) refuse(begin, "an atomic group is");
    if (take("?<") || take("?P<")) {
      while (pos_ < text_.size() && peek() != '>') ++pos_;
      if (!take('>')) fail("the end", "the '>' of a group's name");
    } else if (!take("?:") && peek() == '?') {
      refuse(begin, fmt::format("the group '(?{}' is", peek(1) >= ' ' && peek(1) < 0x7f ? peek(1) : '.'));
    }
    parse_choice(from, to, depth + 1);
    if (!take(')')) fail("the end", "')'");
  }

  CodepointSet parse_class() {
    ++pos_;
    const bool negated = take('^');
    CodepointSet set;
    while (!take(']')) {
      if (pos_ >= text_.size()) fail("the end", "the class's closing ']'");
      const std::optional<uint32_t> first = parse_class_member(set);
      if (peek() != '-' || peek(1) == ']' || pos_ + 1 >= text_.size()) {
        if (first) set.add(*first, *first);
        continue;
      }
      ++pos_;
      const std::optional<uint32_t> last = parse_class_member(set);
      if (!first || !last) {  // [\w-x]: the minus stands for itself
        set.add('-', '-');
        if (first) set.add(*first, *first);
        if (last) set.add(*last, *last);
        continue;
      }
      if (*last < *first) fail("a range that ends before it begins", "a range");
      set.add(*first, *last);
    }
    return negated ? set.complement() : set;
  }

  std::optional<uint32_t> parse_class_member(CodepointSet& set) {
    if (peek() == '\\') return parse_escape(true, set);
    return next_codepoint(text_, pos_, what_);
  }

  // A character, or nothing and its characters added to `set`.
  std::optional<uint32_t> parse_escape(bool in_class, CodepointSet& set) {
    const size_t begin = pos_;
    ++pos_;
    if (pos_ >= text_.size()) fail("the end", "a character after '\\'");
    const char c = text_[pos_];
    if (static_cast<unsigned char>(c) >= 0x80) return next_codepoint(text_, pos_, what_);
    ++pos_;
    switch (c) {
      case 'd':
        set.add(digits());
        return std::nullopt;
      case 'D':
        set.add(digits().complement());
        return std::nullopt;
      case 'w':
        set.add(word_characters());
        return std::nullopt;
      case 'W':
        set.add(word_characters().complement());
        return std::nullopt;
      case 's':
        set.add(spaces());
        return std::nullopt;
      case 'S':
        set.add(spaces().complement());
        return std::nullopt;
      case 't':
        return '\t';
      case 'n':
        return '\n';
      case 'r':
        return '\r';
      case 'f':
        return '\f';
      case 'v':
        return '\v';
      case '0':
        if (peek() >= '0' && peek() <= '9') refuse(begin, "an octal escape is");
        return 0;
      case 'x':
        return parse_hex(2);
      case 'u':
        return parse_unicode_escape();
      case 'c':
        if ((peek() >= 'a' && peek() <= 'z') || (peek() >= 'A' && peek() <= 'Z'))
          return static_cast<uint32_t>(text_[pos_++]) % 32;
        fail("'\\c' without a letter", "a control letter");
      case 'b':
        if (in_class) return '\b';
        refuse(begin, "the word boundary '\\b' is");
      case 'B':
        refuse(begin, "the word boundary '\\B' is");
      case 'p':
      case 'P':
        refuse(begin, "a Unicode property is");
      case 'k':
        refuse(begin, "a back-reference is");
      default:
        break;
    }
    if (c >= '1' && c <= '9') refuse(begin, "a back-reference is");
    if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'))
      refuse(begin, fmt::format("the escape '\\{}' is", c));
    return static_cast<uint32_t>(c);
  }

  uint32_t parse_hex(int digits) {
    uint32_t value = 0;
    for (int i = 0; i < digits; ++i) value = value << 4 | parse_hex_digit();
    return value;
  }

  uint32_t parse_hex_digit() {
    const char c = peek();
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
    if (digit < 0) fail("no hexadecimal digit", "a hexadecimal digit");
    ++pos_;
    return static_cast<uint32_t>(digit);
  }

  uint32_t parse_unicode_escape() {
    uint32_t value = 0;
    if (take('{')) {
      do {
        value = value << 4 | parse_hex_digit();
        if (value > kLastCodepoint) fail("a number above 10FFFF", "a Unicode character");
      } while (!take('}'));
    } else {
      value = parse_hex(4);
      if (value >= 0xd800 && value <= 0xdbff && take("\\u")) {
        const uint32_t low = parse_hex(4);
        if (low < 0xdc00 || low > 0xdfff) fail("half a surrogate pair", "a Unicode character");
        return 0x10000 + ((value - 0xd800) << 10) + (low - 0xdc00);
      }
    }
    if (value >= 0xd800 && value <= 0xdfff) fail("half a surrogate pair", "a Unicode character");
    return value;
  }

  std::string_view text_;
  const std::string& what_;
  size_t pos_ = 0;
  CharNfa nfa_;
};

}  // namespace

CharNfa parse_regex(std::string_view pattern, bool search, const std::string& what) {
  return RegexParser(pattern, what).parse(search);
}

std::shared_ptr<const Grammar> compile_regex(std::string_view pattern) {
  const std::string what = "regex";
  GrammarBuilder builder;
  const RuleId root = builder.add_rule("root");
  builder.define(root, nfa_expression(builder, parse_regex(pattern, false, what)));
  return std::make_shared<const Grammar>(compile_automaton(builder, root, what));
}

}  // namespace millrace::grammar
