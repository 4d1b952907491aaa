#include "engine/rank_messages.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "base/check.h"
#include "base/error.h"

namespace millrace {
namespace {

template <class T>
void append(std::vector<std::byte>& to, std::span<const T> values) {
  // Not insert(): g++ 12 at -O3 warns of a copy behind its end that does not happen.
  const size_t at = to.size();
  to.resize(at + values.size_bytes());
  std::copy_n(std::as_bytes(values).data(), values.size_bytes(), to.data() + at);
}
template <class T>
void append_one(std::vector<std::byte>& to, const T& value) {
  append(to, std::span(&value, 1));
}

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  template <class T>
  void read(std::span<T> to) {
    const size_t count = to.size() * sizeof(T);
    if (count > bytes_.size()) throw_error(ErrorCode::kInternal, "a message of rank 0 is too short");
    if (count > 0) std::memcpy(to.data(), bytes_.data(), count);
    bytes_ = bytes_.subspan(count);
  }
  template <class T>
  T read_one() {
    T value{};
    read(std::span(&value, 1));
    return value;
  }

 private:
  std::span<const std::byte> bytes_;
};

// The part of a spec that has no vectors.
struct PlainSpec {
  int32_t max_tokens, max_logit_rows, max_context, hidden, heads, kv_heads, head_dim, vocab, ffn, experts,
      experts_per_token, expert_ffn;
  int32_t adapter_rank;
  LatentShape latent;
  StateShape state;
  int32_t gated_attention, layer_input, expert_norms, page_summaries;
  DType kv_type;
  uint64_t groups, layers, beside;
};
static_assert(std::is_trivially_copyable_v<PlainSpec> && std::is_trivially_copyable_v<KvGroupSpec>);

struct BatchHeader {
  uint64_t tokens, sequences, logit_rows, table_entries, given, given_values, rope_positions;
  int32_t only_logits;
};

struct PlainSlice {
  int32_t first_row, num_tokens, context_len, adapter, second_text, both_ways, sparse_pages;
};

struct PlainGiven {
  int32_t row, further;
};

struct PlainRow {
  int32_t wanted, draw;
  float scale;
  int32_t top_k;
  float top_p, min_p;
  double uniform;
  float repetition_penalty, presence_penalty, frequency_penalty;
  int32_t logprobs;
  uint64_t counted, biases, words;
};

size_t values_of(const GivenRow& given, const ExecutorSpec& spec) {
  return (1 + static_cast<size_t>(given.further)) * static_cast<size_t>(spec.hidden);
}

size_t table_length(const SequenceSlice& slice) {
  return static_cast<size_t>((slice.context_len + slice.num_tokens + kBlockTokens - 1) / kBlockTokens);
}

}  // namespace

void send_order(dist::Communicator& group, int to, const RankMessage& message,
                std::span<const std::byte> bytes) {
  MILLRACE_CHECK(message.bytes == bytes.size());
  group.send(to, std::as_bytes(std::span(&message, 1)));
  if (!bytes.empty()) group.send(to, bytes);
}

RankMessage receive_order(dist::Communicator& group, int from, std::vector<std::byte>& bytes) {
  RankMessage message;
  group.recv(from, std::as_writable_bytes(std::span(&message, 1)));
  bytes.resize(message.bytes);
  if (!bytes.empty()) group.recv(from, bytes);
  return message;
}

std::vector<std::byte> packed(const ExecutorSpec& spec) {
  std::vector<std::byte> to;
  append_one(to, PlainSpec{spec.max_tokens,
                           spec.max_logit_rows,
                           spec.max_context,
                           spec.hidden,
                           spec.heads,
                           spec.kv_heads,
                           spec.head_dim,
                           spec.vocab,
                           spec.ffn,
                           spec.experts,
                           spec.experts_per_token,
                           spec.expert_ffn,
                           spec.adapter_rank,
                           spec.latent,
                           spec.state,
                           spec.gated_attention ? 1 : 0,
                           spec.layer_input,
                           spec.expert_norms ? 1 : 0,
                           spec.page_summaries ? 1 : 0,
                           spec.kv_type,
                           spec.kv_groups.size(),
                           spec.layers.size(),
                           spec.beside.size()});
  append(to, std::span(spec.kv_groups));
  append(to, std::span(spec.layers));
  append(to, std::span(spec.beside));
  return to;
}

ExecutorSpec unpacked_spec(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  const auto plain = reader.read_one<PlainSpec>();
  ExecutorSpec spec;
  spec.max_tokens = plain.max_tokens;
  spec.max_logit_rows = plain.max_logit_rows;
  spec.max_context = plain.max_context;
  spec.hidden = plain.hidden;
  spec.heads = plain.heads;
  spec.kv_heads = plain.kv_heads;
  spec.head_dim = plain.head_dim;
  spec.vocab = plain.vocab;
  spec.ffn = plain.ffn;
  spec.experts = plain.experts;
  spec.experts_per_token = plain.experts_per_token;
  spec.expert_ffn = plain.expert_ffn;
  spec.adapter_rank = plain.adapter_rank;
  spec.latent = plain.latent;
  spec.state = plain.state;
  spec.gated_attention = plain.gated_attention != 0;
  spec.layer_input = plain.layer_input;
  spec.expert_norms = plain.expert_norms != 0;
  spec.page_summaries = plain.page_summaries != 0;
  spec.kv_type = plain.kv_type;
  spec.kv_groups.resize(plain.groups);
  spec.layers.resize(plain.layers);
  reader.read(std::span(spec.kv_groups));
  reader.read(std::span(spec.layers));
  spec.beside.resize(plain.beside);
  reader.read(std::span(spec.beside));
  return spec;
}

void pack(const Batch& batch, const ExecutorSpec& spec, std::vector<std::byte>& to) {
  to.clear();
  const size_t num_groups = spec.kv_groups.size();
  size_t entries = 0;
  for (const SequenceSlice& slice : batch.sequences) entries += num_groups * table_length(slice);
  size_t given_values = 0;
  for (const GivenRow& given : batch.given) given_values += values_of(given, spec);
  append_one(to, BatchHeader{batch.tokens.size(), batch.sequences.size(), batch.logit_rows.size(), entries,
                             batch.given.size(), given_values, batch.rope_positions.size(),
                             batch.only_logits ? 1 : 0});
  append(to, batch.tokens);
  append(to, batch.logit_rows);
  for (const SequenceSlice& slice : batch.sequences) {
    append_one(to, PlainSlice{slice.first_row, slice.num_tokens, slice.context_len, slice.adapter,
                              slice.second_text, slice.both_ways ? 1 : 0, slice.sparse_pages});
  }
  for (const SequenceSlice& slice : batch.sequences) {
    for (size_t g = 0; g < num_groups; ++g) append(to, std::span(slice.tables[g], table_length(slice)));
  }
  append(to, batch.rope_positions);
  for (const GivenRow& given : batch.given) append_one(to, PlainGiven{given.row, given.further});
  for (const GivenRow& given : batch.given) append(to, std::span(given.values, values_of(given, spec)));
}

void ReceivedBatch::unpack(std::span<const std::byte> bytes, const ExecutorSpec& spec) {
  const size_t num_groups = spec.kv_groups.size();
  Reader reader(bytes);
  const auto header = reader.read_one<BatchHeader>();
  tokens.resize(header.tokens);
  logit_rows.resize(header.logit_rows);
  tables.resize(header.table_entries);
  rope_positions.resize(header.rope_positions);
  given.assign(header.given, {});
  given_values.resize(header.given_values);
  sequences.assign(header.sequences, {});
  only_logits = header.only_logits != 0;
  reader.read(std::span(tokens));
  reader.read(std::span(logit_rows));
  for (SequenceSlice& slice : sequences) {
    const auto plain = reader.read_one<PlainSlice>();
    slice.first_row = plain.first_row;
    slice.num_tokens = plain.num_tokens;
    slice.context_len = plain.context_len;
    slice.adapter = plain.adapter;
    slice.second_text = plain.second_text;
    slice.both_ways = plain.both_ways != 0;
    slice.sparse_pages = plain.sparse_pages;
  }
  reader.read(std::span(tables));
  const int32_t* at = tables.data();
  for (SequenceSlice& slice : sequences) {
    for (size_t g = 0; g < num_groups; ++g, at += table_length(slice)) slice.tables[g] = at;
  }
  reader.read(std::span(rope_positions));
  const float* values = given_values.data();
  for (GivenRow& row : given) {
    const auto plain = reader.read_one<PlainGiven>();
    row = {.row = plain.row, .values = values, .further = plain.further};
    values += values_of(row, spec);
  }
  reader.read(std::span(given_values));
}

void pack(std::span<const SampleRow> rows, dist::Range part, std::vector<std::byte>& to) {
  to.clear();
  append_one(to, uint64_t{rows.size()});
  const auto inside = [&](const auto& entry) { return entry.token >= part.begin && entry.token < part.end; };
  const auto count = [&](const auto& entries) {
    return static_cast<uint64_t>(std::count_if(entries.begin(), entries.end(), inside));
  };
  const auto append_inside = [&](const auto& entries) {
    for (const auto& entry : entries) {
      if (inside(entry)) append_one(to, entry);
    }
  };
  for (const SampleRow& row : rows) {
    std::span<const uint64_t> words = row.allowed;
    if (!words.empty()) {
      const auto first = static_cast<size_t>(part.begin / 64),
                 last = static_cast<size_t>((part.end + 63) / 64);
      words = words.subspan(first, last - first);
    }
    append_one(to, PlainRow{row.wanted ? 1 : 0, row.draw ? 1 : 0, row.scale, row.top_k, row.top_p, row.min_p,
                            row.uniform, row.repetition_penalty, row.presence_penalty, row.frequency_penalty,
                            row.logprobs, count(row.counted), count(row.bias), words.size()});
    append_inside(row.counted);
    append_inside(row.bias);
    append(to, words);
  }
}

void ReceivedRows::unpack(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  const auto count = reader.read_one<uint64_t>();
  rows.assign(count, {});
  counted.resize(count);
  bias.resize(count);
  allowed.resize(count);
  for (size_t i = 0; i < count; ++i) {
    const auto plain = reader.read_one<PlainRow>();
    counted[i].resize(plain.counted);
    bias[i].resize(plain.biases);
    allowed[i].resize(plain.words);
    reader.read(std::span(counted[i]));
    reader.read(std::span(bias[i]));
    reader.read(std::span(allowed[i]));
    SampleRow& row = rows[i];
    row.wanted = plain.wanted != 0;
    row.draw = plain.draw != 0;
    row.scale = plain.scale;
    row.top_k = plain.top_k;
    row.top_p = plain.top_p;
    row.min_p = plain.min_p;
    row.uniform = plain.uniform;
    row.repetition_penalty = plain.repetition_penalty;
    row.presence_penalty = plain.presence_penalty;
    row.frequency_penalty = plain.frequency_penalty;
    row.logprobs = plain.logprobs;
    row.counted = counted[i];
    row.bias = bias[i];
    row.allowed = allowed[i];
  }
}

namespace {

// Which of a group's layers are in [layers): they are numbered in their order.
dist::Range layers_in_group(const ExecutorSpec& spec, dist::Range layers, int group) {
  dist::Range found{0, 0};
  for (int64_t l = 0; l < std::ssize(spec.layers) && l < layers.end; ++l) {
    const bool beside = !spec.beside.empty() && spec.beside[static_cast<size_t>(l)].group == group;
    if (spec.layers[static_cast<size_t>(l)].group != group && !beside) continue;
    if (l < layers.begin) ++found.begin;
    ++found.end;
  }
  return found;
}

}  // namespace

BlockPart block_part(const ExecutorSpec& whole, const dist::Shares& shares, int rank, int group,
                     size_t key_head) {
  const auto layers = static_cast<int64_t>(whole.layers.size());
  if (shares.stages() > 1) {
    return {
        group, layers_in_group(whole, shares.layers_of(rank, layers), group), {0, whole.kv_heads}, key_head};
  }
  // Of a stage's spec those that are there.
  return {group,
          {0, whole.kv_groups[static_cast<size_t>(group)].num_layers},
          shares.heads_of(rank, whole.heads, whole.kv_heads).kv,
          key_head};
}

size_t part_bytes(const ExecutorSpec& whole, const BlockPart& part) {
  size_t bytes = 0;
  for_each_piece(whole, part, [&](size_t, size_t, size_t count) { bytes += count; });
  return bytes;
}

void copy_from_part(const ExecutorSpec& whole, const BlockPart& part, std::span<const std::byte> from,
                    std::span<std::byte> to) {
  for_each_piece(whole, part, [&](size_t whole_at, size_t part_at, size_t bytes) {
    std::memcpy(to.data() + whole_at, from.data() + part_at, bytes);
  });
}

void copy_to_part(const ExecutorSpec& whole, const BlockPart& part, std::span<const std::byte> from,
                  std::vector<std::byte>& to) {
  to.resize(part_bytes(whole, part));
  for_each_piece(whole, part, [&](size_t whole_at, size_t part_at, size_t bytes) {
    std::memcpy(to.data() + part_at, from.data() + whole_at, bytes);
  });
}

void gather_block(dist::Communicator& ranks, Executor& own, const ExecutorSpec& whole,
                  const dist::Shares& shares, size_t key_head, int group, int32_t block,
                  std::vector<std::byte>& part, std::span<std::byte> to) {
  for (int r = 0; r < ranks.size(); ++r) {
    const BlockPart of = block_part(whole, shares, r, group, key_head);
    if (of.empty()) continue;
    part.resize(part_bytes(whole, of));
    if (r == 0) {
      own.read_block(group, block, part);
      own.finish_reads();  // it is taken apart now
    } else {
      ranks.recv(r, part);
    }
    copy_from_part(whole, of, part, to);
  }
}

ExecutorSpec stage_spec(const ExecutorSpec& whole, const dist::Shares& shares) {
  if (shares.stages() == 1) return whole;
  ExecutorSpec spec = whole;
  const dist::Range layers = shares.layers(std::ssize(whole.layers));
  for (int g = 0; g < static_cast<int>(spec.kv_groups.size()); ++g) {
    const dist::Range mine = layers_in_group(whole, layers, g);
    spec.kv_groups[static_cast<size_t>(g)].num_layers = static_cast<int32_t>(mine.size());
    for (std::vector<ExecutorSpec::LayerPlace>* places : {&spec.layers, &spec.beside}) {
      for (int64_t l = 0; l < std::ssize(*places); ++l) {
        ExecutorSpec::LayerPlace& place = (*places)[static_cast<size_t>(l)];
        if (place.group != g) continue;
        const bool here = l >= layers.begin && l < layers.end;
        place.index = here ? place.index - static_cast<int32_t>(mine.begin) : 0;
      }
    }
  }
  return spec;
}

}  // namespace millrace
