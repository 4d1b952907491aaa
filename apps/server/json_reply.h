// A JSON tree as the reply to a request.
#pragma once

#include "http.h"
#include "json_fields.h"

namespace millrace::server {

inline Reply json_reply(const Json& value, int status = 200) {
  return {.response = {.status = status, .body = value.dump(-1, ' ', false, Json::error_handler_t::replace)}};
}

}  // namespace millrace::server
