// HttpParser on bytes: what is one request, what is none, and that it does not matter how the bytes are cut.
// The corpus of tests/server/smuggling.py goes through a server.
#include "http/http_parser.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace millrace::server {
namespace {

struct Outcome {
  int status = 0;  // 0: a request
  HttpRequest request = {};
  std::string rest = {};
};

Outcome parse_pieces(const std::string& bytes, size_t piece,
                     HttpLimits limits = {.header_bytes = 2000, .body_bytes = 4000}) {
  HttpParser parser(limits);
  std::string buffer;
  Outcome outcome;
  size_t at = 0;
  while (at < bytes.size() || !buffer.empty()) {
    const size_t before = buffer.size() + at * 3 + static_cast<size_t>(parser.state());
    buffer += bytes.substr(at, piece);
    at = std::min(bytes.size(), at + piece);
    buffer.erase(0, parser.feed(buffer));
    if (parser.state() == HttpParser::State::kFailed) return {.status = parser.error_status()};
    if (parser.state() == HttpParser::State::kDone) {
      return {.status = 0, .request = parser.take(), .rest = buffer + bytes.substr(at)};
    }
    if (at == bytes.size() && before == buffer.size() + at * 3 + static_cast<size_t>(parser.state())) break;
  }
  return {.status = -1};  // wants more
}

Outcome parse_any(const std::string& bytes, HttpLimits limits = {.header_bytes = 2000, .body_bytes = 4000}) {
  const Outcome whole = parse_pieces(bytes, bytes.size(), limits);
  for (const size_t piece : {1, 2, 3, 7, 64}) {
    const Outcome cut = parse_pieces(bytes, piece, limits);
    EXPECT_EQ(cut.status, whole.status) << bytes.substr(0, 200) << " in pieces of " << piece;
    EXPECT_EQ(cut.request.body, whole.request.body);
  }
  return whole;
}

std::string post_bytes(const std::string& fields, const std::string& body) {
  return "POST /a?b=1 HTTP/1.1\r\nHost: localhost\r\n" + fields + "\r\n" + body;
}

TEST(HttpParser, ReadsRequests) {
  Outcome one = parse_any(post_bytes("content-length: 3\r\nX-A:  b c \t\r\n", "abcGET"));
  EXPECT_EQ(one.status, 0);
  EXPECT_EQ(one.request.method, "POST");
  EXPECT_EQ(one.request.path, "/a");
  EXPECT_EQ(one.request.query, "b=1");
  EXPECT_EQ(one.request.body, "abc");
  EXPECT_EQ(one.request.header("x-a"), "b c");
  EXPECT_TRUE(one.request.keep_alive);
  EXPECT_EQ(one.rest, "GET");
  one = parse_any(post_bytes("Transfer-Encoding: Chunked\r\nconnection: x, Close\r\n",
                             "3;a=b\r\nabc\r\n00a\r\n0123456789\r\n0\r\nx-sum: 1\r\n\r\nnext"));
  EXPECT_EQ(one.status, 0);
  EXPECT_EQ(one.request.body, "abc0123456789");
  EXPECT_FALSE(one.request.keep_alive);
  EXPECT_EQ(one.rest, "next");
  EXPECT_EQ(parse_any("\r\nGET / HTTP/1.0\r\n\r\n").request.keep_alive, false);
  EXPECT_TRUE(parse_any("GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n").request.keep_alive);
  EXPECT_EQ(parse_any("GET http://LocalHost:80/x?y HTTP/1.1\r\nHost: localhost:80\r\n\r\n").request.path,
            "/x");
  EXPECT_EQ(parse_any("GET https://a?y HTTP/1.1\r\nHost: a\r\n\r\n").request.query, "y");
  EXPECT_EQ(parse_any("OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n").status, 0);
  EXPECT_TRUE(
      parse_any(post_bytes("expect: 100-Continue\r\ncontent-length: 1\r\n", "x")).request.expects_continue);
}

TEST(HttpParser, RefusesWhatCouldBeTwo) {
  struct Row {
    int status;
    std::string bytes;
  };
  const std::vector<Row> rows = {
      {400, post_bytes("content-length: 3\r\ntransfer-encoding: chunked\r\n", "0\r\n\r\n")},
      {400, post_bytes("content-length: 3\r\ncontent-length: 3\r\n", "abc")},
      {400, post_bytes("content-length: 3, 3\r\n", "abc")},
      {400, post_bytes("content-length: +3\r\n", "abc")},
      {400, post_bytes("content-length: 0x3\r\n", "abc")},
      {400, post_bytes("content-length:\r\n", "abc")},
      {413, post_bytes("content-length: 99999999999999999999\r\n", "")},
      {413, post_bytes("content-length: 4001\r\n", "")},
      {400, post_bytes("transfer-encoding: chunked, identity\r\n", "0\r\n\r\n")},
      {400, post_bytes("transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n", "0\r\n\r\n")},
      {400, post_bytes("transfer-encoding: identity\r\n", "0\r\n\r\n")},
      {400, post_bytes("transfer-encoding:\r\n", "0\r\n\r\n")},
      {400, post_bytes("transfer-encoding: chunked;q=1\r\n", "0\r\n\r\n")},
      {501, post_bytes("transfer-encoding: gzip, chunked\r\n", "0\r\n\r\n")},
      {501, post_bytes("transfer-encoding: xchunked\r\n", "0\r\n\r\n")},
      {400, post_bytes("transfer-encoding : chunked\r\n", "0\r\n\r\n")},
      {400, post_bytes("transfer_encoding: chunked\r\n", "0\r\n\r\n")},
      {400, post_bytes("x: y\r\n transfer-encoding: chunked\r\n", "0\r\n\r\n")},
      {400, post_bytes("x: y\ntransfer-encoding: chunked\r\n", "0\r\n\r\n")},
      {400, post_bytes("x: y\rtransfer-encoding: chunked\r\n", "0\r\n\r\n")},
      {400, "POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"},
      {400, "GET / HTTP/1.1\r\n\r\n"},
      {400, "GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n"},
      {400, "GET / HTTP/1.1\r\nHost: a b\r\n\r\n"},
      {400, "GET http://b/ HTTP/1.1\r\nHost: a\r\n\r\n"},
      {400, "CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n"},
      {505, "GET / HTTP/2.0\r\nHost: a\r\n\r\n"},
      {400, "GET /\r\n\r\n"},
      {400, "GET / HTTP/1.1 x\r\n\r\n"},
      {417, post_bytes("expect: the-unexpected\r\n", "")},
  };
  for (const Row& row : rows) EXPECT_EQ(parse_any(row.bytes).status, row.status) << row.bytes;
  for (const char* chunk :
       {"3 \r\nabc\r\n", " 3\r\nabc\r\n", "0x3\r\nabc\r\n", "-3\r\nabc\r\n", "3\nabc\r\n", "3\r\nabcd\r\n",
        "3\r\nabc\n0\r\n\r\n", "\r\n", "g\r\n", "3;\x01\r\nabc\r\n", "00000000000000003\r\nabc\r\n",
        "0\r\ncontent-length: 5\r\n\r\n", "0\r\n folded: x\r\n\r\n", "0\r\nno colon\r\n\r\n"}) {
    EXPECT_EQ(parse_any(post_bytes("transfer-encoding: chunked\r\n", chunk)).status, 400) << chunk;
  }
}

TEST(HttpParser, CountsWhatItThrowsAway) {
  const std::string chunked = "transfer-encoding: chunked\r\n";
  std::string small_chunks;
  for (int i = 0; i < 400; ++i) small_chunks += "1;" + std::string(20, 'x') + "\r\na\r\n";
  EXPECT_EQ(parse_any(post_bytes(chunked, small_chunks)).status, 413);
  EXPECT_EQ(parse_any(post_bytes(chunked, "1;" + std::string(3000, 'x'))).status, 431);
  EXPECT_EQ(parse_any(post_bytes(chunked, "fa0\r\n")).status, 413);  // 4,000, and the line that says so
  EXPECT_EQ(parse_any(post_bytes(chunked, "ffffffffffffffff\r\n")).status, 413);
  std::string trailers = "0\r\n";
  for (int i = 0; i < 400; ++i) trailers += "x: y\r\n";
  EXPECT_EQ(parse_any(post_bytes(chunked, trailers)).status, 431);
  EXPECT_EQ(parse_any("GET / HTTP/1.1\r\nHost: a\r\nx: " + std::string(3000, 'y')).status, 431);
  std::string fields;
  for (int i = 0; i < 300; ++i) fields += "x: y\r\n";
  EXPECT_EQ(parse_any(post_bytes(fields, ""), {.header_bytes = 16 << 10, .body_bytes = 10}).status, 431);
}

}  // namespace
}  // namespace millrace::server
