#include "engine/load_tokenizer.h"

#include "base/error.h"
#include "io/hf_directory.h"

namespace millrace {
namespace {

// GGUF files of RWKV have a name where others have a template; this is what it stands for.
constexpr std::string_view kRwkvWorldTemplate =
    "{% for m in messages %}{{ {'system': 'System: ', 'user': 'User: ', 'assistant': 'Assistant: "
    "'}[m['role']] }}"
    "{{ m['content'] | trim }}{{ '\\n\\n' }}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}";

GgufVocabulary vocabulary_of(const io::Gguf& gguf) {
  GgufVocabulary v;
  v.model = gguf.get_string("tokenizer.ggml.model");
  v.pre = gguf.get_string("tokenizer.ggml.pre", "default");
  if (const io::GgufArray* a = gguf.get_array("tokenizer.ggml.tokens")) v.tokens = a->strings;
  if (const io::GgufArray* a = gguf.get_array("tokenizer.ggml.merges")) v.merges = a->strings;
  if (const io::GgufArray* a = gguf.get_array("tokenizer.ggml.scores")) {
    v.scores.reserve(a->reals.size());
    for (const double score : a->reals) v.scores.push_back(static_cast<float>(score));
  }
  if (const io::GgufArray* a = gguf.get_array("tokenizer.ggml.token_type")) {
    v.types.reserve(a->integers.size());
    for (const int64_t type : a->integers) v.types.push_back(static_cast<int32_t>(type));
  }
  const auto id = [&](const char* name) -> std::optional<TokenId> {
    const std::string key = fmt::format("tokenizer.ggml.{}_token_id", name);
    if (!gguf.has(key)) return std::nullopt;
    const int64_t value = gguf.get_int(key);
    if (value < 0 || value >= static_cast<int64_t>(v.tokens.size())) {
      throw_error(ErrorCode::kBadInput, "{}: {}: found {}, expected 0 to {}", gguf.path(), key, value,
                  static_cast<int64_t>(v.tokens.size()) - 1);
    }
    return static_cast<TokenId>(value);
  };
  v.bos = id("bos");
  v.eos = id("eos");
  v.eot = id("eot");
  v.eom = id("eom");
  v.unk = id("unknown");
  v.pad = id("padding");
  v.cls = id("cls");
  v.sep = id("seperator");  // as the key is spelled
  const auto flag = [&](const char* name) -> std::optional<bool> {
    const std::string key = fmt::format("tokenizer.ggml.{}", name);
    if (!gguf.has(key)) return std::nullopt;
    return gguf.get_bool(key, false);
  };
  v.add_bos = flag("add_bos_token");
  v.add_eos = flag("add_eos_token");
  v.add_space_prefix = flag("add_space_prefix");
  v.lowercase = flag("normalizer.lowercase");
  v.strip_accents = flag("normalizer.strip_accents");
  return v;
}

}  // namespace

std::shared_ptr<const Tokenizer> load_tokenizer(const io::Checkpoint& checkpoint) {
  if (checkpoint.gguf) {
    if (!checkpoint.gguf->has("tokenizer.ggml.model")) {
      throw_error(ErrorCode::kBadInput,
                  "{}: tokenizer.ggml.model: found nothing, expected a tokenizer in the file",
                  checkpoint.path());
    }
    return Tokenizer::from_gguf(vocabulary_of(*checkpoint.gguf), checkpoint.path());
  }
  if (checkpoint.hf->tokenizer_json.empty()) {
    if (!checkpoint.hf->tekken_json.empty())
      return Tokenizer::from_tekken(checkpoint.hf->tekken_json, checkpoint.path() + "/tekken.json");
    if (!checkpoint.hf->rwkv_vocab.empty()) {
      return Tokenizer::from_rwkv(checkpoint.hf->rwkv_vocab, checkpoint.path() + "/rwkv_vocab_v20230424.txt");
    }
    throw_error(ErrorCode::kBadInput,
                "{}: found neither tokenizer.json nor tekken.json nor rwkv_vocab_v20230424.txt, expected the "
                "model's tokenizer",
                checkpoint.path());
  }
  const nlohmann::json& config = checkpoint.hf->tokenizer_config;
  return Tokenizer::from_json(checkpoint.hf->tokenizer_json, config.is_null() ? std::string() : config.dump(),
                              checkpoint.path() + "/tokenizer.json");
}

std::string chat_template_text(const io::Checkpoint& checkpoint) {
  if (checkpoint.gguf) {
    std::string text(checkpoint.gguf->get_string("tokenizer.chat_template", ""));
    return text == "rwkv-world" ? std::string(kRwkvWorldTemplate) : text;
  }
  const bool rwkv = checkpoint.hf->chat_template.empty() && !checkpoint.hf->rwkv_vocab.empty();
  return rwkv ? std::string(kRwkvWorldTemplate) : checkpoint.hf->chat_template;
}

}  // namespace millrace
