// The keys of a GGUF file, as llama.cpp's converter writes them, with a synthetic tokenizer.
#include <map>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/config_reader.h"
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
  io::Checkpoint checkpoint;
  checkpoint.hf = std::make_shared<io::HfDirectory>();
  checkpoint.hf->path = plan.name;
  checkpoint.hf->config = plan.config;
  const ConfigReader read(checkpoint, "");
  const auto key = [&](const char* name) { return plan.architecture + "." + name; };
  const auto size = [&](const char* name, int64_t value) {
    writer.set_u32(key(name), static_cast<uint32_t>(value));
  };
  const auto copy = [&](const char* name, const char* field, int64_t high) {
    const int64_t value = read.integer("", field, 1, high);
    size(name, value);
    return value;
  };
  writer.set_string("general.architecture", plan.architecture);
  writer.set_string("general.name", plan.name + " (synthetic)");
  writer.set_u32("general.quantization_version", 2);
  copy("block_count", "num_hidden_layers", 1024);
  copy("context_length", "max_position_embeddings", 1 << 28);
  const int64_t hidden = copy("embedding_length", "hidden_size", 1 << 20);
  copy("feed_forward_length", "intermediate_size", 1 << 20);
  const int64_t heads = copy("attention.head_count", "num_attention_heads", 4096);
  size("attention.head_count_kv", read.integer_or("", "num_key_value_heads", 1, 4096, heads));
  const int64_t head_dim = read.integer_or("", "head_dim", 2, 4096, hidden / heads);
  size("attention.key_length", head_dim);
  size("attention.value_length", head_dim);
  size("vocab_size", plan.vocab);
  if (plan.architecture == "llama") size("rope.dimension_count", head_dim);
  writer.set_f32(key("attention.layer_norm_rms_epsilon"),
                 static_cast<float>(read.real_or("", "rms_norm_eps", 1e-5)));

  nlohmann::json rope = nlohmann::json::object();
  for (const char* field : {"rope_scaling", "rope_parameters"}) {
    if (const auto it = plan.config.find(field); it != plan.config.end() && it->is_object()) rope = *it;
  }
  const double theta = read.real_or("", "rope_theta", 10000.0);
  writer.set_f32(key("rope.freq_base"), static_cast<float>(read.hf_real_or(rope, "rope_theta", theta)));
  const std::string type = rope.value("rope_type", rope.value("type", std::string("default")));
  if (type == "yarn" || type == "linear") {
    writer.set_string(key("rope.scaling.type"), type);
    writer.set_f32(key("rope.scaling.factor"), static_cast<float>(read.hf_real(rope, "factor")));
  }
  if (type == "yarn") {
    size("rope.scaling.original_context_length",
         static_cast<int64_t>(read.hf_real(rope, "original_max_position_embeddings")));
  }
  if (plan.architecture == "gpt-oss") {
    copy("expert_count", "num_local_experts", 4096);
    copy("expert_used_count", "num_experts_per_tok", 4096);
    copy("expert_feed_forward_length", "intermediate_size", 1 << 20);
    copy("attention.sliding_window", "sliding_window", 1 << 28);
  } else if (plan.architecture == "qwen3moe") {
    copy("expert_count", "num_experts", 4096);
    copy("expert_used_count", "num_experts_per_tok", 4096);
    copy("expert_feed_forward_length", "moe_intermediate_size", 1 << 20);
  }
  write_tokenizer(plan, writer);
}

}  // namespace millrace::cli
