#include "item_page.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>

#include "api_error.h"
#include "base/json_writer.h"

namespace millrace::server {
namespace {

size_t page_limit(const HttpRequest& request) {
  constexpr size_t kDefault = 20, kMost = 100;
  const std::string text = request.query_value("limit");
  if (text.empty()) return kDefault;
  size_t limit = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), limit);
  if (error != std::errc() || end != text.data() + text.size() || limit < 1 || limit > kMost) {
    throw ApiError(400, fmt::format("'limit': found \"{}\", expected 1 to {}", text.substr(0, 60), kMost),
                   "limit", "invalid_value");
  }
  return limit;
}

}  // namespace

std::string item_list(const std::vector<ListedItem>& items, bool has_more) {
  std::string out;
  JsonWriter json(out);
  json.begin_object().field("object", "list").key("data").begin_array();
  for (const ListedItem& item : items) json.raw(item.json);
  json.end_array();
  json.text_or_null("first_id", items.empty() ? "" : items.front().id);
  json.text_or_null("last_id", items.empty() ? "" : items.back().id);
  json.field("has_more", has_more).end_object();
  return out;
}

std::string item_page(std::vector<ListedItem> items, const HttpRequest& request) {
  const size_t limit = page_limit(request);
  const std::string order = request.query_value("order"), after = request.query_value("after");
  if (!order.empty() && order != "asc" && order != "desc") {
    throw ApiError(400, fmt::format("'order': found \"{}\", expected asc or desc", order.substr(0, 60)),
                   "order", "invalid_value");
  }
  if (order != "asc") std::reverse(items.begin(), items.end());
  if (!after.empty()) {
    const auto at =
        std::find_if(items.begin(), items.end(), [&](const auto& item) { return item.id == after; });
    if (at == items.end()) {
      throw ApiError(400, fmt::format("'after': there is no item '{}'", after.substr(0, 100)), "after",
                     "invalid_value");
    }
    items.erase(items.begin(), at + 1);
  }
  const bool has_more = items.size() > limit;
  items.resize(std::min(items.size(), limit));
  return item_list(items, has_more);
}

}  // namespace millrace::server
