#include "http/chunked_body.h"

#include <algorithm>
#include <charconv>

namespace millrace::server {
namespace {

bool is_word(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return c > 0x20 && c < 0x7f && std::string_view("\"(),/:;<=>?@[\\]{}").find(c) == std::string_view::npos;
  });
}

// Nothing, or ";name" or ";name=value" any number of times; a value is a word or stands in quotation marks.
bool is_extension(std::string_view text) {
  while (!text.empty()) {
    if (text.front() != ';') return false;
    text.remove_prefix(1);
    const size_t name = std::min(text.find_first_of("=;"), text.size());
    if (!is_word(text.substr(0, name))) return false;
    text.remove_prefix(name);
    if (!text.starts_with('=')) continue;
    text.remove_prefix(1);
    size_t value = std::min(text.find(';'), text.size());
    if (text.starts_with('"')) {
      value = 1;
      while (value < text.size() && text[value] != '"') value += text[value] == '\\' ? 2 : 1;
      if (value >= text.size()) return false;
      ++value;
    } else if (!is_word(text.substr(0, value))) {
      return false;
    }
    text.remove_prefix(value);
  }
  return true;
}

}  // namespace

bool ChunkedBody::too_long(size_t more) {
  if (more <= body_bytes_ - taken_) return false;
  refusal_ = HttpRefusal{.status = 413,
                         .message = "the body is larger than " + std::to_string(body_bytes_) + " bytes"};
  return true;
}

size_t ChunkedBody::feed(std::string_view bytes, std::string& out) {
  size_t taken = 0;
  while (!done() && !refusal_ && taken < bytes.size()) {
    const std::string_view rest = bytes.substr(taken);
    const size_t more = state_ == State::kData ? take_data(rest, out) : take_line(rest);
    if (more == 0) break;
    taken += more;
    taken_ += more;
  }
  return taken;
}

size_t ChunkedBody::take_data(std::string_view bytes, std::string& out) {
  const size_t now = static_cast<size_t>(std::min<uint64_t>(left_, bytes.size()));
  out.append(bytes.data(), now);
  left_ -= now;
  if (left_ == 0) state_ = State::kDataEnd;
  return now;
}

size_t ChunkedBody::take_line(std::string_view bytes) {
  const std::optional<std::string_view> line = scanner_.next(bytes);
  if (scanner_.refusal()) {
    refusal_ = scanner_.refusal();
    return 0;
  }
  const size_t length = line ? line->size() + 2 : bytes.size();
  if (too_long(length)) return 0;
  if (length + trailer_bytes_ > header_bytes_) {
    refusal_ = HttpRefusal{.status = 431,
                           .message = "a chunk's extension or the trailers are larger than " +
                                      std::to_string(header_bytes_) + " bytes"};
    return 0;
  }
  if (!line) return 0;
  switch (state_) {
    case State::kSize:
      read_size(*line);
      break;
    case State::kDataEnd:
      if (!line->empty()) {
        refusal_ =
            HttpRefusal{.status = 400, .message = "no valid HTTP request: a chunk is longer than it says"};
      }
      state_ = State::kSize;
      break;
    default:
      trailer_bytes_ += length;
      read_trailer(*line);
      break;
  }
  return refusal_ ? 0 : length;
}

void ChunkedBody::read_size(std::string_view line) {
  constexpr size_t kMaxDigits = 16;
  const size_t digits = std::min(line.find(';'), line.size());
  const auto [end, error] = std::from_chars(line.data(), line.data() + digits, left_, 16);
  if (digits == 0 || digits > kMaxDigits || error != std::errc() || end != line.data() + digits ||
      !is_extension(line.substr(digits))) {
    refusal_ =
        HttpRefusal{.status = 400, .message = "no valid HTTP request: the size of a chunk is malformed"};
    return;
  }
  if (too_long(left_ > body_bytes_ ? body_bytes_ + 1 : line.size() + static_cast<size_t>(left_))) return;
  state_ = left_ == 0 ? State::kTrailer : State::kData;
}

// Nothing here uses trailers: they are read as strictly as fields and forgotten.
void ChunkedBody::read_trailer(std::string_view line) {
  if (line.empty()) {
    state_ = State::kDone;
    return;
  }
  Headers one;
  refusal_ = read_field(line, one);
  if (!refusal_ && is_framing_field(one.front().first)) {
    refusal_ =
        HttpRefusal{.status = 400, .message = "no valid HTTP request: a trailer may not say where it ends"};
  }
}

}  // namespace millrace::server
