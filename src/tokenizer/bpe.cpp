// Flat tables with linear probing, and the two ways of merging: a scan of the ranks for words, a heap over a
// linked list for text without boundaries.
#include "tokenizer/bpe.h"

#include <algorithm>
#include <bit>
#include <functional>

#include "base/work_budget.h"

namespace millrace {

void TokenTable::reserve(size_t num_tokens, size_t num_bytes) {
  entries_.reserve(num_tokens);
  arena_.reserve(num_bytes);
  const size_t wanted = std::bit_ceil(num_tokens * 2 + 2);
  if (wanted > slots_.size() && used_ == 0) {
    slots_.assign(wanted, {0, kEmpty});
    mask_ = wanted - 1;
  }
}

bool TokenTable::add(uint32_t id, std::string_view bytes, bool searchable) {
  const uint64_t hash = hash_bytes(bytes);
  if (searchable && find(bytes, hash)) return false;
  if (id >= entries_.size()) entries_.resize(static_cast<size_t>(id) + 1);
  entries_[id] = {arena_.size(), static_cast<uint32_t>(bytes.size())};
  arena_.append(bytes);
  if (!searchable) return true;
  if ((used_ + 1) * 2 > slots_.size()) grow();
  size_t i = hash & mask_;
  while (slots_[i].id != kEmpty) i = (i + 1) & mask_;
  slots_[i] = {static_cast<uint32_t>(hash >> 32), id};
  ++used_;
  return true;
}

void TokenTable::grow() {
  const std::vector<Slot> old = std::move(slots_);
  const size_t size = std::max<size_t>(16, old.size() * 2);
  slots_.assign(size, {0, kEmpty});
  mask_ = size - 1;
  for (const Slot& slot : old) {
    if (slot.id == kEmpty) continue;
    size_t i = hash_bytes(bytes(slot.id)) & mask_;
    while (slots_[i].id != kEmpty) i = (i + 1) & mask_;
    slots_[i] = slot;
  }
}

void MergeTable::reserve(size_t num_merges) { grow(std::bit_ceil(num_merges * 2 + 2)); }

void MergeTable::add(uint32_t left, uint32_t right, uint32_t rank, uint32_t symbol) {
  if ((used_ + 1) * 2 > slots_.size()) grow(std::max<size_t>(16, slots_.size() * 2));
  const uint64_t pair = static_cast<uint64_t>(left) << 32 | right;
  size_t i = slot_of(pair);
  while (slots_[i].pair != pair && slots_[i].pair != kEmptyPair) i = (i + 1) & mask_;
  if (slots_[i].pair == kEmptyPair) ++used_;
  slots_[i] = {pair, rank, symbol};
}

void MergeTable::grow(size_t num_slots) {
  if (num_slots <= slots_.size()) return;
  const std::vector<Merge> old = std::move(slots_);
  slots_.assign(num_slots, {kEmptyPair, kNone, 0});
  mask_ = num_slots - 1;
  for (const Merge& merge : old) {
    if (merge.pair == kEmptyPair) continue;
    size_t i = slot_of(merge.pair);
    while (slots_[i].pair != kEmptyPair) i = (i + 1) & mask_;
    slots_[i] = merge;
  }
}

namespace {

// Up to here a scan over the ranks, which sit in one or two cache lines, beats the heap.
constexpr size_t kLongWord = 48;
constexpr uint32_t kEnd = UINT32_MAX;

void merge_short(const MergeTable& merges, MergeScratch& s) {
  std::vector<uint32_t>& symbols = s.symbols;
  size_t n = symbols.size();
  uint32_t ranks[kLongWord];
  uint32_t merged[kLongWord];
  const auto look_up = [&](size_t i) {
    const MergeTable::Merge m = merges.find(symbols[i], symbols[i + 1]);
    ranks[i] = m.rank;
    merged[i] = m.symbol;
  };
  for (size_t i = 0; i + 1 < n; ++i) look_up(i);
  while (n > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < n; ++i)
      if (ranks[i] < ranks[best]) best = i;
    if (ranks[best] == MergeTable::kNone) break;
    symbols[best] = merged[best];
    for (size_t i = best + 1; i + 1 < n; ++i) {
      symbols[i] = symbols[i + 1];
      ranks[i] = ranks[i + 1];
      merged[i] = merged[i + 1];
    }
    --n;
    if (best + 1 < n) look_up(best);
    if (best > 0) look_up(best - 1);
  }
  symbols.resize(n);
}

// The heap holds rank << 32 | position. An entry is stale when the pair at its position has another rank now
// or none; positions never move, because a merge keeps its left symbol's.
void merge_long(const MergeTable& merges, MergeScratch& s) {
  const uint32_t n = static_cast<uint32_t>(s.symbols.size());
  s.ranks.assign(n, MergeTable::kNone);
  s.merged.resize(n);
  s.previous.resize(n);
  s.next.resize(n);
  s.heap.clear();
  const auto look_up = [&](uint32_t i) {
    const MergeTable::Merge m = merges.find(s.symbols[i], s.symbols[s.next[i]]);
    s.ranks[i] = m.rank;
    s.merged[i] = m.symbol;
    return m.rank != MergeTable::kNone;
  };
  const auto entry = [&](uint32_t i) { return static_cast<uint64_t>(s.ranks[i]) << 32 | i; };
  for (uint32_t i = 0; i < n; ++i) {
    spend_work(1);
    s.previous[i] = i == 0 ? kEnd : i - 1;
    s.next[i] = i + 1 == n ? kEnd : i + 1;
    if (s.next[i] != kEnd && look_up(i)) s.heap.push_back(entry(i));
  }
  std::make_heap(s.heap.begin(), s.heap.end(), std::greater<>());
  const auto push = [&](uint32_t i) {
    if (!look_up(i)) return;
    s.heap.push_back(entry(i));
    std::push_heap(s.heap.begin(), s.heap.end(), std::greater<>());
  };
  while (!s.heap.empty()) {
    spend_work(10);
    const uint64_t top = s.heap.front();
    std::pop_heap(s.heap.begin(), s.heap.end(), std::greater<>());
    s.heap.pop_back();
    const uint32_t i = static_cast<uint32_t>(top);
    if (s.ranks[i] != top >> 32) continue;
    const uint32_t gone = s.next[i];
    s.symbols[i] = s.merged[i];
    s.ranks[gone] = MergeTable::kNone;
    s.ranks[i] = MergeTable::kNone;
    s.next[i] = s.next[gone];
    if (s.next[i] != kEnd) {
      s.previous[s.next[i]] = i;
      push(i);
    }
    if (s.previous[i] != kEnd) push(s.previous[i]);
  }
  uint32_t kept = 0;
  for (uint32_t i = 0; i != kEnd; i = s.next[i]) s.symbols[kept++] = s.symbols[i];
  s.symbols.resize(kept);
}

}  // namespace

void merge_symbols(const MergeTable& merges, MergeScratch& scratch) {
  if (scratch.symbols.size() < 2) return;
  if (scratch.symbols.size() <= kLongWord)
    merge_short(merges, scratch);
  else
    merge_long(merges, scratch);
}

}  // namespace millrace
