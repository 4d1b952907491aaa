#include "response_store.h"

namespace millrace::server {

size_t ResponseStore::bytes_of(const StoredResponse& response) {
  size_t bytes =
      sizeof(response) + 2 * response.body.size();  // the input is of the body's order, and counted below
  if (response.events) bytes += response.events->bytes();
  for (const chat::Message& m : response.messages) {
    bytes += sizeof(m) + m.content.size() + m.reasoning.size();
    for (const chat::ToolCall& call : m.tool_calls) bytes += sizeof(call) + call.arguments.size();
  }
  return bytes;
}

void ResponseStore::erase_locked(const std::string& id) {
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) return;
  bytes_ -= found->second->bytes;
  items_.erase(found->second);
  by_id_.erase(found);
}

void ResponseStore::put(StoredResponse response) {
  const size_t bytes = bytes_of(response);
  auto item = std::make_shared<const StoredResponse>(std::move(response));
  const std::lock_guard lock(mutex_);
  erase_locked(item->id);
  bytes_ += bytes;
  items_.push_back({.response = item, .bytes = bytes});
  by_id_[item->id] = std::prev(items_.end());
  while (items_.size() > max_responses_ || (bytes_ > max_bytes_ && items_.size() > 1)) {
    erase_locked(std::string(items_.front().response->id));
  }
}

std::optional<StoredResponse> ResponseStore::find(const std::string& id, const std::string& owner) const {
  const std::lock_guard lock(mutex_);
  const auto found = by_id_.find(id);
  if (found == by_id_.end() || found->second->response->owner != owner) return std::nullopt;
  return *found->second->response;
}

bool ResponseStore::contains(const std::string& id) const {
  const std::lock_guard lock(mutex_);
  return by_id_.contains(id);
}

bool ResponseStore::erase(const std::string& id, const std::string& owner) {
  const std::lock_guard lock(mutex_);
  const auto found = by_id_.find(id);
  if (found == by_id_.end() || found->second->response->owner != owner) return false;
  erase_locked(id);
  return true;
}

size_t ResponseStore::size() const {
  const std::lock_guard lock(mutex_);
  return items_.size();
}

}  // namespace millrace::server
