// A prompt's step over the ranks of a context, as plain data: whose rows attend (zigzag), whose keys and
// values they meet (512 positions at a time are a rank's, base/paging.h), and what each schedule of
// context_plan.h moves for it. Keys and values stay where they are kept: queries and keys of one owner are
// not of the same positions, and of a schedule only who meets whom is used.
//
// Attention of one process makes a partial softmax of every split, 512 positions, and combines a row's in
// order. So that ranks have its bits a partial softmax that another rank has made goes home as it is, one per
// split: what goes round more queries, as a mesh does, pays for it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/paging.h"
#include "dist/context_plan.h"

namespace millrace::dist {

inline constexpr int64_t kPromptSplit = int64_t{kShelfBlocks} * kBlockTokens;

enum class ScheduleKind { kAuto, kRing, kMesh, kWallfacer };
std::optional<ScheduleKind> schedule_kind(std::string_view name);  // auto, ring, mesh, wallfacer

// Fewer rows of a sequence than this are computed by every rank: that takes as long as one rank would, since
// weights are read once either way, and what it saves is an exchange of rows.
inline constexpr int64_t kFewRows = 16;
inline bool shares_rows(int64_t rows, int ranks) { return rows >= kFewRows && rows >= 2 * ranks; }

// Rows [begin, end) of `rows` that are piece `piece` of 2 x ranks; its rank is zigzag_rank's.
struct RowRange {
  int64_t begin = 0, end = 0;
};
RowRange zigzag_rows(int64_t rows, int ranks, int piece);
inline int zigzag_rank(int ranks, int piece) { return piece < ranks ? piece : 2 * ranks - 1 - piece; }

// Positions [first, last) that attend, consecutive rows of one owner.
struct QueryRun {
  int64_t first = 0, last = 0;
  int64_t rows() const { return last - first; }
};

// One layer of a step: a piece of one sequence's prompt.
struct PromptLayout {
  int ranks = 1;
  int64_t first_block = 0, last_block = 0;     // of keys that somebody sees, [first, last)
  int64_t chunk = 0;                           // a row sees from the start of its chunk; 0: from 0
  std::vector<std::vector<QueryRun>> queries;  // [owner], by position

  int64_t rows(int owner) const;
  int64_t most_rows() const;
  int64_t first_split() const { return first_block / kShelfBlocks; }
  int64_t last_split() const { return (last_block + kShelfBlocks - 1) / kShelfBlocks; }
  int owner_of(int64_t split) const { return static_cast<int>(split % ranks); }
  RowRange blocks_of(int64_t split) const;                     // of those that are seen
  int64_t blocks(int owner, RowRange splits) const;            // of the owner's, in [begin, end)
  RowRange seen_by(const QueryRun& run, int64_t split) const;  // rows of the run, counted in it
};
// Rows [context, context + rows) of a sequence. wants: of a layer after which only some rows are of use,
// those, counted from 0; absent: all attend.
PromptLayout prompt_layout(int ranks, int64_t context, int64_t rows, int64_t chunk,
                           const std::vector<int64_t>* wants = nullptr);

struct PromptShape {
  int64_t query_bytes = 0;    // a token's queries
  int64_t block_bytes = 0;    // keys and values of 16 positions
  int64_t partial_bytes = 0;  // a token's partial softmax of one split
};
// What the schedule moves, of every rank: queries once, keys and values as often as they hop, and partial
// softmaxes of others' queries to who asked.
std::vector<RankBytes> prompt_bytes(const ContextSchedule& schedule, const PromptLayout& layout,
                                    const PromptShape& shape);
// Of the kind's schedules (a mesh's a x b, the size of WallFacer's teams) the one in which the rank that
// receives most receives least; of all of them for kAuto, the ring where several are alike. A mesh over 2 or
// 3 ranks moves queries or keys only; teams of one are the ring.
ContextSchedule choose_schedule(ScheduleKind kind, const PromptLayout& layout, const PromptShape& shape);

// The same for the engine's other exchange of a prompt's layer, of rank `rank`: new keys and values as they
// were computed, 4 bytes each, to the ranks that keep them (all of them, where they are not spread).
int64_t kept_rows_received(int ranks, int rank, int64_t context, int64_t rows, bool spread);

}  // namespace millrace::dist
