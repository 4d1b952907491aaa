// Tokenizer::from_tekken: tekken.json as Mistral publishes it. It lists byte strings by rank and no merges:
// any two symbols whose bytes joined are a token merge, the lowest rank first, as in tiktoken.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "tokenizer/byte_bpe.h"
#include "tokenizer/unicode.h"

namespace millrace {
namespace {

using nlohmann::json;

constexpr size_t kMaxTokens = size_t{1} << 24;
constexpr size_t kMaxTokenBytes = 1024;

struct TekkenFile {
  json file;
  const std::string& source;

  const json& member(const json& in, const char* name, const char* path, bool (json::*is)() const) const {
    if (!in.is_object() || !in.contains(name) || !(in[name].*is)())
      throw_error(ErrorCode::kBadInput, "{}: {}: not there or of another type", source, path);
    return in[name];
  }
  size_t count(const json& in, const char* name, const char* path) const {
    const json& value = member(in, name, path, &json::is_number_unsigned);
    if (value.get<uint64_t>() > kMaxTokens)
      throw_error(ErrorCode::kBadInput, "{}: {} is {}, expected at most {}", source, path,
                  value.get<uint64_t>(), kMaxTokens);
    return value.get<size_t>();
  }
};

std::string from_base64(std::string_view text, const std::string& source, size_t rank) {
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  while (text.ends_with("=")) text.remove_suffix(1);
  std::string out;
  uint32_t bits = 0;
  int num_bits = 0;
  for (const char c : text) {
    const size_t digit = kDigits.find(c);
    if (digit == std::string_view::npos)
      throw_error(ErrorCode::kBadInput, "{}: vocab[{}].token_bytes is not base64", source, rank);
    bits = bits << 6 | static_cast<uint32_t>(digit);
    if ((num_bits += 6) < 8) continue;
    num_bits -= 8;
    out.push_back(static_cast<char>(bits >> num_bits & 0xff));
  }
  return out;
}

// Control tokens take the first ids: those listed, and fillers up to num_special.
void add_special(const TekkenFile& f, size_t num_special, TokenizerParts& parts) {
  std::vector<std::string> names(num_special);
  for (size_t i = 0; i < num_special; ++i) names[i] = fmt::format("<SPECIAL_{}>", i);
  if (f.file.contains("special_tokens") && f.file["special_tokens"].is_array()) {
    for (const json& token : f.file["special_tokens"]) {
      const size_t rank = f.count(token, "rank", "special_tokens[].rank");
      if (rank < num_special)
        names[rank] = f.member(token, "token_str", "special_tokens[].token_str", &json::is_string);
    }
  } else {  // files before special tokens were listed (version 3)
    constexpr const char* kFirst[] = {"<unk>",
                                      "<s>",
                                      "</s>",
                                      "[INST]",
                                      "[/INST]",
                                      "[AVAILABLE_TOOLS]",
                                      "[/AVAILABLE_TOOLS]",
                                      "[TOOL_RESULTS]",
                                      "[/TOOL_RESULTS]",
                                      "[TOOL_CALLS]",
                                      "[IMG]",
                                      "<pad>",
                                      "[IMG_BREAK]",
                                      "[IMG_END]",
                                      "[PREFIX]",
                                      "[MIDDLE]",
                                      "[SUFFIX]",
                                      "[SYSTEM_PROMPT]",
                                      "[/SYSTEM_PROMPT]",
                                      "[TOOL_CONTENT]"};
    for (size_t i = 0; i < std::min(num_special, std::size(kFirst)); ++i) names[i] = kFirst[i];
  }
  for (size_t i = 0; i < num_special; ++i) {
    AddedToken token;
    token.id = static_cast<uint32_t>(i);
    token.content = names[i];
    token.special = true;
    if (token.content.empty() || token.content.size() > AddedTokenMatcher::kMaxContentBytes)
      throw_error(ErrorCode::kBadInput, "{}: special token {} has {} bytes, expected 1 to {}", f.source, i,
                  token.content.size(), AddedTokenMatcher::kMaxContentBytes);
    if (token.content == "<s>") parts.bos = static_cast<TokenId>(i);
    if (token.content == "</s>") parts.ends.push_back(static_cast<TokenId>(i));
    parts.added.push_back(std::move(token));
  }
}

void derive_merges(size_t num_special, TokenizerParts& parts) {
  for (uint32_t id = static_cast<uint32_t>(num_special); id < parts.tokens.size(); ++id) {
    const std::string_view bytes = parts.tokens.bytes(id);
    for (size_t i = 1; i < bytes.size(); ++i) {
      const auto left = parts.tokens.find(bytes.substr(0, i)), right = parts.tokens.find(bytes.substr(i));
      if (left && right) parts.merges.add(*left, *right, id, id);
    }
  }
}

}  // namespace

std::shared_ptr<const Tokenizer> Tokenizer::from_tekken(std::string_view tekken_json,
                                                        const std::string& source) {
  const TekkenFile f{json::parse(tekken_json.begin(), tekken_json.end(), nullptr, false), source};
  if (!f.file.is_object()) throw_error(ErrorCode::kBadInput, "{}: not a JSON object", source);
  const json& config = f.member(f.file, "config", "config", &json::is_object);
  const std::string pattern = f.member(config, "pattern", "config.pattern", &json::is_string);
  const Scanner scanner = find_split_scanner(pattern);
  if (scanner == nullptr)
    throw_error(ErrorCode::kUnsupported, "{}: config.pattern is \"{}\", supported: Tekken's", source,
                printable(pattern, 300));
  const size_t size = f.count(config, "default_vocab_size", "config.default_vocab_size");
  const size_t num_special =
      f.count(config, "default_num_special_tokens", "config.default_num_special_tokens");
  const json& vocab = f.member(f.file, "vocab", "vocab", &json::is_array);
  if (num_special >= size || vocab.size() < size - num_special)
    throw_error(ErrorCode::kBadInput, "{}: vocab has {} tokens, expected {} less {} special ones", source,
                vocab.size(), size, num_special);
  TokenizerParts parts;
  parts.source = source;
  parts.ignore_merges = true;
  for (size_t rank = 0; rank < size - num_special; ++rank) {
    const std::string bytes =
        from_base64(f.member(vocab[rank], "token_bytes", "vocab[].token_bytes", &json::is_string)
                        .get_ref<const std::string&>(),
                    source, rank);
    if (bytes.empty() || bytes.size() > kMaxTokenBytes ||
        !parts.tokens.add(static_cast<uint32_t>(num_special + rank), bytes, true))
      throw_error(ErrorCode::kBadInput, "{}: vocab[{}] has {} bytes or is there twice", source, rank,
                  bytes.size());
  }
  derive_merges(num_special, parts);
  add_special(f, num_special, parts);
  if (parts.bos) parts.prefix.push_back(*parts.bos);
  ByteBpeOptions options;
  options.scanners = {scanner};
  return std::make_shared<ByteBpe>(std::move(parts), std::move(options));
}

}  // namespace millrace
