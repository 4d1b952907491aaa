// Stands in for libcurl and OpenSSL where they are not installed: names of the hub are found in the cache,
// and whatever would need the network says in one line why it cannot.
#include "base/error.h"
#include "hub/digest.h"
#include "hub/http_client.h"

namespace millrace::hub {

std::string why_no_network() {
  return "this program was built without libcurl and cannot fetch models: install libcurl4-openssl-dev and "
         "build again";
}

std::unique_ptr<HttpClient> make_http_client() {
  throw_error(ErrorCode::kUnsupported, "{}", why_no_network());
}

std::unique_ptr<Digest> make_sha256() { throw_error(ErrorCode::kUnsupported, "{}", why_no_network()); }
std::unique_ptr<Digest> make_blob_sha1(uint64_t /*size*/) {
  throw_error(ErrorCode::kUnsupported, "{}", why_no_network());
}

}  // namespace millrace::hub
