// Files embedded in the binary: the page and the API's description (apps/server/embed.cmake writes the
// table).
#pragma once

#include <cstddef>
#include <string_view>

#include "http.h"

namespace millrace::server {

struct Asset {
  std::string_view path;  // under /, e.g. /index.html
  std::string_view content_type;
  std::string_view etag;  // quoted, from the content
  const unsigned char* data;
  size_t size;
};
extern const Asset kAssets[];
extern const size_t kNumAssets;

// Null when there is no such file. "/" is /index.html.
const Asset* find_asset(std::string_view path);
HttpResponse asset_response(const Asset& asset, const HttpRequest& request);

}  // namespace millrace::server
