// What every generating endpoint reads alike: sampling, limits, streaming.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "api.h"
#include "json_fields.h"

namespace millrace::server {

struct StreamOptions {
  bool stream = false, include_usage = false;
};

// Throws ApiError{400, context_length_exceeded}; `path`: the field that the prompt was made of.
void check_context(size_t tokens, const ModelInfo& model, std::string_view path);
// Strings to stop at: one or an array of them.
std::vector<std::string> read_stop(const Fields& fields, std::string_view key);
// How many answers to one prompt: up to 128, and to what runs at once.
std::optional<int32_t> read_samples(const Fields& fields, std::string_view key, const ModelInfo& model);
StreamOptions read_stream_options(const Fields& fields);
// What is said of any request, whatever it asks for: priority, deadline, whose cache.
Request read_service(const Fields& fields, const Api& api, const Client& client);
// That, and everything else of a Request but its prompt, its constraint and what endpoints call differently
// (max tokens, logprobs).
Request read_request(const Fields& fields, const Api& api, const ServedModel& model, const Client& client);
// Fields of OpenAI's API that mean nothing here: named in the header x-millrace-ignored and in the log.
Headers warn_ignored(const Fields& fields, std::initializer_list<std::string_view> names, const Api& api,
                     const Client& client);

}  // namespace millrace::server
