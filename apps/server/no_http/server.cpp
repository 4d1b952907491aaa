// Stands in for http/ in a build without Boost and OpenSSL, or with a compiler that has no coroutines.
#include "server.h"

#include "base/error.h"

namespace millrace::server {

void serve(ModelSet& /*models*/, const ServerOptions& /*options*/,
           const std::function<void(const std::string& url)>& /*listening*/) {
  throw_error(
      ErrorCode::kUnsupported,
      "serve: this build has no server; build with g++ and libboost1.81-dev and libssl-dev installed");
}

}  // namespace millrace::server
