// A JSON schema as a document: where its parts lie (for messages), what $ref names, and which keywords are
// understood. What is not understood is refused by name and place, never skipped.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "grammar/json_rules.h"

namespace millrace::grammar {

class SchemaDocument {
 public:
  // Throws Error{kBadInput} for what is not JSON.
  explicit SchemaDocument(std::string_view text);

  const Json& root() const { return root_; }
  const Json& resolve(const Json& schema);  // what its $ref names

  // The subschema under a keyword of `schema`; remembers its place.
  const Json& child(const Json& schema, std::string_view key);
  const Json& child(const Json& schema, std::string_view key, size_t index);
  const Json& child(const Json& schema, std::string_view key, const std::string& name);

  // The subschema of a property by its name, in constant time; null when `properties` does not have it.
  const Json* property(const Json& schema, const std::string& name);

  // Nothing when the keyword is absent; Error{kBadInput} when it has the wrong type.
  std::optional<uint32_t> count(const Json& schema,
                                std::string_view key) const;  // kUnbounded: more than 2^32
  const Json* number(const Json& schema, std::string_view key) const;
  const std::string* string(const Json& schema, std::string_view key) const;
  const Json* array(const Json& schema, std::string_view key) const;
  const Json* object(const Json& schema, std::string_view key) const;

  // Refuses keywords that are not supported. Once per schema is enough.
  void check(const Json& schema);

  std::string pointer(const Json& schema) const;  // "#/properties/a"
  template <class... Args>
  [[noreturn]] void fail(const Json& schema, std::string_view key, fmt::format_string<Args...> format,
                         Args&&... args) const {
    throw Error(ErrorCode::kBadInput, place(schema, key) + fmt::format(format, std::forward<Args>(args)...));
  }
  template <class... Args>
  [[noreturn]] void refuse(const Json& schema, std::string_view key, fmt::format_string<Args...> format,
                           Args&&... args) const {
    throw Error(ErrorCode::kUnsupported,
                place(schema, key) + fmt::format(format, std::forward<Args>(args)...));
  }

 private:
  std::string place(const Json& schema, std::string_view key) const;
  const Json& remember(const Json& part, std::string pointer);

  Json root_;
  std::unordered_map<const Json*, std::string> pointers_;
  std::unordered_map<const Json*, bool> checked_;
  // [properties][name]; objects search for a name.
  std::unordered_map<const Json*, std::unordered_map<std::string_view, const Json*>> properties_;
};

}  // namespace millrace::grammar
