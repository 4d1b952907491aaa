// Checkpoint: a model on disk, whichever way it is packed: a GGUF file, or a Hugging Face directory
// (config.json, generation_config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja,
// *.safetensors).
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/gguf.h"
#include "io/safetensors.h"
#include "tensor/tensor_view.h"

namespace millrace::io {

struct HfDirectory {
  std::string path;
  nlohmann::json config;             // config.json
  nlohmann::json generation_config;  // null when the file is absent
  std::string tokenizer_json;        // text; empty when the file is absent
  nlohmann::json tokenizer_config;   // null when absent
  std::string chat_template;         // chat_template.jinja or tokenizer_config's chat_template; may be empty
  Safetensors weights;
};

// Exactly one of the two is set.
struct Checkpoint {
  std::optional<Gguf> gguf;
  std::optional<HfDirectory> hf;

  // A directory, a .gguf file or a file whose magic says GGUF. Throws Error.
  static Checkpoint open(const std::string& path);

  const std::string& path() const { return gguf ? gguf->path() : hf->path; }
  const std::vector<TensorView>& tensors() const { return gguf ? gguf->tensors() : hf->weights.tensors(); }
  const TensorView* find_tensor(std::string_view name) const {
    return gguf ? gguf->find_tensor(name) : hf->weights.find_tensor(name);
  }
  size_t mapped_bytes() const { return gguf ? gguf->mapped_bytes() : hf->weights.mapped_bytes(); }
};

}  // namespace millrace::io
