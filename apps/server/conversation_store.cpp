#include "conversation_store.h"

namespace millrace::server {

size_t StoredConversation::bytes() const {
  size_t sum = sizeof(*this) + id.size() + owner.size() + metadata.size();
  for (const Item& item : items) sum += sizeof(item) + item.id.size() + item.json.size();
  return sum;
}

std::optional<ConversationStore::Place> ConversationStore::place(const std::string& id,
                                                                 const std::string& owner) const {
  const auto found = by_id_.find(id);
  if (found == by_id_.end() || found->second->conversation.owner != owner) return std::nullopt;
  return found->second;
}

void ConversationStore::erase_at(Place at) {
  bytes_ -= at->bytes;
  by_id_.erase(at->conversation.id);
  entries_.erase(at);
}

void ConversationStore::make_room() {
  while (entries_.size() > max_conversations_ || (bytes_ > max_bytes_ && entries_.size() > 1)) {
    erase_at(entries_.begin());
  }
}

void ConversationStore::put(StoredConversation conversation) {
  const std::lock_guard lock(mutex_);
  const size_t bytes = conversation.bytes();
  entries_.push_back({.conversation = std::move(conversation), .bytes = bytes});
  by_id_[entries_.back().conversation.id] = std::prev(entries_.end());
  bytes_ += bytes;
  make_room();
}

std::optional<StoredConversation> ConversationStore::find(const std::string& id,
                                                          const std::string& owner) const {
  const std::lock_guard lock(mutex_);
  const std::optional<Place> at = place(id, owner);
  return at ? std::optional((*at)->conversation) : std::nullopt;
}

bool ConversationStore::change(const std::string& id, const std::string& owner,
                               const std::function<void(StoredConversation&)>& change) {
  const std::lock_guard lock(mutex_);
  const std::optional<Place> at = place(id, owner);
  if (!at) return false;
  StoredConversation changed = (*at)->conversation;
  change(changed);
  Entry& entry = **at;
  bytes_ -= entry.bytes;
  entry.bytes = changed.bytes();
  entry.conversation = std::move(changed);
  bytes_ += entry.bytes;
  entries_.splice(entries_.end(), entries_, *at);
  make_room();
  return true;
}

bool ConversationStore::erase(const std::string& id, const std::string& owner) {
  const std::lock_guard lock(mutex_);
  const std::optional<Place> at = place(id, owner);
  if (!at) return false;
  erase_at(*at);
  return true;
}

size_t ConversationStore::size() const {
  const std::lock_guard lock(mutex_);
  return entries_.size();
}

}  // namespace millrace::server
