// A page of a list of items, as OpenAI's lists are read: limit, order, after.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "http.h"

namespace millrace::server {

struct ListedItem {
  std::string_view id, json;
};

// {"object": "list", "data", "first_id", "last_id", "has_more"} of what the query asks for. Items come oldest
// first and are listed newest first unless `order` is asc. Throws ApiError{400}.
std::string item_page(std::vector<ListedItem> items, const HttpRequest& request);
// The same of all of them, as they come.
std::string item_list(const std::vector<ListedItem>& items, bool has_more = false);

}  // namespace millrace::server
