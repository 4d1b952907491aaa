// What requests of Ollama's API say, in the words of this server.
#pragma once

#include <optional>
#include <string>

#include "api.h"
#include "chat/format.h"
#include "hub/model_name.h"
#include "json_fields.h"

namespace millrace::server {

// The name of a model as this server has it: "llama3:latest" is "llama3" where that is how it is called.
std::string ollama_model(const Fields& fields, Api& api);
// The model of the hub that is meant. Throws ApiError{404} for what is no name of one.
hub::ModelName name_on_hub(const std::string& given);
bool ollama_streams(const Fields& fields);  // unless it says otherwise
// How long the model is to stay when it is idle, in seconds; negative: for ever. Absent: as it is.
std::optional<double> read_keep_alive(const Fields& fields);

// `options`: sampling and limits, with Ollama's defaults where neither the request nor the model's makers
// say.
Request read_ollama_options(const Fields& fields, Api& api, const ServedModel& model, const Client& client);
// Options that mean nothing here, and what a model that is kept cannot do: for the header that names them.
Headers ollama_ignored(const Fields& fields, Api& api, const ServedModel& model, const Client& client);
// `messages`, `tools`, `think`.
chat::Conversation read_ollama_conversation(const Fields& fields);
// "images", in base64, in front of a message's text.
std::vector<chat::MessageImage> read_ollama_images(const Fields& fields);
void read_think(const Fields& fields, chat::Conversation& conversation);
// `format`: "json", or a JSON schema, which the conversation is told of.
Constraints::Grammar read_ollama_format(const Fields& fields, Constraints& constraints,
                                        chat::Conversation& conversation);

}  // namespace millrace::server
