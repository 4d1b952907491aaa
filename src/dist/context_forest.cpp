#include "dist/context_forest.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/check.h"
#include "base/error.h"

namespace millrace::dist {

Partial PartialMath::make(PartialKind kind, int64_t rows) const {
  const auto floats = [&](int heads, int dim) { return static_cast<size_t>(rows * heads * dim); };
  Partial partial;
  if (kind == PartialKind::kOutput) {
    partial.out.resize(floats(heads_, value_dim_));
    partial.lse.assign(floats(heads_, 1), -std::numeric_limits<float>::infinity());
  } else if (kind == PartialKind::kQueryGradient) {
    partial.out.resize(floats(heads_, head_dim_));
  } else {
    partial.out.resize(floats(kv_heads_, head_dim_));
    partial.second.resize(floats(kv_heads_, value_dim_));
  }
  return partial;
}

size_t PartialMath::bytes(PartialKind kind, int64_t rows) const {
  const int64_t of_row = kind == PartialKind::kOutput ? int64_t{heads_} * (value_dim_ + 1)
                         : kind == PartialKind::kQueryGradient
                             ? int64_t{heads_} * head_dim_
                             : int64_t{kv_heads_} * (head_dim_ + value_dim_);
  return static_cast<size_t>(rows * of_row) * sizeof(float);
}

void PartialMath::check(mr_status status) {
  if (status == MR_OK) return;
  const ErrorCode code = status == MR_ERROR_UNSUPPORTED ? ErrorCode::kUnsupported
                         : status == MR_ERROR_NO_MEMORY ? ErrorCode::kNoMemory
                         : status == MR_ERROR_INVALID   ? ErrorCode::kBadInput
                                                        : ErrorCode::kDevice;
  throw_error(code, "{}", mr_last_error());
}

void PartialMath::merge(PartialKind kind, int64_t rows, Partial& lower, const Partial& upper) const {
  mr_flash_merge_args args{rows, heads_, value_dim_, lower.out.data(), nullptr, upper.out.data(), nullptr};
  if (kind == PartialKind::kOutput) {
    args.lse = lower.lse.data();
    args.other_lse = upper.lse.data();
  } else {
    args.heads = kind == PartialKind::kQueryGradient ? heads_ : kv_heads_;
    args.dim = head_dim_;
  }
  check(mr_flash_merge(device_, &args, nullptr));
  if (kind != PartialKind::kKeyGradient) return;
  args.dim = value_dim_;
  args.out = lower.second.data();
  args.other_out = upper.second.data();
  check(mr_flash_merge(device_, &args, nullptr));
}

void PartialMath::pack(const Partial& partial, std::vector<std::byte>& to) const {
  for (const std::vector<float>* part : {&partial.out, &partial.lse, &partial.second}) {
    const auto* first = reinterpret_cast<const std::byte*>(part->data());
    to.insert(to.end(), first, first + part->size() * sizeof(float));
  }
}

Partial PartialMath::unpack(PartialKind kind, int64_t rows, const std::byte*& from) const {
  Partial partial = make(kind, rows);
  for (std::vector<float>* part : {&partial.out, &partial.lse, &partial.second}) {
    const size_t bytes = part->size() * sizeof(float);
    if (bytes > 0) std::memcpy(part->data(), from, bytes);
    from += bytes;
  }
  return partial;
}

void* PartialMath::workspace(const mr_flash_problem& problem, size_t& bytes) {
  constexpr size_t kAlignment = 256;
  check(mr_flash_forward_workspace_bytes(device_, &problem, &bytes));
  if (workspace_.size() < bytes + kAlignment) workspace_.resize(bytes + kAlignment);
  const auto at = reinterpret_cast<uintptr_t>(workspace_.data());
  return workspace_.data() + (kAlignment - at % kAlignment) % kAlignment;
}

void Forest::add(const PartialMath& math, ChunkNode node, Partial partial) {
  const ChunkNode root = root_of(all_);
  while (node.level < root.level) {
    const ChunkNode sibling{node.level, node.index ^ 1};
    if (!intersection(sibling.span(), all_).empty()) {
      const auto found = nodes_.find(sibling);
      if (found == nodes_.end()) break;
      Partial other = std::move(found->second);
      nodes_.erase(found);
      if (sibling.index < node.index) std::swap(partial, other);
      math.merge(kind_, run_.rows(), partial, other);
    }
    node = {node.level + 1, node.index / 2};
  }
  const bool fresh = nodes_.emplace(node, std::move(partial)).second;
  MILLRACE_CHECK(fresh);
}

const Partial& Forest::node(ChunkNode node) const {
  const auto found = nodes_.find(node);
  MILLRACE_CHECK(found != nodes_.end());
  return found->second;
}

Partial Forest::fold(const PartialMath& math) const {
  std::vector<const std::pair<const ChunkNode, Partial>*> in_order;
  for (const auto& entry : nodes_) in_order.push_back(&entry);
  std::sort(in_order.begin(), in_order.end(),
            [](const auto* a, const auto* b) { return a->first.span().first < b->first.span().first; });
  if (in_order.empty()) return math.make(kind_, run_.rows());
  Partial total = in_order.front()->second;
  for (size_t i = 1; i < in_order.size(); ++i) math.merge(kind_, run_.rows(), total, in_order[i]->second);
  return total;
}

}  // namespace millrace::dist
