#include "input.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <string_view>

#include "base/error.h"
#include "base/mapped_file.h"
#include "interrupt.h"
#include "io/printable.h"

namespace millrace::cli {

std::string read_input(const std::string& path) {
  if (path != "-") return read_text_file(path);
  std::string text;
  std::array<char, 1 << 16> buffer;
  while (true) {
    const ssize_t n = ::read(STDIN_FILENO, buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) {
      throw_if_interrupted();
      continue;
    }
    if (n < 0) throw_error(ErrorCode::kIo, "standard input: cannot read: {}", std::strerror(errno));
    if (n == 0) return text;
    text.append(buffer.data(), static_cast<size_t>(n));
  }
}

std::vector<int32_t> parse_tokens(const std::string& text) {
  const bool from_file = !text.empty() && text[0] == '@';
  const std::string list = from_file ? read_input(text.substr(1)) : text;
  const std::string where = from_file ? text.substr(1) : "token list";
  constexpr std::string_view kSeparators = ", \t\r\n[]";  // a JSON array reads too
  std::vector<int32_t> tokens;
  size_t begin = 0;
  while ((begin = list.find_first_not_of(kSeparators, begin)) != std::string::npos) {
    const size_t end = std::min(list.find_first_of(kSeparators, begin), list.size());
    const std::string_view word = std::string_view(list).substr(begin, end - begin);
    int32_t token = 0;
    const auto [after, error] = std::from_chars(word.data(), word.data() + word.size(), token);
    if (error != std::errc() || after != word.data() + word.size() || token < 0) {
      throw_error(ErrorCode::kBadInput, "{}: token {}: found {}, expected an id such as 42", where,
                  tokens.size(), io::printable(word));
    }
    tokens.push_back(token);
    begin = end;
  }
  if (tokens.empty())
    throw_error(ErrorCode::kBadInput, "{}: found no token ids, expected at least one", where);
  return tokens;
}

}  // namespace millrace::cli
