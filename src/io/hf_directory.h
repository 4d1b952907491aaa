// The files of a Hugging Face directory. Apart from checkpoint.h, because the JSON header takes longer to
// compile than most files that only want to know where a model is.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "io/safetensors.h"

namespace millrace::io {

struct HfDirectory {
  std::string path;
  nlohmann::json config;  // config.json; of a model that also sees, with its text_config in front
  bool nested = false;    // such a model: weights are called language_model. or model.language_model.
  nlohmann::json generation_config;  // null when the file is absent
  nlohmann::json image_processor;    // preprocessor_config.json, or that of processor_config.json; likewise
  std::string tokenizer_json;        // text; empty when the file is absent
  std::string rwkv_vocab;            // RWKV's: rwkv_vocab_v20230424.txt, likewise
  std::string tekken_json;           // Mistral's own form of it, likewise; read where the first is absent
  nlohmann::json tokenizer_config;   // null when absent
  std::string chat_template;         // chat_template.jinja or tokenizer_config's chat_template; may be empty
  Safetensors weights;

  const StoredTensor* find_stored(std::string_view name) const;  // under either name, of whatever type
};

}  // namespace millrace::io
