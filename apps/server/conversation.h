// From the fields of a chat request to a chat::Conversation.
#pragma once

#include "chat/format.h"
#include "json_fields.h"

namespace millrace::server {

// messages, tools, tool_choice, parallel_tool_calls, reasoning_effort, chat_template_kwargs.
chat::Conversation read_conversation(const Fields& fields);

// Parts that both APIs share. `content` is a string, null or an array of parts with text, and, where `images`
// is not null, with images in data URLs.
std::string read_content(const Json* content, const std::string& path,
                         std::vector<chat::MessageImage>* images = nullptr);
inline constexpr size_t kMaxImages = 64;  // of a message
// One more in front of byte `at` of a message's content. `path`: of the field it came from.
void add_image(std::vector<chat::MessageImage>& images, size_t at, std::string file, const std::string& path);
std::string from_base64(std::string_view text, const std::string& path);
// Those of a conversation, in order; none where it has none. Throws ApiError for a model that takes none.
std::vector<std::shared_ptr<const std::string>> read_images(const chat::Conversation& conversation,
                                                            const ModelInfo& info);
// A function or a custom tool. `nested`: what is said of it lies in an object beside its type, as chats have
// it.
chat::Tool read_tool(const Fields& tool, bool nested);
chat::Tool read_function(const Fields& function);
std::string read_schema(const Fields& fields, std::string_view key);  // an object, as text; empty: absent
// tool_choice, and whether there are such tools.
void read_tool_choice(const Fields& fields, chat::Conversation& conversation, bool nested);
std::string read_effort(const Fields& fields, std::string_view key);

}  // namespace millrace::server
