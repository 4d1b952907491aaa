// What an architecture says for `millrace synth`, beside its weights: shapes with names, and a tokenizer.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace millrace {

// A published shape, or a tiny one with every feature of its architecture on, as a config.json.
struct SyntheticPreset {
  std::string_view name, config;
};

// Of byte-level BPE; the words between the special tokens are made up.
struct SyntheticTokenizer {
  std::string pre;  // tokenizer.ggml.pre
  std::map<int32_t, std::string> specials;
  int32_t bos = 0, eos = 0, pad = 0;
  std::string chat_template;
};

// ChatML at the end of the vocabulary: <|endoftext|>, <|im_start|>, <|im_end|>.
SyntheticTokenizer chatml_tokenizer(std::string_view pre, int32_t vocab);

}  // namespace millrace
