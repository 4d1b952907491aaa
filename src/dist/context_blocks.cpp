#include "dist/context_blocks.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace millrace::dist {

int64_t Block::rows() const {
  int64_t total = 0;
  for (const TokenRun& run : runs) total += run.rows();
  return total;
}

size_t Block::bytes() const {
  int64_t of_row = 0;
  for (const int64_t section : row_bytes) of_row += section;
  return static_cast<size_t>(rows() * of_row);
}

const std::byte* Block::at(size_t section, size_t run) const {
  int64_t offset = 0, before = 0;
  for (size_t i = 0; i < section; ++i) offset += rows() * row_bytes[i];
  for (size_t i = 0; i < run; ++i) before += runs[i].rows();
  return data.data() + offset + before * row_bytes[section];
}
std::byte* Block::at(size_t section, size_t run) {
  return const_cast<std::byte*>(static_cast<const Block*>(this)->at(section, run));
}

Block make_block(std::vector<TokenRun> runs, std::vector<int64_t> row_bytes) {
  Block block{std::move(runs), std::move(row_bytes), {}};
  block.data.resize(block.bytes());
  return block;
}

Block part_of(const Block& block, const std::vector<TokenRun>& runs) {
  Block part = make_block(runs, block.row_bytes);
  for (size_t i = 0; i < runs.size(); ++i) {
    const auto holder = std::find_if(block.runs.begin(), block.runs.end(), [&](const TokenRun& held) {
      return held.sequence == runs[i].sequence && held.first <= runs[i].first && runs[i].last <= held.last;
    });
    MILLRACE_CHECK(holder != block.runs.end());
    const auto held = static_cast<size_t>(holder - block.runs.begin());
    for (size_t section = 0; section < block.row_bytes.size(); ++section) {
      const int64_t each = block.row_bytes[section];
      std::memcpy(part.at(section, i), block.at(section, held) + (runs[i].first - holder->first) * each,
                  static_cast<size_t>(runs[i].rows() * each));
    }
  }
  return part;
}

void exchange_messages(Communicator& group, const std::vector<Message>& messages) {
  const int rank = group.rank();
  std::vector<bool> done(messages.size(), false);
  for (size_t left = messages.size(); left > 0;) {
    // A round: the first of what is left that no earlier one of the round stands in the way of.
    std::vector<bool> sends(static_cast<size_t>(group.size())), receives(static_cast<size_t>(group.size()));
    const Message *out = nullptr, *in = nullptr;
    for (size_t i = 0; i < messages.size(); ++i) {
      const Message& m = messages[i];
      const auto from = static_cast<size_t>(m.from), to = static_cast<size_t>(m.to);
      if (done[i] || (m.bytes > 0 && (sends[from] || receives[to]))) continue;
      done[i] = true;
      --left;
      if (m.bytes == 0) continue;
      sends[from] = receives[to] = true;
      if (m.from == rank) out = &m;
      if (m.to == rank) in = &m;
    }
    if (out != nullptr && in != nullptr) {
      group.send_recv(out->to, out->out, in->from, in->in);
    } else if (out != nullptr) {
      group.send(out->to, out->out);
    } else if (in != nullptr) {
      group.recv(in->from, in->in);
    }
  }
}

}  // namespace millrace::dist
