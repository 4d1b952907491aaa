// ReplicaRouter: which of a model's replicas a request goes to: the one that was given most of its prompt
// before, as long as it is not much busier than another. What a replica's cache really holds only its own
// thread knows; the router remembers what it sent where, as many blocks as the cache has.
#pragma once

#include <cstdint>
#include <list>
#include <span>
#include <unordered_map>
#include <vector>

#include "kv/hash.h"

namespace millrace {

class ReplicaRouter {
 public:
  // `blocks`: that each replica remembers. `slots`: requests that one computes at the same time.
  ReplicaRouter(int replicas, size_t blocks, int32_t slots);

  // loads[r]: requests that replica r has now. away[r]: its ranks are lost, and it gets nothing while
  // another's are there; empty: all are there. One thread at a time.
  int choose(std::span<const kv::BlockKey> keys, std::span<const int64_t> loads,
             const std::vector<bool>& away = {});

 private:
  struct KeyHash {
    size_t operator()(const kv::BlockKey& key) const { return key.low(); }
  };
  struct Memory {  // the keys that a replica was sent, most recent first
    std::list<kv::BlockKey> order;
    std::unordered_map<kv::BlockKey, std::list<kv::BlockKey>::iterator, KeyHash> places;
  };

  void remember(Memory& memory, std::span<const kv::BlockKey> keys) const;

  const size_t blocks_;
  const int64_t slots_;
  std::vector<Memory> memories_;
};

}  // namespace millrace
