#include "backend/cpu/context_part.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace millrace::cpu {
namespace {

static_assert(kShelfBlocks * kBlockTokens == kSplitTokens, "a split of attention is one rank's");

constexpr int64_t kStoredPerTask = 8;  // that a task stores
// A step's keys and values in float32, which go to who keeps them.
size_t shared_bytes(const ExecutorSpec& spec) {
  return static_cast<size_t>(spec.max_tokens) * 2 * sizeof(float) * static_cast<size_t>(spec.kv_heads) *
         static_cast<size_t>(spec.head_dim);
}

}  // namespace

ContextPart::ContextPart(dist::Communicator& group, const ExecutorSpec& whole, dist::ScheduleKind kind)
    : group_(group),
      out_bytes_(static_cast<size_t>(group.size())),
      in_bytes_(static_cast<size_t>(group.size())),
      prompts_(group, whole, kind) {
  for (const KvGroupSpec& g : whole.kv_groups) {
    MILLRACE_CHECK(g.shelves == 1 || g.shelves == group.size());
    shelves_.push_back(g.shelves);
  }
}

// A rank computes a part of a step's rows, and each may go to all others.
size_t ContextPart::buffer_bytes(const ExecutorSpec& whole, int ranks, dist::ScheduleKind kind) {
  return 2 * shared_bytes(whole) + PromptAttention::buffer_bytes(whole, ranks, kind);
}

ExecutorSpec ContextPart::local_spec(const ExecutorSpec& whole) {
  ExecutorSpec spec = whole;
  for (KvGroupSpec& group : spec.kv_groups) group.num_blocks = group.blocks_here();
  return spec;
}

int32_t ContextPart::local_block(int group, int32_t block) const {
  MILLRACE_CHECK(!is_spread(group) || block % shelves(group) == group_.rank());
  return block / shelves(group);
}

// ---------------------------------------------------------------- the rows of a step

void ContextPart::translate_tables(Piece& piece) const {
  const int32_t blocks = blocks_for(piece.slice.context_len + piece.slice.num_tokens);
  for (int g = 0; g < static_cast<int>(shelves_.size()); ++g) {
    if (!is_spread(g)) continue;
    std::vector<int32_t>& table = piece.tables[g];
    table.assign(static_cast<size_t>(blocks), kNoBlock);
    const int32_t* whole = piece.slice.tables[static_cast<size_t>(g)];
    for (int32_t b = 0; b < blocks; ++b) {
      if (shelf_of(b, shelves(g)) != group_.rank() || whole[b] == kNoBlock) continue;
      table[static_cast<size_t>(b)] = local_block(g, whole[b]);
    }
    piece.slice.tables[static_cast<size_t>(g)] = table.data();
  }
}

// Who computes which rows; this rank's become sequences of the local batch.
void ContextPart::cut_rows(Piece& piece) {
  const SequenceSlice& whole = piece.slice;
  const int32_t rows = whole.num_tokens, cuts = 2 * ranks();
  // What a row of an image sees of it lies behind that row: no schedule of a prompt has it.
  piece.spread = !whole.both_ways && dist::shares_rows(rows, ranks());
  any_spread_ |= piece.spread;
  const auto add = [&](int32_t begin, int32_t end, int rank) {
    std::fill_n(rank_of_row_.begin() + whole.first_row + begin, end - begin, rank);
    if (rank != kEveryone && rank != group_.rank()) return;
    SequenceSlice mine = whole;
    mine.first_row = static_cast<int32_t>(tokens_.size());
    mine.num_tokens = end - begin;
    mine.context_len = whole.context_len + begin;
    for (int32_t i = begin; i < end; ++i) {
      local_of_row_[static_cast<size_t>(whole.first_row + i)] = mine.first_row + i - begin;
    }
    tokens_.resize(tokens_.size() + static_cast<size_t>(end - begin));
    sequences_.push_back(mine);
    piece_of_sequence_.push_back(num_pieces_);
  };
  if (!piece.spread) return add(0, rows, kEveryone);
  for (int32_t c = 0; c < cuts; ++c) {
    const dist::RowRange part = dist::zigzag_rows(rows, ranks(), c);
    add(static_cast<int32_t>(part.begin), static_cast<int32_t>(part.end), dist::zigzag_rank(ranks(), c));
  }
}

Batch ContextPart::localize(const Batch& whole) {
  rank_of_row_.assign(whole.tokens.size(), kEveryone);
  local_of_row_.assign(whole.tokens.size(), -1);
  tokens_.clear();
  sequences_.clear();
  piece_of_sequence_.clear();
  logit_rows_.clear();
  own_logits_.clear();
  logit_ranks_.clear();
  given_.clear();
  rope_positions_.clear();
  num_pieces_ = 0;
  any_spread_ = false;
  if (pieces_.size() < whole.sequences.size()) pieces_.resize(whole.sequences.size());
  for (const SequenceSlice& slice : whole.sequences) {
    if (slice.num_tokens == 0) continue;
    Piece& piece = pieces_[num_pieces_];
    piece.slice = slice;
    piece.logits.clear();
    piece.works.clear();
    translate_tables(piece);
    cut_rows(piece);
    for (size_t i = 0; i < static_cast<size_t>(slice.num_tokens); ++i) {
      const size_t row = static_cast<size_t>(slice.first_row) + i;
      if (local_of_row_[row] >= 0) tokens_[static_cast<size_t>(local_of_row_[row])] = whole.tokens[row];
    }
    ++num_pieces_;
  }
  size_t at = 0;
  for (const int32_t row : whole.logit_rows) {
    while (row >= pieces_[at].slice.first_row + pieces_[at].slice.num_tokens) ++at;
    pieces_[at].logits.push_back(row - pieces_[at].slice.first_row);
    const int32_t rank = rank_of_row_[static_cast<size_t>(row)];
    logit_ranks_.push_back(std::max(rank, 0));  // rank 0 reports what everybody has
    if (rank != kEveryone && rank != group_.rank()) continue;
    if (logit_ranks_.back() == group_.rank()) own_logits_.push_back(static_cast<int32_t>(logit_rows_.size()));
    logit_rows_.push_back(local_of_row_[static_cast<size_t>(row)]);
  }
  take_images(whole);
  return {.tokens = tokens_,
          .sequences = sequences_,
          .logit_rows = logit_rows_,
          .only_logits = whole.only_logits,
          .given = given_,
          .rope_positions = rope_positions_,
          .adapters = whole.adapters};
}

// Of what the batch says of single rows that which is this rank's. Local rows are in the order of the
// whole's.
void ContextPart::take_images(const Batch& whole) {
  for (GivenRow given : whole.given) {
    given.row = local_of_row_[static_cast<size_t>(given.row)];
    if (given.row >= 0) given_.push_back(given);
  }
  if (whole.rope_positions.empty()) return;
  rope_positions_.resize(3 * tokens_.size());
  for (size_t row = 0; row < whole.tokens.size(); ++row) {
    const int32_t local = local_of_row_[row];
    if (local >= 0)
      std::copy_n(&whole.rope_positions[3 * row], 3, &rope_positions_[3 * static_cast<size_t>(local)]);
  }
}

// ---------------------------------------------------------------- keys and values

void ContextPart::send_kv(ThreadPool& pool, int group, PagedKv kv, int64_t kv_heads, int64_t head_dim,
                          const float* key, const float* value) {
  if (!any_spread_) return;
  const auto cols = static_cast<size_t>(kv_heads * head_dim);
  const int me = group_.rank();
  const auto keeps = [&](int rank, int32_t position) {
    return !is_spread(group) || keeper(group, position) == rank;
  };
  // body(piece, row, position) of rows that `by` computes and `to` keeps.
  const auto each = [&](int by, int to, const auto& body) {
    for (size_t p = 0; p < num_pieces_; ++p) {
      const Piece& piece = pieces_[p];
      for (int32_t i = 0; piece.spread && i < piece.slice.num_tokens; ++i) {
        const int32_t row = piece.slice.first_row + i, position = piece.slice.context_len + i;
        if (rank_of_row_[static_cast<size_t>(row)] == by && keeps(to, position)) body(piece, row, position);
      }
    }
  };
  out_.clear();
  for (int r = 0; r < ranks(); ++r) {
    const size_t before = out_.size();
    if (r != me) {
      each(me, r, [&](const Piece&, int32_t row, int32_t) {
        const auto local = static_cast<size_t>(local_of_row_[static_cast<size_t>(row)]);
        for (const float* values : {key, value}) {
          const auto bytes = std::as_bytes(std::span(values + local * cols, cols));
          out_.insert(out_.end(), bytes.begin(), bytes.end());
        }
      });
    }
    out_bytes_[static_cast<size_t>(r)] = out_.size() - before;
  }
  stored_.clear();
  for (int r = 0; r < ranks(); ++r) {
    size_t rows = 0;
    if (r != me) {
      each(r, me, [&](const Piece& piece, int32_t, int32_t position) {
        stored_.push_back({&piece, position, nullptr});
        ++rows;
      });
    }
    in_bytes_[static_cast<size_t>(r)] = rows * 2 * cols * sizeof(float);
  }
  in_.resize(stored_.size() * 2 * cols * sizeof(float));
  group_.all_to_all(out_, out_bytes_, in_, in_bytes_);
  const auto* values = reinterpret_cast<const float*>(in_.data());
  for (size_t i = 0; i < stored_.size(); ++i) stored_[i].values = values + i * 2 * cols;
  pool.parallel_for(std::ssize(stored_), kStoredPerTask, [&](int64_t begin, int64_t end, int) {
    PagedKv own = kv;
    for (int64_t i = begin; i < end; ++i) {
      const StoredRow& row = stored_[static_cast<size_t>(i)];
      const int32_t* const table = row.piece->slice.tables[static_cast<size_t>(group)];
      own.tables = &table;
      for (int64_t h = 0; h < kv_heads; ++h) {
        store_kv(own, 0, row.position, h, head_dim, row.values + h * head_dim,
                 row.values + static_cast<int64_t>(cols) + h * head_dim);
      }
    }
  });
}

// ---------------------------------------------------------------- attention

// The parts of a rank, in their order: row maxima, row sums, values of each.
void ContextPart::exchange_parts(std::span<const SplitPart> parts, int64_t padded_dim) {
  const auto bytes_of = [&](const SplitPart& part) {
    return static_cast<size_t>(part.rows * (padded_dim + 2)) * sizeof(float);
  };
  const auto rank_of = [&](const SplitPart& part) { return static_cast<size_t>(part.split % ranks()); };
  std::fill(in_bytes_.begin(), in_bytes_.end(), size_t{0});
  for (const SplitPart& part : parts) in_bytes_[rank_of(part)] += bytes_of(part);
  // visit(values in the part, where they are in a message)
  const auto visit = [&](const SplitPart& part, std::byte* at, const auto& copy) {
    const auto rows = static_cast<size_t>(part.rows);
    copy(part.at.row_max, at, rows);
    copy(part.at.row_sum, at + rows * sizeof(float), rows);
    copy(part.at.out, at + 2 * rows * sizeof(float), rows * static_cast<size_t>(padded_dim));
  };
  const auto me = static_cast<size_t>(group_.rank());
  out_.resize(in_bytes_[me]);
  size_t all = 0, at = 0;
  for (const SplitPart& part : parts) {
    all += bytes_of(part);
    if (rank_of(part) != me) continue;
    visit(part, out_.data() + at,
          [](float* from, std::byte* to, size_t count) { std::memcpy(to, from, count * sizeof(float)); });
    at += bytes_of(part);
  }
  in_.resize(all);
  group_.all_gather(out_, in_, in_bytes_);
  std::vector<size_t> next(in_bytes_.size(), 0);
  for (size_t r = 1; r < next.size(); ++r) next[r] = next[r - 1] + in_bytes_[r - 1];
  for (const SplitPart& part : parts) {
    size_t& from = next[rank_of(part)];
    if (rank_of(part) != me) {
      visit(part, in_.data() + from,
            [](float* to, std::byte* what, size_t count) { std::memcpy(to, what, count * sizeof(float)); });
    }
    from += bytes_of(part);
  }
}

const ContextPart::PieceWork& ContextPart::work_of(Piece& piece, int32_t chunk, bool only_logits) const {
  for (const PieceWork& known : piece.works) {
    if (known.chunk == chunk && known.only_logits == only_logits) return known;
  }
  const SequenceSlice& slice = piece.slice;
  PieceWork& made = piece.works.emplace_back(PieceWork{chunk, only_logits, {}, {}});
  made.work = prompts_.plan(dist::prompt_layout(ranks(), slice.context_len, slice.num_tokens, chunk,
                                                only_logits ? &piece.logits : nullptr));
  for (const dist::QueryRun& run : made.work.layout.queries[static_cast<size_t>(group_.rank())]) {
    const int64_t row = slice.first_row + run.first - slice.context_len;
    made.own_rows.push_back(local_of_row_[static_cast<size_t>(row)]);
  }
  return made;
}

void ContextPart::attend(const Context& ctx, const AttentionPlan& plan, int group, PagedAttention op,
                         bool only_logits) {
  const auto piece_of = [&](const QueryTile& tile) {
    return piece_of_sequence_[static_cast<size_t>(tile.sequence)];
  };
  tiles_.clear();
  bool any_shared = false;
  for (size_t p = 0; p < num_pieces_; ++p) any_shared |= !pieces_[p].spread;
  for (const QueryTile& tile : plan.tiles()) {
    if (any_shared && !pieces_[piece_of(tile)].spread) tiles_.push_back(tile);
  }
  if (!tiles_.empty()) {
    paged_attention_over_ranks(
        ctx, plan, op, tiles_,
        {[this](int64_t split) { return split % ranks() == group_.rank(); },
         [&](std::span<const SplitPart> parts) { exchange_parts(parts, plan.padded_dim()); }});
  }
  for (size_t p = 0; p < num_pieces_; ++p) {
    Piece& piece = pieces_[p];
    if (!piece.spread || (only_logits && piece.logits.empty())) continue;
    const PieceWork& work = work_of(piece, op.mask.chunk, only_logits);
    prompts_.attend(ctx, plan, op, work.work, piece.slice.tables[static_cast<size_t>(group)], work.own_rows);
  }
}

// ---------------------------------------------------------------- what rank 0 gets

template <class T>
std::span<const T> ContextPart::collect(const T* own, size_t cols, std::vector<T>& whole) {
  const int me = group_.rank();
  if (std::all_of(logit_ranks_.begin(), logit_ranks_.end(), [](int32_t rank) { return rank == 0; })) {
    if (me != 0) return {};
    return {own, own_logits_.size() * cols};
  }
  if (me != 0) {
    if (!own_logits_.empty()) group_.send(0, std::as_bytes(std::span(own, own_logits_.size() * cols)));
    return {};
  }
  whole.resize(logit_ranks_.size() * cols);
  std::vector<T> theirs;
  for (int r = 0; r < ranks(); ++r) {
    const auto rows = static_cast<size_t>(std::count(logit_ranks_.begin(), logit_ranks_.end(), r));
    const T* from = own;
    if (r != 0) {
      theirs.resize(rows * cols);
      if (rows > 0) group_.recv(r, std::as_writable_bytes(std::span(theirs)));
      from = theirs.data();
    }
    for (size_t i = 0; i < logit_ranks_.size(); ++i) {
      if (logit_ranks_[i] != r) continue;
      std::copy_n(from, cols, whole.begin() + static_cast<std::ptrdiff_t>(i * cols));
      from += cols;
    }
  }
  return whole;
}
template std::span<const float> ContextPart::collect(const float*, size_t, std::vector<float>&);
template std::span<const int32_t> ContextPart::collect(const int32_t*, size_t, std::vector<int32_t>&);

void ContextPart::collect_hidden(const float* residual, int64_t hidden) {
  const auto cols = static_cast<size_t>(hidden);
  const auto each_row_of = [&](int rank, const auto& body) {
    for (size_t row = 0; row < rank_of_row_.size(); ++row) {
      if (rank_of_row_[row] == rank) body(row);
    }
  };
  std::vector<float> rows;
  if (group_.rank() != 0) {
    each_row_of(group_.rank(), [&](size_t row) {
      const float* from = residual + static_cast<size_t>(local_of_row_[row]) * cols;
      rows.insert(rows.end(), from, from + cols);
    });
    if (!rows.empty()) group_.send(0, std::as_bytes(std::span(rows)));
    return;
  }
  hidden_.resize(rank_of_row_.size() * cols);
  for (size_t row = 0; row < rank_of_row_.size(); ++row) {
    if (local_of_row_[row] < 0) continue;
    std::copy_n(residual + static_cast<size_t>(local_of_row_[row]) * cols, cols,
                hidden_.begin() + static_cast<std::ptrdiff_t>(row * cols));
  }
  for (int r = 1; r < ranks(); ++r) {
    rows.resize(static_cast<size_t>(std::count(rank_of_row_.begin(), rank_of_row_.end(), r)) * cols);
    if (rows.empty()) continue;
    group_.recv(r, std::as_writable_bytes(std::span(rows)));
    auto from = rows.begin();
    each_row_of(r, [&](size_t row) {
      std::copy_n(from, cols, hidden_.begin() + static_cast<std::ptrdiff_t>(row * cols));
      from += static_cast<std::ptrdiff_t>(cols);
    });
  }
}

}  // namespace millrace::cpu
