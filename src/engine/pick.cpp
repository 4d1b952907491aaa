// How a step's tokens are picked: on a device that samples, so that only ids cross the bus, or here from the
// logits; and the step after it, launched before anybody has read this one's tokens.
#include <algorithm>
#include <functional>

#include "base/check.h"
#include "engine/loop.h"
#include "sample/softmax.h"

namespace millrace {
namespace {

// What the device is told of a row: the draw after `ahead` others.
SampleRow sample_row(const Sampler& sampler, int32_t ahead) {
  const SamplingParams& p = sampler.params();
  SampleRow row;
  row.wanted = true;
  row.draw = sampler.draws();
  if (row.draw) {
    row.scale = sampler.scale();
    row.top_k = p.top_k;
    row.top_p = p.top_p;
    row.min_p = p.min_p;
    row.uniform = sampler.uniform(ahead);
  }
  row.repetition_penalty = p.repetition_penalty;
  row.presence_penalty = p.presence_penalty;
  row.frequency_penalty = p.frequency_penalty;
  row.counted = sampler.counted();
  row.bias = sampler.bias();
  row.logprobs = p.logprobs.value_or(-1);
  return row;
}

// Of the model's own distribution, as Sampler::sample gives them.
void add_logprobs(const SampledRow& row, SampledToken& to) {
  const double log_sum = log_of_units(row.largest, row.units);
  to.logprob = log_softmax_of(row.chosen, log_sum, row.units);
  for (const auto& [token, logit] : row.top) {
    to.top.emplace_back(token, log_softmax_of(logit, log_sum, row.units));
  }
}

constexpr size_t kWorthSharing = 4;  // rows of logits, or masks, from which on other threads help

}  // namespace

bool Loop::forks(const Item& item) const {
  return item.last && item.sample->job->request.samples > 1 && !item.sample->job->forked;
}

// ---------------------------------------------------------------- on the device

// What the rows of an item are to be sampled with, when the device can know. What a draft's row is picked
// from depends on the drafts before it where there are penalties or a grammar; and forks want the logits.
bool Loop::device_may_pick(const Item& item) const {
  const Sample& sample = *item.sample;
  if (!item.last || sample.hidden || forks(item)) return false;
  return item.drafts == 0 || (!sample.constraint && !sample.sampler.has_penalties());
}

bool Loop::sample_on_device(std::span<Item> items, const Rows& rows) {
  Executor& executor = runtime_.executor();
  if (!executor.samples()) return false;
  make_masks(items);
  sample_rows_.assign(rows.logits, {});
  for (const Item& item : items) {
    if (!device_may_pick(item)) continue;
    for (int32_t i = 0; i <= item.drafts; ++i) {
      SampleRow& row = sample_rows_[item.row + static_cast<size_t>(i)];
      row = sample_row(item.sample->sampler, i);
      if (item.masked) row.allowed = item.sample->mask;
    }
  }
  return executor.sample(sample_rows_);
}

// The masks of those whose tokens a grammar decides, while the device computes.
void Loop::make_masks(std::span<Item> items) {
  const auto wants = [this](const Item& item) { return item.sample->constraint && device_may_pick(item); };
  const auto wanted = static_cast<size_t>(std::count_if(items.begin(), items.end(), wants));
  if (wanted == 0) return;
  runtime_.executor().start();
  const auto body = [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      Item& item = items[static_cast<size_t>(i)];
      if (!wants(item)) continue;
      try {
        item.masked = fill_mask(*item.sample);
      } catch (...) {
        item.sample->failure = std::current_exception();
      }
    }
  };
  if (wanted < kWorthSharing) {
    body(0, static_cast<int64_t>(items.size()));
  } else {
    runtime_.backend().parallel(static_cast<int64_t>(items.size()), std::ref(body));  // allocates nothing
  }
}

// False: every token is allowed.
bool Loop::fill_mask(Sample& sample) {
  std::fill(sample.mask.begin(), sample.mask.end(), 0);
  return sample.constraint->allowed(sample.mask);
}

// What the device picked, and the logits of the rows it left.
Loop::Picks Loop::wait_for(std::span<const Item> items, bool on_device) {
  Executor& executor = runtime_.executor();
  if (!on_device) return {.sampled = {}, .logits = executor.logits()};
  Picks picks{.sampled = executor.sampled(), .logits = {}};
  left_rows_.clear();
  for (const Item& item : items) {
    if (item.sample == nullptr || !item.last || item.sample->hidden) continue;
    for (size_t row = item.row; row <= item.row + static_cast<size_t>(item.drafts); ++row) {
      if (picks.sampled[row].token == SampledRow::kLeft) left_rows_.push_back(static_cast<int32_t>(row));
    }
  }
  if (!left_rows_.empty()) {
    MILLRACE_CHECK(ahead_items_.empty());  // its logits would be the next step's
    picks.logits = executor.logits_of(left_rows_);
  }
  return picks;
}

// ---------------------------------------------------------------- picking

// Everybody picks at the same time; what is wrong with one is kept for later.
void Loop::pick_all(std::span<Item> items, const Picks& picks) {
  size_t rows = 0;  // to be picked from here
  for (const Item& item : items) {
    if (item.sample != nullptr) rows += item.sample->hidden ? static_cast<size_t>(item.tokens) : 1;
  }
  if (!picks.sampled.empty()) rows = std::min(rows, left_rows_.size());
  const auto body = [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      Item& item = items[static_cast<size_t>(i)];
      if (item.sample == nullptr) continue;
      if (item.sample->hidden) {
        pool_hidden(item);
      } else if (item.last) {
        pick(item, picks);
      }
    }
  };
  if (rows < kWorthSharing) {
    body(0, static_cast<int64_t>(items.size()));
  } else {
    runtime_.backend().parallel(static_cast<int64_t>(items.size()), std::ref(body));  // allocates nothing
  }
}

// The tokens that follow: one, and one more for every draft that was right. Any thread.
void Loop::pick(Item& item, const Picks& picks) {
  Sample& sample = *item.sample;
  sample.picked.clear();
  try {
    if (sample.failure) return;  // of the grammar, while its mask was made
    for (int32_t i = 0; i <= item.drafts; ++i) {
      sample.picked.push_back(pick_row(item, item.row + static_cast<size_t>(i), picks));
      const int32_t token = sample.picked.back().token;
      if (sample.constraint) sample.constraint->accept(token);
      if (i < item.drafts && (token != sample.drafts[static_cast<size_t>(i)] ||
                              std::find(sample.job->end_tokens.begin(), sample.job->end_tokens.end(),
                                        token) != sample.job->end_tokens.end()))
        break;
    }
  } catch (...) {
    sample.failure = std::current_exception();
  }
}

SampledToken Loop::pick_row(const Item& item, size_t row, const Picks& picks) {
  Sample& sample = *item.sample;
  if (row < picks.sampled.size() && picks.sampled[row].token != SampledRow::kLeft) {
    const SampledRow& found = picks.sampled[row];
    if (found.token < 0) runtime_.explain_no_token(found.token);
    SampledToken token;
    token.token = found.token;
    if (sample.sampler.params().logprobs) add_logprobs(found, token);
    sample.sampler.accept(found.token);
    return token;
  }
  const auto vocab = static_cast<size_t>(runtime_.config().vocab);
  const std::span<const float> logits = picks.logits.subspan(row * vocab, vocab);
  runtime_.check_logits(logits);
  std::span<const uint64_t> allowed;
  if (sample.constraint && (item.masked || fill_mask(sample))) allowed = sample.mask;
  return sample.sampler.sample(logits, allowed);
}

// ---------------------------------------------------------------- the step after it

// Does the next step of everybody who runs depend on nothing that is known only here?
bool Loop::may_go_ahead(std::span<const Item> items) const {
  if (options_.speculation != Speculation::kOff || !loading_.empty()) return false;
  if (!scheduler_.quiet(recorder_.now())) return false;
  int32_t live = 0;
  for (const Item& item : items) {
    if (item.sample == nullptr) continue;
    ++live;
    const Sample& sample = *item.sample;
    if (item.drafts > 0 || !device_may_pick(item) || sample.constraint || sample.sampler.has_penalties()) {
      return false;
    }
    if (!sample_rows_[item.row].simple()) return false;
  }
  return live == scheduler_.running();
}

// Launches the next step of all that do not end with this one by its length. Whoever ends otherwise leaves a
// row behind that nobody reads.
void Loop::go_ahead(std::span<const Item> items) {
  if (!may_go_ahead(items)) return;
  static constexpr int32_t kUnknown[1] = {0};
  const double begin = recorder_.now();
  slices_.clear();
  sample_rows_.clear();
  for (const Item& item : items) {
    if (item.sample == nullptr) continue;
    Sample& sample = *item.sample;
    const int32_t asked = sample.job->request.max_tokens;
    const int32_t length = sample.blocks.length() + item.tokens;
    if (length + 1 >= runtime_.context() || (asked > 0 && sample.usage.generated_tokens + 1 >= asked))
      continue;
    if (!cache_.reserve(sample.blocks, item.tokens + 1)) {
      ahead_items_.clear();
      return;  // a plan has to make room
    }
    slices_.push_back({.sequence = &sample.blocks,
                       .tokens = kUnknown,
                       .ahead = item.tokens,
                       .sampled_row = static_cast<int32_t>(item.row)});
    sample_rows_.push_back(sample_row(sample.sampler, 1));
    ahead_items_.push_back({.id = item.id,
                            .sample = &sample,
                            .tokens = 1,
                            .drafts = 0,
                            .last = true,
                            .row = ahead_items_.size(),
                            .first_row = static_cast<int32_t>(ahead_items_.size())});
  }
  if (ahead_items_.empty()) return;
  ahead_rows_ = {.all = static_cast<int32_t>(slices_.size()), .prompts = 0, .logits = slices_.size()};
  ahead_begin_ = begin;
  try {
    runtime_.launch(slices_);
    MILLRACE_CHECK(runtime_.executor().sample(sample_rows_));
  } catch (...) {
    ahead_items_.clear();  // the plain step will show what is wrong
  }
}

// Nobody will read the step ahead.
void Loop::forget_ahead() noexcept {
  if (ahead_items_.empty()) return;
  ahead_items_.clear();
  try {
    runtime_.executor().sampled();
  } catch (...) {  // the fault of the step before, or one that shows again
  }
}

}  // namespace millrace
