#include "constraints.h"

#include "api_error.h"

namespace millrace::server {

std::shared_ptr<const grammar::Grammar> Constraints::compiled(const std::string& path, char /*kind*/,
                                                              const std::string& /*source*/) {
  throw ApiError(501, "constrained output is not part of this build yet", path, "unsupported");
}

std::shared_ptr<const grammar::Grammar> Constraints::of_text_format(const Fields& format) {
  const auto type = format.choice("type", {"text", "json_object", "json_schema"});
  if (!type) bad_field(format.path_of("type"), "is missing, expected a string", "missing_field");
  if (*type == "text") return nullptr;
  return compiled(format.path(), 'j', "");
}

std::shared_ptr<const grammar::Grammar> Constraints::grammar_of(const Fields& fields) {
  if (const auto format = fields.object("response_format")) return of_text_format(*format);
  if (fields.text("regex")) return compiled("regex", 'r', "");
  if (fields.text("grammar")) return compiled("grammar", 'g', "");
  return nullptr;
}

std::shared_ptr<const TokenConstraint> Constraints::of_request(const Fields& fields) {
  grammar_of(fields);
  return nullptr;
}

std::shared_ptr<const TokenConstraint> Constraints::of_chat(const Fields& fields, const chat::Format& format,
                                                            const chat::Conversation& conversation) {
  return format.constraint(conversation, grammar_of(fields));
}

}  // namespace millrace::server
