// The events of a response that was made without any: each item whole.
#pragma once

#include <memory>

#include "json_fields.h"
#include "response_log.h"

namespace millrace::server {

std::shared_ptr<ResponseLog> replay_response(const Json& response);

}  // namespace millrace::server
