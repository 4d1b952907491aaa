// What rank 0 tells the ranks that follow it: the executor it made, its steps, and what it does with KV
// blocks. Plain bytes between processes of the same program (checked at the start), so structs go as they
// are.
#pragma once

#include <cstdint>
#include <span>
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
    kHidden,      // the residual stream of the last step, to rank 0
    kReadBlock,   // `from`, to rank 0
    kWriteBlock,  // `to`, followed by the rank's bytes
    kCopyBlock,
    kSample,  // the last step's tokens, followed by how (SampleRow)
  } kind = Kind::kStop;
  int32_t group = 0, from = 0, to = 0;  // of the KV cache
  uint64_t bytes = 0;                   // that follow
};

// A message and the bytes that follow it, to one rank; and what comes next from one.
void send_order(dist::Communicator& group, int to, const RankMessage& message,
                std::span<const std::byte> bytes = {});
RankMessage receive_order(dist::Communicator& group, int from, std::vector<std::byte>& bytes);

std::vector<std::byte> packed(const ExecutorSpec& spec);
ExecutorSpec unpacked_spec(std::span<const std::byte> bytes);

void pack(const Batch& batch, const ExecutorSpec& spec, std::vector<std::byte>& to);

// A batch and the memory it points into.
struct ReceivedBatch {
  std::vector<int32_t> tokens, logit_rows, tables, rope_positions;
  std::vector<SequenceSlice> sequences;
  std::vector<GivenRow> given;
  std::vector<float> given_values;
  bool only_logits = false;

  void unpack(std::span<const std::byte> bytes, const ExecutorSpec& spec);
  Batch view() const {
    return {.tokens = tokens,
            .sequences = sequences,
            .logit_rows = logit_rows,
            .only_logits = only_logits,
            .given = given,
            .rope_positions = rope_positions};
  }
};

// How a step's rows are to be sampled, of the tokens of `part`: of counts, biases and masks no others. A mask
// begins with the word that has the part's first token.
void pack(std::span<const SampleRow> rows, dist::Range part, std::vector<std::byte>& to);
inline int64_t first_allowed(dist::Range part) { return part.begin / 64 * 64; }

// Such rows and the memory they point into.
struct ReceivedRows {
  std::vector<SampleRow> rows;
  std::vector<std::vector<TokenCount>> counted;
  std::vector<std::vector<TokenBias>> bias;
  std::vector<std::vector<uint64_t>> allowed;

  void unpack(std::span<const std::byte> bytes);
};

// What of a KV block (ExecutorSpec::kv_layer_bytes) is a rank's: some KV heads of all layers, or all of some
// layers. Of stages that share rows each has a part of its stage's part, whose spec is stage_spec().
struct BlockPart {
  int group = 0;
  dist::Range layers, kv_heads;
  size_t key_head = 0;  // bytes of a head's keys, of 16 tokens
  bool empty() const { return layers.size() == 0 || kv_heads.size() == 0; }
};
// key_head: Backend::key_head_bytes, of ranks that share heads.
BlockPart block_part(const ExecutorSpec& whole, const dist::Shares& shares, int rank, int group,
                     size_t key_head = 0);
size_t part_bytes(const ExecutorSpec& whole, const BlockPart& part);

// copy(offset in the whole block, offset in the part, bytes) for each piece.
template <class Copy>
void for_each_piece(const ExecutorSpec& whole, const BlockPart& part, const Copy& copy) {
  if (part.kv_heads.size() == whole.kv_heads) {  // whatever a layer keeps
    const size_t layer = whole.kv_layer_bytes(part.group);
    if (part.empty()) return;
    return copy(static_cast<size_t>(part.layers.begin) * layer, size_t{0},
                static_cast<size_t>(part.layers.size()) * layer);
  }
  const size_t both = 2 * static_cast<size_t>(kBlockTokens) * kv_head_bytes(whole.kv_type, whole.head_dim);
  const auto heads = static_cast<size_t>(whole.kv_heads), mine = static_cast<size_t>(part.kv_heads.size());
  const auto first_head = static_cast<size_t>(part.kv_heads.begin);
  const auto first = static_cast<size_t>(part.layers.begin), last = static_cast<size_t>(part.layers.end);
  const size_t keys = part.key_head, values = both - keys;
  for (size_t l = first; l < last; ++l) {
    const size_t whole_at = l * heads * both, part_at = (l - first) * mine * both;
    copy(whole_at + first_head * keys, part_at, mine * keys);
    copy(whole_at + heads * keys + first_head * values, part_at + mine * keys, mine * values);
  }
}

void copy_from_part(const ExecutorSpec& whole, const BlockPart& part, std::span<const std::byte> from,
                    std::span<std::byte> to);
void copy_to_part(const ExecutorSpec& whole, const BlockPart& part, std::span<const std::byte> from,
                  std::vector<std::byte>& to);
// Rank 0, when everybody has been told of kReadBlock: its own part and those that the others send, as `to`.
void gather_block(dist::Communicator& ranks, Executor& own, const ExecutorSpec& whole,
                  const dist::Shares& shares, size_t key_head, int group, int32_t block,
                  std::vector<std::byte>& part, std::span<std::byte> to);

// The spec of a stage's executors: KV pools of its layers alone. Of ranks without a pipeline: the whole one.
ExecutorSpec stage_spec(const ExecutorSpec& whole, const dist::Shares& shares);

}  // namespace millrace
