// CUDA graphs behind RAII, and the few that an executor keeps: one per kind of step it has seen.
#pragma once

#include <algorithm>
#include <cstdint>
#include <list>
#include <tuple>
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
  bool has(const std::vector<uint64_t>& signature) const {
    return std::any_of(graphs_.begin(), graphs_.end(), [&](const auto& g) { return g.first == signature; });
  }
  // The graph of this signature, captured now when there is none.
  template <class Record>
  const Graph& get(std::vector<uint64_t> signature, const Stream& stream, Record&& record) {
    for (auto it = graphs_.begin(); it != graphs_.end(); ++it) {
      if (it->first != signature) continue;
      graphs_.splice(graphs_.begin(), graphs_, it);
      return graphs_.front().second;
    }
    if (graphs_.size() >= most_) {
      stream.synchronize();  // it may still run
      graphs_.pop_back();
    }
    graphs_.emplace_front(std::piecewise_construct, std::forward_as_tuple(std::move(signature)),
                          std::forward_as_tuple(stream, std::forward<Record>(record)));
    return graphs_.front().second;
  }
  // Steps in so many pieces have a graph for each.
  void allow_pieces(size_t pieces) { most_ = kMaxGraphs * std::max<size_t>(1, pieces / 2); }
  void clear() { graphs_.clear(); }  // when a buffer that graphs point to has moved; the stream must be idle

 private:
  static constexpr size_t kMaxGraphs = 64;  // some megabytes each
  size_t most_ = kMaxGraphs;
  std::list<std::pair<std::vector<uint64_t>, Graph>> graphs_;
};

}  // namespace millrace::cuda
