// JSON that clients send: bodies parsed within limits, and fields read with their path in every complaint.
// What is sent back is written by base/json_writer.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace millrace::server {

using Json = nlohmann::ordered_json;

// Deeper nesting is refused: what traverses a tree may be recursive.
inline constexpr size_t kMaxNesting = 64;

// The body of a request as JSON, in linear time. Throws ApiError{400} for what is none (bad syntax, broken
// UTF-8, numbers out of range, a key twice) and for more than the limits of base/json_tree.h: nesting,
// values, keys.
Json parse_json(std::string_view text);
// ... which must be an object.
Json parse_object(std::string_view text);

// Reads the fields of an object. Absent and null are the same; a wrong type or value throws ApiError{400}
// that names the field by its path. Fields nobody asks for are no error.
class Fields {
 public:
  explicit Fields(const Json& object, std::string path = {});  // throws when it is no object

  std::string path_of(std::string_view key) const;
  const Json* find(std::string_view key) const;  // null when absent
  bool has(std::string_view key) const { return find(key) != nullptr; }

  std::optional<bool> boolean(std::string_view key) const;
  std::optional<double> number(std::string_view key, double min, double max) const;
  std::optional<int64_t> integer(std::string_view key, int64_t min, int64_t max) const;
  std::optional<std::string> text(std::string_view key) const;
  std::optional<std::string> choice(std::string_view key,
                                    std::initializer_list<std::string_view> names) const;
  const Json* array(std::string_view key) const;
  std::optional<Fields> object(std::string_view key) const;
  std::string required_text(std::string_view key) const;

  const Json& json() const { return *object_; }
  const std::string& path() const { return path_; }
  [[noreturn]] void refuse(std::string_view key, std::string_view problem) const;

 private:
  const Json* object_;
  std::string path_;
};

// Throws ApiError{400}: "`path`: found a string, expected an array".
[[noreturn]] void wrong_type(const std::string& path, const Json& found, std::string_view expected);
[[noreturn]] void bad_field(const std::string& path, std::string_view problem, std::string_view code = {});
std::string element_path(const std::string& path, size_t index);  // path[index]

}  // namespace millrace::server
