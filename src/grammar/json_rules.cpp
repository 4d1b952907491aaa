#include "grammar/json_rules.h"

#include <cmath>

#include "base/error.h"
#include "grammar/char_dfa.h"
#include "grammar/compiled_grammar.h"

namespace millrace::grammar {

JsonRules::JsonRules(GrammarBuilder& builder) : builder_(builder) {
  // 64 blanks: 16 levels of 4, 32 of 2.
  const RuleId line = builder.add_rule("(line)", true);
  builder.define(line, builder.sequence({builder.bytes("\n"),
                                         builder.choice({builder.repeat(builder.bytes(" "), 0, 64),
                                                         builder.repeat(builder.bytes("\t"), 1, 16)})}));
  const ExprId blank = builder.bytes(" ");
  space_ = builder.choice({builder.empty(), blank, builder.rule(line)});
  comma_ = builder.sequence({builder.bytes(","), space_});
  colon_ = builder.sequence({builder.bytes(":"), builder.optional(blank)});
  add_strings();
  add_numbers();
  add_values();
}

void JsonRules::add_strings() {
  const auto hex = [&](std::string_view first_digits) {
    CodepointSet set;
    for (const char c : first_digits) set.add(static_cast<uint8_t>(c), static_cast<uint8_t>(c));
    return builder_.set(set);
  };
  const ExprId any_hex = hex("0123456789abcdefABCDEF");
  // A surrogate is written with its other half or not at all: the text must be Unicode.
  const ExprId ordinary =
      builder_.choice({builder_.sequence({hex("0123456789abcefABCEF"), any_hex, any_hex, any_hex}),
                       builder_.sequence({hex("dD"), hex("01234567"), any_hex, any_hex})});
  const ExprId pair = builder_.sequence({hex("dD"), hex("89abAB"), any_hex, any_hex, builder_.bytes("\\u"),
                                         hex("dD"), hex("cdefCDEF"), any_hex, any_hex});
  const RuleId escape = builder_.add_rule("(escape)", true);
  builder_.define(
      escape,
      builder_.sequence(
          {builder_.bytes("\\"),
           builder_.choice({builder_.set(CodepointSet::of(U"\"\\/bfnrt")),
                            builder_.sequence({builder_.bytes("u"), builder_.choice({ordinary, pair})})})}));
  const CodepointSet plain =
      CodepointSet(0x20, kLastCodepoint).intersection(CodepointSet::of(U"\"\\").complement());
  character_ = builder_.choice({builder_.set(plain), builder_.rule(escape)});
  const RuleId string = builder_.add_rule("string", true);
  builder_.define(string, quoted(builder_.repeat(character_, 0, kUnbounded)));
  string_ = builder_.rule(string);
}

ExprId JsonRules::digits(uint32_t min, uint32_t max) {
  return builder_.repeat(builder_.set(CodepointSet('0', '9')), min, max);
}

void JsonRules::add_numbers() {
  const ExprId minus = builder_.optional(builder_.bytes("-"));
  const ExprId first = builder_.set(CodepointSet('1', '9')), zero = builder_.bytes("0");
  integer_ = builder_.choice({zero, builder_.sequence({minus, first, digits(0, kIntegerDigits - 1)})});
  std::vector<ExprId> forms;
  for (uint32_t n = 1; n <= kNumberDigits; ++n) {
    const ExprId whole = n == 1 ? digits(1, 1) : builder_.sequence({first, digits(n - 1, n - 1)});
    if (n == kNumberDigits) {
      forms.push_back(whole);
    } else {
      forms.push_back(builder_.sequence({whole, builder_.optional(builder_.sequence(
                                                    {builder_.bytes("."), digits(1, kNumberDigits - n)}))}));
    }
  }
  const ExprId exponent =
      builder_.sequence({builder_.set(CodepointSet::of(U"eE")),
                         builder_.optional(builder_.set(CodepointSet::of(U"+-"))), digits(1, 2)});
  const RuleId number = builder_.add_rule("number", true);
  builder_.define(number, builder_.sequence({minus, builder_.choice(forms), builder_.optional(exponent)}));
  number_ = builder_.rule(number);
}

void JsonRules::add_values() {
  const RuleId value = builder_.add_rule("value", true), object = builder_.add_rule("object", true),
               array = builder_.add_rule("array", true);
  value_ = builder_.rule(value);
  object_ = builder_.rule(object);
  array_ = builder_.rule(array);
  builder_.define(value, builder_.choice({builder_.bytes("null"), builder_.bytes("true"),
                                          builder_.bytes("false"), string_, number_, array_, object_}));
  const ExprId item = builder_.sequence({string_, colon_, value_});
  const auto list = [&](std::string_view open, ExprId element, std::string_view close) {
    const ExprId more = builder_.repeat(builder_.sequence({comma_, element}), 0, kUnbounded);
    return builder_.sequence({builder_.bytes(open), space_,
                              builder_.optional(builder_.sequence({element, more, space_})),
                              builder_.bytes(close)});
  };
  builder_.define(object, list("{", item, "}"));
  builder_.define(array, list("[", value_, "]"));
}

ExprId JsonRules::quoted(ExprId content) {
  return builder_.sequence({builder_.bytes("\""), content, builder_.bytes("\"")});
}

ExprId JsonRules::string_of_length(uint32_t min, uint32_t max) {
  return quoted(builder_.repeat(character_, min, max));
}

ExprId JsonRules::literal(const Json& value) {
  if (value.is_string()) return builder_.bytes(value.dump());
  if (value.is_number()) {
    const std::optional<std::string> text = number_text(value);
    return text ? builder_.bytes(*text) : builder_.nothing();
  }
  if (!value.is_structured()) return builder_.bytes(value.dump());
  std::vector<ExprId> parts = {builder_.bytes(value.is_object() ? "{" : "["), space_};
  bool is_first = true;
  for (const auto& item : value.items()) {
    if (!is_first) parts.push_back(comma_);
    is_first = false;
    if (value.is_object()) {
      parts.push_back(builder_.bytes(Json(item.key()).dump()));
      parts.push_back(colon_);
    }
    parts.push_back(literal(item.value()));
  }
  if (!is_first) parts.push_back(space_);
  parts.push_back(builder_.bytes(value.is_object() ? "}" : "]"));
  return builder_.sequence(std::move(parts));
}

std::optional<std::string> number_text(const Json& number) {
  if (number.is_number_unsigned()) return std::to_string(number.get<uint64_t>());
  if (number.is_number_integer()) return std::to_string(number.get<int64_t>());
  const double value = number.get<double>();
  if (!std::isfinite(value)) return std::nullopt;
  if (value == std::floor(value) && std::abs(value) < 1e15)
    return std::to_string(static_cast<int64_t>(value));
  return number.dump();
}

std::shared_ptr<const Grammar> compile_json_object() {
  GrammarBuilder builder;
  const JsonRules json(builder);
  const RuleId root = builder.add_rule("root");
  builder.define(root, json.object());
  return std::make_shared<const Grammar>(compile_automaton(builder, root, "json_object"), true);
}

}  // namespace millrace::grammar
