// Construction and the public face of kv::Cache.
#include "kv/cache.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "base/check.h"
#include "base/error.h"
#include "kv/cache_impl.h"

namespace millrace::kv {

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
    if (group.boundary_tokens < 0) bad("boundary tokens of a group", group.boundary_tokens, "0 or more");
    if (group.shelves < 1 || group.shelves > kMaxShelves) bad("shelves", group.shelves, "1 to 16");
    if (group.num_blocks % group.shelves != 0) bad("blocks", group.num_blocks, "as many on every shelf");
    if (group.sparse && group.shelves > 1) bad("shelves of a sparse group", group.shelves, "1");
    if (group.sparse && group.window == 0) bad("window of a sparse group", group.window, "at least 1");
    if (!options.disk_directory.empty() && options.disk_bytes < kFileHeaderBytes + group.block_bytes) {
      bad("size of the disk tier", options.disk_bytes, "room for a block at least");
    }
  }
  if (options.boundary_tokens < 1) bad("boundary tokens", options.boundary_tokens, "at least 1");
}

}  // namespace

Cache::Impl::Pool::Pool(const GroupOptions& group, const CacheOptions& options, uint64_t seed)
    : window(group.window),
      block_bytes(group.block_bytes),
      sparse(group.sparse),
      boundary_blocks(std::max(
          1, (group.boundary_tokens > 0 ? group.boundary_tokens : options.boundary_tokens) / kBlockTokens)),
      tail_blocks(group.window > 0 ? blocks_for(group.window - 1) : 0),
      blocks(group.num_blocks) {
  for (int32_t s = 0; s < group.shelves; ++s) {
    shelves.push_back({{}, Evictor(options.eviction, group.num_blocks, seed, std::max(1, tail_blocks))});
    std::vector<int32_t>& free = shelves.back().free;
    free.reserve(static_cast<size_t>(group.num_blocks / group.shelves));
    // Handed out from the back: low ids first, so a short run touches little memory.
    for (int32_t b = group.num_blocks - group.shelves + s; b >= 0; b -= group.shelves) free.push_back(b);
  }
}

Cache::Impl::Impl(CacheOptions options, BlockStore& store) : options_(std::move(options)), store_(store) {
  check_options(options_);
  identity_ = options_.identity;
  for (const GroupOptions& group : options_.groups) {
    identity_ += fmt::format("|{}:{}", group.window, group.block_bytes);
    pools_.emplace_back(group, options_, options_.seed + pools_.size());
    pools_.back().first_count = counts();
    for (int32_t s = 0; s < group.shelves; ++s) places_.emplace_back(static_cast<int>(pools_.size()) - 1, s);
    has_full_group_ |= group.window == 0;
  }
  size_t blocks = 0;
  for (const Pool& pool : pools_) blocks += pool.blocks.size();
  if (options_.prefix_cache) index_.reserve(blocks);
  if (!options_.log) {
    options_.log = [](const std::string& line) { std::fprintf(stderr, "millrace: %s\n", line.c_str()); };
  }
  if (!options_.disk_directory.empty()) open_disk();
  if (options_.ram_bytes == 0) return;
  // A first idea of what swapping costs: the best of three, since one that a busy machine held up would say
  // that it never pays, and what is never done is never measured again.
  for (int i = 0; i < 3 * num_groups(); ++i) {
    const int g = i % num_groups();
    if (i == g) store_.write(g, 0, read_main(g, 0)->span());
    const auto start = std::chrono::steady_clock::now();
    const Buffer bytes = read_main(g, 0);
    store_.finish();
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

std::shared_ptr<const Prompt> Cache::make_prompt(std::span<const int32_t> tokens, std::string_view salt,
                                                 std::string_view variant) const {
  return impl_->make_prompt(tokens, salt, variant);
}
Match Cache::match(const Prompt& prompt) const { return impl_->match(prompt); }
Sequence Cache::attach(std::shared_ptr<const Prompt> prompt) { return impl_->attach(std::move(prompt)); }
Sequence Cache::make_sequence(std::string_view salt, std::string_view variant) {
  return impl_->make_sequence(salt, variant);
}
bool Cache::ready(Sequence& sequence) { return impl_->ready(*sequence.s_); }
bool Cache::reserve(Sequence& sequence, int32_t tokens) { return impl_->reserve(*sequence.s_, tokens); }
void Cache::advance(Sequence& sequence, std::span<const int32_t> tokens) {
  impl_->advance(*sequence.s_, tokens);
}
Sequence Cache::fork(const Sequence& sequence) { return impl_->fork(*sequence.s_); }
bool Cache::swap_out(Sequence& sequence) { return impl_->swap_out(*sequence.s_); }
bool Cache::swap_in(Sequence& sequence) { return impl_->swap_in(*sequence.s_); }
SwapCost Cache::swap_cost(const Sequence& sequence) const { return impl_->swap_cost(*sequence.s_); }
int32_t Cache::available(int count) const { return impl_->available(count); }
int Cache::counts() const { return impl_->counts(); }
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
void Cache::forget_main() { impl_->forget_main(); }
void Cache::poll() { impl_->poll(); }
void Cache::wait(std::chrono::milliseconds at_most) { impl_->wait(at_most); }
void Cache::flush() { impl_->flush(); }
CacheStats Cache::stats() const { return impl_->stats(); }
void Cache::check_invariants() const { impl_->check_invariants(); }

}  // namespace millrace::kv
