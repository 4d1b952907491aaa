// Names of requests and answers.
#pragma once

#include <string>
#include <string_view>

#include "http.h"

namespace millrace::server {

std::string new_id(std::string_view prefix, int digits);  // prefix and so many random hexadecimal digits

// The client's own request id and traceparent where they are well-formed; else an id of ours and no trace.
Client describe_client(const HttpRequest& head, std::string remote);

}  // namespace millrace::server
