// The keys of a GGUF file, as llama.cpp's converter writes them, with a synthetic tokenizer.
#include <map>

#include "base/error.h"
#include "gguf_keys.h"
#include "synth/plan.h"
#include "synth/vocabulary.h"

namespace millrace::cli {
namespace {

struct Specials {
  std::map<int32_t, std::string> tokens;
  int32_t bos = 0, eos = 0, pad = 0;
};

// Harmony's special tokens: at their published ids in a vocabulary of the published size, else at its end.
Specials harmony_specials(int32_t vocab) {
  constexpr int32_t kPublishedVocab = 201088, kFirst = 199998, kNamed = 15;
  const bool published = vocab == kPublishedVocab;
  const int32_t first = published ? kFirst : vocab - kNamed;
  Specials specials{{}, first, first + 4, first + 1};
  for (int32_t id = first; id < vocab; ++id)
    specials.tokens[id] = fmt::format("<|reserved_{}|>", id - first + kFirst);
  specials.tokens[first] = "<|startoftext|>";
  specials.tokens[first + 1] = "<|endoftext|>";
  specials.tokens[first + 4] = "<|return|>";
  specials.tokens[first + 5] = "<|constrain|>";
  specials.tokens[first + 7] = "<|channel|>";
  specials.tokens[first + 8] = "<|start|>";
  specials.tokens[first + 9] = "<|end|>";
  specials.tokens[first + 10] = "<|message|>";
  specials.tokens[first + 14] = "<|call|>";
  return specials;
}

Specials chatml_specials(int32_t vocab) {
  return {{{vocab - 3, "<|endoftext|>"}, {vocab - 2, "<|im_start|>"}, {vocab - 1, "<|im_end|>"}},
          vocab - 3,
          vocab - 1,
          vocab - 3};
}

// Not the models' own templates, which are long: the same turns, plainly.
constexpr const char* kHarmonyTemplate =
    "{% for message in messages %}<|start|>{{ message['role'] }}<|message|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}";
constexpr const char* kChatmlTemplate =
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

void write_tokenizer(const SynthPlan& plan, io::GgufWriter& writer) {
  const bool oss = plan.architecture == "gpt-oss";
  if (plan.vocab < 300) {
    throw_error(ErrorCode::kBadInput,
                "{}: vocab_size: found {}, expected at least 300 (256 bytes and special tokens)", plan.name,
                plan.vocab);
  }
  const Specials specials = oss ? harmony_specials(plan.vocab) : chatml_specials(plan.vocab);
  const Vocabulary vocabulary = make_vocabulary(plan.vocab, specials.tokens);
  writer.set_string("tokenizer.ggml.model", "gpt2");
  writer.set_string("tokenizer.ggml.pre", oss                            ? "gpt-4o"
                                          : plan.architecture == "llama" ? "llama-bpe"
                                                                         : "qwen2");
  writer.set_strings("tokenizer.ggml.tokens", vocabulary.tokens);
  writer.set_i32s("tokenizer.ggml.token_type", vocabulary.types);
  writer.set_strings("tokenizer.ggml.merges", vocabulary.merges);
  writer.set_u32("tokenizer.ggml.bos_token_id", static_cast<uint32_t>(specials.bos));
  writer.set_u32("tokenizer.ggml.eos_token_id", static_cast<uint32_t>(specials.eos));
  writer.set_u32("tokenizer.ggml.padding_token_id", static_cast<uint32_t>(specials.pad));
  writer.set_bool("tokenizer.ggml.add_bos_token", false);
  writer.set_string("tokenizer.chat_template", oss ? kHarmonyTemplate : kChatmlTemplate);
}

}  // namespace

void write_metadata(const SynthPlan& plan, io::GgufWriter& writer) {
  writer.set_string("general.architecture", plan.architecture);
  writer.set_string("general.name", plan.name + " (synthetic)");
  writer.set_u32("general.quantization_version", 2);
  write_config_keys(plan.config, plan.name, plan.architecture, plan.vocab, writer);
  write_tokenizer(plan, writer);
}

}  // namespace millrace::cli
