// JSON itself as expressions: what every schema is made of, and the policy for white space and numbers
// (docs/constrained_output.md): enough freedom for the usual ways to lay JSON out, none to go on forever.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>

#include "grammar/expression.h"

namespace millrace::grammar {

using Json = nlohmann::ordered_json;

class JsonRules {
 public:
  explicit JsonRules(GrammarBuilder& builder);

  ExprId space() const { return space_; }  // after { [ , and before } ]: nothing, a blank or an indented line
  ExprId comma() const { return comma_; }
  ExprId colon() const { return colon_; }
  ExprId value() const { return value_; }    // anything
  ExprId object() const { return object_; }  // any object
  ExprId array() const { return array_; }
  ExprId string() const { return string_; }
  ExprId number() const { return number_; }
  ExprId integer() const { return integer_; }
  ExprId string_of_length(uint32_t min, uint32_t max);
  ExprId quoted(ExprId content);
  // Exactly this value: strings in their shortest form, objects in their own order.
  ExprId literal(const Json& value);

  // Digits are bounded, or a model could write them forever.
  static constexpr int kIntegerDigits = 18;  // fits 64 bits
  static constexpr int kNumberDigits = 15;   // before and after the point together: a double keeps them apart

 private:
  void add_strings();
  void add_numbers();
  void add_values();
  ExprId digits(uint32_t min, uint32_t max);

  GrammarBuilder& builder_;
  ExprId space_ = 0, comma_ = 0, colon_ = 0, value_ = 0, object_ = 0, array_ = 0, string_ = 0, number_ = 0,
         integer_ = 0, character_ = 0;
};

// A number as it is written here: 3.0 is 3, 1e2 is 100. Nothing when it needs more digits than there may be.
std::optional<std::string> number_text(const Json& number);

}  // namespace millrace::grammar
