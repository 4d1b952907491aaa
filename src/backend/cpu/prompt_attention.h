// A prompt's attention over the ranks of a context, in one layer: queries, keys and values, and partial
// softmaxes move as a schedule says (dist/prompt_plan.h), while what is here is computed. Nothing here knows
// a ring from a mesh.
//
// Keys and values go in rounds of a few splits of every rank, so that a rank never holds more than a round's,
// however long the context is; of its own rows it keeps one partial softmax per split of the round until all
// are there, and then adds them to its rows' totals in the order of positions: the bits of one process. Sinks
// join at the end, once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "dist/communicator.h"
#include "dist/context_blocks.h"
#include "dist/prompt_plan.h"
#include "kernels/cpu/attention/paged_attention.h"

namespace millrace::cpu {

// What all ranks know of a layer's prompt.
struct PromptWork {
  dist::PromptLayout layout;
  dist::ContextSchedule schedule;
  bool moves_queries = false;
  std::vector<std::vector<std::set<int>>> met;  // [rank][owner of queries]: whose keys it met with them
};

class PromptAttention {
 public:
  PromptAttention(dist::Communicator& group, const ExecutorSpec& whole, dist::ScheduleKind kind);

  // What a rank holds for it.
  static size_t buffer_bytes(const ExecutorSpec& whole, int ranks, dist::ScheduleKind kind);

  PromptWork plan(dist::PromptLayout layout) const;

  // op: the layer, with the rank's own blocks; table: of the prompt's sequence, logical block -> own block;
  // own_rows: the first row in op.query and op.out of each of this rank's runs.
  void attend(const Context& ctx, const AttentionPlan& plan, const PagedAttention& op, const PromptWork& work,
              const int32_t* table, std::span<const int32_t> own_rows);

 private:
  struct alignas(64) Line {
    float values[16];
  };
  // Grows, and is not cleared.
  class Floats {
   public:
    float* at_least(int64_t count);
    float* data() { return reinterpret_cast<float*>(lines_.data()); }

   private:
    std::vector<Line> lines_;
  };
  struct Owner {  // of queries
    std::vector<AttentionSequence> sequences;
    std::vector<PlacedTile> tiles;
    std::vector<const int32_t*> tables;  // [sequences]
    int64_t rows = 0;
    Floats queries;  // of others
    std::vector<ActivationBlock> blocks;
    Floats row_max, row_sum, out;
    std::vector<std::byte> message;  // queries of this rank's, or partial softmaxes from or for another
  };
  struct Round {
    int64_t first = 0, last = 0;  // splits
    bool queries_move = false;
  };

  int ranks() const { return group_.size(); }
  int me() const { return group_.rank(); }
  void begin(const AttentionPlan& plan, const PagedAttention& op, const PromptWork& work,
             std::span<const int32_t> own_rows);
  void pack_queries(const PagedAttention& op);
  void take_keys(const PagedAttention& op, const dist::PromptLayout& layout, const Round& round,
                 const int32_t* table);
  std::vector<PlacedSplit> splits_of(const PromptWork& work, const Round& round, int rank, int owner) const;
  void make_room(const PromptWork& work, const Round& round, int owner);
  std::vector<dist::Message> moves_of(const PromptWork& work, const Round& round,
                                      const dist::ContextStep& step);
  void compute(const Context& ctx, const PagedAttention& op, const PromptWork& work, const Round& round,
               const dist::ContextTile& tile);
  void quantize_arrived(const Context& ctx, const dist::ContextStep& step);
  void send_partials_home(const PromptWork& work, const Round& round);
  size_t partial_bytes(const PromptWork& work, const Round& round, int from, int to) const;
  template <class Copy>
  void visit_partials(const PromptWork& work, int owner, std::span<const PlacedSplit> splits,
                      std::span<std::byte> message, const Copy& copy);

  PartialSoftmax parts_of(Owner& owner) {
    return {owner.row_max.data(), owner.row_sum.data(), owner.out.data()};
  }

  dist::Communicator& group_;
  const dist::ScheduleKind kind_;
  const dist::PromptShape shape_;
  const int64_t most_rows_;  // of a rank in a step

  // Of the layer that runs.
  const AttentionPlan* plan_ = nullptr;
  int64_t kv_heads_ = 0, group_size_ = 0, padded_dim_ = 0, query_cols_ = 0, block_bytes_ = 0;
  std::vector<Owner> owners_;
  std::vector<std::vector<Line>> keys_;  // [owner of keys]
  std::vector<size_t> key_bytes_;        // of this round
  std::vector<int32_t> table_;           // logical block -> its place among its owner's of the round
  Floats total_max_, total_sum_, total_out_;
};

}  // namespace millrace::cpu
