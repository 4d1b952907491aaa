#include "engine/picker.h"

#include <algorithm>
#include <functional>

#include "sample/token_softmax.h"

namespace millrace {
namespace {

// Of the model's own distribution, as Sampler::sample gives them.
void add_logprobs(const SampledRow& row, SampledToken& to) {
  const double log_sum = log_of_units(row.largest, row.units);
  to.logprob = log_softmax_of(row.chosen, log_sum, row.units);
  for (const auto& [token, logit] : row.top) {
    to.top.emplace_back(token, log_softmax_of(logit, log_sum, row.units));
  }
}

// False: every token is allowed.
bool fill_mask(Sample& sample) {
  std::fill(sample.mask.begin(), sample.mask.end(), 0);
  return sample.constraint->allowed(sample.mask);
}

constexpr size_t kWorthSharing = 4;  // rows of logits, or masks, from which on other threads help

}  // namespace

Picker::Picker(Runtime& runtime) : runtime_(runtime) {
  if (!runtime.executor().samples()) return;
  rows_.reserve(static_cast<size_t>(runtime.spec().max_logit_rows));
  left_.reserve(static_cast<size_t>(runtime.spec().max_logit_rows));
}

template <class Body>
void Picker::for_items(std::span<StepItem> items, size_t worth, const Body& body) {
  const auto count = static_cast<int64_t>(items.size());
  const auto range = [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) body(items[static_cast<size_t>(i)]);
  };
  if (worth < kWorthSharing) {
    range(0, count);
  } else {
    runtime_.backend().parallel(count, std::ref(range));  // allocates nothing
  }
}

// ---------------------------------------------------------------- on the device

SampleRow Picker::device_row(const Sampler& sampler, int32_t ahead) {
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

bool Picker::device_may_pick(const StepItem& item) {
  const Sample& sample = *item.sample;
  if (!item.last || sample.hidden || item.scored > 0 || item.forks()) return false;
  return item.drafts == 0 || (!sample.constraint && !sample.sampler.has_penalties());
}

bool Picker::start(std::span<StepItem> items, const StepRows& rows) {
  Executor& executor = runtime_.executor();
  if (!executor.samples()) return false;
  make_masks(items);
  rows_.assign(rows.logits, {});
  for (const StepItem& item : items) {
    if (!device_may_pick(item)) continue;
    for (int32_t i = 0; i <= item.drafts; ++i) {
      SampleRow& row = rows_[item.row + static_cast<size_t>(i)];
      row = device_row(item.sample->sampler, i);
      if (item.masked) row.allowed = item.sample->mask;
    }
  }
  return executor.sample(rows_);
}

// The masks of those whose tokens a grammar decides, while the device computes.
void Picker::make_masks(std::span<StepItem> items) {
  const auto wants = [](const StepItem& item) { return item.sample->constraint && device_may_pick(item); };
  const auto wanted = static_cast<size_t>(std::count_if(items.begin(), items.end(), wants));
  if (wanted == 0) return;
  runtime_.executor().start();
  for_items(items, wanted, [&](StepItem& item) {
    if (!wants(item)) return;
    try {
      item.masked = fill_mask(*item.sample);
    } catch (...) {
      item.sample->failure = std::current_exception();
    }
  });
}

Picks Picker::wait(std::span<const StepItem> items, bool on_device) {
  Executor& executor = runtime_.executor();
  if (!on_device && runtime_.spares_logits() && all_greedy(items)) {
    if (const std::span<const SampledRow> rows = greedy_rows(); !rows.empty()) {
      return {.sampled = rows, .left = {}, .logits = {}};
    }
  }
  if (!on_device) return {.sampled = {}, .left = {}, .logits = executor.logits()};
  Picks picks{.sampled = executor.sampled(), .left = {}, .logits = {}};
  left_.clear();
  for (const StepItem& item : items) {
    if (item.sample == nullptr) continue;
    for (int32_t i = item.scored; i > 0; --i) {
      left_.push_back(static_cast<int32_t>(item.row) + 1 - i);
    }
    if (!item.last || item.sample->hidden || item.scored > 0) continue;
    for (size_t row = item.row; row <= item.row + static_cast<size_t>(item.drafts); ++row) {
      if (picks.sampled[row].token == SampledRow::kLeft) left_.push_back(static_cast<int32_t>(row));
    }
  }
  if (!left_.empty()) picks.logits = executor.logits_of(left_);
  picks.left = left_;
  return picks;
}

bool Picker::all_greedy(std::span<const StepItem> items) {
  bool any = false;
  for (const StepItem& item : items) {
    if (item.sample == nullptr) continue;
    if (item.sample->hidden || item.scored > 0) return false;
    if (!item.last) continue;
    any = true;
    if (item.sample->constraint || !device_may_pick(item) ||
        !device_row(item.sample->sampler, 0).plain_greedy()) {
      return false;
    }
  }
  return any;
}

std::span<const SampledRow> Picker::greedy_rows() {
  greedy_.clear();
  for (const int32_t token : runtime_.executor().greedy_tokens()) {
    SampledRow row;
    row.token = token;  // -1: kNotANumber
    greedy_.push_back(row);
  }
  return greedy_;
}

// ---------------------------------------------------------------- here

void Picker::pick_all(std::span<StepItem> items, const Picks& picks) {
  size_t rows = 0;  // to be picked from here
  for (const StepItem& item : items) {
    if (item.sample == nullptr) continue;
    rows += item.sample->hidden || item.scored > 0 ? static_cast<size_t>(item.tokens) : 1;
  }
  if (!picks.sampled.empty()) rows = std::min(rows, picks.left.size());
  for_items(items, rows, [&](StepItem& item) {
    if (item.sample == nullptr) return;
    if (item.sample->hidden) {
      pool_hidden(item);
      return;
    }
    if (item.scored > 0) score_prompt(item, picks);
    if (item.last) pick(item, picks);
  });
}

void Picker::pick(StepItem& item, const Picks& picks) const {
  Sample& sample = *item.sample;
  sample.picked.clear();
  try {
    if (sample.failure) return;  // of the grammar, while its mask was made
    const std::vector<int32_t>& ends = sample.job->end_tokens;
    for (int32_t i = 0; i <= item.drafts; ++i) {
      sample.picked.push_back(pick_row(item, item.row + static_cast<size_t>(i), picks));
      const int32_t token = sample.picked.back().token;
      if (sample.constraint) sample.constraint->accept(token);
      if (i == item.drafts || token != sample.draft.tokens[static_cast<size_t>(i)] ||
          std::find(ends.begin(), ends.end(), token) != ends.end()) {
        break;
      }
    }
  } catch (...) {
    sample.failure = std::current_exception();
  }
}

SampledToken Picker::pick_row(const StepItem& item, size_t row, const Picks& picks) const {
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

// Takes the logprobs of the prompt's tokens that this step's rows tell of.
void Picker::score_prompt(StepItem& item, const Picks& picks) const {
  Sample& sample = *item.sample;
  sample.failure = nullptr;
  try {
    const auto vocab = static_cast<size_t>(runtime_.config().vocab);
    const size_t first_row = item.row + 1 - static_cast<size_t>(item.scored);
    for (int32_t i = 0; i < item.scored; ++i) {
      if (!sample.scores->wants(sample.blocks.length() + i)) continue;
      const auto logits = picks.logits.subspan((first_row + static_cast<size_t>(i)) * vocab, vocab);
      runtime_.check_logits(logits);
      sample.scores->add(logits);
    }
  } catch (...) {
    sample.failure = std::current_exception();
  }
}

// Adds this step's rows to an embedding.
void Picker::pool_hidden(StepItem& item) const {
  Sample& sample = *item.sample;
  sample.failure = nullptr;
  try {
    const int32_t first = sample.blocks.length();
    sample.hidden->add(runtime_, item.first_row, first, first + item.tokens);
  } catch (...) {
    sample.failure = std::current_exception();
  }
}

}  // namespace millrace
