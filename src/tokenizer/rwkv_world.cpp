#include "tokenizer/rwkv_world.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "base/error.h"
#include "base/work_budget.h"
#include "tokenizer/unicode.h"

namespace millrace {
namespace {

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

// Of a literal of text also \uXXXX and \UXXXXXXXX, and \xXX is a character: all of them as UTF-8.
bool unescape_text(std::string_view token, std::string& bytes) {
  bytes.clear();
  for (size_t i = 0; i < token.size(); ++i) {
    const char kind = token[i] == '\\' && i + 1 < token.size() ? token[i + 1] : ' ';
    const size_t digits = kind == 'x' ? 2 : kind == 'u' ? 4 : kind == 'U' ? 8 : 0;
    if (digits == 0) {  // a character, or an escape that bytes have too
      const size_t length = token[i] == '\\' ? 2 : 1;
      std::string one;
      if (!unescape_rwkv_token(token.substr(i, length), one)) return false;
      bytes += one;
      i += length - 1;
      continue;
    }
    if (i + 1 + digits >= token.size()) return false;
    uint32_t c = 0;
    for (size_t d = 0; d < digits; ++d) {
      const int digit = hex_digit(token[i + 2 + d]);
      if (digit < 0) return false;
      c = 16 * c + static_cast<uint32_t>(digit);
    }
    if (c > 0x10ffff || (c >= 0xd800 && c < 0xe000)) return false;
    append_utf8(bytes, c);
    i += 1 + digits;
  }
  return true;
}

// Bytes as GGUF files have them, ASCII alone.
std::string escape_bytes(std::string_view bytes) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string out;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\\') {
      out += "\\\\";
    } else if (byte >= ' ' && byte < 0x7f) {
      out += c;
    } else {
      out += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  return out;
}

}  // namespace

RwkvVocabulary read_rwkv_vocabulary(std::string_view text, const std::string& source) {
  constexpr size_t kMostTokens = size_t{1} << 20;
  constexpr int32_t kNormal = 1, kControl = 3, kUnused = 5;
  RwkvVocabulary v;
  v.tokens = {"<|rwkv_tokenizer_end_of_text|>"};
  v.types = {kControl};
  std::string bytes;
  for (size_t line = 1; !text.empty(); ++line) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view left = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (left.ends_with('\r')) left.remove_suffix(1);
    if (left.empty()) continue;
    const size_t first = left.find(' '), last = left.rfind(' ');
    size_t id = 0, length = 0;
    const auto number = [](std::string_view digits, size_t& to) {
      const auto [at, error] = std::from_chars(digits.data(), digits.data() + digits.size(), to);
      return error == std::errc() && at == digits.data() + digits.size();
    };
    bool good = first < last && last != std::string_view::npos && number(left.substr(0, first), id) &&
                number(left.substr(last + 1), length) && id > 0 && id < kMostTokens;
    if (good) {
      std::string_view literal = left.substr(first + 1, last - first - 1);
      const bool of_bytes = literal.starts_with('b');
      if (of_bytes) literal.remove_prefix(1);
      good = literal.size() >= 2 && (literal[0] == '\'' || literal[0] == '"') && literal.back() == literal[0];
      if (good) literal = literal.substr(1, literal.size() - 2);
      good = good && (of_bytes ? unescape_rwkv_token(literal, bytes) : unescape_text(literal, bytes)) &&
             bytes.size() == length && length > 0;
    }
    if (good && id >= v.tokens.size()) {
      v.tokens.resize(id + 1);
      v.types.resize(id + 1, kUnused);
    }
    if (!good || v.types[id] != kUnused) {
      throw_error(
          ErrorCode::kBadInput,
          "{}: line {}: found {}, expected an id that is free, a Python literal and its length in bytes",
          source, line, printable(left));
    }
    v.tokens[id] = escape_bytes(bytes);
    v.types[id] = kNormal;
  }
  if (v.tokens.size() == 1)
    throw_error(ErrorCode::kBadInput, "{}: found no tokens, expected a line for each", source);
  for (size_t id = 0; id < v.tokens.size(); ++id) {
    if (v.types[id] == kUnused) v.tokens[id] = fmt::format("[PAD{}]", id);
  }
  return v;
}

std::shared_ptr<const Tokenizer> Tokenizer::from_rwkv(std::string_view vocabulary,
                                                      const std::string& source) {
  const RwkvVocabulary read = read_rwkv_vocabulary(vocabulary, source);
  GgufVocabulary v;
  v.model = "rwkv";
  v.tokens.assign(read.tokens.begin(), read.tokens.end());
  v.types = read.types;
  v.eos = 0;
  return from_gguf(v, source);
}

bool unescape_rwkv_token(std::string_view token, std::string& bytes) {
  bytes.clear();
  for (size_t i = 0; i < token.size(); ++i) {
    if (token[i] != '\\') {
      bytes += token[i];
      continue;
    }
    if (++i == token.size()) return false;
    switch (token[i]) {
      case 'n':
        bytes += '\n';
        break;
      case 'r':
        bytes += '\r';
        break;
      case 't':
        bytes += '\t';
        break;
      case '\\':
      case '\'':
      case '"':
        bytes += token[i];
        break;
      case 'x': {
        if (i + 2 >= token.size()) return false;
        const int high = hex_digit(token[i + 1]), low = hex_digit(token[i + 2]);
        if (high < 0 || low < 0) return false;
        bytes += static_cast<char>(16 * high + low);
        i += 2;
        break;
      }
      default:
        return false;
    }
  }
  return true;
}

RwkvWorld::RwkvWorld(TokenizerParts parts) : BpeTokenizer(std::move(parts)) {
  for (uint32_t id = 0; id < parts_.tokens.size(); ++id) {
    if (!parts_.tokens.has(id)) continue;
    const std::string_view bytes = parts_.tokens.bytes(id);
    if (bytes.empty()) continue;
    size_t& longest = longest_[static_cast<unsigned char>(bytes[0])];
    longest = std::max(longest, bytes.size());
  }
  index_added_tokens();
}

void RwkvWorld::encode_text(std::string_view text, bool, EncodeState& state) const {
  for (size_t at = 0; at < text.size() && state.out.size() <= state.max_tokens;) {
    size_t length = std::min(text.size() - at, longest_[static_cast<unsigned char>(text[at])]);
    spend_work(1 + length);
    std::optional<uint32_t> id;
    for (; length > 0 && !id; --length) id = parts_.tokens.find(text.substr(at, length));
    if (id) {
      state.out.push_back(static_cast<TokenId>(*id));
      at += length + 1;  // counted down once behind the one that was found
      continue;
    }
    if (parts_.unk) state.out.push_back(static_cast<TokenId>(*parts_.unk));
    ++at;
  }
}

std::string RwkvWorld::decode(std::span<const TokenId> ids, bool special) const {
  std::string out;
  for (const TokenId id : ids) out += token_bytes(id, special);
  return valid_utf8(out);
}

}  // namespace millrace
