#include "tokenizer/rwkv_world.h"

#include <algorithm>
#include <utility>

#include "base/work_budget.h"
#include "tokenizer/unicode.h"

namespace millrace {
namespace {

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

}  // namespace

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
