#include "engine/fim_tokens.h"

#include <algorithm>

#include "base/error.h"

namespace millrace {
namespace {

// A family's names; empty: it has none.
struct Family {
  const char *prefix, *suffix, *middle;
  const char *repository, *file;  // before the name of a repository, and before each of its files
  const char *pad, *end;          // what ends an answer beside the model's own end tokens
};
constexpr Family kFamilies[] = {
    {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>",
     "<|file_separator|>"},  // Qwen 2.5 and 3; CodeGemma, which has the last
    {"<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>", "<fim_pad>",
     ""},  // StarCoder, Granite
    {"<fim-prefix>", "<fim-suffix>", "<fim-middle>", "<reponame>", "", "<fim-pad>", ""},  // SantaCoder
    {"<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "", "", "", ""},               // DeepSeek
    {"<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", "", "", "", ""},            // GLM
    {"▁<PRE>", "▁<SUF>", "▁<MID>", "", "", "", "▁<EOT>"},                                 // Code Llama
    {"[PREFIX]", "[SUFFIX]", "", "", "", "", ""},                                         // Codestral
};

std::optional<ModelInfo::Infill> of_family(const Family& family, const Tokenizer& tokenizer) {
  const auto find = [&](const char* name) { return *name == 0 ? -1 : tokenizer.find(name).value_or(-1); };
  ModelInfo::Infill infill{.prefix = find(family.prefix),
                           .suffix = find(family.suffix),
                           .middle = find(family.middle),
                           .repository = find(family.repository),
                           .file = find(family.file)};
  const bool has_middle = *family.middle != 0;
  if (infill.prefix < 0 || infill.suffix < 0 || (has_middle && infill.middle < 0)) return std::nullopt;
  infill.suffix_first = !has_middle;
  for (const char* name : {family.repository, family.file, family.pad, family.end}) {
    if (const int32_t token = find(name); token >= 0) infill.ends.push_back(token);
  }
  return infill;
}

ModelInfo::Infill of_gguf(const io::Gguf& gguf, int32_t vocab) {
  const auto id = [&](const char* name, const char* older) -> int32_t {
    std::string key = fmt::format("tokenizer.ggml.{}_token_id", name);
    if (!gguf.has(key)) key = fmt::format("tokenizer.ggml.{}_token_id", older);
    if (!gguf.has(key)) return -1;
    const int64_t value = gguf.get_int(key);
    if (value < 0 || value >= vocab) {
      throw_error(ErrorCode::kBadInput, "{}: {}: found {}, expected 0 to {}", gguf.path(), key, value,
                  vocab - 1);
    }
    return static_cast<int32_t>(value);
  };
  ModelInfo::Infill infill{.prefix = id("fim_pre", "prefix"),
                           .suffix = id("fim_suf", "suffix"),
                           .middle = id("fim_mid", "middle"),
                           .repository = id("fim_rep", "fim_rep"),
                           .file = id("fim_sep", "fim_sep")};
  for (const int32_t token : {infill.repository, infill.file, id("fim_pad", "fim_pad")}) {
    if (token >= 0) infill.ends.push_back(token);
  }
  return infill;
}

}  // namespace

ModelInfo::Infill find_fim_tokens(const io::Checkpoint& checkpoint, const Tokenizer& tokenizer) {
  if (checkpoint.gguf) {
    ModelInfo::Infill told = of_gguf(*checkpoint.gguf, tokenizer.vocab_size());
    if (told.fills()) return told;
  }
  for (const Family& family : kFamilies) {
    if (const auto found = of_family(family, tokenizer)) return *found;
  }
  return {};
}

}  // namespace millrace
