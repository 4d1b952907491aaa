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
  Json echo;                            // the response object but for id, status, output and usage
  bool store = true, background = false, stream = false, logprobs = false;
};

ResponseInput read_response_input(const Fields& fields, Api& api, const Client& client);

}  // namespace millrace::server
