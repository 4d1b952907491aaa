// What others need of the conversations that are kept: to add to one.
#pragma once

#include <string>
#include <vector>

#include "api.h"
#include "conversation_store.h"
#include "json_fields.h"

namespace millrace::server {

// False when there is no such conversation. Throws ApiError{400} when it would become too large.
bool append_items(Api& api, const std::string& id, const std::string& owner,
                  const std::vector<StoredConversation::Item>& items);
// An array of items with ids, as they are kept.
std::vector<StoredConversation::Item> stored_items(const Json& items);

}  // namespace millrace::server
