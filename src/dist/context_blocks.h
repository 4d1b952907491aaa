// What moves between ranks: the rows of one owner's tokens, packed, and rounds of messages in which every
// rank sends at most one and receives at most one.
#pragma once

#include <compare>
#include <cstddef>
#include <vector>

#include "dist/communicator.h"
#include "dist/context_plan.h"

namespace millrace::dist {

struct BlockId {
  BlockKind kind;
  int owner;
  // NOLINTNEXTLINE(modernize-use-nullptr): clang-tidy 14 sees the zero that the compiler compares with
  auto operator<=>(const BlockId&) const = default;
};

// Sections one after the other, each with the rows of all runs: keys and values; or queries, for backward
// with d_out, lse and delta.
struct Block {
  std::vector<TokenRun> runs;
  std::vector<int64_t> row_bytes;  // of each section
  std::vector<std::byte> data;

  int64_t rows() const;
  size_t bytes() const;
  // The rows of run i in a section.
  const std::byte* at(size_t section, size_t run) const;
  std::byte* at(size_t section, size_t run);
};
Block make_block(std::vector<TokenRun> runs, std::vector<int64_t> row_bytes);
// The rows of `runs`, each of which lies within one of the block's.
Block part_of(const Block& block, const std::vector<TokenRun>& runs);

struct Message {
  int from, to;
  std::span<const std::byte> out;  // where this rank is `from`
  std::span<std::byte> in;         // where this rank is `to`
  size_t bytes;                    // known to both
};
// All ranks call it with the same list. Messages of 0 bytes are left out.
void exchange_messages(Communicator& group, const std::vector<Message>& messages);

}  // namespace millrace::dist
