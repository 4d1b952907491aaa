#include "kv/cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/error.h"
#include "kv/cache_impl.h"

namespace millrace::kv {

// ---------------------------------------------------------------- blocks of the main pool

Cache::Impl::Pool::Pool(const GroupOptions& group, const CacheOptions& options, uint64_t seed)
    : window(group.window),
      block_bytes(group.block_bytes),
      tail_blocks(group.window > 0 ? blocks_for(group.window - 1) : 0),
      blocks(group.num_blocks),
      free(group.num_blocks),
      evictor(options.eviction, group.num_blocks, seed, std::max(1, tail_blocks)) {
  // Handed out from the back: low ids first, so a short run touches little memory.
  std::iota(free.rbegin(), free.rend(), 0);
}

int32_t Cache::Impl::allocate(int group) {
  Pool& pool = pools_[group];
  if (pool.free.empty()) {
    const int32_t victim = choose_victim(group);
    MILLRACE_CHECK(victim != kNoBlock);
    demote(group, victim);
  }
  const int32_t block = pool.free.back();
  pool.free.pop_back();
  pool.blocks[block].refs = 1;
  return block;
}

void Cache::Impl::hold(int group, int32_t block) {
  Pool& pool = pools_[group];
  if (pool.blocks[block].refs++ == 0) pool.evictor.remove(block);
}

void Cache::Impl::unhold(int group, int32_t block) {
  Pool& pool = pools_[group];
  MILLRACE_CHECK(pool.blocks[block].refs > 0);
  if (--pool.blocks[block].refs > 0) return;
  const int32_t node = pool.blocks[block].node;
  if (node == kNoNode) {
    pool.free.push_back(block);
  } else if (!index_[node].copies[group].loading) {
    pool.evictor.add(block, index_[node].last_use, index_[node].uses);
  }
}

// As unhold, but what no boundary wants is not worth remembering.
void Cache::Impl::leave_window(int group, int32_t block) {
  const Pool::Block& b = pools_[group].blocks[block];
  if (b.refs == 1 && b.node != kNoNode && !index_[b.node].copies[group].keep) unname(group, block);
  unhold(group, block);
}

void Cache::Impl::unname(int group, int32_t block) {
  const int32_t node = std::exchange(pools_[group].blocks[block].node, kNoNode);
  index_[node].copies[group].block = kNoBlock;
  index_.erase_if_unused(node);
}

void Cache::Impl::touch(int32_t id, uint64_t uses) {
  Node& node = index_[id];
  node.last_use = ++tick_;
  node.uses += uses;
  for (int g = 0; g < num_groups(); ++g) {
    const int32_t item = item_of(id, g);
    if (ram_order_.contains(item)) ram_order_.set(item, {tick_, 0});
    if (disk_order_.contains(item)) disk_order_.set(item, {tick_, 0});
  }
}

int32_t Cache::Impl::available(int group) const {
  return static_cast<int32_t>(pools_[group].free.size()) + pools_[group].evictor.size();
}

int32_t Cache::Impl::first_seen(int group, int32_t position) const {
  const int32_t window = pools_[group].window;
  return window == 0 ? 0 : std::max(0, position - window + 1) / kBlockTokens;
}

// ---------------------------------------------------------------- looking up

std::shared_ptr<const Prompt> Cache::Impl::make_prompt(std::span<const int32_t> tokens,
                                                       std::string_view salt) const {
  auto prompt = std::make_shared<Prompt>();
  prompt->tokens.assign(tokens.begin(), tokens.end());
  prompt->root = root_key(identity_, salt);
  if (!options_.prefix_cache) return prompt;
  const BlockKey* parent = &prompt->root;
  prompt->keys.reserve(tokens.size() / kBlockTokens);
  for (; tokens.size() >= kBlockTokens; tokens = tokens.subspan(kBlockTokens)) {
    prompt->keys.push_back(child_key(*parent, tokens.first(kBlockTokens)));
    parent = &prompt->keys.back();
  }
  return prompt;
}

int32_t Cache::Impl::usable_blocks(int32_t most) const {
  for (int32_t n = most; n > 0;) {
    int32_t missing = -1;
    for (int g = 0; g < num_groups(); ++g) {
      if (pools_[g].window == 0) continue;
      for (int32_t b = n - 1; b >= first_seen(g, n * kBlockTokens) && b > missing; --b) {
        if (path_[b] == kNoNode || !index_[path_[b]].copies[g].anywhere()) missing = b;
      }
    }
    if (missing < 0) return n;
    n = missing;  // any boundary behind it that is nearer than the window needs this block too
  }
  return 0;
}

BlockCounts Cache::Impl::taken_by(int32_t blocks) const {
  BlockCounts takes{};
  for (int g = 0; g < num_groups(); ++g) {
    for (int32_t b = first_seen(g, blocks * kBlockTokens); b < blocks; ++b) {
      const Copy& copy = index_[path_[b]].copies[g];
      takes[g] += copy.block == kNoBlock || (!copy.loading && pools_[g].blocks[copy.block].refs == 0);
    }
  }
  return takes;
}

Cache::Impl::Hit Cache::Impl::find(const Prompt& prompt) const {
  Hit hit;
  path_.clear();
  for (const BlockKey& key : prompt.keys) {
    const int32_t node = index_.find(key);
    bool whole = node != kNoNode;
    for (int g = 0; whole && g < num_groups(); ++g) {
      whole = pools_[g].window > 0 || index_[node].copies[g].anywhere();
    }
    if (!whole && has_full_group_) break;
    path_.push_back(whole ? node : kNoNode);
  }
  if (path_.empty()) return hit;
  // The last token is always left to compute: its logits are wanted.
  const auto most = static_cast<int32_t>(prompt.tokens.size() - 1) / kBlockTokens;
  hit.branch = std::min(static_cast<int32_t>(path_.size()), most);
  hit.blocks = usable_blocks(hit.branch);
  const bool whole_way = hit.blocks == hit.branch;
  while (true) {
    hit.takes = taken_by(hit.blocks);
    int32_t excess = 0;
    for (int g = 0; g < num_groups(); ++g) excess = std::max(excess, hit.takes[g] - available(g));
    if (excess == 0) break;
    hit.blocks = usable_blocks(std::max(0, hit.blocks - excess));
  }
  if (whole_way && hit.blocks == hit.branch) find_partial(prompt, hit);
  return hit;
}

// A block of which only the first tokens fit is copied: its remaining places are then computed.
void Cache::Impl::find_partial(const Prompt& prompt, Hit& hit) const {
  const auto usable = [&](const Node& node) {
    for (int g = 0; g < num_groups(); ++g) {
      const Copy& copy = node.copies[g];
      if (copy.block == kNoBlock || copy.loading) return false;
    }
    return true;
  };
  const int32_t begin = hit.blocks * kBlockTokens;
  const int32_t left = static_cast<int32_t>(prompt.tokens.size()) - 1 - begin;
  PrefixIndex::Partial partial;
  if (hit.blocks <
      static_cast<int32_t>(path_.size())) {  // all of the block is known, but the last token is wanted
    const int32_t node = path_[hit.blocks];
    if (node != kNoNode && usable(index_[node])) partial = {node, left};
  } else if (hit.blocks > 0 && left > 0 && path_[hit.blocks - 1] != kNoNode) {
    partial = index_.best_child(path_[hit.blocks - 1], std::span(prompt.tokens).subspan(begin, left), usable);
  }
  if (partial.tokens == 0) return;
  for (int g = 0; g < num_groups(); ++g) {  // the copy, and its source until it is made
    const int32_t source = index_[partial.node].copies[g].block;
    if (hit.takes[g] + 1 + (pools_[g].blocks[source].refs == 0) > available(g)) return;
  }
  hit.partial = partial;
  for (int g = 0; g < num_groups(); ++g) ++hit.takes[g];
}

Match Cache::Impl::match(const Prompt& prompt) const {
  const Hit hit = find(prompt);
  Match match{.tokens = hit.tokens(), .takes = hit.takes};
  for (int32_t b = 0; b < hit.blocks; ++b) {
    bool ram = false, disk = false;
    for (int g = 0; g < num_groups(); ++g) {
      if (b < first_seen(g, hit.blocks * kBlockTokens)) continue;
      const Copy& copy = index_[path_[b]].copies[g];
      if (copy.block != kNoBlock) continue;
      (copy.ram != nullptr ? ram : disk) = true;
    }
    if (disk) {
      match.from_disk += kBlockTokens;
    } else if (ram) {
      match.from_ram += kBlockTokens;
    }
  }
  return match;
}

// ---------------------------------------------------------------- sequences

Cache::Impl::Rep* Cache::Impl::new_rep() {
  auto* s = new Rep;
  s->owner = this;
  s->place = sequences_.size();
  sequences_.push_back(s);
  return s;
}

Sequence Cache::Impl::make_sequence(std::string_view salt) {
  Rep* s = new_rep();
  s->key = root_key(identity_, salt);
  return Sequence(s);
}

Sequence Cache::Impl::attach(std::shared_ptr<const Prompt> prompt) {
  Sequence sequence(new_rep());
  ++stats_.prompts;
  stats_.prompt_tokens += prompt->tokens.size();
  start(*sequence.s_, prompt);
  return sequence;
}

void Cache::Impl::start(Rep& s, const std::shared_ptr<const Prompt>& prompt) {
  const Hit hit = find(*prompt);
  count_hit(hit);
  s.length = s.cached = hit.tokens();
  s.key = hit.blocks > 0 ? prompt->keys[hit.blocks - 1] : prompt->root;
  s.prompt_blocks = static_cast<int32_t>(prompt->tokens.size()) / kBlockTokens;
  s.branch_blocks = hit.branch;
  const bool partial = hit.partial.tokens > 0;
  if (partial) {  // must not leave while room is made for the rest
    touch(hit.partial.node, 1);
    for (int g = 0; g < num_groups(); ++g) hold(g, index_[hit.partial.node].copies[g].block);
  }
  take_path(s, *prompt, hit.blocks);
  if (partial) copy_partial(s, *prompt, hit);
  s.state = s.loads.empty() ? Sequence::State::kActive : Sequence::State::kLoading;
  s.prompt = s.loads.empty() ? nullptr : prompt;
}

void Cache::Impl::count_hit(const Hit& hit) {
  stats_.hit_tokens += static_cast<uint64_t>(hit.tokens());
  stats_.main.hit_tokens += static_cast<uint64_t>(hit.partial.tokens);
  for (int32_t b = 0; b < hit.blocks; ++b) {
    TierStats* slowest = &stats_.main;
    for (int g = 0; g < num_groups(); ++g) {
      if (b < first_seen(g, hit.blocks * kBlockTokens)) continue;
      const Copy& copy = index_[path_[b]].copies[g];
      TierStats& tier = copy.block != kNoBlock ? stats_.main : copy.ram != nullptr ? stats_.ram : stats_.disk;
      ++tier.hits;
      if (&tier == &stats_.disk || (&tier == &stats_.ram && slowest == &stats_.main)) slowest = &tier;
    }
    slowest->hit_tokens += kBlockTokens;
  }
}

// Holds the first blocks of path_. First everything that is wanted is made safe, then room is made for the
// rest.
void Cache::Impl::take_path(Rep& s, const Prompt& prompt, int32_t blocks) {
  for (int32_t b = blocks - 1; b >= 0; --b) {  // parents last: they are to leave after their children
    if (path_[b] == kNoNode) continue;
    const BlockKey& parent = b > 0 ? prompt.keys[b - 1] : prompt.root;
    index_.describe(path_[b], parent, b, std::span(prompt.tokens).subspan(b * kBlockTokens, kBlockTokens));
    touch(path_[b], 1);
  }
  for (int g = 0; g < num_groups(); ++g) {
    Rep::Table& table = s.tables[g];
    table.blocks.assign(blocks, kNoBlock);
    table.first_held = first_seen(g, blocks * kBlockTokens);
    for (int32_t b = table.first_held; b < blocks; ++b) {
      Copy& copy = index_[path_[b]].copies[g];
      if (copy.block != kNoBlock) {
        hold(g, table.blocks[b] = copy.block);
        if (copy.loading) s.loads.push_back({g, b});
      } else if (copy.ram != nullptr) {
        pin_ram(path_[b], g);
      } else {
        copy.loading = true;
        disk_order_.erase(item_of(path_[b], g));
      }
    }
  }
  for (int g = 0; g < num_groups(); ++g) {
    Rep::Table& table = s.tables[g];
    for (int32_t b = table.first_held; b < blocks; ++b) {
      if (table.blocks[b] != kNoBlock) continue;
      const int32_t node = path_[b], block = table.blocks[b] = allocate(g);
      Copy& copy = index_[node].copies[g];
      copy.block = block;
      pools_[g].blocks[block].node = node;
      pools_[g].evictor.returned(index_[node].key);
      if (copy.loading) {
        submit_read(node, g);
        s.loads.push_back({g, b});
      } else {
        store_.write(g, block, copy.ram->span());
        stats_.ram.bytes_read += pools_[g].block_bytes;
        unpin_ram(node, g);
      }
    }
  }
}

// The source is held; it is let go here.
void Cache::Impl::copy_partial(Rep& s, const Prompt& prompt, const Hit& hit) {
  const auto begin = prompt.tokens.begin() + hit.blocks * kBlockTokens;
  std::copy(begin, begin + hit.partial.tokens, s.tail.begin());
  const auto& copies = index_[hit.partial.node].copies;
  for (int g = 0; g < num_groups(); ++g) {
    const int32_t block = allocate(g);
    store_.copy(g, copies[g].block, block);
    s.tables[g].blocks.push_back(block);
    ++stats_.copies_on_write;
  }
  for (int g = 0; g < num_groups(); ++g) unhold(g, copies[g].block);
}

bool Cache::Impl::ready(Rep& s) {
  while (s.state == Sequence::State::kLoading) {
    bool failed = false;
    while (!s.loads.empty() && !failed) {
      const auto [g, b] = s.loads.back();
      const int32_t node = pools_[g].blocks[s.tables[g].blocks[b]].node;
      failed = node == kNoNode;
      if (!failed && index_[node].copies[g].loading) return false;
      if (!failed) s.loads.pop_back();
    }
    if (failed) {  // look it up again: what could not be read is forgotten
      const std::shared_ptr<const Prompt> prompt = s.prompt;
      stats_.hit_tokens -= static_cast<uint64_t>(s.cached);
      drop_blocks(s);
      start(s, prompt);
      continue;
    }
    s.state = Sequence::State::kActive;
    s.prompt.reset();
  }
  return true;
}

BlockCounts Cache::Impl::blocks_to_reserve(const Rep& s, int32_t tokens) const {
  BlockCounts needs{};
  if (tokens <= 0) return needs;
  const int32_t wanted = blocks_for(static_cast<int64_t>(s.length) + tokens),
                partial = s.length / kBlockTokens;
  for (int g = 0; g < num_groups(); ++g) {
    const auto held = static_cast<int32_t>(s.tables[g].blocks.size());
    needs[g] = std::max(0, wanted - held);
    if (s.length % kBlockTokens != 0 && pools_[g].blocks[s.tables[g].blocks[partial]].refs > 1) ++needs[g];
  }
  return needs;
}

bool Cache::Impl::reserve(Rep& s, int32_t tokens) {
  MILLRACE_CHECK(s.state == Sequence::State::kActive);
  const BlockCounts needs = blocks_to_reserve(s, tokens);
  for (int g = 0; g < num_groups(); ++g) {
    if (needs[g] > available(g)) return false;
  }
  for (int g = 0; g < num_groups(); ++g) {
    if (needs[g] == 0) continue;
    std::vector<int32_t>& table = s.tables[g].blocks;
    if (s.length % kBlockTokens != 0) {
      int32_t& partial = table[s.length / kBlockTokens];
      if (pools_[g].blocks[partial].refs > 1) {
        const int32_t copy = allocate(g);
        store_.copy(g, partial, copy);
        unhold(g, std::exchange(partial, copy));
        ++stats_.copies_on_write;
      }
    }
    const int32_t wanted = blocks_for(static_cast<int64_t>(s.length) + tokens);
    while (static_cast<int32_t>(table.size()) < wanted) table.push_back(allocate(g));
  }
  return true;
}

void Cache::Impl::advance(Rep& s, std::span<const int32_t> tokens) {
  MILLRACE_CHECK(s.state == Sequence::State::kActive);
  const int32_t final_length = s.length + static_cast<int32_t>(tokens.size());
  MILLRACE_CHECK(blocks_for(final_length) <= static_cast<int32_t>(s.tables[0].blocks.size()));
  if (options_.prefix_cache) {
    for (const int32_t token : tokens) {
      s.tail[s.length % kBlockTokens] = token;
      if (++s.length % kBlockTokens == 0) commit(s, s.length / kBlockTokens - 1, final_length);
    }
  }
  s.length = final_length;
  for (int g = 0; g < num_groups(); ++g) {
    Rep::Table& table = s.tables[g];
    const int32_t first = std::min(first_seen(g, s.length), static_cast<int32_t>(table.blocks.size()));
    for (; table.first_held < first; ++table.first_held) {
      leave_window(g, std::exchange(table.blocks[table.first_held], kNoBlock));
    }
  }
}

// A full block gets its name. If that is known already, the sequence takes the known block and gives up its
// own.
void Cache::Impl::commit(Rep& s, int32_t index, int32_t final_length) {
  const BlockKey parent = std::exchange(s.key, child_key(s.key, s.tail));
  const int32_t node = index_.find_or_add(s.key);
  index_.describe(node, parent, index, s.tail);
  touch(node, 0);
  for (int g = 0; g < num_groups(); ++g) {
    const bool keep = is_kept(s, g, index);
    if (!keep && index < first_seen(g, final_length)) continue;  // nobody will ask for it
    int32_t& mine = s.tables[g].blocks[index];
    Copy& copy = index_[node].copies[g];
    if (copy.block == kNoBlock) {
      copy.block = mine;
      pools_[g].blocks[mine].node = node;
      pools_[g].evictor.returned(s.key);
    } else if (!copy.loading) {
      hold(g, copy.block);
      unhold(g, std::exchange(mine, copy.block));
      ++stats_.deduplicated;
    }
    if (keep) {
      copy.keep = true;
      mark_dirty(node, g);
    }
  }
  index_.erase_if_unused(node);
}

// Is the block in the tail that resuming at some boundary needs?
bool Cache::Impl::is_kept(const Rep& s, int group, int32_t index) const {
  const Pool& pool = pools_[group];
  if (pool.window == 0) return true;
  const auto in_tail_of = [&](int32_t boundary) {
    return index < boundary && index >= boundary - pool.tail_blocks;
  };
  const int32_t every = std::max(1, options_.boundary_tokens / kBlockTokens);
  return in_tail_of(s.prompt_blocks) || in_tail_of(s.branch_blocks) ||
         in_tail_of((index / every + 1) * every);
}

Sequence Cache::Impl::fork(const Rep& s) {
  MILLRACE_CHECK(s.state == Sequence::State::kActive);
  Rep* copy = new_rep();
  copy->length = s.length;
  copy->cached = s.cached;
  copy->key = s.key;
  copy->tail = s.tail;
  copy->prompt_blocks = s.prompt_blocks;
  copy->branch_blocks = s.branch_blocks;
  for (int g = 0; g < num_groups(); ++g) {
    const Rep::Table& from = s.tables[g];
    const int32_t count = blocks_for(s.length);  // what is reserved beyond stays its own
    copy->tables[g].blocks.assign(from.blocks.begin(), from.blocks.begin() + count);
    copy->tables[g].first_held = from.first_held;
    for (int32_t b = from.first_held; b < count; ++b) hold(g, from.blocks[b]);
  }
  return Sequence(copy);
}

BlockCounts Cache::Impl::blocks_of_its_own(const Rep& s) const {
  BlockCounts counts{};
  for (int g = 0; g < num_groups(); ++g) {
    for (const int32_t block : s.tables[g].blocks) {
      if (block == kNoBlock) continue;
      const Pool::Block& b = pools_[g].blocks[block];
      counts[g] += b.refs == 1 && (b.node == kNoNode || !index_[b.node].copies[g].loading);
    }
  }
  return counts;
}

// The end of a sequence is where the next turn of a conversation resumes.
void Cache::Impl::remember_tail(Rep& s) {
  const auto blocks = static_cast<int32_t>(s.tables[0].blocks.size());
  for (int32_t b = blocks - 1; b >= 0; --b) {
    bool touched = false;
    for (int g = 0; g < num_groups(); ++g) {
      const int32_t block = s.tables[g].blocks[b];
      const int32_t node = block == kNoBlock ? kNoNode : pools_[g].blocks[block].node;
      if (node == kNoNode) continue;
      if (!std::exchange(touched, true)) touch(node, 0);
      index_[node].copies[g].keep = true;
      mark_dirty(node, g);
    }
  }
}

void Cache::Impl::drop_blocks(Rep& s) {
  for (int g = 0; g < num_groups(); ++g) {
    for (const int32_t block : s.tables[g].blocks) {
      if (block != kNoBlock) unhold(g, block);
    }
    s.tables[g].blocks.clear();
    s.tables[g].first_held = 0;
  }
  s.loads.clear();
  s.length = s.cached = 0;
}

void Cache::Impl::release(Rep* s) {
  if (s->state == Sequence::State::kActive) remember_tail(*s);
  if (s->state == Sequence::State::kSwapped) forget_swapped(*s);
  drop_blocks(*s);
  sequences_.back()->place = s->place;
  std::swap(sequences_[s->place], sequences_.back());
  sequences_.pop_back();
  delete s;
}

// ---------------------------------------------------------------- construction

namespace {

void check_options(const CacheOptions& options) {
  const auto bad = [](const char* what, auto found, const char* expected) {
    throw_error(ErrorCode::kBadInput, "kv cache: {}: found {}, expected {}", what, found, expected);
  };
  const size_t groups = options.groups.size();
  if (groups < 1 || groups > kMaxKvGroups) bad("groups", groups, "1 to 4");
  for (const GroupOptions& group : options.groups) {
    if (group.num_blocks < 1) bad("blocks of a group", group.num_blocks, "at least 1");
    if (group.block_bytes < 1) bad("bytes of a block", group.block_bytes, "at least 1");
    if (group.window < 0) bad("window", group.window, "0 or more");
    if (!options.disk_directory.empty() && options.disk_bytes < kFileHeaderBytes + group.block_bytes) {
      bad("size of the disk tier", options.disk_bytes, "room for a block at least");
    }
  }
  if (options.boundary_tokens < 1) bad("boundary tokens", options.boundary_tokens, "at least 1");
}

}  // namespace

Cache::Impl::Impl(CacheOptions options, BlockStore& store) : options_(std::move(options)), store_(store) {
  check_options(options_);
  identity_ = options_.identity;
  for (const GroupOptions& group : options_.groups) {
    identity_ += fmt::format("|{}:{}", group.window, group.block_bytes);
    pools_.emplace_back(group, options_, options_.seed + pools_.size());
    has_full_group_ |= group.window == 0;
  }
  if (!options_.log) {
    options_.log = [](const std::string& line) { std::fprintf(stderr, "millrace: %s\n", line.c_str()); };
  }
  if (!options_.disk_directory.empty()) open_disk();
  if (options_.ram_bytes == 0) return;
  for (int g = 0; g < num_groups(); ++g) {  // a first idea of what swapping costs
    store_.write(g, 0, read_main(g, 0)->span());
    const auto start = std::chrono::steady_clock::now();
    const Buffer bytes = read_main(g, 0);
    const auto middle = std::chrono::steady_clock::now();
    store_.write(g, 0, bytes->span());
    const std::chrono::duration<double> out = middle - start, in = std::chrono::steady_clock::now() - middle;
    const auto size = static_cast<double>(pools_[g].block_bytes);
    stats_.swap_out_rate = std::max(stats_.swap_out_rate, size / std::max(out.count(), 1e-9));
    stats_.swap_in_rate = std::max(stats_.swap_in_rate, size / std::max(in.count(), 1e-9));
  }
}

Cache::Impl::~Impl() { MILLRACE_CHECK(sequences_.empty()); }

// ---------------------------------------------------------------- the public face

Sequence& Sequence::operator=(Sequence&& other) noexcept {
  if (this != &other) {
    reset();
    s_ = std::exchange(other.s_, nullptr);
  }
  return *this;
}

void Sequence::reset() {
  if (s_ != nullptr) s_->owner->release(std::exchange(s_, nullptr));
}

Sequence::State Sequence::state() const { return s_->state; }
int32_t Sequence::length() const { return s_->length; }
int32_t Sequence::cached_tokens() const { return s_->cached; }
const int32_t* Sequence::table(int group) const { return s_->tables[group].blocks.data(); }
int32_t Sequence::held_blocks(int group) const {
  return static_cast<int32_t>(s_->tables[group].blocks.size()) - s_->tables[group].first_held;
}

Cache::Cache(CacheOptions options, BlockStore& store)
    : impl_(std::make_unique<Impl>(std::move(options), store)) {}
Cache::~Cache() = default;

std::shared_ptr<const Prompt> Cache::make_prompt(std::span<const int32_t> tokens,
                                                 std::string_view salt) const {
  return impl_->make_prompt(tokens, salt);
}
Match Cache::match(const Prompt& prompt) const { return impl_->match(prompt); }
Sequence Cache::attach(std::shared_ptr<const Prompt> prompt) { return impl_->attach(std::move(prompt)); }
Sequence Cache::make_sequence(std::string_view salt) { return impl_->make_sequence(salt); }
bool Cache::ready(Sequence& sequence) { return impl_->ready(*sequence.s_); }
bool Cache::reserve(Sequence& sequence, int32_t tokens) { return impl_->reserve(*sequence.s_, tokens); }
void Cache::advance(Sequence& sequence, std::span<const int32_t> tokens) {
  impl_->advance(*sequence.s_, tokens);
}
Sequence Cache::fork(const Sequence& sequence) { return impl_->fork(*sequence.s_); }
bool Cache::swap_out(Sequence& sequence) { return impl_->swap_out(*sequence.s_); }
bool Cache::swap_in(Sequence& sequence) { return impl_->swap_in(*sequence.s_); }
SwapCost Cache::swap_cost(const Sequence& sequence) const { return impl_->swap_cost(*sequence.s_); }
int32_t Cache::available(int group) const { return impl_->available(group); }
BlockCounts Cache::blocks_to_reserve(const Sequence& sequence, int32_t tokens) const {
  return impl_->blocks_to_reserve(*sequence.s_, tokens);
}
BlockCounts Cache::blocks_to_swap_in(const Sequence& sequence) const {
  return impl_->blocks_to_swap_in(*sequence.s_);
}
BlockCounts Cache::blocks_of_its_own(const Sequence& sequence) const {
  return impl_->blocks_of_its_own(*sequence.s_);
}
int32_t Cache::evict(int group, int32_t count) { return impl_->evict(group, count); }
void Cache::poll() { impl_->poll(); }
void Cache::wait(std::chrono::milliseconds at_most) { impl_->wait(at_most); }
void Cache::flush() { impl_->flush(); }
CacheStats Cache::stats() const { return impl_->stats(); }
void Cache::check_invariants() const { impl_->check_invariants(); }

}  // namespace millrace::kv
