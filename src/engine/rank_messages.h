// What rank 0 tells the ranks that follow it: the executor it made, its steps, and what it does with KV
// blocks. Plain bytes between processes of the same program (checked at the start), so structs go as they
// are.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "dist/communicator.h"
#include "dist/shares.h"

namespace millrace {

struct RankMessage {
  enum class Kind : int32_t {
    kStop,          // the model is closed
    kMakeExecutor,  // followed by a spec
    kStep,          // followed by a batch
    kLogits,        // of the last step, to rank 0
    kGreedy,
    kReadBlock,   // `from`, to rank 0
    kWriteBlock,  // `to`, followed by the rank's bytes
    kCopyBlock,
  } kind = Kind::kStop;
  int32_t group = 0, from = 0, to = 0;  // of the KV cache
  uint64_t bytes = 0;                   // that follow
};

std::vector<std::byte> packed(const ExecutorSpec& spec);
ExecutorSpec unpacked_spec(std::span<const std::byte> bytes);

void pack(const Batch& batch, size_t num_groups, std::vector<std::byte>& to);

// A batch and the memory it points into.
struct ReceivedBatch {
  std::vector<int32_t> tokens, logit_rows, tables;
  std::vector<SequenceSlice> sequences;
  bool only_logits = false;

  void unpack(std::span<const std::byte> bytes, size_t num_groups);
  Batch view() const {
    return {.tokens = tokens, .sequences = sequences, .logit_rows = logit_rows, .only_logits = only_logits};
  }
};

// The bytes of a KV block of one rank inside the whole block, [layers][key, value][kv heads][16 x head_dim]:
// those of its KV heads. copy(whole offset, part offset, bytes) for each piece.
template <class Copy>
void for_each_piece(const ExecutorSpec& whole, int group, dist::Range kv_heads, const Copy& copy) {
  const size_t head = static_cast<size_t>(kBlockTokens) * kv_head_bytes(whole.kv_type, whole.head_dim);
  const size_t heads = static_cast<size_t>(whole.kv_heads), mine = static_cast<size_t>(kv_heads.size());
  const auto pieces = static_cast<size_t>(whole.kv_groups[static_cast<size_t>(group)].num_layers) * 2;
  for (size_t i = 0; i < pieces; ++i) {
    copy((i * heads + static_cast<size_t>(kv_heads.begin)) * head, i * mine * head, mine * head);
  }
}
// Of a rank's part; 0 where it has no KV heads.
size_t part_bytes(const ExecutorSpec& whole, int group, dist::Range kv_heads);

}  // namespace millrace
