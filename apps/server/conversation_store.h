// ConversationStore: what /v1/conversations keeps: items in order, so that a response can go on from all that
// was said. Bounded in number and bytes: those that were not touched for longest are forgotten.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace millrace::server {

struct StoredConversation {
  struct Item {
    std::string id = {}, json = {};
  };
  std::string id = {};
  std::string owner = {};     // the key that made it; another key does not see it
  int64_t created = 0;        // Unix time
  std::string metadata = {};  // a JSON object
  std::vector<Item> items = {};

  size_t bytes() const;
};

class ConversationStore {
 public:
  ConversationStore(size_t max_conversations, size_t max_bytes)
      : max_conversations_(max_conversations), max_bytes_(max_bytes) {}

  void put(StoredConversation conversation);
  std::optional<StoredConversation> find(const std::string& id, const std::string& owner) const;
  // Changes one in place; false when there is none. What `change` throws is thrown on, and nothing is kept of
  // it.
  bool change(const std::string& id, const std::string& owner,
              const std::function<void(StoredConversation&)>& change);
  bool erase(const std::string& id, const std::string& owner);
  size_t size() const;
  // No conversation may be larger: all others would be forgotten for it.
  size_t most_bytes() const { return max_bytes_ / 4; }

 private:
  struct Entry {
    StoredConversation conversation;
    size_t bytes = 0;
  };
  using Place = std::list<Entry>::iterator;
  std::optional<Place> place(const std::string& id, const std::string& owner) const;
  void erase_at(Place at);
  void make_room();

  const size_t max_conversations_, max_bytes_;
  mutable std::mutex mutex_;
  std::list<Entry> entries_;  // longest untouched first
  std::unordered_map<std::string, Place> by_id_;
  size_t bytes_ = 0;
};

}  // namespace millrace::server
