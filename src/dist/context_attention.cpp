#include "dist/context_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <thread>

#include "base/check.h"
#include "base/error.h"

namespace millrace::dist {
namespace {

static_assert(kContextChunk == MR_FLASH_CHUNK);

// The tokens of chunks within a run.
TokenRun tokens_of(const ChunkRange& chunks, const TokenRun& run) {
  return {run.sequence, std::max(chunks.first * kContextChunk, run.first),
          std::min(chunks.last * kContextChunk, run.last)};
}

int32_t window_side(int64_t side) {
  return side < 0 ? -1
                  : static_cast<int32_t>(std::min<int64_t>(side, std::numeric_limits<int32_t>::max() / 2));
}

mr_flash_problem flash_problem(const ContextProblem& p, int64_t queries, int64_t keys) {
  mr_flash_problem to{};
  to.type = p.type;
  to.batch = 1;
  to.heads = p.heads;
  to.kv_heads = p.kv_heads;
  to.head_dim = p.head_dim;
  to.value_dim = p.value_dim;
  to.max_q = static_cast<int32_t>(queries);
  to.max_k = static_cast<int32_t>(keys);
  to.scale = p.scale;
  to.softcap = p.softcap;
  to.window_left = window_side(p.mask.left);
  to.window_right = window_side(p.mask.right);
  return to;
}

// Dense rows [heads][dim]; never written where it is an input.
mr_flash_tensor dense(const void* data, int64_t rows, int heads, int dim) {
  const int64_t row = int64_t{heads} * dim;
  return {const_cast<void*>(data), rows * row, row, dim};
}

void check_problem(const ContextProblem& p) {
  if (p.type != MR_F32 && p.type != MR_F16 && p.type != MR_BF16) {
    throw_error(ErrorCode::kUnsupported, "problem.type is {}, expected bf16, f16 or f32",
                mr_dtype_name(p.type));
  }
  if (p.heads < 1 || p.kv_heads < 1 || p.heads % p.kv_heads != 0) {
    throw_error(ErrorCode::kBadInput, "problem.heads is {}, expected a multiple of the {} kv_heads", p.heads,
                p.kv_heads);
  }
  for (const int dim : {p.head_dim, p.value_dim}) {
    if (dim < 8 || dim > 256 || dim % 8 != 0) {
      throw_error(ErrorCode::kUnsupported, "problem.{} is {}, expected a multiple of 8 from 8 to 256",
                  dim == p.head_dim ? "head_dim" : "value_dim", dim);
    }
  }
}

void check_group(const Communicator& group, const ContextLayout& layout) {
  check_layout(layout);
  if (group.size() != layout.ranks) {
    throw_error(ErrorCode::kBadInput, "layout.ranks is {}, expected the group's {}", layout.ranks,
                group.size());
  }
}

int64_t length_of(const ContextLayout& layout, const TokenRun& run) {
  return layout.lengths[static_cast<size_t>(run.sequence)];
}

// Of [all.first, all.last) the chunks whose owner is one of `owners`.
std::vector<bool> chunks_owned(const ContextLayout& layout, int sequence, const ChunkRange& all,
                               const std::set<int>& owners) {
  std::vector<bool> part(static_cast<size_t>(all.last - all.first));
  for (size_t i = 0; i < part.size(); ++i) {
    part[i] =
        owners.contains(layout.owner[static_cast<size_t>(sequence)][static_cast<size_t>(all.first) + i]);
  }
  return part;
}

// One span of keys for one run of queries.
Partial attend_span(PartialMath& math, const ContextProblem& problem, const std::byte* q,
                    const TokenRun& queries, const std::byte* k, const std::byte* v, const TokenRun& keys) {
  Partial partial = math.make(PartialKind::kOutput, queries.rows());
  const mr_flash_problem p = flash_problem(problem, queries.rows(), keys.rows());
  const auto q_first = static_cast<int32_t>(queries.first), k_first = static_cast<int32_t>(keys.first);
  const mr_flash_span span{&q_first, &k_first};
  size_t bytes = 0;
  void* workspace = math.workspace(p, bytes);
  PartialMath::check(mr_flash_partial_forward(
      math.device(), &p, &span, dense(q, queries.rows(), problem.heads, problem.head_dim),
      dense(k, keys.rows(), problem.kv_heads, problem.head_dim),
      dense(v, keys.rows(), problem.kv_heads, problem.value_dim),
      dense(partial.out.data(), queries.rows(), problem.heads, problem.value_dim), partial.lse.data(),
      workspace, bytes, nullptr));
  return partial;
}

// All nodes that a run of keys gives a run of queries.
void attend_run(PartialMath& math, const ContextProblem& problem, const std::byte* q, Forest& forest,
                const std::byte* k, const std::byte* v, const TokenRun& keys) {
  const ContextShape shape = problem.shape();
  const int64_t k_row = int64_t{shape.kv_heads} * shape.head_dim * shape.element_bytes;
  const int64_t v_row = int64_t{shape.kv_heads} * shape.value_dim * shape.element_bytes;
  for (const ChunkNode& node : nodes_of(forest.all(), chunks_of(keys))) {
    const TokenRun part = tokens_of(intersection(node.span(), forest.all()), keys);
    const int64_t offset = part.first - keys.first;
    forest.add(math, node,
               attend_span(math, problem, q, forest.run(), k + offset * k_row, v + offset * v_row, part));
  }
}

// The rounded result of a root.
void finish_partial(const PartialMath& math, const ContextProblem& problem, const float* sinks,
                    const Partial& partial, int64_t rows, void* out, float* lse) {
  const mr_flash_finish_args args{problem.type,
                                  rows,
                                  problem.heads,
                                  problem.value_dim,
                                  partial.out.data(),
                                  partial.lse.data(),
                                  sinks,
                                  dense(out, rows, problem.heads, problem.value_dim),
                                  lse};
  PartialMath::check(mr_flash_finish(math.device(), &args, nullptr));
}

void finish_gradient(const PartialMath& math, mr_dtype type, const std::vector<float>& partial, int64_t rows,
                     int heads, int dim, void* out) {
  const mr_flash_finish_args args{
      type, rows, heads, dim, partial.data(), nullptr, nullptr, dense(out, rows, heads, dim), nullptr};
  PartialMath::check(mr_flash_finish(math.device(), &args, nullptr));
}

}  // namespace

ContextAttention::ContextAttention(mr_device* device, Communicator& group, const ContextProblem& problem,
                                   const ContextLayout& layout, const ContextSchedule& schedule,
                                   PartialOrder order)
    : math_(device, problem.heads, problem.kv_heads, problem.head_dim, problem.value_dim),
      group_(group),
      problem_(problem),
      layout_(layout),
      schedule_(schedule),
      order_(order),
      keys_of_queries_(static_cast<size_t>(layout.ranks)),
      queries_of_keys_(static_cast<size_t>(layout.ranks)) {
  check_problem(problem);
  check_group(group, layout);
  check_schedule(schedule, layout, problem.mask);
  for (const ContextStep& step : schedule.steps) {
    for (size_t rank = 0; rank < step.tiles.size(); ++rank) {
      for (const ContextTile& tile : step.tiles[rank]) {
        keys_of_queries_[rank][tile.queries].insert(tile.keys);
        queries_of_keys_[rank][tile.keys].insert(tile.queries);
      }
    }
  }
}

std::vector<Forest> ContextAttention::query_forests(int owner, PartialKind kind) const {
  std::vector<Forest> forests;
  for (const TokenRun& run : layout_.runs(owner)) {
    forests.emplace_back(run, keys_seen(run, length_of(layout_, run), problem_.mask), kind);
  }
  return forests;
}

std::vector<Forest> ContextAttention::key_forests(int owner) const {
  std::vector<Forest> forests;
  for (const TokenRun& run : layout_.runs(owner)) {
    forests.emplace_back(run, queries_seeing(run, length_of(layout_, run), problem_.mask),
                         PartialKind::kKeyGradient);
  }
  return forests;
}

// What `rank` sends home to `owner`, of each of its runs.
std::vector<std::vector<ChunkNode>> ContextAttention::nodes_of_queries(int rank, int owner) const {
  std::vector<std::vector<ChunkNode>> nodes;
  const Owners& owners = keys_of_queries_[static_cast<size_t>(rank)];
  for (const TokenRun& run : layout_.runs(owner)) {
    const ChunkRange all = keys_seen(run, length_of(layout_, run), problem_.mask);
    nodes.push_back(nodes_of(all, chunks_owned(layout_, run.sequence, all, owners.at(owner))));
  }
  return nodes;
}

std::vector<std::vector<ChunkNode>> ContextAttention::nodes_of_keys(int rank, int owner) const {
  std::vector<std::vector<ChunkNode>> nodes;
  const Owners& owners = queries_of_keys_[static_cast<size_t>(rank)];
  for (const TokenRun& run : layout_.runs(owner)) {
    const ChunkRange all = queries_seeing(run, length_of(layout_, run), problem_.mask);
    nodes.push_back(nodes_of(all, chunks_owned(layout_, run.sequence, all, owners.at(owner))));
  }
  return nodes;
}

Block ContextAttention::own_block(BlockKind kind, const ContextInputs& in) const {
  const ContextShape shape = problem_.shape();
  const int64_t of_head = int64_t{shape.head_dim} * shape.element_bytes;
  const int64_t of_value = int64_t{shape.value_dim} * shape.element_bytes;
  const std::vector<TokenRun> runs = layout_.runs(group_.rank());
  const auto copy = [](Block& block, size_t section, const void* from) {
    const auto bytes = static_cast<size_t>(block.rows() * block.row_bytes[section]);
    if (bytes == 0) return;
    if (from == nullptr)
      throw_error(ErrorCode::kBadInput, "q, k or v is null, expected {} rows", block.rows());
    std::memcpy(block.at(section, 0), from, bytes);
  };
  if (kind == BlockKind::kKeys) {
    Block keys = make_block(runs, {shape.kv_heads * of_head, shape.kv_heads * of_value});
    copy(keys, 0, in.k);
    copy(keys, 1, in.v);
    return keys;
  }
  Block queries = make_block(runs, {shape.heads * of_head});
  copy(queries, 0, in.q);
  return queries;
}

void ContextAttention::run_steps(std::map<BlockId, Block>& blocks,
                                 const std::function<void(const ContextTile&)>& compute) {
  const int rank = group_.rank();
  // The last step that uses a block of another owner: it is freed then.
  std::map<BlockId, size_t> last_use;
  for (size_t s = 0; s < schedule_.steps.size(); ++s) {
    for (const ContextTile& tile : schedule_.steps[s].tiles[static_cast<size_t>(rank)]) {
      last_use[{BlockKind::kQueries, tile.queries}] = last_use[{BlockKind::kKeys, tile.keys}] = s;
    }
    for (const BlockMove& move : schedule_.steps[s].moves) {
      if (move.from == rank) last_use[{move.kind, move.owner}] = s;
    }
  }
  for (size_t s = 0; s < schedule_.steps.size(); ++s) {
    const ContextStep& step = schedule_.steps[s];
    std::map<BlockId, Block> arriving;
    std::vector<Block> cut;  // parts of blocks, which must stay where they are
    cut.reserve(step.moves.size());
    std::vector<Message> messages;
    for (const BlockMove& move : step.moves) {
      const std::vector<int64_t>& row_bytes = blocks.at({move.kind, rank}).row_bytes;
      Message message{move.from, move.to, {}, {}, 0};
      int64_t rows = 0, of_row = 0;
      for (const TokenRun& run : move.runs) rows += run.rows();
      for (const int64_t section : row_bytes) of_row += section;
      message.bytes = static_cast<size_t>(rows * of_row);
      if (move.from == rank) {
        const Block& held = blocks.at({move.kind, move.owner});
        message.out = held.runs == move.runs ? held.data : cut.emplace_back(part_of(held, move.runs)).data;
      } else if (move.to == rank) {
        Block& block = arriving[{move.kind, move.owner}] = make_block(move.runs, row_bytes);
        message.in = block.data;
      }
      messages.push_back(message);
    }
    std::exception_ptr fault;
    std::thread moves([&] {
      try {
        exchange_messages(group_, messages);
      } catch (...) {
        fault = std::current_exception();
      }
    });
    try {
      for (const ContextTile& tile : step.tiles[static_cast<size_t>(rank)]) compute(tile);
    } catch (...) {
      moves.join();
      throw;
    }
    moves.join();
    if (fault != nullptr) std::rethrow_exception(fault);
    for (auto& [id, block] : arriving) blocks[id] = std::move(block);
    std::erase_if(blocks,
                  [&](const auto& entry) { return entry.first.owner != rank && last_use[entry.first] <= s; });
    if (on_step) on_step(s + 1, schedule_.steps.size());
  }
}

void ContextAttention::forward_tile(const Block& queries, const Block& keys, std::vector<Forest>& forests) {
  for (size_t i = 0; i < queries.runs.size(); ++i) {
    for (size_t j = 0; j < keys.runs.size(); ++j) {
      if (keys.runs[j].sequence != queries.runs[i].sequence) continue;
      attend_run(math_, problem_, queries.at(0, i), forests[i], keys.at(0, j), keys.at(1, j), keys.runs[j]);
    }
  }
}

// Those that rank `from` has of rank `to`'s tokens: of queries, or of keys where they are keys' gradients.
std::vector<std::vector<ChunkNode>> ContextAttention::nodes_sent(PartialKind kind, int from, int to) const {
  return kind == PartialKind::kKeyGradient ? nodes_of_keys(from, to) : nodes_of_queries(from, to);
}

// Partial results of others' tokens to their owners, who put them among their own.
void ContextAttention::return_partials(PartialKind kind, std::map<int, std::vector<Forest>>& forests) {
  const std::map<int, std::vector<std::byte>> received = exchange_partials(kind, forests);
  std::vector<Forest>& own = forests.at(group_.rank());
  if (order_ == PartialOrder::kCompact) return merge_compact(kind, received, own);
  for (const auto& [from, bytes] : received) {
    const std::byte* data = bytes.data();
    const auto nodes = nodes_sent(kind, from, group_.rank());
    for (size_t i = 0; i < own.size(); ++i) {
      for (const ChunkNode& node : nodes[i]) {
        own[i].add(math_, node, math_.unpack(kind, own[i].run().rows(), data));
      }
    }
  }
}

// What others have of this rank's tokens, by the rank it is from. `forests` of others are gone afterwards.
std::map<int, std::vector<std::byte>> ContextAttention::exchange_partials(
    PartialKind kind, std::map<int, std::vector<Forest>>& forests) {
  const int rank = group_.rank(), n = group_.size();
  const std::vector<Owners>& met = kind == PartialKind::kKeyGradient ? queries_of_keys_ : keys_of_queries_;
  std::map<int, std::vector<std::byte>> out, in;  // by the other rank
  std::vector<Message> messages;
  for (int hop = 1; hop < n; ++hop) {
    for (int from = 0; from < n; ++from) {
      const int to = (from + hop) % n;
      if (!met[static_cast<size_t>(from)].contains(to)) continue;
      const std::vector<TokenRun> runs = layout_.runs(to);
      const auto nodes = nodes_sent(kind, from, to);
      size_t bytes = 0;
      for (size_t i = 0; i < runs.size(); ++i) {
        const size_t count = order_ == PartialOrder::kCompact ? 1 : nodes[i].size();
        bytes += count * math_.bytes(kind, runs[i].rows());
      }
      Message message{from, to, {}, {}, bytes};
      if (from == rank) {
        std::vector<std::byte>& packed = out[to];
        packed.reserve(bytes);
        for (size_t i = 0; i < runs.size(); ++i) {
          const Forest& forest = forests.at(to)[i];
          if (order_ == PartialOrder::kCompact) {
            math_.pack(forest.fold(math_), packed);
          } else {
            for (const ChunkNode& node : nodes[i]) math_.pack(forest.node(node), packed);
          }
        }
        MILLRACE_CHECK(packed.size() == bytes);
        message.out = packed;
        forests.erase(to);
      } else if (to == rank) {
        in[from].resize(bytes);
        message.in = in[from];
      }
      messages.push_back(message);
    }
  }
  exchange_messages(group_, messages);
  return in;
}

// One partial of each run from every rank: own nodes first, then the others' in rank order.
void ContextAttention::merge_compact(PartialKind kind, const std::map<int, std::vector<std::byte>>& received,
                                     std::vector<Forest>& own) {
  size_t at = 0;  // of the run's partial in what a rank sent
  for (Forest& forest : own) {
    const int64_t rows = forest.run().rows();
    Forest folded(forest.run(), forest.all(), kind);
    Partial total = forest.fold(math_);
    for (const auto& [from, bytes] : received) {
      const std::byte* data = bytes.data() + at;
      math_.merge(kind, rows, total, math_.unpack(kind, rows, data));
    }
    folded.add(math_, root_of(forest.all()), std::move(total));
    forest = std::move(folded);
    at += math_.bytes(kind, rows);
  }
}

void ContextAttention::forward(const ContextInputs& in, void* out, float* lse) {
  const int rank = group_.rank();
  std::map<BlockId, Block> blocks;
  for (const BlockKind kind : {BlockKind::kQueries, BlockKind::kKeys})
    blocks[{kind, rank}] = own_block(kind, in);
  std::map<int, std::vector<Forest>> forests;
  forests.emplace(rank, query_forests(rank, PartialKind::kOutput));
  run_steps(blocks, [&](const ContextTile& tile) {
    auto found = forests.find(tile.queries);
    if (found == forests.end()) {
      found = forests.emplace(tile.queries, query_forests(tile.queries, PartialKind::kOutput)).first;
    }
    forward_tile(blocks.at({BlockKind::kQueries, tile.queries}), blocks.at({BlockKind::kKeys, tile.keys}),
                 found->second);
  });
  return_partials(PartialKind::kOutput, forests);
  auto* to = static_cast<std::byte*>(out);
  const int64_t row = int64_t{problem_.heads} * problem_.value_dim * problem_.shape().element_bytes;
  for (const Forest& forest : forests.at(rank)) {
    const int64_t rows = forest.run().rows();
    finish_partial(math_, problem_, problem_.sinks, forest.root(), rows, to, lse);
    to += rows * row;
    if (lse != nullptr) lse += rows * problem_.heads;
  }
}

// ---------------------------------------------------------------- backward

namespace {

// [heads][rows of the run] -> [heads][rows of the part]
std::vector<float> part_of_rows(const std::byte* from, int heads, const TokenRun& run, const TokenRun& part) {
  std::vector<float> to(static_cast<size_t>(heads * part.rows()));
  for (int h = 0; h < heads; ++h) {
    std::memcpy(to.data() + h * part.rows(),
                from + (h * run.rows() + part.first - run.first) * static_cast<int64_t>(sizeof(float)),
                static_cast<size_t>(part.rows()) * sizeof(float));
  }
  return to;
}

}  // namespace

void ContextAttention::backward_tile(const ContextTile& tile, const Block& queries, const Block& keys) {
  const ContextShape shape = problem_.shape();
  const int64_t q_row = queries.row_bytes[0], o_row = queries.row_bytes[1];
  std::vector<Forest>& d_queries = d_queries_.at(tile.queries);
  std::vector<Forest>& d_keys = d_keys_.at(tile.keys);
  // By run of keys and node of queries: rows of keys that are not held here are seen by nobody here.
  std::map<std::pair<size_t, ChunkNode>, Partial> of_keys;
  for (size_t i = 0; i < queries.runs.size(); ++i) {
    const TokenRun& q_run = queries.runs[i];
    for (size_t j = 0; j < keys.runs.size(); ++j) {
      const TokenRun& held = keys.runs[j];
      if (held.sequence != q_run.sequence) continue;
      const auto whole = std::find_if(d_keys.begin(), d_keys.end(), [&](const Forest& f) {
        return f.run().sequence == held.sequence && f.run().first <= held.first && held.last <= f.run().last;
      });
      MILLRACE_CHECK(whole != d_keys.end());
      const auto run_idx = static_cast<size_t>(whole - d_keys.begin());
      const std::vector<ChunkNode> q_nodes = nodes_of(whole->all(), chunks_of(q_run));
      for (const ChunkNode& q_node : q_nodes) {
        of_keys.try_emplace({run_idx, q_node}, math_.make(PartialKind::kKeyGradient, whole->run().rows()));
      }
      for (const ChunkNode& k_node : nodes_of(d_queries[i].all(), chunks_of(held))) {
        const TokenRun k_part = tokens_of(intersection(k_node.span(), d_queries[i].all()), held);
        Partial of_queries = math_.make(PartialKind::kQueryGradient, q_run.rows());
        for (const ChunkNode& q_node : q_nodes) {
          const TokenRun q_part = tokens_of(intersection(q_node.span(), whole->all()), q_run);
          if (intersection(keys_seen(q_part, length_of(layout_, q_part), problem_.mask), chunks_of(k_part))
                  .empty()) {
            continue;
          }
          const int64_t q_at = q_part.first - q_run.first, k_at = k_part.first - held.first;
          const int64_t k_to = k_part.first - whole->run().first;
          Partial& keys_to = of_keys.at({run_idx, q_node});
          const std::vector<float> lse = part_of_rows(queries.at(2, i), shape.heads, q_run, q_part);
          const std::vector<float> delta = part_of_rows(queries.at(3, i), shape.heads, q_run, q_part);
          const mr_flash_problem p = flash_problem(problem_, q_part.rows(), k_part.rows());
          const auto q_first = static_cast<int32_t>(q_part.first),
                     k_first = static_cast<int32_t>(k_part.first);
          const mr_flash_span span{&q_first, &k_first};
          const mr_flash_partial_gradients gradients{
              dense(queries.at(1, i) + q_at * o_row, q_part.rows(), shape.heads, shape.value_dim),
              lse.data(),
              delta.data(),
              dense(of_queries.out.data() + q_at * shape.heads * shape.head_dim, q_part.rows(), shape.heads,
                    shape.head_dim),
              dense(keys_to.out.data() + k_to * shape.kv_heads * shape.head_dim, k_part.rows(),
                    shape.kv_heads, shape.head_dim),
              dense(keys_to.second.data() + k_to * shape.kv_heads * shape.value_dim, k_part.rows(),
                    shape.kv_heads, shape.value_dim)};
          size_t bytes = 0;
          void* workspace = math_.workspace(p, bytes);
          PartialMath::check(mr_flash_partial_backward(
              math_.device(), &p, &span,
              dense(queries.at(0, i) + q_at * q_row, q_part.rows(), shape.heads, shape.head_dim),
              dense(keys.at(0, j) + k_at * keys.row_bytes[0], k_part.rows(), shape.kv_heads, shape.head_dim),
              dense(keys.at(1, j) + k_at * keys.row_bytes[1], k_part.rows(), shape.kv_heads, shape.value_dim),
              &gradients, workspace, bytes, nullptr));
        }
        d_queries[i].add(math_, k_node, std::move(of_queries));
      }
    }
  }
  for (auto& [id, partial] : of_keys) d_keys[id.first].add(math_, id.second, std::move(partial));
}

void ContextAttention::finish_sinks(const float* lse, const std::vector<float>& delta, float* d_sinks) {
  const int n = group_.size(), heads = problem_.heads;
  std::vector<double> mine;
  std::vector<size_t> bytes_of_rank(static_cast<size_t>(n));
  size_t total = 0;
  for (int rank = 0; rank < n; ++rank) {
    for (const TokenRun& run : layout_.runs(rank)) {
      const ChunkRange chunks = chunks_of(run);
      bytes_of_rank[static_cast<size_t>(rank)] +=
          static_cast<size_t>((chunks.last - chunks.first) * heads) * sizeof(double);
    }
    total += bytes_of_rank[static_cast<size_t>(rank)];
  }
  int64_t at = 0;
  for (const TokenRun& run : layout_.runs(group_.rank())) {
    for (int64_t first = 0; first < run.rows(); first += kContextChunk) {
      for (int h = 0; h < heads; ++h) {
        double sum = 0;
        const int64_t row = at + h * run.rows() + first;
        if (problem_.sinks[h] != -std::numeric_limits<float>::infinity()) {
          PartialMath::check(mr_flash_sink_gradient(problem_.sinks[h], lse + row, delta.data() + row,
                                                    std::min(kContextChunk, run.rows() - first), &sum));
        }
        mine.push_back(sum);
      }
    }
    at += run.rows() * heads;
  }
  std::vector<double> all(total / sizeof(double));
  group_.all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)), bytes_of_rank);
  // By sequence and chunk, as one device adds them: each rank's are in that order already.
  std::vector<size_t> next(static_cast<size_t>(n));
  for (size_t rank = 1; rank < next.size(); ++rank)
    next[rank] = next[rank - 1] + bytes_of_rank[rank - 1] / sizeof(double);
  std::vector<double> sums(static_cast<size_t>(heads));
  for (const std::vector<int>& owners : layout_.owner) {
    for (const int owner : owners) {
      for (double& sum : sums) sum += all[next[static_cast<size_t>(owner)]++];
    }
  }
  for (int h = 0; h < heads; ++h) d_sinks[h] = static_cast<float>(sums[static_cast<size_t>(h)]);
}

// delta of each run [heads][rows], as lse.
std::vector<float> ContextAttention::deltas(const ContextGradients& g) {
  const ContextShape shape = problem_.shape();
  const int64_t o_row = int64_t{shape.heads} * shape.value_dim * shape.element_bytes;
  std::vector<float> delta(static_cast<size_t>(layout_.rows(group_.rank()) * shape.heads));
  int64_t at = 0;
  for (const TokenRun& run : layout_.runs(group_.rank())) {
    const mr_flash_problem p = flash_problem(problem_, run.rows(), run.rows());
    size_t bytes = 0;
    void* workspace = math_.workspace(p, bytes);
    PartialMath::check(mr_flash_delta(
        math_.device(), &p,
        dense(static_cast<const std::byte*>(g.out) + at * o_row, run.rows(), shape.heads, shape.value_dim),
        dense(static_cast<const std::byte*>(g.d_out) + at * o_row, run.rows(), shape.heads, shape.value_dim),
        delta.data() + at * shape.heads, workspace, bytes, nullptr));
    at += run.rows();
  }
  return delta;
}

// Queries with what their gradients need: dO, lse and delta.
Block ContextAttention::block_of_gradients(const ContextInputs& in, const ContextGradients& g,
                                           const std::vector<float>& delta) const {
  const ContextShape shape = problem_.shape();
  const int64_t rows = layout_.rows(group_.rank());
  const int64_t o_row = int64_t{shape.heads} * shape.value_dim * shape.element_bytes,
                of_float = int64_t{shape.heads} * 4;
  const Block q = own_block(BlockKind::kQueries, in);
  Block own = make_block(layout_.runs(group_.rank()), {q.row_bytes[0], o_row, of_float, of_float});
  if (rows > 0) {
    std::memcpy(own.at(0, 0), q.data.data(), q.data.size());
    std::memcpy(own.at(1, 0), g.d_out, static_cast<size_t>(rows * o_row));
    std::memcpy(own.at(2, 0), g.lse, static_cast<size_t>(rows * of_float));
    std::memcpy(own.at(3, 0), delta.data(), static_cast<size_t>(rows * of_float));
  }
  return own;
}

// This rank's own, whose forests are whole, as tensors of the problem's type.
void ContextAttention::finish_gradients(const ContextGradients& g) const {
  const ContextShape shape = problem_.shape();
  const std::vector<TokenRun> runs = layout_.runs(group_.rank());
  const std::vector<Forest>&queries = d_queries_.at(group_.rank()), &keys = d_keys_.at(group_.rank());
  auto *d_q = static_cast<std::byte*>(g.d_q), *d_k = static_cast<std::byte*>(g.d_k),
       *d_v = static_cast<std::byte*>(g.d_v);
  for (size_t i = 0; i < runs.size(); ++i) {
    const int64_t count = runs[i].rows();
    const Partial& of_keys = keys[i].root();
    finish_gradient(math_, problem_.type, queries[i].root().out, count, shape.heads, shape.head_dim, d_q);
    finish_gradient(math_, problem_.type, of_keys.out, count, shape.kv_heads, shape.head_dim, d_k);
    finish_gradient(math_, problem_.type, of_keys.second, count, shape.kv_heads, shape.value_dim, d_v);
    d_q += count * shape.heads * shape.head_dim * shape.element_bytes;
    d_k += count * shape.kv_heads * shape.head_dim * shape.element_bytes;
    d_v += count * shape.kv_heads * shape.value_dim * shape.element_bytes;
  }
}

void ContextAttention::backward(const ContextInputs& in, const ContextGradients& g) {
  const int rank = group_.rank();
  if (g.d_sinks != nullptr && problem_.sinks == nullptr) {
    throw_error(ErrorCode::kBadInput, "d_sinks is set, expected null where problem.sinks is null");
  }
  const int64_t rows = layout_.rows(rank);
  if (rows > 0 && (g.out == nullptr || g.lse == nullptr || g.d_out == nullptr)) {
    throw_error(ErrorCode::kBadInput, "out, lse or d_out is null, expected {} rows", rows);
  }
  const std::vector<float> delta = deltas(g);
  std::map<BlockId, Block> blocks;
  blocks[{BlockKind::kKeys, rank}] = own_block(BlockKind::kKeys, in);
  blocks[{BlockKind::kQueries, rank}] = block_of_gradients(in, g, delta);
  d_queries_.clear();
  d_keys_.clear();
  d_queries_.emplace(rank, query_forests(rank, PartialKind::kQueryGradient));
  d_keys_.emplace(rank, key_forests(rank));
  run_steps(blocks, [&](const ContextTile& tile) {
    if (!d_queries_.contains(tile.queries)) {
      d_queries_.emplace(tile.queries, query_forests(tile.queries, PartialKind::kQueryGradient));
    }
    if (!d_keys_.contains(tile.keys)) d_keys_.emplace(tile.keys, key_forests(tile.keys));
    backward_tile(tile, blocks.at({BlockKind::kQueries, tile.queries}),
                  blocks.at({BlockKind::kKeys, tile.keys}));
  });
  return_partials(PartialKind::kQueryGradient, d_queries_);
  return_partials(PartialKind::kKeyGradient, d_keys_);
  finish_gradients(g);
  d_queries_.clear();
  d_keys_.clear();
  if (g.d_sinks != nullptr) finish_sinks(g.lse, delta, g.d_sinks);
}

// ---------------------------------------------------------------- decode

namespace {

// The queries of every sequence that has enough tokens, and what each rank has for them.
struct DecodeRun {
  TokenRun queries;
  ChunkRange all;
};
std::vector<DecodeRun> decode_runs(const ContextLayout& layout, const ContextMask& mask, int queries) {
  std::vector<DecodeRun> runs;
  for (size_t s = 0; s < layout.lengths.size(); ++s) {
    const int64_t length = layout.lengths[s];
    if (length < queries) {
      throw_error(ErrorCode::kBadInput, "layout.lengths[{}] is {}, expected at least the {} queries", s,
                  length, queries);
    }
    const TokenRun run{static_cast<int>(s), length - queries, length};
    runs.push_back({run, keys_seen(run, length, mask)});
  }
  return runs;
}

std::vector<ChunkNode> decode_nodes(const ContextLayout& layout, const DecodeRun& run, int rank) {
  return nodes_of(run.all, chunks_owned(layout, run.queries.sequence, run.all, {rank}));
}

size_t decode_partial_bytes(const ContextLayout& layout, const PartialMath& math,
                            const std::vector<DecodeRun>& runs, int rank) {
  size_t bytes = 0;
  for (const DecodeRun& run : runs) {
    bytes += decode_nodes(layout, run, rank).size() * math.bytes(PartialKind::kOutput, run.queries.rows());
  }
  return bytes;
}

}  // namespace

int64_t decode_bytes(const ContextLayout& layout, const ContextProblem& problem, int queries, int rank) {
  const PartialMath math(nullptr, problem.heads, problem.kv_heads, problem.head_dim, problem.value_dim);
  const std::vector<DecodeRun> runs = decode_runs(layout, problem.mask, queries);
  size_t bytes = 0;
  for (int other = 0; other < layout.ranks; ++other) {
    if (other != rank) bytes += decode_partial_bytes(layout, math, runs, other);
  }
  return static_cast<int64_t>(bytes);
}

void context_decode(mr_device* device, Communicator& group, const ContextProblem& problem,
                    const ContextLayout& layout, int queries, const ContextInputs& in, void* out) {
  check_problem(problem);
  check_group(group, layout);
  if (queries < 1) throw_error(ErrorCode::kBadInput, "queries is {}, expected 1 or more", queries);
  PartialMath math(device, problem.heads, problem.kv_heads, problem.head_dim, problem.value_dim);
  const ContextShape shape = problem.shape();
  const std::vector<DecodeRun> runs = decode_runs(layout, problem.mask, queries);
  const int64_t q_row = int64_t{shape.heads} * shape.head_dim * shape.element_bytes;
  const int64_t k_row = int64_t{shape.kv_heads} * shape.head_dim * shape.element_bytes;
  const int64_t v_row = int64_t{shape.kv_heads} * shape.value_dim * shape.element_bytes;
  const auto *q = static_cast<const std::byte*>(in.q), *k = static_cast<const std::byte*>(in.k),
             *v = static_cast<const std::byte*>(in.v);
  std::vector<Forest> forests;
  for (const DecodeRun& run : runs) forests.emplace_back(run.queries, run.all, PartialKind::kOutput);
  int64_t row = 0;
  for (const TokenRun& keys : layout.runs(group.rank())) {
    const auto s = static_cast<size_t>(keys.sequence);
    attend_run(math, problem, q + keys.sequence * queries * q_row, forests[s], k + row * k_row,
               v + row * v_row, keys);
    row += keys.rows();
  }
  std::vector<size_t> bytes_of_rank;
  std::vector<std::byte> mine;
  size_t total = 0;
  for (int rank = 0; rank < group.size(); ++rank) {
    bytes_of_rank.push_back(decode_partial_bytes(layout, math, runs, rank));
    total += bytes_of_rank.back();
  }
  for (size_t s = 0; s < runs.size(); ++s) {
    for (const ChunkNode& node : decode_nodes(layout, runs[s], group.rank()))
      math.pack(forests[s].node(node), mine);
  }
  std::vector<std::byte> all(total);
  group.all_gather(mine, all, bytes_of_rank);
  const std::byte* from = all.data();
  for (int rank = 0; rank < group.size(); ++rank) {
    for (size_t s = 0; s < runs.size(); ++s) {
      for (const ChunkNode& node : decode_nodes(layout, runs[s], rank)) {
        Partial partial = math.unpack(PartialKind::kOutput, queries, from);
        if (rank != group.rank()) forests[s].add(math, node, std::move(partial));
      }
    }
  }
  auto* to = static_cast<std::byte*>(out);
  const int64_t o_row = int64_t{shape.heads} * shape.value_dim * shape.element_bytes;
  for (const Forest& forest : forests) {
    finish_partial(math, problem, problem.sinks, forest.root(), queries, to, nullptr);
    to += queries * o_row;
  }
}

}  // namespace millrace::dist
