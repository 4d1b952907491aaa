// Checkpoint: a model on disk, whichever way it is packed: a GGUF file, or a Hugging Face directory
// (config.json, generation_config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja,
// *.safetensors).
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/gguf.h"
#include "tensor/tensor_view.h"

namespace millrace::io {

struct HfDirectory;  // io/hf_directory.h

// Exactly one of the two is set.
struct Checkpoint {
  std::optional<Gguf> gguf;
  std::shared_ptr<HfDirectory> hf;

  // A directory, a .gguf file or a file whose magic says GGUF. Throws Error.
  static Checkpoint open(const std::string& path);

  const std::string& path() const;
  const std::vector<TensorView>& tensors() const;
  const TensorView* find_tensor(std::string_view name) const;
  size_t mapped_bytes() const;
};

}  // namespace millrace::io
