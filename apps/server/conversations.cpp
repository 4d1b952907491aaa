// /v1/conversations: create, retrieve, update and delete, and the items in them.
#include "conversations.h"

#include <fmt/core.h>

#include <algorithm>

#include "api_error.h"
#include "base/json_writer.h"
#include "endpoints.h"
#include "ids.h"
#include "item_page.h"
#include "logprobs.h"
#include "response_input.h"

namespace millrace::server {
namespace {

constexpr size_t kMaxItems = 20;  // in one request, as OpenAI has it

[[noreturn]] void no_conversation(const std::string& id) {
  throw ApiError(404, fmt::format("the conversation '{}' is not stored here", id.substr(0, 100)),
                 "conversation_id", "conversation_not_found");
}

[[noreturn]] void no_item(const std::string& item_id) {
  throw ApiError(404, fmt::format("there is no item '{}' in this conversation", item_id.substr(0, 100)),
                 "item_id", "item_not_found");
}

void check_size(const StoredConversation& conversation, Api& api) {
  const size_t most = api.conversations().most_bytes();
  if (conversation.bytes() <= most) return;
  throw ApiError(400, fmt::format("the conversation would have more than {} bytes: begin another", most),
                 "items", "conversation_too_large");
}

StoredConversation conversation_of(Api& api, const std::string& id, const Client& client) {
  std::optional<StoredConversation> found = api.conversations().find(id, client.key_name);
  if (!found) no_conversation(id);
  return *std::move(found);
}

// OpenAI's limits: 16 pairs, names of 64 characters, values of 512.
std::string read_metadata(const Fields& fields) {
  const std::optional<Fields> metadata = fields.object("metadata");
  if (!metadata) return "{}";
  if (metadata->json().size() > 16) {
    bad_field("metadata", "expected at most 16 pairs", "object_above_max_properties");
  }
  for (const auto& [key, value] : metadata->json().items()) {
    const std::string path = metadata->path_of(key.substr(0, 64));
    if (!value.is_string()) wrong_type(path, value, "a string");
    if (count_characters(key) > 64) {
      bad_field(path, "expected a name of at most 64 characters", "string_above_max_length");
    }
    if (count_characters(value.get_ref<const std::string&>()) > 512) {
      bad_field(path, "expected at most 512 characters", "string_above_max_length");
    }
  }
  return metadata->json().dump();
}

std::vector<StoredConversation::Item> read_new_items(const Fields& fields) {
  const Json* items = fields.array("items");
  if (items == nullptr) return {};
  if (items->size() > kMaxItems) {
    bad_field("items", fmt::format("found {} items, expected at most {}", items->size(), kMaxItems),
              "array_above_max_length");
  }
  std::vector<chat::Message> checked;
  return stored_items(read_items(*items, "items", checked));
}

Reply conversation_reply(const StoredConversation& conversation) {
  std::string out;
  JsonWriter(out)
      .begin_object()
      .field("id", conversation.id)
      .field("object", "conversation")
      .field("created_at", conversation.created)
      .key("metadata")
      .raw(conversation.metadata)
      .end_object();
  return {.response = {.body = std::move(out)}};
}

std::vector<ListedItem> listed(const std::vector<StoredConversation::Item>& items) {
  std::vector<ListedItem> list;
  for (const StoredConversation::Item& item : items) list.push_back({.id = item.id, .json = item.json});
  return list;
}

Reply add_items(Api& api, const std::string& id, const HttpRequest& request, const Client& client) {
  const Json body = parse_object(request.body);
  const Fields fields(body);
  if (!fields.has("items")) {
    bad_field("items", "is missing, expected an array", "missing_required_parameter");
  }
  const std::vector<StoredConversation::Item> items = read_new_items(fields);
  if (!append_items(api, id, client.key_name, items)) no_conversation(id);
  return {.response = {.body = item_list(listed(items))}};
}

Reply get_item(Api& api, const std::string& id, const std::string& item_id, const Client& client) {
  StoredConversation found = conversation_of(api, id, client);
  for (StoredConversation::Item& item : found.items) {
    if (item.id == item_id) return {.response = {.body = std::move(item.json)}};
  }
  no_item(item_id);
}

Reply delete_item(Api& api, const std::string& id, const std::string& item_id, const Client& client) {
  StoredConversation left;
  const bool found = api.conversations().change(id, client.key_name, [&](StoredConversation& conversation) {
    const auto same = [&](const StoredConversation::Item& item) { return item.id == item_id; };
    if (std::erase_if(conversation.items, same) == 0) no_item(item_id);
    left = conversation;
  });
  if (!found) no_conversation(id);
  return conversation_reply(left);
}

Reply update_conversation(Api& api, const std::string& id, const HttpRequest& request, const Client& client) {
  const Json body = parse_object(request.body);
  const Fields fields(body);
  if (!fields.has("metadata")) {
    bad_field("metadata", "is missing, expected an object", "missing_required_parameter");
  }
  const std::string metadata = read_metadata(fields);
  StoredConversation now;
  const bool found = api.conversations().change(id, client.key_name, [&](StoredConversation& conversation) {
    conversation.metadata = metadata;
    now = conversation;
  });
  if (!found) no_conversation(id);
  return conversation_reply(now);
}

Reply delete_conversation(Api& api, const std::string& id, const Client& client) {
  if (!api.conversations().erase(id, client.key_name)) no_conversation(id);
  std::string out;
  JsonWriter(out)
      .begin_object()
      .field("id", id)
      .field("object", "conversation.deleted")
      .field("deleted", true)
      .end_object();
  return {.response = {.body = std::move(out)}};
}

}  // namespace

Reply create_conversation(Api& api, const HttpRequest& request, const Client& client) {
  const Json body = request.body.empty() ? Json::object() : parse_object(request.body);
  const Fields fields(body);
  StoredConversation fresh;
  fresh.id = new_id("conv_", 48);
  fresh.owner = client.key_name;
  fresh.created = static_cast<int64_t>(unix_time());
  fresh.metadata = read_metadata(fields);
  fresh.items = read_new_items(fields);
  check_size(fresh, api);
  Reply reply = conversation_reply(fresh);
  api.conversations().put(std::move(fresh));
  return reply;
}

// ID, ID/items, ID/items/ITEM
Reply conversation_path(Api& api, const std::string& method, const std::string& rest,
                        const HttpRequest& request, const Client& client) {
  constexpr std::string_view kItems = "/items";
  const std::string id = rest.substr(0, rest.find('/'));
  const std::string tail = rest.substr(id.size());
  if (tail.empty()) {
    if (method == "GET") return conversation_reply(conversation_of(api, id, client));
    if (method == "POST") return update_conversation(api, id, request, client);
    if (method == "DELETE") return delete_conversation(api, id, client);
    return wrong_method("GET, POST, DELETE");
  }
  if (tail == kItems) {
    if (method == "GET") {
      const StoredConversation found = conversation_of(api, id, client);
      return {.response = {.body = item_page(listed(found.items), request)}};
    }
    return method == "POST" ? add_items(api, id, request, client) : wrong_method("GET, POST");
  }
  const std::string item = tail.starts_with("/items/") ? tail.substr(kItems.size() + 1) : std::string();
  if (item.empty() || item.find('/') != std::string::npos) {
    throw ApiError(404, fmt::format("there is nothing at {}", request.path.substr(0, 200)), "", "not_found");
  }
  if (method == "GET") return get_item(api, id, item, client);
  return method == "DELETE" ? delete_item(api, id, item, client) : wrong_method("GET, DELETE");
}

std::vector<StoredConversation::Item> stored_items(const Json& items) {
  std::vector<StoredConversation::Item> out;
  for (const Json& item : items) {
    out.push_back({.id = item["id"].get<std::string>(),
                   .json = item.dump(-1, ' ', false, Json::error_handler_t::replace)});
  }
  return out;
}

bool append_items(Api& api, const std::string& id, const std::string& owner,
                  const std::vector<StoredConversation::Item>& items) {
  return api.conversations().change(id, owner, [&](StoredConversation& conversation) {
    conversation.items.insert(conversation.items.end(), items.begin(), items.end());
    check_size(conversation, api);
  });
}

}  // namespace millrace::server
