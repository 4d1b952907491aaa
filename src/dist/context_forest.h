// Partial results of one run of tokens while their chunks arrive in any order: nodes of the tree of chunks,
// merged as soon as both halves are there (millrace/kernels/flash_partial.h). However many ranks and
// arrivals, a run holds a few nodes, and the root has the bits of one device.
#pragma once

#include <map>
#include <vector>

#include "dist/context_plan.h"
#include "millrace/kernels/flash_partial.h"

namespace millrace::dist {

enum class PartialKind { kOutput, kQueryGradient, kKeyGradient };

// kOutput: out [rows][heads][value_dim], lse [heads][rows]. kQueryGradient: out [rows][heads][head_dim].
// kKeyGradient: out [rows][kv_heads][head_dim], second [rows][kv_heads][value_dim].
struct Partial {
  std::vector<float> out, lse, second;
};

// The kernels' calls, checked; and memory for them.
class PartialMath {
 public:
  PartialMath(mr_device* device, int heads, int kv_heads, int head_dim, int value_dim)
      : device_(device), heads_(heads), kv_heads_(kv_heads), head_dim_(head_dim), value_dim_(value_dim) {}

  mr_device* device() const { return device_; }
  Partial make(PartialKind kind, int64_t rows) const;  // zeros; log-sum-exps of rows that have seen nothing
  size_t bytes(PartialKind kind, int64_t rows) const;
  void merge(PartialKind kind, int64_t rows, Partial& lower, const Partial& upper) const;
  void pack(const Partial& partial, std::vector<std::byte>& to) const;  // appends
  Partial unpack(PartialKind kind, int64_t rows, const std::byte*& from) const;
  // Throws Error with the library's line.
  static void check(mr_status status);
  void* workspace(const mr_flash_problem& problem, size_t& bytes);

 private:
  mr_device* device_;
  int heads_, kv_heads_, head_dim_, value_dim_;
  std::vector<std::byte> workspace_;
};

class Forest {
 public:
  Forest(const TokenRun& run, const ChunkRange& all, PartialKind kind) : run_(run), all_(all), kind_(kind) {}

  const TokenRun& run() const { return run_; }
  const ChunkRange& all() const { return all_; }
  PartialKind kind() const { return kind_; }
  void add(const PartialMath& math, ChunkNode node, Partial partial);
  const Partial& node(ChunkNode node) const;
  // All nodes merged in order, whether neighbours or not; an empty partial where there are none.
  Partial fold(const PartialMath& math) const;
  const Partial& root() const { return node(root_of(all_)); }
  size_t nodes() const { return nodes_.size(); }

 private:
  TokenRun run_;
  ChunkRange all_;
  PartialKind kind_;
  std::map<ChunkNode, Partial> nodes_;
};

}  // namespace millrace::dist
