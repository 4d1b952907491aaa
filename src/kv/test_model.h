// For the tests of the cache: a pretend model whose "keys and values" tell exactly which tokens they were
// computed from. The slot of position p in group g holds a hash of tokens [0, p] and g, so that a block that
// answers for other tokens than it should is seen at once.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kv/cache.h"

namespace millrace::kv {

inline constexpr size_t kTestBlockBytes = kBlockTokens * sizeof(uint64_t);

inline GroupOptions full(int32_t blocks) { return {0, blocks, kTestBlockBytes}; }
inline GroupOptions shelved(int32_t blocks, int32_t shelves) {
  return {0, blocks, kTestBlockBytes, false, shelves};
}
inline GroupOptions window(int32_t window, int32_t blocks) { return {window, blocks, kTestBlockBytes}; }

// `apart`: tokens between the states that are kept.
inline GroupOptions state(int32_t blocks, int32_t apart = 256) {
  return {kBlockTokens + 1, blocks, kTestBlockBytes, true, 1, apart};
}

inline std::vector<int32_t> counting(int32_t from, int32_t count) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) tokens[i] = from + i;
  return tokens;
}

// Allocations of this thread until one fails; -1: never. operator new is in cache_test.cpp.
extern thread_local int64_t test_fail_in;

class TestStore final : public BlockStore {
 public:
  explicit TestStore(const std::vector<GroupOptions>& groups) {
    for (const GroupOptions& group : groups) {
      pools_.emplace_back(static_cast<size_t>(group.num_blocks) * group.block_bytes, std::byte{0xAA});
      block_bytes_.push_back(group.block_bytes);
    }
  }
  // What the block holds now is there when finish() returns; before, `to` is something else.
  void read(int group, int32_t block, std::span<std::byte> to) override {
    late_.reset(new (std::malloc(sizeof(Late) + to.size())) Late{to, std::move(late_)});
    std::memcpy(late_->content(), at(group, block), to.size());
    std::memset(to.data(), 0xCD, to.size());
  }
  void finish() override {
    while (late_ != nullptr) {
      std::memcpy(late_->to.data(), late_->content(), late_->to.size());
      late_ = std::move(late_->next);
    }
  }
  void write(int group, int32_t block, std::span<const std::byte> from) override {
    std::memcpy(at(group, block), from.data(), block_bytes_[group]);
  }
  void copy(int group, int32_t from, int32_t to) override {
    std::memcpy(at(group, to), at(group, from), block_bytes_[group]);
  }
  // The slot of one token; whatever else a block holds is that many copies of it.
  void put(int group, int32_t block, int32_t slot, uint64_t value) {
    std::memcpy(at(group, block) + slot * sizeof(value), &value, sizeof(value));
  }
  uint64_t get(int group, int32_t block, int32_t slot) {
    uint64_t value;
    std::memcpy(&value, at(group, block) + slot * sizeof(value), sizeof(value));
    return value;
  }

 private:
  std::byte* at(int group, int32_t block) { return pools_[group].data() + block * block_bytes_[group]; }
  // A read that nobody has waited for, its bytes behind it. By malloc: allocations of the cache are counted
  // and made to fail, a device's are none.
  struct Late {
    struct Free {
      void operator()(Late* late) const {
        late->~Late();
        std::free(late);
      }
    };
    std::span<std::byte> to;
    std::unique_ptr<Late, Free> next;
    std::byte* content() { return reinterpret_cast<std::byte*>(this + 1); }
  };
  std::unique_ptr<Late, Late::Free> late_;
  std::vector<std::vector<std::byte>> pools_;
  std::vector<size_t> block_bytes_;
};

inline uint64_t test_mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

// A sequence and what it should hold.
struct TestStream {
  Sequence sequence;
  std::string salt;
  std::vector<int32_t> tokens;  // all that are wanted; sequence.length() of them are computed
};

inline std::vector<uint64_t> prefix_hashes(std::span<const int32_t> tokens) {
  std::vector<uint64_t> hashes;
  uint64_t h = 1;
  for (const int32_t token : tokens)
    hashes.push_back(h = test_mix(h + static_cast<uint64_t>(token) + 0x9e37));
  return hashes;
}

// Computes the next n tokens: writes their slots, and checks that everything they see is what it should be.
inline void test_compute(TestStore& store, const std::vector<GroupOptions>& groups, TestStream& s,
                         int32_t n) {
  const std::vector<uint64_t> hashes = prefix_hashes(s.tokens);
  const int32_t length = s.sequence.length();
  for (int g = 0; g < static_cast<int>(groups.size()); ++g) {
    const int32_t window = groups[g].window, first = window > 0 ? std::max(0, length - window + 1) : 0;
    const int32_t* table = s.sequence.table(g);
    for (int32_t p = first; p < length; ++p) {
      const int32_t block = table[p / kBlockTokens];
      ASSERT_NE(block, kNoBlock) << "group " << g << " position " << p << " of " << length;
      ASSERT_EQ(store.get(g, block, p % kBlockTokens), hashes[p] + static_cast<uint64_t>(g))
          << "group " << g << " position " << p << " of " << length;
    }
    for (int32_t p = length; p < length + n; ++p) {
      if (groups[g].sparse && table[p / kBlockTokens] == kNoBlock) continue;  // nobody will see it
      store.put(g, table[p / kBlockTokens], p % kBlockTokens, hashes[p] + static_cast<uint64_t>(g));
    }
  }
}

// Computes everything a sequence lacks, in chunks. False when there is no space.
inline bool test_run(Cache& cache, TestStore& store, const std::vector<GroupOptions>& groups, TestStream& s,
                     int32_t chunk = 512) {
  while (!cache.ready(s.sequence)) cache.wait(std::chrono::milliseconds(100));
  while (s.sequence.length() < static_cast<int32_t>(s.tokens.size())) {
    const int32_t length = s.sequence.length();
    const int32_t n = std::min(chunk, static_cast<int32_t>(s.tokens.size()) - length);
    if (!cache.reserve(s.sequence, n)) return false;
    test_compute(store, groups, s, n);
    cache.advance(s.sequence, std::span(s.tokens).subspan(length, n));
  }
  return true;
}

// A directory of its own that is gone afterwards.
class TestDirectory {
 public:
  TestDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "millrace-kv-XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  ~TestDirectory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace millrace::kv
