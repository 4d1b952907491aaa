#include "assets.h"

namespace millrace::server {

const Asset* find_asset(std::string_view path) {
  if (path == "/") path = "/index.html";
  for (size_t i = 0; i < kNumAssets; ++i) {
    if (kAssets[i].path == path) return &kAssets[i];
  }
  return nullptr;
}

HttpResponse asset_response(const Asset& asset, const HttpRequest& request) {
  HttpResponse response{.content_type = std::string(asset.content_type)};
  response.headers = {{"etag", std::string(asset.etag)},
                      {"cache-control", "no-cache"},  // ask again, and get 304 while nothing changed
                      {"x-content-type-options", "nosniff"},
                      // Nothing is loaded from anywhere else: the page works without network.
                      {"content-security-policy",
                       "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
                       "frame-ancestors 'none'"}};
  if (request.header("if-none-match") == asset.etag) {
    response.status = 304;
    return response;
  }
  response.body.assign(reinterpret_cast<const char*>(asset.data), asset.size);
  return response;
}

}  // namespace millrace::server
