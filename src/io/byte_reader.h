// ByteReader: little-endian reads from a span, none past its end. Every read names the field it is for, so
// that a file cut anywhere gives a message that says where.
#pragma once

#include <fmt/core.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "io/printable.h"

namespace millrace::io {

static_assert(std::endian::native == std::endian::little, "files are read in place: little-endian only");

// What is being read, put into words only when something is wrong with it: "metadata 'a.b' element 7 length".
struct Field {
  std::string_view kind;       // "metadata", "tensor"; empty for the fixed header
  std::string_view name = {};  // of the entry, once it is known
  int64_t entry = -1;          // number of the entry, used while the name is not known
  std::string_view part = {};  // "type", "offset"
  int64_t element = -1;        // within an array
  bool length = false;         // not the string itself but its length

  Field of(std::string_view which_part) const {
    Field field = *this;
    field.part = which_part;
    return field;
  }

  std::string text() const {
    std::string out(kind);
    const auto add = [&out](const std::string& word) { out += (out.empty() ? "" : " ") + word; };
    if (!name.empty()) {
      add(printable(name));
    } else if (entry >= 0) {
      add(std::to_string(entry));
    }
    if (element >= 0) add(fmt::format("element {}", element));
    if (!part.empty()) add(std::string(part));
    if (length) add("length");
    return out;
  }
};

class ByteReader {
 public:
  ByteReader(std::span<const std::byte> bytes, const std::string& path) : bytes_(bytes), path_(path) {}

  size_t offset() const { return offset_; }
  size_t remaining() const { return bytes_.size() - offset_; }

  // "{path}: {field}: " and the rest, which says what was found and what was expected.
  template <class... Args>
  [[noreturn]] void fail(ErrorCode code, const Field& field, fmt::format_string<Args...> format,
                         Args&&... args) const {
    throw Error(code, fmt::format("{}: {}: {}", path_, field.text(),
                                  fmt::format(format, std::forward<Args>(args)...)));
  }

  template <class T>
  T read(const Field& field) {
    static_assert(std::is_arithmetic_v<T>);
    require(sizeof(T), field);
    T value;
    std::memcpy(&value, bytes_.data() + offset_, sizeof(T));
    offset_ += sizeof(T);
    return value;
  }

  // A number of things of at least `min_bytes` each that must still fit in the file.
  uint64_t read_count(const Field& field, size_t min_bytes) {
    const uint64_t count = read<uint64_t>(field);
    const uint64_t max_count = remaining() / min_bytes;
    if (count > max_count) {
      fail(ErrorCode::kBadInput, field, "found {}, expected at most {} ({} bytes are left in the file)",
           count, max_count, remaining());
    }
    return count;
  }

  // u64 length, then that many bytes; they stay where they are.
  std::string_view read_string(const Field& field) {
    Field length_field = field;
    length_field.length = true;
    const uint64_t length = read_count(length_field, 1);
    const std::string_view text(reinterpret_cast<const char*>(bytes_.data()) + offset_, length);
    offset_ += length;
    return text;
  }

 private:
  void require(size_t needed, const Field& field) const {
    if (remaining() < needed) {
      fail(ErrorCode::kBadInput, field,
           "found the end of the file at byte {}, expected {} more bytes after byte {}", bytes_.size(),
           needed, offset_);
    }
  }

  std::span<const std::byte> bytes_;
  const std::string& path_;
  size_t offset_ = 0;
};

}  // namespace millrace::io
