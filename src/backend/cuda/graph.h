// CUDA graphs behind RAII, and the few that an executor keeps: one per kind of step it has seen.
#pragma once

#include <algorithm>
#include <cstdint>
#include <list>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/cuda/device.h"

namespace millrace::cuda {

class Graph {
 public:
  // Captures what `record` launches on the stream; nothing runs.
  template <class Record>
  Graph(const Stream& stream, Record&& record) {
    begin_capture(stream);
    try {
      record();
    } catch (...) {
      abandon_capture(stream);
      throw;
    }
    end_capture(stream);
  }
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(const Stream& stream) const;

 private:
  static void begin_capture(const Stream& stream);
  static void abandon_capture(const Stream& stream) noexcept;
  void end_capture(const Stream& stream);

  cudaGraphExec_t executable_ = nullptr;
};

// The most recently used graphs by signature.
class GraphCache {
 public:
  bool has(const std::vector<uint64_t>& signature) const { return by_signature_.contains(signature); }
  // The graph of this signature, captured now when there is none.
  template <class Record>
  const Graph& get(const std::vector<uint64_t>& signature, const Stream& stream, Record&& record) {
    if (const auto found = by_signature_.find(signature); found != by_signature_.end()) {
      graphs_.splice(graphs_.begin(), graphs_, found->second);
      return graphs_.front().second;
    }
    if (graphs_.size() >= most_) {
      stream.synchronize();  // it may still run
      by_signature_.erase(graphs_.back().first);
      graphs_.pop_back();
    }
    graphs_.emplace_front(std::piecewise_construct, std::forward_as_tuple(signature),
                          std::forward_as_tuple(stream, std::forward<Record>(record)));
    by_signature_.emplace(signature, graphs_.begin());
    return graphs_.front().second;
  }
  // Steps in so many pieces have a graph for each.
  void allow_pieces(size_t pieces) { most_ = kMaxGraphs * std::max<size_t>(1, pieces / 2); }
  // When a buffer that graphs point to has moved; the stream must be idle.
  void clear() {
    by_signature_.clear();
    graphs_.clear();
  }

 private:
  struct Hash {
    size_t operator()(const std::vector<uint64_t>& words) const {
      uint64_t hash = words.size();
      for (const uint64_t word : words) hash = (hash ^ word) * 0x9e3779b97f4a7c15u + (hash >> 29);
      return hash;
    }
  };
  using Entries = std::list<std::pair<std::vector<uint64_t>, Graph>>;
  static constexpr size_t kMaxGraphs = 64;  // of whole steps: some megabytes each
  size_t most_ = kMaxGraphs;
  Entries graphs_;  // the last used first
  std::unordered_map<std::vector<uint64_t>, Entries::iterator, Hash> by_signature_;
};

}  // namespace millrace::cuda
