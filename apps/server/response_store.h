// ResponseStore: finished and running answers of the responses API, so that clients can ask for them again,
// go on from them and cancel them. Bounded in number and bytes: the oldest are forgotten.
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "chat/format.h"
#include "json_fields.h"
#include "response_log.h"

namespace millrace::server {

struct StoredResponse {
  std::string id = {};
  std::string owner = {};  // the key that made it; another key does not see it
  std::string body = {};   // the response object as JSON
  Json input_items = Json::array();
  std::vector<chat::Message> messages = {};  // up to and with this answer, instructions left out
  std::function<void()> cancel = {};         // while it runs
  std::shared_ptr<ResponseLog> events = {};  // as they were sent; null: nobody asked for any
};

class ResponseStore {
 public:
  ResponseStore(size_t max_responses, size_t max_bytes)
      : max_responses_(max_responses), max_bytes_(max_bytes) {}

  void put(StoredResponse response);  // replaces one with the same id
  std::optional<StoredResponse> find(const std::string& id, const std::string& owner) const;
  bool erase(const std::string& id, const std::string& owner);
  bool contains(const std::string& id) const;
  size_t size() const;

 private:
  struct Item {
    std::shared_ptr<const StoredResponse> response;
    size_t bytes = 0;  // when it was put in
  };
  static size_t bytes_of(const StoredResponse& response);
  void erase_locked(const std::string& id);

  const size_t max_responses_, max_bytes_;
  mutable std::mutex mutex_;
  std::list<Item> items_;  // oldest first
  std::unordered_map<std::string, std::list<Item>::iterator> by_id_;
  size_t bytes_ = 0;
};

}  // namespace millrace::server
