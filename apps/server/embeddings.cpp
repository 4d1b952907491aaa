// POST /v1/embeddings.
#include "api_error.h"
#include "endpoints.h"

namespace millrace::server {

Reply embeddings(Api& /*api*/, const HttpRequest& /*request*/, const Client& /*client*/) {
  throw ApiError(501, "this server gives no embeddings", "", "unsupported");
}

}  // namespace millrace::server
