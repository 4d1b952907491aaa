// The cpu executor: the operations of backend.h as loops over a thread pool. Every loop hands out tasks that
// write disjoint outputs, and no number depends on which thread or how many ran them.
//   cpu_executor.cpp  slots, norms and dense products
//   attention.cpp     rope, the KV pools, attention
//   experts.cpp       routing and experts
#pragma once

#include <initializer_list>
#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/matmul.h"
#include "backend/cpu/memory.h"
#include "backend/cpu/workspace.h"
#include "base/thread_pool.h"

namespace millrace::cpu {

class CpuExecutor final : public Executor {
 public:
  CpuExecutor(const ExecutorSpec& spec, const KernelTable& kernels, ThreadPool& pool);

  void begin(const Batch& batch) override;
  void embed(const Weight& table, float scale) override;
  void norm_qkv(const NormQkv& op) override;
  void rope_append_kv(const Rope& op) override;
  void attend(const Attend& op) override;
  void project_add(const Linear& op) override;
  void ffn_add(const Ffn& op) override;
  void route(const Route& op) override;
  void experts_add(const Experts& op) override;
  void norm_logits(const Logits& op) override;
  std::span<const float> logits() override;
  std::span<const int32_t> greedy_tokens() override;
  void read_hidden(const Norm& norm, int32_t row, std::span<float> to) override;
  void read_block(int group, int32_t block, std::span<std::byte> to) override;
  void write_block(int group, int32_t block, std::span<const std::byte> from) override;
  void copy_block(int group, int32_t from, int32_t to) override;
  std::vector<float> read_slot(Slot slot) override;
  void write_slot(Slot slot, std::span<const float> values) override;

 private:
  // y = x W^T + b into y [rows][stride].
  struct Product {
    const Linear* op;
    float* out;
  };
  // gate and up of one feed-forward block, dense or of one expert.
  struct GateUp {
    const Linear *gate, *up;
    const Experts* activation;  // absent: silu
  };
  // Forms of activations that some product wants.
  struct Forms {
    bool blocks = false, binary = false, tiles = false, values = false, cells = false;
  };
  struct Formed {
    ActivationBlock *blocks, *binary;
    uint16_t* tiles;
    // In the memory of the blocks: a step makes one of both.
    Int8Tile* cells() const { return reinterpret_cast<Int8Tile*>(blocks); }
    // Of `count` rows.
    Rows rows(const float* values, int64_t count, int64_t cols, Forms made,
              const int32_t* index = nullptr) const {
      return {values,
              made.cells ? nullptr : blocks,
              cols,
              index,
              made.cells ? cells() : nullptr,
              made.binary ? binary : nullptr,
              made.tiles ? tiles : nullptr,
              bf16_tile_height(count)};
    }
  };
  // The activations between up and down, of num_m rows; values only where the forms have them.
  struct Inner {
    float* values;
    Formed formed;
    Forms forms;
  };

  struct SlotShape {
    float* values;
    int64_t rows, cols, max_rows;
  };
  SlotShape shape_of(Slot slot);
  std::span<std::byte> block_bytes(int group, int32_t block) const;

  // --- cpu_executor.cpp
  // indexed: rows are picked by an index.
  Forms forms_for(std::initializer_list<const Linear*> ops, int64_t rows, bool indexed = false) const;
  void make_forms(Forms forms, const float* x, int64_t first, int64_t count, int64_t row, int64_t rows,
                  int64_t cols, const Formed& to) const;
  Formed inner_at(int64_t at) const;  // from value `at` on
  Formed input() const { return {work_->blocks, work_->input_binary, work_->input_tiles}; }
  void norm_rows(const Norm& op, std::span<const int32_t> rows, Forms forms);
  void norm_row(const Norm& op, int64_t row, int64_t to, int64_t count, Forms forms) const;
  Rows normed(int64_t rows) const { return input().rows(work_->normed, rows, spec_.hidden, normed_forms_); }
  Rows formed(const float* values, int64_t rows, int64_t cols, Forms forms);
  // Rows that a thread multiplies together in a step of few tokens: [first, first + count), and where its
  // next rows begin, -1 if that is not known. asked: for the first of them.
  struct RowPart {
    int64_t first, count, next;
    bool asked;
  };
  // body(part, thread) for parts of [0, rows), in units of `unit`.
  template <class Body>
  void share_rows(const ShrinkingParts& parts, Body body) {
    pool_.parallel_parts(parts.count(), [&](const LoopPart& part, int thread) {
      const auto [first, count] = parts.part(part.index);
      body(RowPart{first, count, part.next < 0 ? -1 : parts.part(part.next).first, part.asked}, thread);
    });
  }
  // Rows of outputs that nobody reads in blocks of 32 are handed out by sixteens.
  ShrinkingParts plain_parts(int64_t rows) const { return {rows, kRowsAtOnce, pool_.size()}; }
  // Calls body(first, count, next, asked) for a part in pieces whose outputs fit into a thread's buffer.
  template <class Body>
  static void in_bufferfuls(const RowPart& part, Body body) {
    for (int64_t r = 0; r < part.count; r += kMostFewRows) {
      const int64_t some = std::min(kMostFewRows, part.count - r);
      body(part.first + r, some, r + some < part.count ? part.first + r + some : part.next,
           part.asked || r > 0);
    }
  }
  // The first rows of these matrices, `rows` for each thread.
  static Soon soon_of(std::initializer_list<const CpuWeight*> weights, int64_t rows);
  void announce(const Soon& mine, const Soon* next = nullptr);
  void multiply_few(std::span<const Product> products, int64_t total, const Rows& x, int64_t rows);
  void multiply_part(const Product& product, int64_t first, int64_t count, const Rows& x, int64_t m,
                     int64_t num_m, int thread, const PrefetchHint& chain = {});
  void multiply_add_part(const Linear& op, int64_t first, int64_t count, const Rows& x, int64_t m,
                         int64_t num_m, float* y, int thread, const PrefetchHint& chain = {});
  void multiply_all(std::span<const Product> products, const Rows& x, int64_t rows);
  void multiply_add(const Linear& op, const Rows& x, float* y);
  void norm_heads(const Norm& op, int64_t heads, float* values);
  // Rows [first, first + count) of the inner activations of product rows [0, num_m), into inner [num_m][inner
  // cols].
  void gate_up(const GateUp& op, int64_t expert, int64_t first, int64_t count, const Rows& x, int64_t num_m,
               const Inner& inner, int thread, const PrefetchHint& chain = {});

  // --- attention.cpp
  struct KvPlace {  // of one layer
    uint8_t* pool;
    int64_t block_bytes, key_offset, value_offset, head_bytes;
  };
  KvPlace place_of(int layer) const;
  void plan_attention();
  bool leaves_rows_out(int layer) const;
  void plan_logit_rows();
  void keep_logit_rows();
  void attend_planned(const Attend& op);
  void prepare_rotation(const Rope& op);
  void append(const KvPlace& place, int group, int64_t row, int64_t first, int64_t last);  // KV heads
  struct SpanTask {
    const QueryTile* tile;
    int kv_head;
    int64_t span;
    int heads = 1;  // from kv_head on
  };
  void first_blocks(const Attend& op, const SpanTask& task, int from_head, const uint8_t** blocks) const;
  // after: what this thread attends to next, if anything; asked: for the first tile, by the span before.
  // out: of the first head; head_rows: rows from one head's to the next's.
  void attend_span(const Attend& op, const SpanTask& task, const SpanTask* after, bool asked,
                   const Partial& out, int64_t head_rows, int thread);
  struct TileRows {  // of a tile
    int32_t begin, end;
  };
  void merge_span(TileRows rows, const Partial& part, const Partial& total, const int32_t* first,
                  const int32_t* last, bool fresh);
  void merge_row(int32_t row, const Partial& parts, int64_t spans, const Partial& total);
  void visible(const Attend& op, const QueryTile& tile, int64_t span, int32_t* first, int32_t* last) const;
  void finish(const Attend& op, const QueryTile& tile, TileRows rows, int kv_head, const Partial& total);
  std::pair<int64_t, int64_t> spans_of(const Attend& op, const QueryTile& tile) const;

  // --- experts.cpp
  void choose(const Route& op, int64_t token);
  void sort_by_expert(int64_t chosen);
  void gather_tiles();
  template <class Part>
  void share_experts(const Linear& op, int64_t unit, int64_t per_task, Part part);
  void combine(const Experts& op, int64_t token, int64_t first, int64_t count);

  ExecutorSpec spec_;
  const KernelTable& kernels_;
  ThreadPool& pool_;
  StepMemory memory_;
  std::unique_ptr<Workspace> work_;
  std::vector<Pages> kv_pools_;  // per group

  // The largest logit of a piece of a row.
  struct Largest {
    float value;
    int32_t token;  // -1: a NaN
  };
  std::vector<Largest> largest_;  // [logit rows][pieces]
  std::vector<int32_t> greedy_;   // [logit rows]
  std::vector<int32_t> kept_;     // [max logit rows]: 0, 1 ..: the logit rows when only they are kept

  Batch batch_{};
  int64_t rows_ = 0;                 // tokens of this step; behind the last attention those that are kept
  int64_t num_tiles_ = 0;            // query tiles of this step
  int64_t num_active_ = 0;           // experts with tokens
  Forms normed_forms_;               // that work_->normed has
  bool few_ = false;                 // the step began with few tokens
  bool deep_ = false;                // attention of this step reads more than the caches hold
  bool wait_for_attention_ = false;  // the next product is followed by such attention
  // What the products of a step of few tokens begin with, in order, as the last such step had it: a model
  // does the same in every step. A wrong guess costs some reading.
  std::vector<Soon> order_;
  size_t at_ = 0;                       // the product that comes next
  const float* rotation_of_ = nullptr;  // inv_freq the cosines were made from
  float rotation_magnitude_ = 0;
  int64_t rotation_size_ = 0;
};

}  // namespace millrace::cpu
