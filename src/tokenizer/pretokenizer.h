// Pre-tokenization: where BPE may not merge across. Each model's regular expression is a hand-written scanner
// here; a file's pattern is recognised by its exact text.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace millrace {

// Where the next piece of [begin, end) ends: after a match of the expression at begin, or, where it does not
// match there, before the next match. The text is well-formed UTF-8 and not empty.
using Scanner = const char* (*)(const char* begin, const char* end);

const char* scan_gpt2(const char* begin, const char* end);
const char* scan_llama3(const char* begin, const char* end);
const char* scan_qwen2(const char* begin, const char* end);
const char* scan_qwen35(const char* begin, const char* end);  // scan_qwen2 with marks in words
const char* scan_o200k(const char* begin, const char* end);
const char* scan_kimi(const char* begin, const char* end);  // o200k's with \p{Han}+ apart
const char* scan_tekken(const char* begin, const char* end);
const char* scan_seed(const char* begin, const char* end);             // ByteDance's Seed
const char* scan_deepseek3(const char* begin, const char* end);        // the last of DeepSeek V3's three
const char* scan_han_or_kana(const char* begin, const char* end);      // the second of them
const char* scan_number_by_three(const char* begin, const char* end);  // \p{N}{1,3}
const char* scan_one_number(const char* begin, const char* end);       // \p{N}
const char* scan_line_end(const char* begin, const char* end);         // [\r\n]
const char* scan_space_letters(const char* begin, const char* end);    // \s?\p{L}+
const char* scan_space_cased(const char* begin, const char* end);      // \s?[cased letters]+ of DeepSeek LLM
const char* scan_space_punctuation(const char* begin, const char* end);  // \s?\p{P}+
const char* scan_space_marks(const char* begin, const char* end);        // \s?[!-/:-~ and their wide forms]+
const char* scan_space_at_end(const char* begin, const char* end);       // \s+$
const char* scan_han_or_hangul(const char* begin, const char* end);      // DeepSeek LLM's and Coder's
const char* scan_digit(const char* begin, const char* end);              // Hugging Face's Digits, each alone
const char* scan_digit_run(const char* begin, const char* end);          // Hugging Face's Digits, together
const char* scan_number(const char* begin, const char* end);             // \p{N}+
const char* scan_punctuation(const char* begin, const char* end);        // [\p{P}\$\+<=>\^~\|]+
const char* scan_three_digits(const char* begin, const char* end);       // [0-9][0-9][0-9]

// Whether the expression is \s?[...]+ with the letters of scan_space_cased.
bool is_cased_letters(std::string_view regex);

// The scanner of a Split pattern of a tokenizer.json; nullptr when it is none of ours.
Scanner find_split_scanner(std::string_view regex);

// What a GGUF file's tokenizer.ggml.pre stands for.
struct GgufPretokenizer {
  std::vector<Scanner> scanners;  // applied one inside the other
  bool ignore_merges = false;     // a word that is a token is that token
  bool add_bos = false;           // where the file does not say
  bool nfc = false;               // the file does not say so, but the model was trained that way
};
// Nothing when the name is unknown.
std::optional<GgufPretokenizer> find_gguf_pretokenizer(std::string_view pre);
// The name of one that cuts by these, with NFC before it if one is; empty when there is none.
std::string_view name_gguf_pretokenizer(const std::vector<Scanner>& scanners, bool nfc);
// All names, for messages.
std::string gguf_pretokenizer_names();

}  // namespace millrace
