// Parsing is iterative, and destruction too: depth is limited for the sake of whoever recurses over the
// result.
#include "io/json_file.h"

#include "base/error.h"
#include "base/mapped_file.h"

namespace millrace::io {
namespace {

// Deeper than any configuration, and shallow enough for code that recurses over a tree.
constexpr int kMaxDepth = 64;

}  // namespace

nlohmann::json read_json_object(const std::string& path, size_t max_bytes) {
  using nlohmann::json;
  const MappedFile file(path);
  if (file.bytes().size() > max_bytes) {
    throw_error(ErrorCode::kBadInput, "{}: size: found {} bytes, expected at most {}", path,
                file.bytes().size(), max_bytes);
  }
  const char* text = reinterpret_cast<const char*>(file.bytes().data());
  const auto check_depth = [&path](int depth, json::parse_event_t, json&) {
    if (depth > kMaxDepth) {
      throw_error(ErrorCode::kBadInput, "{}: JSON: found values nested deeper than {}, expected fewer levels",
                  path, kMaxDepth);
    }
    return true;
  };
  json value;
  try {
    value = json::parse(text, text + file.bytes().size(), check_depth);
  } catch (const json::parse_error& error) {
    throw_error(ErrorCode::kBadInput, "{}: JSON: found a syntax error at byte {}, expected one JSON object",
                path, error.byte);
  } catch (const json::exception&) {
    throw_error(ErrorCode::kBadInput, "{}: JSON: found a number out of range, expected one JSON object",
                path);
  }
  if (!value.is_object()) {
    throw_error(ErrorCode::kBadInput, "{}: JSON: found {}, expected an object", path, value.type_name());
  }
  return value;
}

}  // namespace millrace::io
