// The file of one block on disk: a header of 176 bytes, then the bytes, plain or compressed. docs/kv_cache.md
// has the layout. A file is believed only if every field, both checksums and the label agree with what was
// asked for.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/paging.h"
#include "kv/block_store.h"
#include "kv/hash.h"

namespace millrace::kv {

// Bytes that are not cleared before they are filled.
class Bytes {
 public:
  explicit Bytes(size_t size) : own_(new std::byte[size]), data_(own_.get()), size_(size) {}
  // What lies behind the first `skipped` bytes, where it is.
  Bytes(std::vector<std::byte> file, size_t skipped)
      : file_(std::move(file)), data_(file_.data() + skipped), size_(file_.size() - skipped) {}
  ~Bytes() { abandon(); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  size_t size() const { return size_; }
  std::span<std::byte> span() { return {data_, size_}; }
  // Waits for a block that is on its way here; on the engine's thread. For another thread (the disk tier's)
  // somebody has asked before.
  std::span<const std::byte> span() const {
    if (coming_from_ != nullptr) arrive();
    return {data_, size_};
  }
  // Fills the bytes, at some time.
  void read_from(BlockStore& store, int group, int32_t block) {
    store.read(group, block, span());
    coming_from_ = &store;
  }

 private:
  void arrive() const { std::exchange(coming_from_, nullptr)->finish(); }
  // Nobody may write to what is no longer there.
  void abandon() const noexcept {
    if (coming_from_ == nullptr) return;
    try {
      arrive();
    } catch (...) {  // a device that failed has forgotten the read; whoever uses it next is told
    }
  }

  std::unique_ptr<std::byte[]> own_;
  std::vector<std::byte> file_;
  std::byte* data_;  // in one of these
  size_t size_;
  mutable BlockStore* coming_from_ = nullptr;
};
using Buffer = std::shared_ptr<const Bytes>;

// Which block: its name, its parent's, what it holds.
struct BlockLabel {
  BlockKey key, parent;
  int32_t group = 0, index = 0;  // index: how many blocks come before it
  std::array<int32_t, kBlockTokens> tokens{};
  size_t raw_bytes = 0;
};

inline constexpr uint32_t kFileVersion = 1;
inline constexpr size_t kFileHeaderBytes = 176;

// "<32 hex digits>-<group>-<index>.kv1". The version is there so that a scan knows a stale file without
// opening it, the index so that it knows which of two files leaves first.
std::string file_name(const BlockKey& key, int group, int32_t index);
struct FileName {
  BlockKey key;
  int group = 0;
  int32_t index = 0;
  uint32_t version = 0;
};
std::optional<FileName> parse_file_name(const std::string& name);

// The header for a payload that follows it. element_bytes is 0 for a plain payload, else what the planes were
// split by.
std::array<std::byte, kFileHeaderBytes> encode_header(const BlockLabel& label, size_t element_bytes,
                                                      std::span<const std::byte> payload);

// Which block a file that begins so is of, as it says itself: nothing when it is not ours, damaged, or when
// the name does not follow from its parent's and the tokens.
std::optional<BlockLabel> decode_header(std::span<const std::byte> file);

// The block's bytes, which stay where they are unless they are compressed; or what was found and what was
// expected.
struct Decoded {
  Buffer bytes;
  std::string fault;
};
Decoded decode_file(const BlockLabel& expected, std::vector<std::byte> file);

}  // namespace millrace::kv
