// How long a prompt is by its images.
#pragma once

#include <cstddef>

#include "chat/format.h"
#include "millrace/engine.h"

namespace millrace::server {

// What a conversation's images take of a prompt. Throws ApiError for a model that takes none, and Error for a
// file that is no picture.
size_t image_tokens(const chat::Conversation& conversation, const Engine& engine);

}  // namespace millrace::server
