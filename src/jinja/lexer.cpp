// The lexer: jinja2's rules (regular expressions there) as hand-written scanning. See lexer.h.
#include "jinja/lexer.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "jinja/big_integer.h"
#include "jinja/python_text.h"

namespace millrace::jinja {
namespace {

// "\r\n" and "\r" become "\n"; one newline at the very end is dropped, as jinja2 does by default.
std::string normalize_newlines(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      out += source[i];
    } else {
      out += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    }
  }
  if (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

bool is_dec(char c) { return c >= '0' && c <= '9'; }

class Lexer {
 public:
  explicit Lexer(std::string source) : source_(std::move(source)), text_(source_) {}

  std::vector<Token> run() {
    while (position_ < text_.size()) root();
    emit(TokenKind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  // Text up to the next tag, then the tag.
  void root() {
    size_t tag = position_;
    for (;; ++tag) {
      tag = text_.find('{', tag);
      if (tag == text_.npos || tag + 1 >= text_.size()) {
        emit_text(text_.substr(position_));
        position_ = text_.size();
        return;
      }
      char c = text_[tag + 1];
      if (c == '%' || c == '{' || c == '#') break;
    }
    char type = text_[tag + 1];
    size_t after = tag + 2;
    char sign = after < text_.size() && (text_[after] == '-' || text_[after] == '+') ? text_[after++] : ' ';
    std::string_view data = text_.substr(position_, tag - position_);
    emit_text(strip_before_tag(data, sign, type != '{'));
    line_ += count_lines(data.substr(printed_));
    position_ = after;
    if (type == '#') return comment();
    if (type == '%' && raw(after)) return;
    emit(type == '{' ? TokenKind::kVariableBegin : TokenKind::kBlockBegin, "");
    code(type == '{');
  }

  // What of `data` stands before a tag with this sign; printed_ remembers its length for the line count.
  std::string_view strip_before_tag(std::string_view data, char sign, bool is_block) {
    std::string_view kept = data;
    if (sign == '-') {
      kept = strip_right(data, nullptr);
    } else if (sign != '+' && is_block) {
      size_t newline = data.rfind('\n');
      size_t begin = newline == data.npos ? 0 : newline + 1;
      if ((begin > 0 || line_starting_) && strip_left(data.substr(begin), nullptr).empty())
        kept = data.substr(0, begin);
    }
    printed_ = kept.size();
    return kept;
  }

  void comment() {
    size_t end = text_.find("#}", position_);
    if (end == text_.npos) error("Missing end of comment tag");
    char sign = end > position_ ? text_[end - 1] : ' ';
    line_ += count_lines(text_.substr(position_, end - position_));
    finish_tag(end + 2, sign);
  }

  // {% raw %} ... {% endraw %} from `at`, just behind the opening sign.
  bool raw(size_t at) {
    size_t p = skip_space(at);
    if (text_.substr(p, 3) != "raw") return false;
    p = skip_space(p + 3);
    if (text_.substr(p, 3) == "-%}") {
      p = skip_space(p + 3);
    } else if (text_.substr(p, 2) == "%}") {
      p += 2;
    } else {
      return false;
    }
    line_ += count_lines(text_.substr(at, p - at));
    line_starting_ = text_[p - 1] == '\n';
    position_ = p;
    for (size_t tag = text_.find("{%", p); tag != text_.npos; tag = text_.find("{%", tag + 1)) {
      size_t after = tag + 2;
      char sign = after < text_.size() && (text_[after] == '-' || text_[after] == '+') ? text_[after++] : ' ';
      after = skip_space(after);
      if (text_.substr(after, 6) != "endraw") continue;
      after = skip_space(after + 6);
      char end_sign =
          after < text_.size() && (text_[after] == '-' || text_[after] == '+') ? text_[after++] : ' ';
      if (text_.substr(after, 2) != "%}") continue;
      std::string_view data = text_.substr(p, tag - p);
      emit_text(strip_before_tag(data, sign, true));
      line_ += count_lines(text_.substr(p + printed_, after - p - printed_));
      finish_tag(after + 2, end_sign);
      return true;
    }
    error("Missing end of raw directive");
  }

  // Behind "%}" or "#}": '-' eats all white space, '+' nothing, otherwise one newline goes (trim_blocks).
  void finish_tag(size_t after, char sign) {
    size_t end = after;
    if (sign == '-')
      end = skip_space(after);
    else if (sign != '+' && after < text_.size() && text_[after] == '\n')
      ++end;
    leave(after, end);
  }

  void leave(size_t from, size_t end) {
    line_ += count_lines(text_.substr(from, end - from));
    line_starting_ = end > 0 && text_[end - 1] == '\n';
    position_ = end;
  }

  // Inside {{ }} or {% %}.
  void code(bool variable) {
    std::string open;
    while (position_ < text_.size()) {
      if (open.empty() && code_end(variable)) return;
      char c = text_[position_];
      size_t at = position_;
      if (size_t p = skip_space(at); p > at) {
        leave(at, p);
      } else if (is_dec(c)) {
        number();
      } else if (c == '"' || c == '\'') {
        string(c);
      } else if (size_t name = name_end(at); name > at) {
        emit(TokenKind::kName, std::string(text_.substr(at, name - at)));
        position_ = name;
      } else {
        operator_token(open);
      }
    }
  }

  bool code_end(bool variable) {
    std::string_view rest = text_.substr(position_, 3), end = variable ? "}}" : "%}";
    char sign = !rest.empty() && (rest[0] == '-' || (rest[0] == '+' && !variable)) ? rest[0] : ' ';
    size_t skip = sign == ' ' ? 0 : 1;
    if (rest.substr(std::min(skip, rest.size()), 2) != end) return false;
    size_t after = position_ + skip + 2;
    emit(variable ? TokenKind::kVariableEnd : TokenKind::kBlockEnd, "");
    if (variable)
      leave(after, sign == '-' ? skip_space(after) : after);
    else
      finish_tag(after, sign);
    return true;
  }

  size_t digits_end(size_t p) const {  // (\d+_)*\d+
    while (p < text_.size() && (is_dec(text_[p]) || (text_[p] == '_' && p + 1 < text_.size() &&
                                                     is_dec(text_[p + 1]) && is_dec(text_[p - 1])))) {
      ++p;
    }
    return p;
  }

  bool digit_at(size_t p) const { return p < text_.size() && is_dec(text_[p]); }

  void number() {
    size_t begin = position_, whole = digits_end(begin), end = whole;
    bool after_dot = begin > 0 && text_[begin - 1] == '.';
    bool is_float = false;
    if (!after_dot) {
      if (end < text_.size() && text_[end] == '.' && digit_at(end + 1)) {
        end = digits_end(end + 1);
        is_float = true;
      }
      if (end < text_.size() && (text_[end] == 'e' || text_[end] == 'E')) {
        size_t p = end + 1;
        if (p < text_.size() && (text_[p] == '+' || text_[p] == '-')) ++p;
        if (digit_at(p)) {
          end = digits_end(p);
          is_float = true;
        }
      }
    }
    if (!is_float) return integer(whole);
    std::string digits(text_.substr(begin, end - begin));
    std::erase(digits, '_');
    double value = 0;
    std::from_chars(digits.data(), digits.data() + digits.size(), value);
    // Beyond the range of double from_chars leaves the value alone; Python has inf or 0.
    if (value == 0) value = std::strtod(digits.c_str(), nullptr);
    emit(TokenKind::kFloat, digits);
    tokens_.back().real = value;
    position_ = end;
  }

  void integer(size_t decimal_end) {
    size_t begin = position_, end = decimal_end;
    int base = 10;
    if (text_[begin] == '0') {
      char c = begin + 1 < text_.size() ? static_cast<char>(text_[begin + 1] | 0x20) : ' ';
      int wanted = c == 'x' ? 16 : c == 'o' ? 8 : c == 'b' ? 2 : 10;
      size_t p = begin + 2;
      auto is_digit_of_base = [&](char d) {
        int v = is_dec(d) ? d - '0' : (d | 0x20) >= 'a' && (d | 0x20) <= 'f' ? (d | 0x20) - 'a' + 10 : 99;
        return v < wanted;
      };
      while (wanted != 10 && p < text_.size() &&
             (is_digit_of_base(text_[p]) ||
              (text_[p] == '_' && p + 1 < text_.size() && is_digit_of_base(text_[p + 1])))) {
        ++p;
      }
      if (wanted != 10 && p > begin + 2) {
        base = wanted;
        end = p;
      } else {  // zeros only: "01" is two numbers
        for (end = begin + 1;
             end < decimal_end && (text_[end] == '0' || (text_[end] == '_' && text_[end + 1] == '0'));) {
          ++end;
        }
      }
    }
    std::string digits(text_.substr(begin + (base == 10 ? 0 : 2), end - begin - (base == 10 ? 0 : 2)));
    std::erase(digits, '_');
    if (digits.size() > BigInteger::kMaxDigits)
      throw SyntaxError{true, line_,
                        fmt::format("an integer of more than {} digits", BigInteger::kMaxDigits)};
    emit(TokenKind::kInteger, digits);
    tokens_.back().integer = Value::whole(*BigInteger::parse(digits, base));
    position_ = end;
  }

  void string(char quote) {
    size_t p = position_ + 1;
    while (p < text_.size() && text_[p] != quote) p += text_[p] == '\\' ? 2 : 1;
    if (p >= text_.size())
      error(fmt::format("unexpected char {} at {}: the string does not end", quote, position_));
    std::string_view body = text_.substr(position_ + 1, p - position_ - 1);
    emit(TokenKind::kString, unescape(body));
    leave(position_, p + 1);
  }

  std::string unescape(std::string_view body) {
    std::string out;
    for (size_t i = 0; i < body.size();) {
      if (body[i] != '\\' || i + 1 >= body.size()) {
        out += body[i++];
        continue;
      }
      char c = body[i + 1];
      i += 2;
      constexpr std::string_view kNames = "\\'\"abfnrtv", kValues = "\\'\"\a\b\f\n\r\t\v";
      if (size_t k = kNames.find(c); k != kNames.npos)
        out += kValues[k];
      else if (c == 'x')
        append_escape(out, hex(body, i, 2, c));
      else if (c == 'u')
        append_escape(out, hex(body, i, 4, c));
      else if (c == 'U')
        append_escape(out, hex(body, i, 8, c));
      else if (c == 'N')
        throw SyntaxError{true, line_, "the escape \\N{...} in a string"};
      else if (c >= '0' && c <= '7')
        append_escape(out, octal(body, --i));
      else if (c != '\n')
        out += {'\\', c};  // an unknown escape stays; a backslash at the end of a line joins
    }
    return out;
  }

  char32_t hex(std::string_view body, size_t& i, size_t count, char type) {
    uint32_t value = 0;
    const char* begin = body.data() + i;
    auto result = std::from_chars(begin, begin + std::min(count, body.size() - i), value, 16);
    if (result.ptr != begin + count) error(fmt::format("truncated \\{} escape in a string", type));
    i += count;
    return value;
  }

  static char32_t octal(std::string_view body, size_t& i) {
    char32_t value = 0;
    for (int k = 0; k < 3 && i < body.size() && body[i] >= '0' && body[i] <= '7'; ++k) {
      value = value * 8 + static_cast<char32_t>(body[i++] - '0');
    }
    return value;
  }

  void append_escape(std::string& out, char32_t c) {
    if (c > 0x10ffff || (c >= 0xd800 && c <= 0xdfff)) {
      error(fmt::format("a string holds the code point {:#x}, which is not a character",
                        static_cast<uint32_t>(c)));
    }
    append_utf8(out, c);
  }

  size_t name_end(size_t p) const {
    while (p < text_.size()) {
      size_t next = p;
      char32_t c = next_code_point(text_, next);
      bool in_name =
          c < 0x80 ? c == '_' || is_dec(static_cast<char>(c)) || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z')
                   : is_alpha(c);
      if (!in_name) break;
      p = next;
    }
    return p;
  }

  void operator_token(std::string& open) {
    std::string_view two = text_.substr(position_, 2);
    constexpr std::string_view kTwo[] = {"//", "**", "==", "!=", ">=", "<="};
    size_t length = std::find(std::begin(kTwo), std::end(kTwo), two) != std::end(kTwo) ? 2 : 1;
    std::string_view op = text_.substr(position_, length);
    constexpr std::string_view kOne = "+-/*%~[](){}><=.:|,;";
    if (length == 1 && kOne.find(op[0]) == kOne.npos) {
      size_t next = position_;
      next_code_point(text_, next);
      error(fmt::format("unexpected char {}", repr_string(text_.substr(position_, next - position_))));
    }
    if (op == "(") open += ')';
    if (op == "[") open += ']';
    if (op == "{") open += '}';
    if (op == ")" || op == "]" || op == "}") {
      if (open.empty()) error(fmt::format("unexpected '{}'", op));
      if (open.back() != op[0]) error(fmt::format("unexpected '{}', expected '{}'", op, open.back()));
      open.pop_back();
    }
    emit(TokenKind::kOperator, std::string(op));
    line_starting_ = false;
    position_ += length;
  }

  size_t skip_space(size_t p) const {
    while (p < text_.size()) {
      size_t next = p;
      if (!is_space(next_code_point(text_, next))) break;
      p = next;
    }
    return p;
  }

  static int count_lines(std::string_view text) {
    return static_cast<int>(std::count(text.begin(), text.end(), '\n'));
  }

  void emit_text(std::string_view data) {
    if (!data.empty()) emit(TokenKind::kData, std::string(data));
    line_ += count_lines(data);
  }
  void emit(TokenKind kind, std::string text) { tokens_.push_back({kind, line_, std::move(text), {}, 0}); }
  [[noreturn]] void error(std::string message) const { throw SyntaxError{false, line_, std::move(message)}; }

  std::string source_;
  std::string_view text_;
  size_t position_ = 0, printed_ = 0;
  int line_ = 1;
  bool line_starting_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source) { return Lexer(normalize_newlines(source)).run(); }

std::string describe(const Token& token) {
  switch (token.kind) {
    case TokenKind::kData:
      return "template text";
    case TokenKind::kVariableBegin:
      return "begin of print statement";
    case TokenKind::kVariableEnd:
      return "end of print statement";
    case TokenKind::kBlockBegin:
      return "begin of statement block";
    case TokenKind::kBlockEnd:
      return "end of statement block";
    case TokenKind::kEnd:
      return "end of template";
    case TokenKind::kString:
      return "string";
    default:
      return token.text;
  }
}

}  // namespace millrace::jinja
