// The names of the pre-tokenizers: which scanner a Split pattern of a tokenizer.json is, and what GGUF's
// tokenizer.ggml.pre stands for.
#include <span>

#include "tokenizer/pretokenizer.h"

namespace millrace {

Scanner find_split_scanner(std::string_view regex) {
  struct Known {
    std::string_view regex;
    Scanner scanner;
  };
  static constexpr Known kKnown[] = {
      {R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)", scan_gpt2},
      {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|)"
       R"(\s+(?!\S)|\s+)",
       scan_llama3},
      {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|)"
       R"(\s+(?!\S)|\s+)",
       scan_qwen2},
      {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|)"
       R"(\s*[\r\n]+|\s+(?!\S)|\s+)",
       scan_qwen35},
      {R"([\p{Han}]+|)"
       R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+)"
       R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
       R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*)"
       R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
       R"(\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
       scan_kimi},
      {R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
       R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
       R"(\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
       scan_o200k},
      {R"('(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|)"
       R"(\s+(?!\S)|\s+)",
       scan_llama3},
      {R"('(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|)"
       R"(\s+(?!\S)|\s+)",
       scan_qwen2},
      {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|)"
       R"(\s+(?!\S)|\s+)",
       scan_seed},
      {R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|)"
       R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|)"
       R"(\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
       scan_tekken},
      {R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|)"
       R"( ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
       scan_deepseek3},
      {"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", scan_han_or_kana},
      {"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", scan_han_or_hangul},
      {R"(\p{N}{1,3})", scan_number_by_three},
      {R"([\r\n])", scan_line_end},
      {R"(\s?\p{L}+)", scan_space_letters},
      {R"(\s?\p{P}+)", scan_space_punctuation},
      {"\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", scan_space_marks},
      {R"(\s+$)", scan_space_at_end},
      {R"(\p{N}+)", scan_number},
      {R"(\p{N})", scan_one_number},
  };
  // Some files have a line feed itself where others have it escaped.
  std::string written;
  for (const char c : regex) {
    if (c == '\r' || c == '\n')
      written += c == '\r' ? "\\r" : "\\n";
    else
      written.push_back(c);
  }
  for (const Known& known : kKnown)
    if (known.regex == written) return known.scanner;
  return is_cased_letters(written) ? scan_space_cased : nullptr;
}

namespace {

struct NamedPretokenizer {
  std::string_view name;
  GgufPretokenizer what;
};

std::span<const NamedPretokenizer> named_pretokenizers() {
  static const NamedPretokenizer kNamed[] = {
      {"gpt-2", {{scan_gpt2}}},
      {"phi-2", {{scan_gpt2}}},
      {"olmo", {{scan_gpt2}, false, false, true}},
      {"modern-bert", {{scan_gpt2}, false, false, true}},
      {"roberta-bpe", {{scan_gpt2}}},
      {"granite-docling", {{scan_gpt2}}},
      {"llama-bpe", {{scan_llama3}, true, true}},
      {"llama3", {{scan_llama3}, true, true}},
      {"llama-v3", {{scan_llama3}, true, true}},
      {"pixtral", {{scan_llama3}, true, true}},
      {"falcon3", {{scan_llama3}, true, true}},
      {"falcon-h1", {{scan_llama3}, true, true}},
      {"lfm2", {{scan_llama3}, true, true}},
      {"midm-2.0", {{scan_llama3}, true, true}},
      {"dbrx", {{scan_llama3}}},
      {"smaug-bpe", {{scan_llama3}}},
      {"glm4", {{scan_llama3}}},
      {"chatglm-bpe", {{scan_llama3}}},
      {"qwen2", {{scan_qwen2}, false, false, true}},
      {"deepseek-r1-qwen", {{scan_qwen2}, false, false, true}},
      {"qwen35", {{scan_qwen35}, false, false, true}},
      {"seed-coder", {{scan_seed}}},
      {"gpt-4o", {{scan_o200k}, true}},
      {"llama4", {{scan_o200k}, true}},
      {"kanana2", {{scan_o200k}, true}},
      {"kimi-k2", {{scan_kimi}, true}},
      {"tekken", {{scan_tekken}, true, true}},
      {"deepseek-v3", {{scan_number_by_three, scan_han_or_kana, scan_deepseek3}}},
      {"joyai-llm", {{scan_number_by_three, scan_han_or_kana, scan_deepseek3}}},
      {"deepseek-coder",
       {{scan_line_end, scan_space_letters, scan_space_punctuation, scan_han_or_hangul, scan_digit}}},
      {"deepseek-llm",
       {{scan_line_end, scan_space_cased, scan_space_marks, scan_space_at_end, scan_han_or_hangul,
         scan_digit}}},
      {"smollm", {{scan_digit, scan_gpt2}}},
      {"refact", {{scan_digit, scan_gpt2}}},
      {"starcoder", {{scan_digit, scan_gpt2}}},
      {"command-r", {{scan_digit, scan_gpt2}}},
      // What converters wrote before they knew the model: llama.cpp's fallback, for the same ids as there.
      {"default", {{scan_punctuation, scan_gpt2, scan_number, scan_three_digits}}},
  };
  return kNamed;
}

}  // namespace

std::optional<GgufPretokenizer> find_gguf_pretokenizer(std::string_view pre) {
  if (pre.empty()) pre = "default";
  for (const NamedPretokenizer& named : named_pretokenizers())
    if (named.name == pre) return named.what;
  return std::nullopt;
}

std::string_view name_gguf_pretokenizer(const std::vector<Scanner>& scanners, bool nfc) {
  std::string_view found;
  for (const NamedPretokenizer& named : named_pretokenizers()) {
    if (named.what.scanners != scanners) continue;
    if (named.what.nfc == nfc) return named.name;
    if (found.empty()) found = named.name;
  }
  return found;
}

std::string gguf_pretokenizer_names() {
  std::string out;
  for (const NamedPretokenizer& named : named_pretokenizers())
    out.append(out.empty() ? "" : ", ").append(named.name);
  return out;
}

}  // namespace millrace
