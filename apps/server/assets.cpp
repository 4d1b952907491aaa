#include "assets.h"

#include <string>

namespace millrace::server {

const Asset* find_asset(std::string_view path) {
  if (path == "/") path = "/index.html";
  for (size_t i = 0; i < kNumAssets; ++i) {
    if (kAssets[i].path == path) return &kAssets[i];
  }
  return nullptr;
}

namespace {

// Nothing is loaded from or said to anywhere else, no script is made out of a string, nobody frames the page.
constexpr std::string_view kPolicy =
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "worker-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types millrace";
// The one script that talks to others: the tool servers whose addresses the reader has entered. A worker's
// policy is its own, so the page's stays as strict as it is.
constexpr std::string_view kToolWorker = "/mcp_worker.js";
constexpr std::string_view kToolWorkerPolicy =
    "default-src 'none'; script-src 'self'; connect-src http: https:";

}  // namespace

HttpResponse asset_response(const Asset& asset, const HttpRequest& request) {
  const std::string_view policy = asset.path == kToolWorker ? kToolWorkerPolicy : kPolicy;
  HttpResponse response{.content_type = std::string(asset.content_type)};
  response.headers = {{"etag", std::string(asset.etag)},
                      {"cache-control", "no-cache"},  // ask again, and get 304 while nothing changed
                      {"x-content-type-options", "nosniff"},
                      {"referrer-policy", "no-referrer"},
                      {"content-security-policy", std::string(policy)}};
  if (request.header("if-none-match") == asset.etag) {
    response.status = 304;
    return response;
  }
  response.body.assign(reinterpret_cast<const char*>(asset.data), asset.size);
  return response;
}

}  // namespace millrace::server
