// Tokenizer: text to ids and back, exactly as the model was trained. Byte-level BPE (GPT-2, Llama 3, Qwen
// 2/3, SmolLM2, o200k, Tekken, DeepSeek), SentencePiece BPE with byte fallback (Llama 2, Gemma), WordPiece
// (BERT) and RWKV's World.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace millrace {

using TokenId = int32_t;

// What GGUF's tokenizer.ggml.* keys say, in plain data.
struct GgufVocabulary {
  std::string model;  // "gpt2" (byte-level BPE), "llama" (SentencePiece), "gemma4" (with merges), bert, rwkv
  std::string pre;    // "gpt-4o", "llama-bpe", "qwen2", "smollm", "gpt-2", "default", ...
  std::vector<std::string_view> tokens;
  std::vector<float> scores;   // SentencePiece
  std::vector<int32_t> types;  // 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte
  std::vector<std::string_view> merges;
  std::optional<TokenId> bos, eos, eot, eom, unk, pad, cls, sep;
  std::optional<bool> add_bos, add_eos, add_space_prefix;
  std::optional<bool> lowercase, strip_accents;  // bert
};

class Tokenizer {
 public:
  // tokenizer_config_json may be empty. `source` names the file in messages.
  static std::shared_ptr<const Tokenizer> from_json(std::string_view tokenizer_json,
                                                    std::string_view tokenizer_config_json,
                                                    const std::string& source);
  static std::shared_ptr<const Tokenizer> from_gguf(const GgufVocabulary& vocabulary,
                                                    const std::string& source);
  // tekken.json, as Mistral publishes it.
  static std::shared_ptr<const Tokenizer> from_tekken(std::string_view tekken_json,
                                                      const std::string& source);
  // RWKV's vocabulary as its directories have it (rwkv_vocab_v20230424.txt).
  static std::shared_ptr<const Tokenizer> from_rwkv(std::string_view vocabulary, const std::string& source);
  virtual ~Tokenizer() = default;

  struct EncodeOptions {
    bool add_special = true;    // bos / eos as the model's post-processor asks
    bool parse_special = true;  // "<|im_start|>" in the text is the token, not its letters
    // Once more than this have come out the rest is not looked at: what came out is more than max_tokens
    // then, and not all.
    size_t max_tokens = std::numeric_limits<size_t>::max();
  };
  virtual std::vector<TokenId> encode(std::string_view text, EncodeOptions options) const = 0;
  std::vector<TokenId> encode(std::string_view text) const { return encode(text, EncodeOptions()); }

  // So many tokens at least: a bound from bytes alone, in a small part of encode's time.
  virtual size_t min_tokens(std::string_view text) const = 0;

  // The bytes of one token as they appear in running text (may be part of a character). Special tokens give
  // their literal text when `special` is set and nothing otherwise. An id out of range throws
  // Error{kBadInput}.
  virtual std::string token_bytes(TokenId id, bool special) const = 0;
  // All of them, invalid UTF-8 replaced by U+FFFD as Hugging Face's decode does; a SentencePiece model drops
  // the leading space its encoder added.
  virtual std::string decode(std::span<const TokenId> ids, bool special) const = 0;

  virtual int32_t vocab_size() const = 0;
  virtual std::optional<TokenId> find(std::string_view token) const = 0;  // by its literal text
  virtual bool is_special(TokenId id) const = 0;
  virtual std::optional<TokenId> bos() const = 0;
  // Ends of generation the tokenizer itself knows (eos, eot); generation_config may add more.
  virtual std::vector<TokenId> end_tokens() const = 0;
  // Whether decode drops one space at the start, which the encoder had put there.
  virtual bool strips_leading_space() const { return false; }
  // What GGUF calls its way of cutting text into words (tokenizer.ggml.pre); empty: GGUF has no name for it.
  virtual std::string_view gguf_pre() const { return "default"; }
};

}  // namespace millrace
