// A rank's part of a step whose context is spread over ranks: which rows it computes, which keys and values
// it keeps, and what ranks tell one another. Every rank has the whole model.
//
// Rows of a long piece of a prompt are cut into 2 x ranks pieces, of which rank r computes the r-th and the
// r-th from the end (zigzag: attention costs all of them alike); a few rows, a decoded token above all, and
// an image whose tokens see one another are computed by everybody. Keys and values go where their positions
// are kept: of groups that are spread, 512 positions at a time are a rank's (base/paging.h); of other groups
// (windows) everybody keeps all.
//
// Attention over a group that is spread has the bits of one process, because 512 positions are what it adds
// up in one chain on one device too:
//   few rows    every rank attends to its own positions; partial softmaxes go to everybody, who combine them
//   many rows   queries, keys and values go from rank to rank by a schedule (prompt_attention.h)
// Which of both goes by the rows alone, so that all ranks know.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/prompt_attention.h"
#include "base/thread_pool.h"
#include "dist/communicator.h"
#include "kernels/cpu/attention/paged_attention.h"

namespace millrace::cpu {

class ContextPart {
 public:
  ContextPart(dist::Communicator& group, const ExecutorSpec& whole, dist::ScheduleKind kind);

  // The spec of a rank's executor: its blocks.
  static ExecutorSpec local_spec(const ExecutorSpec& whole);
  // What a rank holds for exchanges, beside its executor.
  static size_t buffer_bytes(const ExecutorSpec& whole, int ranks, dist::ScheduleKind kind);

  // This rank's rows of a step as a batch, which points into here and into `whole`.
  Batch localize(const Batch& whole);

  bool is_spread(int group) const { return shelves(group) > 1; }
  int32_t local_block(int group, int32_t block) const;

  // Keys and values, [rows][cols] of this rank's rows, to those who keep them and have not computed them;
  // what arrives is stored. `kv` is the layer's; its tables are not looked at.
  void send_kv(ThreadPool& pool, int group, PagedKv kv, int64_t kv_heads, int64_t head_dim, const float* key,
               const float* value);

  // One layer's attention over a group that is spread. only_logits: of sequences that want no logits nobody
  // attends any more.
  void attend(const Context& ctx, const AttentionPlan& plan, int group, PagedAttention op, bool only_logits);

  // Which of the local logit rows are this rank's to compute: ordinals.
  std::span<const int32_t> own_logits() const { return own_logits_; }
  // Rank 0 gets everybody's, [own logits][cols] of each, in the order of the whole batch; `own` itself where
  // all are its. Empty on the others.
  template <class T>
  std::span<const T> collect(const T* own, size_t cols, std::vector<T>& whole);
  // Rank 0 gets the residual streams of all rows.
  void collect_hidden(const float* residual, int64_t hidden);
  const float* hidden(int32_t row, int64_t cols) const { return hidden_.data() + row * cols; }
  int64_t rows() const { return static_cast<int64_t>(rank_of_row_.size()); }  // of the whole batch

 private:
  static constexpr int32_t kEveryone = -1;
  // What layers of a kind have in common: where rows see to, and whether all of them attend.
  struct PieceWork {
    int32_t chunk;
    bool only_logits;
    PromptWork work;
    std::vector<int32_t> own_rows;  // local, the first of each of this rank's runs
  };
  struct Piece {  // of the whole batch
    SequenceSlice slice;
    bool spread = false;
    std::vector<int64_t> logits;  // rows that want some, counted from its first
    std::vector<PieceWork> works;
    std::vector<int32_t> tables[kMaxKvGroups];  // of groups that are spread: local blocks
  };
  struct StoredRow {
    const Piece* piece;
    int32_t position;
    const float* values;  // keys, values
  };

  int ranks() const { return group_.size(); }
  int32_t shelves(int group) const { return shelves_[static_cast<size_t>(group)]; }
  int keeper(int group, int32_t position) const { return shelf_of(position / kBlockTokens, shelves(group)); }
  void cut_rows(Piece& piece);
  void take_images(const Batch& whole);
  void translate_tables(Piece& piece) const;
  void exchange_parts(std::span<const SplitPart> parts, int64_t padded_dim);
  const PieceWork& work_of(Piece& piece, int32_t chunk, bool only_logits) const;

  dist::Communicator& group_;
  std::vector<int32_t> shelves_;  // of the KV groups

  std::vector<Piece> pieces_;
  size_t num_pieces_ = 0;
  std::vector<int32_t> rank_of_row_, local_of_row_;  // of the whole batch
  std::vector<int32_t> tokens_, logit_rows_, own_logits_, logit_ranks_;
  std::vector<GivenRow> given_;          // local
  std::vector<int32_t> rope_positions_;  // likewise
  std::vector<SequenceSlice> sequences_;
  std::vector<size_t> piece_of_sequence_;  // local
  bool any_spread_ = false;

  std::vector<std::byte> out_, in_;  // exchanges
  std::vector<size_t> out_bytes_, in_bytes_;
  std::vector<QueryTile> tiles_;
  std::vector<StoredRow> stored_;
  std::vector<float> hidden_;
  PromptAttention prompts_;
};

}  // namespace millrace::cpu
