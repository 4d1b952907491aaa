// {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {"key": "text"}}
#include "io/safetensors_header.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "io/printable.h"

namespace millrace::io {
namespace {

using nlohmann::json;

// Events come in from nlohmann's parser; each either fits the place reached or throws.
class HeaderHandler : public nlohmann::json_sax<json> {
 public:
  explicit HeaderHandler(const std::string& path) : path_(path) {}

  std::vector<SafetensorsEntry> take_entries() { return std::move(entries_); }

  bool start_object(std::size_t) override {
    if (place_ == Place::kStart) {
      place_ = Place::kTop;
    } else if (place_ == Place::kTop) {
      place_ = in_metadata_ ? Place::kMetadata : Place::kEntry;
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kEntry) finish_entry();
    place_ = place_ == Place::kTop ? Place::kStart : Place::kTop;
    return true;
  }

  bool key(string_t& text) override {
    switch (place_) {
      case Place::kTop:
        start_entry(text);
        break;
      case Place::kEntry:
        start_field(text);
        break;
      default:
        break;  // metadata: any key
    }
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ != Place::kEntry || field_ == Field::kDtype) unexpected("an array");
    place_ = Place::kNumbers;
    num_numbers_ = 0;
    return true;
  }

  bool end_array() override {
    if (field_ == Field::kShape) {
      entries_.back().rank = static_cast<int>(std::min(num_numbers_, entries_.back().shape.size()));
    } else if (num_numbers_ != 2) {
      fail("data_offsets", fmt::format("found {} numbers, expected 2", num_numbers_));
    }
    place_ = Place::kEntry;
    return true;
  }

  bool string(string_t& text) override {
    if (place_ == Place::kMetadata) return true;
    if (place_ != Place::kEntry || field_ != Field::kDtype) unexpected(printable(text));
    entries_.back().dtype = std::move(text);
    return true;
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::kNumbers) unexpected(fmt::format("{}", value));
    SafetensorsEntry& entry = entries_.back();
    if (field_ == Field::kShape) {
      // A fifth one (of a convolution over time) goes with the fourth: nobody here tells them apart.
      uint64_t& last = entry.shape[std::min(num_numbers_, entry.shape.size() - 1)];
      if (num_numbers_ > entry.shape.size())
        fail("shape", "found more than 5 dimensions, expected at most 5");
      if (num_numbers_ < entry.shape.size()) {
        last = value;
      } else if (__builtin_mul_overflow(last, value, &last)) {
        fail("shape", "found more elements than 64 bits count, expected fewer");
      }
    } else if (num_numbers_ < 2) {
      (num_numbers_ == 0 ? entry.begin : entry.end) = value;
    }
    ++num_numbers_;
    return true;
  }

  bool number_integer(number_integer_t value) override { return unexpected(fmt::format("{}", value)); }
  bool number_float(number_float_t, const string_t& text) override { return unexpected(printable(text)); }
  bool boolean(bool value) override { return unexpected(value ? "true" : "false"); }
  bool null() override { return unexpected("null"); }
  bool binary(binary_t&) override { return unexpected("binary data"); }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    throw_error(ErrorCode::kBadInput,
                "{}: header: found what is not JSON at its byte {}, expected a JSON object", path_, position);
  }

 private:
  enum class Place { kStart, kTop, kMetadata, kEntry, kNumbers };
  enum class Field { kDtype, kShape, kOffsets };
  static constexpr std::string_view kFieldNames[] = {"dtype", "shape", "data_offsets"};

  [[noreturn]] void fail(std::string_view field, const std::string& found) {
    throw_error(ErrorCode::kBadInput, "{}: tensor {} {}: {}", path_, printable(entries_.back().name), field,
                found);
  }

  // True only to please the callers that return it.
  bool unexpected(const std::string& found) {
    switch (place_) {
      case Place::kStart:
        throw_error(ErrorCode::kBadInput, "{}: header: found {}, expected an object", path_, found);
      case Place::kTop:
        throw_error(ErrorCode::kBadInput, "{}: {}: found {}, expected an object", path_,
                    in_metadata_ ? "__metadata__" : "tensor " + printable(entries_.back().name), found);
      case Place::kMetadata:
        throw_error(ErrorCode::kBadInput, "{}: __metadata__: found {}, expected strings", path_, found);
      case Place::kNumbers:
        fail(field_name(), fmt::format("found {}, expected an integer of 0 or more", found));
      case Place::kEntry:
        fail(field_name(),
             fmt::format("found {}, expected {}", found, field_ == Field::kDtype ? "a string" : "an array"));
    }
    return true;
  }

  std::string_view field_name() const { return kFieldNames[static_cast<size_t>(field_)]; }

  void start_entry(const std::string& name) {
    in_metadata_ = name == "__metadata__";
    if (!names_.insert(name).second) {
      throw_error(ErrorCode::kBadInput, "{}: tensor {}: found the name a second time, expected it once",
                  path_, printable(name));
    }
    if (in_metadata_) return;
    entries_.emplace_back().name = name;
    seen_ = {};
  }

  void start_field(const std::string& text) {
    for (size_t i = 0; i < seen_.size(); ++i) {
      if (text != kFieldNames[i]) continue;
      if (seen_[i]) fail(text, "found the field a second time, expected it once");
      seen_[i] = true;
      field_ = static_cast<Field>(i);
      return;
    }
    fail("field", fmt::format("found {}, expected dtype, shape or data_offsets", printable(text)));
  }

  void finish_entry() {
    for (size_t i = 0; i < seen_.size(); ++i) {
      if (!seen_[i]) fail(kFieldNames[i], "found nothing, expected the field");
    }
    const SafetensorsEntry& entry = entries_.back();
    if (entry.begin > entry.end) {
      fail("data_offsets", fmt::format("found [{}, {}], expected the smaller first", entry.begin, entry.end));
    }
  }

  const std::string& path_;
  std::vector<SafetensorsEntry> entries_;
  std::set<std::string, std::less<>> names_;
  Place place_ = Place::kStart;
  Field field_ = Field::kDtype;
  bool in_metadata_ = false;
  size_t num_numbers_ = 0;      // in the array being read
  std::array<bool, 3> seen_{};  // fields of the entry being read
};

}  // namespace

std::vector<SafetensorsEntry> parse_safetensors_header(std::string_view text, const std::string& path) {
  HeaderHandler handler(path);
  json::sax_parse(text.begin(), text.end(), &handler);
  return handler.take_entries();
}

}  // namespace millrace::io
