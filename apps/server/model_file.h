// What a model's files say of it, read without loading it: for lists of models, whether they are loaded or
// not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace millrace::server {

struct ModelFile {
  size_t bytes = 0;         // of its weights
  int64_t modified = 0;     // Unix time
  std::string format = {};  // gguf or safetensors
  std::string architecture = {};
  std::string quantization = {};  // the type that most of the bytes have, e.g. q4_k
  int64_t parameters = 0;
  int32_t trained_context = 0, embedding_size = 0;
  std::string chat_template = {};  // empty: none
  bool classifies = false;         // it has the head of a cross-encoder, which nothing here computes
  // 64 hexadecimal digits that change when the file does: of its name, size and time, not of its content.
  std::string digest = {};
  std::string error = {};  // why it is no model, with its path
};

// Never throws: what is wrong is in `error`.
ModelFile read_model_file(const std::string& path);

}  // namespace millrace::server
