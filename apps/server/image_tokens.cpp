#include "image_tokens.h"

#include "conversation.h"

namespace millrace::server {

size_t image_tokens(const chat::Conversation& conversation, const Engine& engine) {
  size_t tokens = 0;
  for (const auto& file : read_images(conversation, engine.model())) tokens += engine.image_tokens(*file);
  return tokens;
}

}  // namespace millrace::server
