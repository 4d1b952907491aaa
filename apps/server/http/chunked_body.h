// ChunkedBody: a body in chunks (RFC 9112, 7.1) within limits. Sizes, extensions and trailers are counted as
// well: what is thrown away costs as much to read as what is kept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "http/http_head.h"

namespace millrace::server {

class ChunkedBody {
 public:
  // All of it, framing and data, may have `body_bytes`; a line and all trailers together `header_bytes`.
  ChunkedBody(size_t header_bytes, size_t body_bytes)
      : header_bytes_(header_bytes), body_bytes_(body_bytes) {}

  // Appends data to `out` and returns how many bytes were taken; the rest is to be given again, with more
  // behind it.
  size_t feed(std::string_view bytes, std::string& out);
  bool done() const { return state_ == State::kDone; }
  const MaybeRefusal& refusal() const { return refusal_; }

 private:
  enum class State { kSize, kData, kDataEnd, kTrailer, kDone };
  size_t take_line(std::string_view bytes);
  size_t take_data(std::string_view bytes, std::string& out);
  void read_size(std::string_view line);
  void read_trailer(std::string_view line);
  bool too_long(size_t more);

  const size_t header_bytes_, body_bytes_;
  State state_ = State::kSize;
  uint64_t left_ = 0;  // of the chunk
  size_t taken_ = 0, trailer_bytes_ = 0;
  LineScanner scanner_;
  MaybeRefusal refusal_;
};

}  // namespace millrace::server
