// The keys of a GGUF file, as llama.cpp's converter writes them, with a synthetic tokenizer.
#include "synth/metadata.h"

#include "base/error.h"
#include "model/architecture.h"
#include "model/gguf_keys.h"
#include "synth/vocabulary.h"

namespace millrace::cli {
namespace {

void write_tokenizer(const SynthPlan& plan, io::GgufWriter& writer) {
  const int32_t vocab = plan.config.vocab;
  if (vocab < 300) {
    throw_error(ErrorCode::kBadInput,
                "{}: vocab_size: found {}, expected at least 300 (256 bytes and special tokens)",
                plan.config.name, vocab);
  }
  const SyntheticTokenizer tokenizer = architecture_of(plan.config).synthetic_tokenizer(vocab);
  const SyntheticVocabulary vocabulary = make_vocabulary(vocab, tokenizer.specials);
  writer.set_string("tokenizer.ggml.model", "gpt2");
  writer.set_string("tokenizer.ggml.pre", tokenizer.pre);
  writer.set_strings("tokenizer.ggml.tokens", vocabulary.tokens);
  writer.set_i32s("tokenizer.ggml.token_type", vocabulary.types);
  writer.set_strings("tokenizer.ggml.merges", vocabulary.merges);
  writer.set_u32("tokenizer.ggml.bos_token_id", static_cast<uint32_t>(tokenizer.bos));
  writer.set_u32("tokenizer.ggml.eos_token_id", static_cast<uint32_t>(tokenizer.eos));
  writer.set_u32("tokenizer.ggml.padding_token_id", static_cast<uint32_t>(tokenizer.pad));
  writer.set_bool("tokenizer.ggml.add_bos_token", false);
  writer.set_string("tokenizer.chat_template", tokenizer.chat_template);
}

}  // namespace

void write_metadata(const SynthPlan& plan, io::GgufWriter& writer) {
  writer.set_string("general.architecture", plan.config.architecture);
  writer.set_string("general.name", plan.config.name + " (synthetic)");
  writer.set_u32("general.quantization_version", 2);
  write_config_keys(plan.checkpoint, plan.config, writer);
  write_tokenizer(plan, writer);
}

}  // namespace millrace::cli
