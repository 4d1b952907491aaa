#include "engine/drafter.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>

#include "base/error.h"

namespace millrace {

// ---------------------------------------------------------------- lookup

void LookupDrafter::reserve(size_t capacity) {
  // Twice as many places as tokens: a place is taken over by whoever hashes there last.
  const size_t size = std::bit_ceil(2 * std::max<size_t>(capacity, 16));
  for (Table& table : tables_) table.after.assign(size, 0);
  learned_ = 0;
  from_ = copy_ = ahead_ = 0;
}

namespace {

size_t place_of(std::span<const int32_t> gram, size_t size) {
  uint64_t h = 0;
  for (const int32_t token : gram) h = (h ^ static_cast<uint32_t>(token)) * 0x9e3779b97f4a7c15u;
  return static_cast<size_t>(h >> 20) & (size - 1);
}

}  // namespace

void LookupDrafter::learn(std::span<const int32_t> tokens) {
  for (; learned_ < tokens.size(); ++learned_) {
    for (size_t t = 0; t < kOrders.size(); ++t) {
      const auto order = static_cast<size_t>(kOrders[t]);
      if (learned_ < order) continue;
      Buffer<int32_t>& after = tables_[t].after;
      after[place_of(tokens.subspan(learned_ - order, order), after.size())] = static_cast<int32_t>(learned_);
    }
  }
}

int32_t LookupDrafter::find(const Table& table, std::span<const int32_t> tokens, int order) const {
  const auto n = static_cast<size_t>(order);
  if (tokens.size() < n + 1) return 0;
  const std::span<const int32_t> gram = tokens.last(n);
  const int32_t after = table.after[place_of(gram, table.after.size())];
  const bool same = after > 0 && std::equal(gram.begin(), gram.end(), tokens.begin() + after - order);
  return same ? after : 0;
}

LookupDrafter::Evidence LookupDrafter::look(std::span<const int32_t> tokens) {
  constexpr int32_t kMaxAgree = 24;
  constexpr int32_t kStray = 16;  // tokens that a copy may differ for and still be thought to go on
  from_ = 0;
  if (tables_[0].after.empty()) return kNone;
  learn(tokens);
  const auto size = static_cast<int32_t>(tokens.size());
  for (size_t t = 0; t < kOrders.size() && from_ == 0; ++t) from_ = find(tables_[t], tokens, kOrders[t]);
  int32_t agree = 0;
  while (agree < std::min(from_, kMaxAgree) && tokens[from_ - 1 - agree] == tokens[size - 1 - agree]) ++agree;
  if (agree >= 3) {
    copy_ = from_;
    ahead_ = size;
    return agree >= 24 ? k24Agree : agree >= 12 ? k12Agree : agree >= 6 ? k6Agree : k3Agree;
  }
  if (copy_ > 0 && size > ahead_ && size - ahead_ <= kStray) {
    from_ = copy_ + size - ahead_;
    return kResumed;
  }
  return from_ > 0 ? k2Agree : kNone;
}

void LookupDrafter::take(std::span<const int32_t> tokens, int32_t count, Buffer<int32_t>& drafts) const {
  drafts.clear();
  for (int32_t i = 0; from_ > 0 && i < count; ++i) {
    // Past the end it goes on with its own guesses: a repetition repeats.
    const size_t at = static_cast<size_t>(from_) + static_cast<size_t>(i);
    drafts.push_back(at < tokens.size() ? tokens[at] : drafts[at - tokens.size()]);
  }
}

// ---------------------------------------------------------------- how many

void DraftLength::add(int32_t drafted, int32_t accepted) {
  if (drafted == 0) return;
  constexpr double kKeep = 0.85;
  right_ = kKeep * right_ + accepted;
  wrong_ = kKeep * wrong_ + (accepted < drafted ? 1 : 0);
}

int32_t DraftLength::best(double row_cost, double draft_cost, int32_t max_drafts) const {
  const double a = std::min(0.999, acceptance());
  double best_ratio = 1.02;  // less gain than this is not worth the trouble
  int32_t best = 0;
  double tokens = 1.0, power = 1.0;
  for (int32_t k = 1; k <= max_drafts; ++k) {
    power *= a;
    tokens += power;
    const double ratio = tokens / (1.0 + k * (row_cost + draft_cost));
    if (ratio > best_ratio) {
      best_ratio = ratio;
      best = k;
    }
  }
  if (best > 0) {
    refused_ = 0;
    return best;
  }
  // Text changes: look again from time to time.
  constexpr int32_t kTryAgain = 32;
  return ++refused_ % kTryAgain == 0 ? std::min(2, max_drafts) : 0;
}

void StepCost::add(double rows, double seconds) {
  constexpr double kKeep = 0.97;
  n_ = kKeep * n_ + 1;
  x_ = kKeep * x_ + rows;
  y_ = kKeep * y_ + seconds;
  xx_ = kKeep * xx_ + rows * rows;
  xy_ = kKeep * xy_ + rows * seconds;
}

double StepCost::row_s() const {
  const double spread = n_ * xx_ - x_ * x_;
  // Steps of one size only say nothing of the slope: half the mean cost of a row is a cautious guess.
  if (spread < 0.05 * x_ * x_) return x_ > 0 ? 0.5 * y_ / x_ : 0.0;
  return std::max(0.0, (n_ * xy_ - x_ * y_) / spread);
}

double StepCost::step_s(double rows) const {
  if (n_ <= 0) return 0.0;
  return std::max(y_ / n_ + (rows - x_ / n_) * row_s(), 0.1 * y_ / n_);
}

// ---------------------------------------------------------------- a draft model

ModelDrafter::ModelDrafter(std::unique_ptr<Runtime> runtime, int32_t target_vocab)
    : runtime_(std::move(runtime)) {
  if (runtime_->config().vocab != target_vocab) {
    throw_error(ErrorCode::kBadInput, "{}: draft model: vocabulary has {} tokens, expected the model's {}",
                runtime_->checkpoint().path(), runtime_->config().vocab, target_vocab);
  }
}

// All known tokens but the last are computed; false when there is no space for that and the drafts.
bool ModelDrafter::catch_up(Item& item) {
  kv::Cache& cache = runtime_->cache();
  if (!*item.sequence) *item.sequence = cache.make_sequence();
  kv::Sequence& sequence = *item.sequence;
  const auto chunk = static_cast<size_t>(runtime_->spec().max_tokens);
  while (static_cast<size_t>(sequence.length()) + 1 < item.tokens.size()) {
    const auto at = static_cast<size_t>(sequence.length());
    const size_t n = std::min(chunk, item.tokens.size() - 1 - at);
    if (!cache.reserve(sequence, static_cast<int32_t>(n))) return false;
    const Slice slice{
        .sequence = &sequence, .tokens = item.tokens.subspan(at, n), .want = Slice::Want::kNone};
    runtime_->forward({&slice, 1});
    cache.advance(sequence, slice.tokens);
  }
  return cache.reserve(sequence, item.count);
}

void ModelDrafter::propose(std::span<Item> items) {
  live_.clear();
  samplers_.clear();
  for (Item& item : items) {
    item.drafts->clear();
    const auto end = static_cast<int32_t>(item.tokens.size()) + item.count;
    if (item.count <= 0 || end > runtime_->context() || !catch_up(item)) continue;
    live_.push_back(&item);
    samplers_.push_back(*item.sampler);
  }
  const auto vocab = static_cast<size_t>(runtime_->config().vocab);
  for (int32_t round = 0; !live_.empty(); ++round) {
    slices_.clear();
    for (const Item* item : live_) {
      const std::span<const int32_t> last =
          round == 0 ? item->tokens.last(1) : std::span(*item->drafts).last(1);
      slices_.push_back(
          {.sequence = item->sequence, .tokens = last, .want = Slice::Want::kLast, .ahead = round});
    }
    const auto start = std::chrono::steady_clock::now();
    const std::span<const float> logits = runtime_->forward(slices_);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    draft_s_ += 0.1 * (seconds / static_cast<double>(live_.size()) - draft_s_);
    size_t kept = 0;
    for (size_t i = 0; i < live_.size(); ++i) {
      Item* item = live_[i];
      item->drafts->push_back(samplers_[i].sample(logits.subspan(i * vocab, vocab)).token);
      if (static_cast<int32_t>(item->drafts->size()) == item->count) continue;
      if (kept != i) std::swap(samplers_[kept], samplers_[i]);
      live_[kept++] = item;
    }
    live_.resize(kept);
    samplers_.erase(samplers_.begin() + static_cast<std::ptrdiff_t>(kept), samplers_.end());
  }
}

}  // namespace millrace
