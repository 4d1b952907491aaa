// The parts every BPE tokenizer shares: a flat hash from bytes to ids, a flat hash from a pair of symbols to
// what it merges to, and the merging itself (lowest rank first, leftmost among equals).
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace millrace {

// Multiplies 8 bytes at a time into 64 bits; equal on every machine of one byte order, and never stored.
inline uint64_t hash_bytes(std::string_view text) {
  uint64_t h = text.size() * 0x9e3779b97f4a7c15u;
  const auto mix = [&h](uint64_t x) {
    h = (h ^ x) * 0xd6e8feb86659fd93u;
    h ^= h >> 32;
  };
  const char* p = text.data();
  size_t n = text.size();
  for (; n >= 8; p += 8, n -= 8) {
    uint64_t x;
    std::memcpy(&x, p, 8);
    mix(x);
  }
  if (n > 0) {
    uint64_t x = 0;
    std::memcpy(&x, p, n);
    mix(x);
  }
  return h ^ h >> 29;
}

// Byte strings by id, and back. Ids without a string are holes; a string of an id may be left out of the
// search.
class TokenTable {
 public:
  void reserve(size_t num_tokens, size_t num_bytes);
  // False when `searchable` bytes are there already. Ids are added in any order, each once.
  bool add(uint32_t id, std::string_view bytes, bool searchable);
  size_t size() const { return entries_.size(); }  // largest id + 1
  bool has(uint32_t id) const { return id < entries_.size() && entries_[id].offset != kHole; }
  std::string_view bytes(uint32_t id) const {
    return std::string_view(arena_).substr(entries_[id].offset, entries_[id].length);
  }
  std::optional<uint32_t> find(std::string_view bytes) const { return find(bytes, hash_bytes(bytes)); }
  std::optional<uint32_t> find(std::string_view bytes, uint64_t hash) const {
    if (slots_.empty()) return std::nullopt;
    const uint32_t tag = static_cast<uint32_t>(hash >> 32);
    for (size_t i = hash & mask_;; i = (i + 1) & mask_) {
      const Slot slot = slots_[i];
      if (slot.id == kEmpty) return std::nullopt;
      if (slot.tag == tag && this->bytes(slot.id) == bytes) return slot.id;
    }
  }

 private:
  static constexpr uint32_t kEmpty = UINT32_MAX;
  static constexpr uint64_t kHole = UINT64_MAX;
  struct Slot {
    uint32_t tag;
    uint32_t id;
  };
  struct Entry {
    uint64_t offset = kHole;
    uint32_t length = 0;
  };
  void grow();

  std::string arena_;
  std::vector<Entry> entries_;
  std::vector<Slot> slots_;  // a power of two, at most half full
  size_t mask_ = 0;
  size_t used_ = 0;
};

// (left, right) -> rank and merged symbol.
class MergeTable {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Merge {
    uint64_t pair;
    uint32_t rank;
    uint32_t symbol;
  };
  void reserve(size_t num_merges);
  // A pair given twice keeps the later rank, as in Hugging Face's map.
  void add(uint32_t left, uint32_t right, uint32_t rank, uint32_t symbol);
  // rank kNone when the pair does not merge.
  Merge find(uint32_t left, uint32_t right) const {
    const uint64_t pair = static_cast<uint64_t>(left) << 32 | right;
    if (slots_.empty()) return {pair, kNone, 0};
    for (size_t i = slot_of(pair);; i = (i + 1) & mask_) {
      const Merge& slot = slots_[i];
      if (slot.pair == pair || slot.pair == kEmptyPair) return slot;
    }
  }

 private:
  static constexpr uint64_t kEmptyPair = UINT64_MAX;
  size_t slot_of(uint64_t pair) const {
    const uint64_t h = pair * 0x9e3779b97f4a7c15u;
    return static_cast<size_t>(h ^ h >> 32) & mask_;
  }
  void grow(size_t num_slots);

  std::vector<Merge> slots_;  // a power of two, at most half full; empty slots have rank kNone
  size_t mask_ = 0;
  size_t used_ = 0;
};

// Buffers of one encode call, kept between its words.
struct MergeScratch {
  std::vector<uint32_t> symbols;  // in: the word's symbols; out: what is left of them
  std::vector<uint32_t> ranks;
  std::vector<uint32_t> merged;
  std::vector<uint32_t> previous, next;
  std::vector<uint64_t> heap;
};

// Merges scratch.symbols until no pair merges: O(n^2) with a small constant for short words, O(n log n) for
// long ones. At most 2^32 - 2 symbols.
void merge_symbols(const MergeTable& merges, MergeScratch& scratch);

}  // namespace millrace
