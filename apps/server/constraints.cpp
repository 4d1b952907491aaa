#include "constraints.h"

#include <fmt/core.h>

#include "api_error.h"

namespace millrace::server {

using grammar::GrammarCache;

Constraints::Grammar Constraints::compiled(GrammarCache::Kind kind, const std::string& text,
                                           const std::string& path) {
  try {
    return grammars_->get(kind, text);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kBadInput && error.code() != ErrorCode::kUnsupported) throw;
    bad_field(path, error.what(),
              error.code() == ErrorCode::kUnsupported ? "unsupported_value" : "invalid_value");
  }
}

grammar::Objects Constraints::objects(const Fields& fields) const {
  const std::optional<bool> open = fields.boolean("open_objects");
  if (!open) return objects_;
  return *open ? grammar::Objects::kOpen : grammar::Objects::kClosed;
}

Constraints::Grammar Constraints::of_format(const Fields& format, grammar::Objects objects,
                                            chat::Conversation* conversation) {
  const auto type = format.choice("type", {"text", "json_object", "json_schema"});
  if (!type) bad_field(format.path_of("type"), "is missing, expected a string", "missing_required_parameter");
  if (*type == "text") return nullptr;
  if (*type == "json_object") return compiled(GrammarCache::Kind::kJsonObject, "", format.path());
  const std::optional<Fields> nested = format.object("json_schema");
  const Fields& place = nested ? *nested : format;
  const Json* schema = place.find("schema");
  if (schema == nullptr)
    bad_field(place.path_of("schema"), "is missing, expected a JSON schema", "missing_required_parameter");
  const std::string text = schema->dump();
  // Answers are held to the schema either way; strict ones to the properties that it names.
  const GrammarCache::Kind kind = place.boolean("strict").value_or(false)
                                      ? GrammarCache::Kind::kStrictJsonSchema
                                  : objects == grammar::Objects::kOpen ? GrammarCache::Kind::kOpenJsonSchema
                                                                       : GrammarCache::Kind::kJsonSchema;
  Grammar grammar = compiled(kind, text, place.path_of("schema"));
  if (conversation != nullptr) {
    conversation->response_name = place.text("name").value_or("");
    conversation->response_description = place.text("description").value_or("");
    conversation->response_schema = text;
  }
  return grammar;
}

Constraints::Grammar Constraints::of_request(const Fields& fields, chat::Conversation* conversation) {
  const std::optional<Fields> format = fields.object("response_format");
  const std::optional<std::string> regex = fields.text("regex"), rules = fields.text("grammar");
  const int given = static_cast<int>(format.has_value()) + static_cast<int>(regex.has_value()) +
                    static_cast<int>(rules.has_value());
  if (given > 1) {
    bad_field(regex ? "regex" : "grammar", "expected only one of response_format, regex and grammar");
  }
  if (format) return of_format(*format, objects(fields), conversation);
  if (regex) return compiled(GrammarCache::Kind::kRegex, *regex, "regex");
  if (rules) return compiled(GrammarCache::Kind::kGbnf, *rules, "grammar");
  return nullptr;
}

std::shared_ptr<const TokenConstraint> Constraints::for_text(Grammar grammar) {
  if (!grammar) return nullptr;
  return grammars_->constrain(std::move(grammar), engine_.model().end_tokens);
}

}  // namespace millrace::server
