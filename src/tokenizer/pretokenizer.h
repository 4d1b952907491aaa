// Pre-tokenization: where BPE may not merge across. Each model's regular expression is a hand-written scanner
// here; a file's pattern is recognised by its exact text.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>
#include <vector>

namespace millrace {

// Where the next piece of [begin, end) ends: after a match of the expression at begin, or, where it does not
// match there, before the next match. The text is well-formed UTF-8 and not empty.
using Scanner = const char* (*)(const char* begin, const char* end);

const char* scan_gpt2(const char* begin, const char* end);
const char* scan_llama3(const char* begin, const char* end);
const char* scan_qwen2(const char* begin, const char* end);
const char* scan_o200k(const char* begin, const char* end);
const char* scan_digit(const char* begin, const char* end);         // Hugging Face's Digits, each alone
const char* scan_digit_run(const char* begin, const char* end);     // Hugging Face's Digits, together
const char* scan_number(const char* begin, const char* end);        // \p{N}+
const char* scan_punctuation(const char* begin, const char* end);   // [\p{P}\$\+<=>\^~\|]+
const char* scan_three_digits(const char* begin, const char* end);  // [0-9][0-9][0-9]

// The scanner of a Split pattern of a tokenizer.json; nullptr when it is none of ours.
Scanner find_split_scanner(std::string_view regex);
// The scanners, applied one inside the other, of a GGUF file's tokenizer.ggml.pre; nothing when unknown.
std::optional<std::vector<Scanner>> find_gguf_scanners(std::string_view pre);

}  // namespace millrace
