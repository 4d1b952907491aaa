// Stands in for http/ in a build without Boost and OpenSSL, or with a compiler that has no coroutines.
#include "server.h"

#include "base/error.h"

namespace millrace::server {
namespace {

[[noreturn]] void refuse() {
  throw_error(
      ErrorCode::kUnsupported,
      "serve: this build has no server; build with g++ and libboost1.81-dev and libssl-dev installed");
}

}  // namespace

void serve(ModelSet& /*models*/, const ServerOptions& /*options*/,
           const std::function<void(const std::string& url)>& /*listening*/) {
  refuse();
}

void serve_inside(ModelSet& /*models*/, const ServerOptions& /*options*/,
                  const std::function<void(const std::string& url)>& /*listening*/,
                  const std::stop_token& /*stop*/) {
  refuse();
}

}  // namespace millrace::server
