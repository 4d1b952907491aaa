// Context parallelism as plain data: which rank holds which tokens of each sequence (ContextLayout), and who
// computes which queries against which keys, and what moves between ranks meanwhile (ContextSchedule). Ring,
// mesh and WallFacer's grouping are three such schedules; what runs them (context_attention.h) knows none of
// them by name. No memory and no device is touched here.
//
// Tokens are handed out in whole chunks of kContextChunk positions: attention merges chunks in one fixed tree
// (millrace/kernels/flash_partial.h), so that results have the bits of one device for any layout and
// schedule.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace millrace::dist {

inline constexpr int64_t kContextChunk = 256;  // MR_FLASH_CHUNK

// Tokens [first, last) of a sequence. first is a multiple of a chunk, and so is last unless the sequence ends
// there.
struct TokenRun {
  int sequence = 0;
  int64_t first = 0, last = 0;
  int64_t rows() const { return last - first; }
  bool operator==(const TokenRun&) const = default;
};

struct ContextLayout {
  int ranks = 1;
  std::vector<int64_t> lengths;         // tokens of each sequence
  std::vector<std::vector<int>> owner;  // [sequence][chunk]: a rank

  // A rank's tokens in the order of its tensors' rows: by sequence, then position; neighbours are one run.
  std::vector<TokenRun> runs(int rank) const;
  int64_t rows(int rank) const;
};

// Zigzag: 2n pieces of a sequence, of which rank r has pieces r and 2n - 1 - r, so that causal work is even.
// Any number of ranks and any lengths; pieces may be empty. Sequences of fewer chunks than pieces begin at
// one rank after the other.
ContextLayout zigzag_layout(const std::vector<int64_t>& lengths, int ranks);
// One more token of a sequence (decode): it joins its chunk, or begins one at the rank that has the fewest
// tokens.
void append_token(ContextLayout& layout, int sequence);
// Throws Error{kBadInput} that names the field which is wrong.
void check_layout(const ContextLayout& layout);

// What a query at position p sees: [p - left, p + right], a negative side is open. Causal: -1, 0.
struct ContextMask {
  int64_t left = -1, right = 0;
};
// Chunks [first, last) of a sequence of `length` tokens that some query (or, of `seen_from`, some key) of the
// run meets; none where first == last.
struct ChunkRange {
  int64_t first = 0, last = 0;
  bool empty() const { return first >= last; }
  bool has(int64_t chunk) const { return first <= chunk && chunk < last; }
  bool operator==(const ChunkRange&) const = default;
};
ChunkRange chunks_of(const TokenRun& run);
ChunkRange keys_seen(const TokenRun& queries, int64_t length, const ContextMask& mask);
ChunkRange queries_seeing(const TokenRun& keys, int64_t length, const ContextMask& mask);

// A node of the tree of chunks: [index << level, (index + 1) << level).
struct ChunkNode {
  int level = 0;
  int64_t index = 0;
  ChunkRange span() const { return {index << level, (index + 1) << level}; }
  // NOLINTNEXTLINE(modernize-use-nullptr): clang-tidy 14 sees the zero that the compiler compares with
  auto operator<=>(const ChunkNode&) const = default;
};
// The largest nodes of which every chunk of `all` is in `part`, in order: what `part` alone can be merged to.
std::vector<ChunkNode> nodes_of(const ChunkRange& all,
                                const std::vector<bool>& part);  // part: [chunk - all.first]
std::vector<ChunkNode> nodes_of(const ChunkRange& all, const ChunkRange& part);
ChunkNode root_of(const ChunkRange& all);
ChunkRange intersection(const ChunkRange& a, const ChunkRange& b);

enum class BlockKind { kQueries, kKeys };

// The queries, or the keys and values, of the tokens of `owner`.
struct BlockMove {
  BlockKind kind;
  int owner, from, to;
  std::vector<TokenRun> runs;  // of the owner's, what goes: all unless pruned
};
struct ContextTile {  // computed by a rank: queries of one owner against keys of one
  int queries, keys;
  // NOLINTNEXTLINE(modernize-use-nullptr): clang-tidy 14 sees the zero that the compiler compares with
  auto operator<=>(const ContextTile&) const = default;
};
// Tiles of a step use what a rank had before the step; meanwhile the moves bring what later steps use.
struct ContextStep {
  std::vector<BlockMove> moves;
  std::vector<std::vector<ContextTile>> tiles;  // [rank]
};
// Every pair of owners is a tile of one rank, once. Partial results of others' queries go home at the end.
struct ContextSchedule {
  std::string name;
  int ranks = 1;
  std::vector<ContextStep> steps;
};

// Keys and values go round: after n - 1 hops everybody has seen all.
ContextSchedule ring_schedule(const ContextLayout& layout);
// a x b tiles: queries go round groups of a ranks, keys and values round groups of b = n / a. a = 1 is the
// ring.
ContextSchedule mesh_schedule(const ContextLayout& layout, int a);
// WallFacer's grouping: teams of c neighbours share their queries; member m of a team goes with the teams
// from m (n / c) / c on, round in a ring of its own, so that a team's c rings together see all keys. n is a
// multiple of c c.
ContextSchedule wallfacer_schedule(const ContextLayout& layout, int team);
// Tiles of which no query sees a key are dropped, and what then nobody needs does not move; keys that are
// needed go straight to who needs them, in one hop. For masks with a window, where little is left of a
// schedule.
ContextSchedule window_schedule(const ContextLayout& layout, const ContextMask& mask);
// Throws Error{kBadInput} where a block moves from a rank that lacks it, or a pair is computed twice or
// never.
void check_schedule(const ContextSchedule& schedule, const ContextLayout& layout, const ContextMask& mask);

struct ContextShape {
  int heads = 1, kv_heads = 1, head_dim = 8, value_dim = 8;
  int element_bytes = 2;  // of q, k, v and the gradient of out
};
// Exact: partial results are sent as the nodes of the tree, a few each, and the result has the bits of one
// device. Compact: each is merged to one before it is sent; fewer bytes, and bits that depend on the
// schedule.
enum class PartialOrder { kExact, kCompact };

struct RankBytes {
  int64_t sent = 0, received = 0;
  bool operator==(const RankBytes&) const = default;
};
// What forward moves, of every rank, from the schedule alone.
std::vector<RankBytes> forward_bytes(const ContextSchedule& schedule, const ContextLayout& layout,
                                     const ContextMask& mask, const ContextShape& shape, PartialOrder order);
// The formula, of a rank, with tokens / n tokens on each: [(a - 1)(d_q + partial output) + (b - 1) d_kv]
// tokens / n. Ring: a = 1, b = n. Queries, keys and values at element_bytes, partial outputs and log-sum-exps
// at 4.
double formula_bytes(const ContextShape& shape, int64_t tokens, int a, int b);
// The a that the formula likes best, of n's divisors.
int best_mesh(const ContextShape& shape, int ranks);

}  // namespace millrace::dist
