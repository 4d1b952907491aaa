// What a request of the responses API says, as a conversation and as the fields its response object repeats.
#pragma once

#include <vector>

#include "api.h"
#include "chat/format.h"
#include "json_fields.h"

namespace millrace::server {

struct ResponseInput {
  chat::Conversation conversation;      // instructions, what came before, and the new input
  std::vector<chat::Message> messages;  // the same without instructions: what a later request goes on from
  Json items = Json::array();           // of the new input, with ids
  std::string conversation_id = {};     // that the items and the answer are added to; empty: none
  Json echo;                            // the response object but for id, status, output and usage
  bool truncate = false;                // messages may be left out when all of them do not fit
  bool store = true, background = false, stream = false, logprobs = false;
};

// Items as clients write them: what they say is appended to `messages`; they come back with ids and their
// content in parts, as they are stored and listed.
Json read_items(const Json& items, const std::string& path, std::vector<chat::Message>& messages);

ResponseInput read_response_input(const Fields& fields, Api& api, const Client& client);

}  // namespace millrace::server
